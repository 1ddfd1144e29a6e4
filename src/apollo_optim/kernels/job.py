"""What a step works on: one weight with its state and the options it steps by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.rule import Rule
from ..core.scaling import effective_scale
from ..core.shape import MatrixShape


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


def summary(reports: Iterable[Report]) -> dict[str, float]:
    """Numbers for a log, of the weights whose gradients were finite. Waits for the device."""
    finite = [report for report in reports if report.finite]
    gains = [float(report.gain) for report in finite if report.gain is not None]
    shrinks = [float(report.shrink) for report in finite if report.shrink is not None]
    numbers = {}
    if gains:
        numbers |= {"gain/mean": sum(gains) / len(gains), "gain/max": max(gains), "gain/min": min(gains)}
    if shrinks:
        limited = sum(shrink < 1 for shrink in shrinks)
        numbers |= {"limiter/active": limited / len(shrinks), "limiter/shrink": sum(shrinks) / len(shrinks)}
    return numbers
