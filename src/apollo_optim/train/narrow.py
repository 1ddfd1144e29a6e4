"""Models whose weights are int8."""

from collections.abc import Collection

from torch import Tensor, nn

from ..quant import Int8Weight, quantize_weights_
from .filling import Finish

LAYERS = nn.Linear, nn.Embedding


def narrowing(wide: Collection[nn.Module]) -> Finish:
    """What makes a layer's weights int8, so that no two are in a wider dtype at one time; but not those of `wide`."""

    def narrow_(module: nn.Module) -> None:
        if isinstance(module, LAYERS) and module not in wide:
            quantize_weights_(module)

    return narrow_


def wide_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of a model with int8 weights as one without them has it, on the host; None where there are none."""
    narrow = {name: weight for name, weight in model.named_parameters() if isinstance(weight, Int8Weight)}
    if not narrow:
        return None
    parts = {f"{name}.{part}" for name in narrow for part in ("codes", "scale")}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in parts}
    return state | {name: weight.dequantize().cpu() for name, weight in narrow.items()}
