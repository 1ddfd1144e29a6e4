"""The last part of a plain step: what is added to a weight, and how an int8 weight takes it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.direction import Direction
from ..core.scaling import Scalar
from ..quant.groups import Draws, Quantized, dequantized, quantized, row_pieces
from ..quant.int8 import Int8Weight
from .job import Job


class Move(NamedTuple):
    """What is added to a weight: factor * by."""

    by: Tensor
    factor: Scalar

    def of(self, rows: slice) -> "Move":
        """The same for a run of the weight's rows."""
        factor = self.factor
        if isinstance(factor, Tensor) and factor.dim() > 0 and len(factor) > 1:
            factor = factor[rows]
        return Move(self.by[rows], factor)


def move_of(job: Job, grad: Tensor, direction: Direction) -> Move:
    """- lr * update"""
    if direction.gain is not None:
        assert job.shape is not None
        return Move(grad, job.shape.spread(direction.gain * -_lr(job)))
    assert direction.update is not None
    return Move(direction.update if job.shape is None else job.shape.restored(direction.update), -_lr(job))


def move_(weight: Tensor, move: Move, job: Job) -> None:
    """weight <- (1 - lr * decay) * weight + factor * by"""
    if job.group["weight_decay"] != 0:
        weight.mul_(1 - _lr(job) * job.group["weight_decay"])
    if isinstance(move.factor, Tensor):
        weight.addcmul_(move.by, move.factor)
    else:
        weight.add_(move.by, alpha=move.factor)


def apply_int8_(weight: Int8Weight, job: Job, move: Move, finite: Tensor, step: Scalar) -> None:
    """The same on an int8 weight, a few rows at a time: no wide copy of it is ever there whole."""
    number = step.long() if isinstance(step, Tensor) else int(step)
    seed, stochastic = int(job.state["seed"]), job.group["rounding"] == "stochastic"
    for rows in row_pieces(*weight.shape):
        old = Quantized(weight.codes[rows], weight.scale[rows])
        moved = dequantized(*old, weight.group_size, job.dtype)
        move_(moved, move.of(rows), job)
        new = quantized(moved.float(), weight.group_size, Draws(seed, number, rows.start) if stochastic else None)
        for target, value in zip(old, new, strict=True):
            target.copy_(torch.where(finite, value, target))
    # Autograd sees codes written, and not the weight.
    increment_version(weight)


def _lr(job: Job) -> Scalar:
    """The learning rate; a tensor at least as wide as the arithmetic, for 1 - lr * decay not to be rounded to less."""
    lr = job.group["lr"]
    return lr.reshape(()).to(torch.promote_types(lr.dtype, job.dtype)) if isinstance(lr, Tensor) else lr
