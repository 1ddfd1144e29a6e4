"""A model's weights to int8 and back, and its checkpoints in plain tensors."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.patterns import Matcher, Owners, Pattern, check_model, owners_of
from ..distributed import is_placed_as, is_sharded, local, placed_as, split_as, whole
from .groups import GROUP_SIZE, dequantized
from .int8 import Int8Weight

LAYERS = nn.Linear, nn.Embedding
WIDE = torch.float32, torch.bfloat16, torch.float16
LEAST_GROUP = 8

PARTS = "codes", "scale"
"""The tensors of an int8 weight called `weight` in a checkpoint: `weight.codes` and `weight.scale`."""


def quantize_weights_(model: nn.Module, group_size: int = GROUP_SIZE, exclude: Sequence[Pattern] = ()) -> nn.Module:
    """Keep the weights of linear layers and embeddings as int8 from now on; returns the model.

    Shard the model with FSDP2 and build the optimizer afterwards: the parameters are new ones. Any optimizer of
    `apollo_optim` trains them.
    `model.state_dict()` then holds `weight.codes` (int8) and `weight.scale` (float32) in place of each `weight`, plain
    tensors both, and `load_state_dict` takes these or a wide `weight`. `save_pretrained` of a model of `transformers`
    writes wide weights, in the dtype they read as: nobody else reads codes.

    Args:
        model: Its weights read as before, in the dtype they have now: float32, bfloat16 or float16.
        group_size: Elements of a row that share a scale: a power of two, at least 8. A row that it does not divide ends
            in a shorter group.
        exclude: What to leave as it is, as in `param_groups`: `(nn.Embedding, "lm_head")` spares embedding and head.

    Raises:
        ValueError: The group size cannot be, a weight is int8 already or cannot be, or a pattern matched nothing.
    """
    if not isinstance(group_size, int) or group_size < LEAST_GROUP or group_size & (group_size - 1):
        raise ValueError(f"group_size must be a power of two and at least {LEAST_GROUP}, got {group_size!r}")
    check_model(model)
    refuse_others()
    # By owner and not by weight, so that each wide weight is gone before the next is made narrow.
    for owners in _chosen(model, exclude):
        weight = _held(owners)
        narrow = nn.Parameter(Int8Weight.of(weight, group_size), requires_grad=weight.requires_grad)
        _replace_(owners, narrow)
        for _, owner in owners:
            _hook_(owner)
        del weight
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = partial(_save_wide, model)
    return model


def dequantize_weights_(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Give a model ordinary weights of this dtype in place of its int8 ones; returns the model."""
    if dtype not in WIDE:
        raise ValueError(f"dtype must be one of {WIDE}, got {dtype}")
    check_model(model)
    for owners in list(owners_of(model).values()):
        weight = _held(owners)
        if is_sharded(weight) and is_int8(weight):
            raise ValueError(f"{owners[0][0]} is int8 and sharded: make the model's weights wide before it is sharded")
        if isinstance(weight, Int8Weight):
            wide = nn.Parameter(weight.dequantize(dtype), requires_grad=weight.requires_grad)
            _replace_(owners, wide)
    vars(model).pop("save_pretrained", None)
    return model


def _chosen(model: nn.Module, exclude: Sequence[Pattern]) -> list[Owners]:
    """The owners of each weight that is to be int8."""
    matcher = Matcher(model, exclude, must_match=True)
    chosen: dict[Any, Owners] = {}
    for weight, owners in owners_of(model).items():
        read_by_a_layer = any(isinstance(owner, LAYERS) and owner.weight is weight for _, owner in owners)
        if read_by_a_layer and not matcher.claims(weight, owners):
            _check(owners[0][0], weight)
            # Two parameters may be one tensor: they become one weight.
            memory = weight.data_ptr() or id(weight)
            chosen.setdefault((memory, weight.shape, weight.stride()), []).extend(owners)
    matcher.check("linear layer or embedding")
    return list(chosen.values())


def _held(owners: Owners) -> Tensor:
    name, owner = owners[0]
    return getattr(owner, name.rpartition(".")[-1])


def _replace_(owners: Owners, weight: nn.Parameter) -> None:
    for name, owner in owners:
        setattr(owner, name.rpartition(".")[-1], weight)


def _check(name: str, weight: Tensor) -> None:
    if isinstance(weight, Int8Weight):
        raise ValueError(f"{name} is int8 already: quantize a model once, or exclude the layer")
    if type(weight) not in (Tensor, nn.Parameter):
        after = ": quantize first, and shard afterwards" if is_sharded(weight) else ""
        raise ValueError(f"{name} is a {type(weight).__name__}; expected an ordinary parameter{after}")
    if weight.dtype not in WIDE:
        raise ValueError(f"{name} has dtype {weight.dtype}; expected one of {WIDE}")
    # By its extremes, which are NaN where a number is: isfinite() takes as much memory again as a wide weight.
    if weight.device.type != "meta" and weight.numel() > 0 and not all(map(torch.isfinite, weight.aminmax())):
        raise ValueError(f"{name} holds a number that is not finite, which int8 cannot")


def _hook_(module: nn.Module) -> None:
    """Let a module save and load its int8 weights as plain tensors."""
    if _save_parts not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_save_parts)
        module.register_load_state_dict_pre_hook(_load_parts)


def _save_wide(
    model: Any, folder: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **options: Any
) -> Any:
    """`save_pretrained` with whole weights in place of codes and scales."""
    saved = dict(model.state_dict() if state_dict is None else state_dict)
    wide: dict[Tensor, Tensor] = {}  # by weight, so that tied ones stay one tensor
    for module_name, module in model.named_modules():
        for name, weight in _int8_weights(module).items():
            key = f"{module_name}.{name}" if module_name else name
            codes, scale = (saved.pop(f"{key}.{part}", None) for part in PARTS)
            if codes is not None and scale is not None:
                if weight not in wide:
                    group_size = _held_of(weight).group_size
                    wide[weight] = dequantized(whole(codes), whole(scale), group_size, weight.dtype)
                saved[key] = wide[weight]
    return type(model).save_pretrained(model, folder, is_main_process, saved, *args, **options)


def int8_part(weight: Tensor) -> Int8Weight | None:
    """This rank's rows of an int8 weight; None of a wide one."""
    held = local(weight)
    return held if isinstance(held, Int8Weight) else None


def is_int8(weight: Tensor) -> bool:
    return int8_part(weight) is not None


def _int8_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module._parameters.items() if weight is not None and is_int8(weight)}


def _held_of(weight: Tensor) -> Int8Weight:
    held = int8_part(weight)
    assert held is not None
    return held


def _parts(weight: Tensor) -> dict[str, Tensor]:
    """Codes and scales of an int8 weight, sharded as it is."""
    held = _held_of(weight)
    return {part: _placed(getattr(held, part), weight) for part in PARTS}


def _placed(rows: Tensor, like: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded as `like` is."""
    return placed_as(like, rows) if is_sharded(like) else rows


def _save_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in _int8_weights(module):
        for part, tensor in _parts(state_dict.pop(prefix + name)).items():
            state_dict[f"{prefix}{name}.{part}"] = tensor
            if is_sharded(tensor):
                # torch.distributed.checkpoint.state_dict looks for an attribute of every name.
                setattr(module._parameters[name], part, tensor)


def _load_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    *_, missing_keys, _, error_msgs = others
    for name, weight in _int8_weights(module).items():
        key = prefix + name
        parts: Mapping[str, Tensor | None] = {part: state_dict.pop(f"{key}.{part}", None) for part in PARTS}
        if key in state_dict and all(part is None for part in parts.values()):
            of_wide = _parts_of(state_dict[key], weight)
            if of_wide is None:
                continue  # torch says what is wrong with it
            parts = of_wide
        missing = [f"{key}.{part}" for part, found in parts.items() if found is None]
        errors = _misfits(key, weight, parts)
        missing_keys += missing
        error_msgs += errors
        # Where something is wrong the weight stands in for itself, so that torch says no more than was said here.
        fits = not missing and not errors
        state_dict[key] = _weight_of(parts, weight) if fits else weight


def _weight_of(parts: Mapping[str, Any], like: Tensor) -> Tensor:
    held = _held_of(like)
    found = [parts[part] if is_sharded(parts[part]) else split_as(like, parts[part]) for part in PARTS]
    return _placed(Int8Weight(*map(local, found), group_size=held.group_size, dtype=like.dtype), like)


def _parts_of(wide: Any, weight: Tensor) -> dict[str, Tensor] | None:
    """Codes and scales of a wide weight in a checkpoint; None where it cannot be this one."""
    if not isinstance(wide, Tensor) or is_int8(wide) or wide.shape != weight.shape:
        return None
    wide = wide if is_sharded(wide) else split_as(weight, wide)
    return _parts(_placed(Int8Weight.of(local(wide), _held_of(weight).group_size), wide))


def _misfits(name: str, weight: Tensor, parts: Mapping[str, Tensor | None]) -> list[str]:
    """Reasons why the parts in a checkpoint cannot be those of a weight."""
    errors = []
    for part, own in _parts(weight).items():
        found = parts[part]
        if found is None:
            continue
        if (found.dtype, found.shape) != (own.dtype, own.shape):
            errors.append(
                f"{name}.{part} is {found.dtype} {tuple(found.shape)} in the checkpoint, "
                f"{own.dtype} {tuple(own.shape)} here, in groups of {_held_of(weight).group_size}"
            )
        elif is_sharded(found) and not is_placed_as(own, found):
            errors.append(f"{name}.{part} is sharded in another way in the checkpoint than here: load it whole")
        elif part == "scale" and not found.is_meta and not bool(local(found).isfinite().all()):
            errors.append(f"{name} holds a number that is not finite in the checkpoint, which int8 cannot")
    return errors


@cache
def refuse_others() -> None:
    """Let every step of an optimizer that cannot step int8 weights, and has one, fail from now on."""
    register_optimizer_step_pre_hook(_refuse_int8)


def _refuse_int8(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if getattr(optimizer, "steps_int8", False):
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad and is_int8(weight):
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step an int8 weight {tuple(weight.shape)}: its update would be "
                    "lost in rounding. Use an optimizer of apollo_optim (APOLLO, APOLLOMini, ...), or give the model "
                    "its wide weights back with apollo_optim.quant.dequantize_weights_(model)"
                )
