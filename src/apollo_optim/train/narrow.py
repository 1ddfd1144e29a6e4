"""A new model whose weights are int8 from the start: no two of them exist in a wider dtype at one time."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from ..quant import Int8Weight, quantize_weights_

LAYERS = nn.Linear, nn.Embedding


@torch.no_grad()
def fill_narrow_(
    model: nn.Module, device: torch.device, initialise: Callable[[nn.Module], None], wide: Collection[nn.Module]
) -> None:
    """Give a model on the meta device its weights, layer by layer, each made int8 before the next; but not `wide` ones.

    `initialise` fills a module's own weights.
    """
    for module in _children_first(model):
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device))
        _fill_buffers_(module, device)
        initialise(module)
        if isinstance(module, LAYERS) and module not in wide:
            quantize_weights_(module)


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
        raise ValueError(f"--int8: {type(module).__name__} has buffers that cannot be made anew; train in bf16")
    with device:
        fresh = type(module)(config)
    for name in module._buffers:
        module._buffers[name] = fresh._buffers[name]


def wide_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of a model with int8 weights as one without them has it, on the host; None where there are none."""
    narrow = {name: weight for name, weight in model.named_parameters() if isinstance(weight, Int8Weight)}
    if not narrow:
        return None
    parts = {f"{name}.{part}" for name in narrow for part in ("codes", "scale")}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in parts}
    return state | {name: weight.dequantize().cpu() for name, weight in narrow.items()}
