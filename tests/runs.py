"""Small runs that depend on nothing but the step number, so that tests can compare them bit for bit."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apollo_optim.optimizer import ProjectedOptimizer
from family import Member

# One weight of every kind the optimizers tell apart. Every matrix has a smaller side above the rank of the table, 4.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (9, 40),
    "tall": (40, 9),
    "square": (16, 16),
    "experts": (3, 10, 24),
    "conv": (8, 4, 3, 3),
    "norm": (40,),
    "scalar": (),
}
REFRESH_EVERY = 3


def weights(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    """Named parameters that are the same in every run and process."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(number)
        made[name] = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return made


def built(member: Member, named: Mapping[str, nn.Parameter], **options: Any) -> ProjectedOptimizer:
    """The member over named parameters, with a basis that is renewed every third step."""
    group = {"params": list(named.items()), "refresh_every": REFRESH_EVERY}
    return member.build([group], **({"lr": 0.01, "weight_decay": 0.1} | options))


def gradient(name: str, step: int, like: Tensor) -> Tensor:
    """The gradient that the weight called `name` has at `step` in every run."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def run(optimizer: ProjectedOptimizer, named: Mapping[str, nn.Parameter], steps: Iterable[int]) -> None:
    """Take the steps of these numbers."""
    for step in steps:
        for name, weight in named.items():
            weight.grad = gradient(name, step, weight)
        optimizer.step()


def steps(optimizer: ProjectedOptimizer, numbers: Iterable[int]) -> nn.Parameter:
    """The only weight of an optimizer, after these steps."""
    (weight,) = optimizer.param_groups[0]["params"]
    run(optimizer, {"embed": weight}, numbers)
    return weight


def bits(tensor: Tensor) -> bytes:
    """What a tensor is made of: equal only where shape, dtype and every bit are."""
    plain = tensor.detach().cpu().contiguous()
    return repr((tuple(plain.shape), plain.dtype)).encode() + plain.view(-1).view(torch.uint8).numpy().tobytes()


class Snapshot(NamedTuple):
    """An optimizer and its weights at one moment."""

    weights: list[bytes]
    state: list[dict[str, bytes]]
    options: list[dict[str, Any]]


def snapshot(optimizer: ProjectedOptimizer) -> Snapshot:
    """Everything about a run that a step may change."""
    params = [weight for group in optimizer.param_groups for weight in group["params"]]
    return Snapshot(
        weights=[bits(weight) for weight in params],
        state=[{name: bits(value) for name, value in optimizer.state.get(weight, {}).items()} for weight in params],
        options=[{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
    )


def state_bytes_of(optimizer: ProjectedOptimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    return sum(value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values())
