"""Optimizers that train large models with SGD-like memory: APOLLO and its family."""

from .in_backward import step_in_backward
from .memory import optimizer_memory
from .param_groups import param_groups
from .quant import dequantize_weights_, quantize_weights_
from .variants import APOLLO, APOLLOMini, Fira, Flora, GaLore, StructuredAdamW

__all__ = [
    "APOLLO",
    "APOLLOMini",
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

__version__ = "0.1.0"
