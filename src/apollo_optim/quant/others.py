"""Optimizers of other libraries, which would step an int8 weight by rounding its update away."""

from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .int8 import Int8Weight


@cache
def refuse_others() -> None:
    """Let every step of an optimizer that cannot step int8 weights, and has one, fail from now on."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if getattr(optimizer, "steps_int8", False):
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if isinstance(weight, Int8Weight) and weight.requires_grad:
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step an int8 weight {tuple(weight.shape)}: its update would be "
                    "lost in rounding. Use an optimizer of apollo_optim (APOLLO, APOLLOMini, ...), or give the model "
                    "its wide weights back with apollo_optim.quant.dequantize_weights_(model)"
                )
