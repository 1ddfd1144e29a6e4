"""Bytes of optimizer state, predicted from shapes alone."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .distributed import Entry, local
from .host_state import buffer_sizes, visiting_bytes
from .optimizer import ProjectedOptimizer
from .state import state_entries
from .variants import APOLLO

Shapes = nn.Module | Iterable[Any]


def optimizer_memory(
    model_or_shapes: Shapes,
    optimizer: type[ProjectedOptimizer] = APOLLO,
    *,
    dtype: torch.dtype = torch.float32,
    on: Literal["device", "host"] | None = None,
    **options: Any,
) -> int:
    """Bytes of state that `optimizer` keeps once every weight has had a gradient.

    Args:
        model_or_shapes: A model (also on the meta device), parameters or named parameters, group dicts, or bare shapes.
        optimizer: A class of the family.
        dtype: Dtype of the weights, if bare shapes are given.
        on: "device" or "host" to count only the state there, if the weights are on a GPU. With `state_device="cpu"` the
            device holds two buffers, through which the state passes.
        **options: Options of the optimizer.
    """
    if on not in (None, "device", "host"):
        raise ValueError(f'on must be "device", "host", or None for both, got {on!r}')
    by_weight = _entries_by_weight(model_or_shapes, optimizer, dtype, options).values()
    kept = [entry for entries in by_weight for entry in entries.values()]
    if on is None:
        return sum(entry.bytes for entry in kept)
    if on == "host":
        return sum(entry.bytes for entry in kept if entry.on_host)
    buffers = buffer_sizes(list(map(visiting_bytes, by_weight)))
    return sum(entry.bytes for entry in kept if not entry.on_host) + sum(buffers)


def state_bytes(
    model_or_shapes: Shapes,
    optimizer: type[ProjectedOptimizer] = APOLLO,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, dict[str, int]]:
    """Bytes of state by weight and kind of state, as `optimizer_memory` adds them up."""
    found = _entries_by_weight(model_or_shapes, optimizer, dtype, options)
    return {name: {kind: entry.bytes for kind, entry in entries.items()} for name, entries in found.items()}


def _entries_by_weight(
    model_or_shapes: Shapes, optimizer: type[ProjectedOptimizer], dtype: torch.dtype, options: Mapping[str, Any]
) -> dict[str, Mapping[str, Entry]]:
    if not (isinstance(optimizer, type) and issubclass(optimizer, ProjectedOptimizer)):
        raise ValueError(f"optimizer must be a class of apollo_optim, got {optimizer!r}")
    built = optimizer(_as_parameters(model_or_shapes, dtype), **options)
    result: dict[str, Mapping[str, Entry]] = {}
    for group in built.param_groups:
        entries_of = cache(partial(state_entries, group=group))  # a model has hundreds of weights, and few shapes
        for name, weight in built._named(group):
            if weight.requires_grad and weight.numel() > 0:
                result[name] = entries_of(weight.shape, weight.dtype)
    return result


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that an optimizer holds now, on this rank."""
    entries = (entry for state in optimizer.state.values() for entry in state.values())
    return sum(bytes_of(local(entry)) for entry in entries if isinstance(entry, Tensor))


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor, or of its parts: 8-bit state of torchao's claims to be float32."""
    return sum(part.nbytes for part in parts_of(tensor))


def parts_of(tensor: Any) -> list[Tensor]:
    """The ordinary tensors that a tensor is made of: itself, or codes and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def _as_parameters(model_or_shapes: Shapes, dtype: torch.dtype) -> Any:
    if isinstance(model_or_shapes, nn.Module):
        return model_or_shapes
    if not isinstance(model_or_shapes, Iterable):
        raise TypeError(f"model_or_shapes must be a module, or parameters or shapes to list, got {model_or_shapes!r}")
    items = list(model_or_shapes)
    if all(_is_shape(item) for item in items):
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype, that of the weights, got {dtype!r}")
        for item in items:
            if any(length < 0 for length in item):
                raise ValueError(f"a shape must be of integers >= 0, got {item!r}")
        return [nn.Parameter(torch.empty(item, dtype=dtype, device="meta")) for item in items]
    return items


def _is_shape(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and all(isinstance(length, int) for length in item)
