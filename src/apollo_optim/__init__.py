"""Optimizers that train large models with SGD-like memory: APOLLO and its family."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .in_backward import step_in_backward
    from .memory import optimizer_memory
    from .param_groups import param_groups
    from .quant import dequantize_weights_, quantize_weights_
    from .variants import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore, StructuredAdamW

__version__ = "0.1.0"

__all__ = [
    "APOLLO",
    "APOLLOMini",
    "Artemis",
    "ArtemisMini",
    "FactoredAdamW",
    "Fira",
    "Flora",
    "GaLore",
    "StructuredAdamW",
    "dequantize_weights_",
    "optimizer_memory",
    "param_groups",
    "quantize_weights_",
    "step_in_backward",
]

# The command `apollo` answers --help without PyTorch, whose import takes seconds: names are looked up when first used.
_MODULES = {
    **dict.fromkeys(("APOLLO", "APOLLOMini", "Artemis", "ArtemisMini", "FactoredAdamW"), "variants"),
    **dict.fromkeys(("Fira", "Flora", "GaLore", "StructuredAdamW"), "variants"),
    **dict.fromkeys(("dequantize_weights_", "quantize_weights_"), "quant"),
    "optimizer_memory": "memory",
    "param_groups": "param_groups",
    "step_in_backward": "in_backward",
}
_PACKAGES = "quant", "memory", "llama"


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `param_groups` the function: its module has the same name, and importing it would put that in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
