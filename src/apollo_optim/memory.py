"""Bytes of optimizer state, predicted from shapes alone."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import local
from .optimizer import ProjectedOptimizer
from .state import state_entries
from .variants import APOLLO

Shapes = nn.Module | Iterable[Any]


def optimizer_memory(
    model_or_shapes: Shapes,
    optimizer: type[ProjectedOptimizer] = APOLLO,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> int:
    """Bytes of state that `optimizer` keeps once every weight has had a gradient.

    Args:
        model_or_shapes: A model (also on the meta device), parameters or named parameters, group dicts, or bare shapes.
        optimizer: A class of the family.
        dtype: Of the weights, where bare shapes are given.
        **options: As the optimizer takes them.
    """
    by_weight = state_bytes(model_or_shapes, optimizer, dtype=dtype, **options)
    return sum(sum(kinds.values()) for kinds in by_weight.values())


def state_bytes(
    model_or_shapes: Shapes,
    optimizer: type[ProjectedOptimizer] = APOLLO,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, dict[str, int]]:
    """The same by weight and kind of state."""
    params = _as_parameters(model_or_shapes, dtype)
    built = optimizer(params, **options)
    if not isinstance(built, ProjectedOptimizer):
        raise ValueError(f"optimizer must be a class of apollo_optim, got {optimizer!r}")
    result: dict[str, dict[str, int]] = {}
    for group in built.param_groups:
        by_kind = cache(partial(_bytes_by_kind, group))  # a model has hundreds of weights, and few shapes
        for name, weight in zip(built._names(group), group["params"], strict=True):
            if weight.requires_grad and weight.numel() > 0:
                result[name] = by_kind(weight.shape, weight.dtype)
    return result


def _bytes_by_kind(group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype) -> dict[str, int]:
    return {kind: entry.bytes for kind, entry in state_entries(shape, dtype, group).items()}


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that an optimizer holds now, on this rank."""
    entries = (entry for state in optimizer.state.values() for entry in state.values())
    return sum(local(entry).nbytes for entry in entries if isinstance(entry, Tensor))


def _as_parameters(model_or_shapes: Shapes, dtype: torch.dtype) -> Any:
    if isinstance(model_or_shapes, nn.Module):
        return model_or_shapes
    items = list(model_or_shapes)
    if items and all(_is_shape(item) for item in items):
        return [nn.Parameter(torch.empty(item, dtype=dtype, device="meta")) for item in items]
    return items


def _is_shape(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and all(isinstance(length, int) for length in item)
