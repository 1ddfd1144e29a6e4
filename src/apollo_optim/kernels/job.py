"""What a step works on: one weight with its state and the options it steps by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rule import Rule
from ..core.scaling import effective_scale
from ..core.shape import MatrixShape
from ..quant.blocks import BLOCK
from ..quant.int8 import Int8Weight


@dataclass(frozen=True)
class Job:
    """One weight to step, for as long as its options stay as they are."""

    weight: Tensor
    state: dict[str, Tensor]
    shape: MatrixShape | None
    """How the weight is projected; None for AdamW."""
    rule: Rule
    dtype: torch.dtype
    """Of the arithmetic."""
    group: Mapping[str, Any]

    @property
    def by_row(self) -> bool:
        """Whether this is AdamW with one second moment per row."""
        return self.shape is None and self.rule.second_moment == "rowwise" and self.weight.dim() >= 2

    @property
    def group_size(self) -> int:
        """Elements of a row that a kernel steps together, because they may share a scale; 0 where nothing is shared."""
        if isinstance(self.weight, Int8Weight):
            return self.weight.group_size
        return BLOCK if self.by_row or "exp_avg_scale" in self.state else 0

    @property
    def stored(self) -> Tensor:
        """The tensor that a kernel writes: the weight, or its codes where it is int8."""
        return self.weight.codes if isinstance(self.weight, Int8Weight) else self.weight

    @property
    def grad(self) -> Tensor:
        assert self.weight.grad is not None
        return self.weight.grad

    @property
    def scale(self) -> float:
        assert self.shape is not None
        return effective_scale(self.group["scale"], self.shape.rank, self.shape.side, self.rule.caps_scale)


class Report(NamedTuple):
    """What a step leaves for the log."""

    finite: Tensor
    """Whether the gradient was, and so whether the weight was stepped."""
    gain: Tensor | None
    """Mean factor on the gradient, where the rule has one."""
    shrink: Tensor | None
    """Mean factor of the growth limiter, where the rule has one."""
