"""Checks of a model and an optimizer before they are stepped in backward, and the hooks that do it."""

import gc
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.patterns import check_model
from ..distributed import ORDINARY, is_offloaded, is_sharded
from ..optimizer import ProjectedOptimizer
from ..options import is_number
from .averaging import agree, first_

if TYPE_CHECKING:
    import weakref

    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle


@torch._disable_dynamo
def call_on_gradient(handle: "weakref.ref[Any]", weight: Tensor) -> None:
    """Autograd's hook, with the handle that `step_in_backward` has given."""
    there = handle()
    if there is not None:
        there.on_gradient(weight)


def remove_all(hooks: "list[RemovableHandle]") -> None:
    """Remove hooks, by their handles."""
    for hook in hooks:
        hook.remove()


def is_swapped(weight: Tensor) -> bool:
    """True if a weight is made of other tensors, and so swapped, hooks and all, where its model is moved."""
    return type(weight) not in ORDINARY and not is_sharded(weight)


def is_compiled() -> bool:
    """True inside a backward that compiled autograd runs."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def rearm_(model: nn.Module, args: Any) -> None:
    """Before a forward: weights made of other tensors are swapped where a model is moved, and autograd forgets them."""
    if torch.compiler.is_compiling():
        return
    for weight in model.parameters():
        if is_swapped(weight):
            hooked: Any = weight
            hooked._post_accumulate_grad_hooks = hooked._post_accumulate_grad_hooks


def _steps_elsewhere(weight: Tensor) -> bool:
    """True if the hook of another optimizer that is still there steps this weight."""
    hooks: Any = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, partial) and hook.func is call_on_gradient for hook in hooks.values())


def refuse_scalers(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before every step that raises where torch.amp.GradScaler has called it."""
    if hasattr(optimizer, "found_inf") and hasattr(optimizer, "grad_scale"):
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "torch.amp.GradScaler cannot be used with step_in_backward: it says whether to step only after backward "
            "has done so, with gradients still scaled. Train in bfloat16, which needs no scaler, pass enabled=False to "
            "it, or step in the ordinary way"
        )


def check(
    model: nn.Module, optimizer: ProjectedOptimizer, clip_norm: float | None, group: Any, accumulating: Any
) -> None:
    """Raise ValueError for what cannot be stepped in backward."""
    if not isinstance(optimizer, ProjectedOptimizer):
        raise ValueError(
            f"optimizer must be one of this library's (APOLLO, APOLLOMini, ...), got {type(optimizer).__name__}"
        )
    check_model(model)
    if optimizer._step_override is not None:
        raise ValueError("optimizer is stepped in backward already: call remove() on the handle it was given first")
    if clip_norm is not None and not (is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise ValueError(f"clip_norm must be a number > 0, or None for no clipping, got {clip_norm!r}")
    if accumulating is not None and not callable(accumulating):
        raise ValueError(f"accumulating must be a function without arguments, or None, got {accumulating!r}")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in DistributedDataParallel, whose buckets hold all gradients until they are averaged: "
            'step_in_backward does not support it. Pass the model inside, unwrapped, and group="world", or step in the '
            "ordinary way"
        )
    own = set(model.parameters())
    for params in optimizer.param_groups:
        if params["state_device"] is not None:
            raise ValueError(
                f"state_device={params['state_device']!r} is for steps after backward, which bring the state of one "
                "block while they step another: leave it out, or step in the ordinary way"
            )
        for name, weight in optimizer._named(params):
            _check_weight(name, weight, own, group)


def _check_weight(name: str, weight: Tensor, own: set[nn.Parameter], group: Any) -> None:
    if _steps_elsewhere(weight):
        gc.collect()  # it may be gone, and not be freed yet
    if _steps_elsewhere(weight):
        raise ValueError(
            f"{name} {tuple(weight.shape)} is stepped in backward by another optimizer: call remove() on the handle "
            "that one was given first"
        )
    if weight not in own:
        raise ValueError(f"{name} {tuple(weight.shape)} is in the optimizer, but not in the model")
    if group is not None and is_sharded(weight):
        raise ValueError(
            f"{name} is sharded, and whoever shards averages its gradient: leave group out, got group={group!r}"
        )
    if is_offloaded(weight):
        raise ValueError(
            f"{name} is sharded and offloaded to the host, and its gradient is still on its way there when backward "
            "announces it: shard without CPUOffloadPolicy, or step in the ordinary way"
        )


@torch.no_grad()
def align_(model: nn.Module, optimizer: ProjectedOptimizer, ranks: "ProcessGroup", clip_norm: float | None) -> None:
    """Give every rank the first one's weights; raise ValueError where they could not train together."""
    weights = optimizer._weights()
    devices = {weight.device for weight in weights}
    if len(devices) > 1:
        raise ValueError(f"group needs all weights of the optimizer on one device, got {sorted(map(str, devices))}")
    (device,) = devices
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    order = {tensor: number for number, (_, tensor) in enumerate(tensors)}
    seeds = [group["seed"] for group in optimizer.param_groups]
    if not agree([*facts, *[order[weight] for weight in weights], *seeds, clip_norm], device, ranks):
        raise ValueError(
            "the ranks of group do not train the same: names, shapes, dtypes and requires_grad of the model, the order "
            "of the optimizer's parameters and its seeds, and clip_norm must be equal on all"
        )
    for _, tensor in tensors:
        first_(tensor, ranks)
