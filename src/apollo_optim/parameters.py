"""What an optimizer's parameters may be."""

from typing import Any

from torch import Tensor


def check_steppable(name: str, weight: Tensor) -> None:
    """Raise where a weight that has a gradient cannot be stepped by it."""
    check_real(name, weight)
    if weight.grad is not None and weight.grad.shape != weight.shape:
        raise RuntimeError(
            f"{name} is {tuple(weight.shape)}, and its gradient {tuple(weight.grad.shape)}, of before it was changed"
        )
    if weight.grad is not None and weight.grad.is_sparse:
        raise RuntimeError(f"{name} has a sparse gradient; make it dense, e.g. nn.Embedding(..., sparse=False)")


def check_real(name: str, weight: Tensor) -> None:
    if not weight.is_floating_point():
        raise ValueError(f"{name} has dtype {weight.dtype}; only real floating-point parameters can be trained")


def check_parameter(name: str, weight: Tensor) -> None:
    """Raise where a weight cannot be in a group. One that is frozen, as quantised layers are, may be of any dtype."""
    if weight.requires_grad:
        check_real(name, weight)
    flat = type(weight).__name__ == "FlatParameter" or getattr(weight, "_fsdp_flattened", False)
    if flat or hasattr(weight, "ds_id"):
        framework = "FSDP1" if flat else "DeepSpeed ZeRO"
        raise ValueError(
            f"{name} is flattened by {framework}, which takes away the rows and columns this optimizer needs: shard "
            "with FSDP2 (torch.distributed.fsdp.fully_shard) instead"
        )


def drop_repeated_(group: dict[str, Any]) -> None:
    """Leave a parameter that is listed twice, which torch has warned of, in its first place only."""
    first = {weight: place for place, weight in reversed(list(enumerate(group["params"])))}
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][place] for place in sorted(first.values())]


def shapes_of(group: dict[str, Any]) -> list[str]:
    """What each weight's shape was, for later comparison: in words, because checkpoint formats lose an empty tuple."""
    return [str(tuple(weight.shape)) for weight in group["params"]]
