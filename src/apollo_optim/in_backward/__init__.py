"""Step weights inside the backward pass, a few at a time when their gradients are complete, and free the gradients."""

from .handle import InBackward, step_in_backward

__all__ = ["InBackward", "step_in_backward"]
