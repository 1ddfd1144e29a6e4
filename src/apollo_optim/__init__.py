"""Optimizers that train large models with SGD-like memory: APOLLO and its family."""

from .in_backward import step_in_backward
from .memory import optimizer_memory
from .param_groups import param_groups
from .variants import APOLLO, APOLLOMini, Artemis, ArtemisMini, Fira, Flora, GaLore, StructuredAdamW

__all__ = [
    "APOLLO",
    "APOLLOMini",
    "Artemis",
    "ArtemisMini",
    "Fira",
    "Flora",
    "GaLore",
    "StructuredAdamW",
    "optimizer_memory",
    "param_groups",
    "step_in_backward",
]
