"""The weights of a new model, made module by module: what a module becomes need never be beside all others' weights."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

Finish = Callable[[nn.Module], None]
"""What is done to a module as soon as it has its weights; to those inside of it before."""


@torch.no_grad()
def fill_(model: nn.Module, device: torch.device, initialise: Callable[[nn.Module], None], finish: Finish) -> None:
    """Give a model on the meta device its weights. `initialise` fills a module's own."""
    for module in _children_first(model):
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device))
        _fill_buffers_(module, device)
        initialise(module)
        finish(module)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _fill_buffers_(module: nn.Module, device: torch.device) -> None:
    """Buffers are computed by constructors, so a module that has some is constructed once more, on the device."""
    if not module._buffers:
        return
    config = getattr(module, "config", None)
    if config is None:
        raise ValueError(
            f"{type(module).__name__} has buffers, and no configuration to make them anew from: train without --int8"
        )
    with device:
        fresh = type(module)(config)
    for name in module._buffers:
        module._buffers[name] = fresh._buffers[name]
