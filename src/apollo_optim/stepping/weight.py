"""The step of one weight: what it works on, and what it reports."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.limiter import effective_scale
from ..core.orthogonal import SymmetricProduct, symmetric_product
from ..core.random import RoundingKey
from ..core.rule import ADAFACTOR, ROWWISE_ADAMW, Rule
from ..core.shape import MatrixShape, positions
from ..distributed import Part, local
from ..quant.blocks import BLOCK
from ..quant.int8 import Int8Weight
from ..quant.rounding import write_rounded_
from .crossing import CrossingMoments


class StateView(MutableMapping[str, Tensor]):
    """A weight's state as its step sees it: this rank's parts of what the optimizer keeps, or copies on the device."""

    def __init__(self, state: MutableMapping[str, Tensor], copies: Mapping[str, Tensor] | None = None):
        self.state, self.copies = state, copies or {}

    def __getitem__(self, name: str) -> Tensor:
        return local(self.copies.get(name, self.state[name]))

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.state[name] = value

    def __delitem__(self, name: str) -> None:
        del self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)

    def values(self) -> Any:
        """The values, without looking each up by its name: a step asks for all of a model's."""
        return map(local, {**self.state, **self.copies}.values())


def stored(part: Tensor) -> Tensor:
    """The tensor that a kernel writes: what this rank holds of a weight, or its codes where it is int8."""
    return part.codes if isinstance(part, Int8Weight) else part


@dataclass(frozen=True)
class WeightStep:
    """One weight with its state and the options it steps by, for as long as its plan is used."""

    name: str
    """The weight's name, for messages."""
    parameter: Tensor
    """The weight as the optimizer was given it: a DTensor where it is sharded."""
    state: MutableMapping[str, Tensor]
    """State of this rank's part."""
    shape: MatrixShape | None
    """This rank's part of the weight as the matrices that are projected or factored; None for AdamW."""
    rule: Rule
    dtype: torch.dtype
    """Dtype of the arithmetic."""
    group: Mapping[str, Any]
    part: Part | None = None
    """The part of the weight that this rank holds; None where that is an ordinary tensor."""
    owner: int = 0
    """The place, on the axis of most ranks, of the rank that orthogonalises the whole of a split matrix."""
    crossing: CrossingMoments | None = None
    """Its 8-bit moments during a step; None unless other ranks have elements of the same blocks."""
    write_rounded_: Callable[[Tensor, Tensor, RoundingKey, Tensor | None], None] = write_rounded_
    """Writes a wide value into the weight, or into its state, where that is narrow."""
    symmetric_product: SymmetricProduct = symmetric_product
    """The product by which its update is orthogonalised."""

    @property
    def weight(self) -> Tensor:
        """This rank's part of the parameter."""
        return local(self.parameter)

    @property
    def matrix_count(self) -> int:
        """Matrices that kernels step of it: this rank's experts, or one that stands in where it holds none of them."""
        return 1 if self.shape is None else self.shape.experts or 1

    @property
    def by_row(self) -> bool:
        """True if this is AdamW with one second moment per row."""
        return self.rule is ROWWISE_ADAMW

    @property
    def by_factors(self) -> bool:
        """True if this is Adafactor: not projected, with a second moment per row and one per column."""
        return self.rule is ADAFACTOR

    @property
    def in_4_bits(self) -> bool:
        """True if its momentum is kept in 4-bit codes, two to a byte; codes of 8 bits have a sign."""
        return "exp_avg" in self.state and self.state["exp_avg"].dtype == torch.uint8

    @property
    def group_size(self) -> int:
        """Elements of a row that a kernel steps together, because they may share a scale; 0 where nothing is shared."""
        if isinstance(self.weight, Int8Weight):
            return self.weight.group_size
        shares = self.by_row or self.by_factors or "exp_avg_scale" in self.state
        return BLOCK if self.shape is None and shares else 0

    @property
    def stored(self) -> Tensor:
        """The tensor that a kernel writes."""
        return stored(self.weight)

    @property
    def grad(self) -> Tensor:
        """This rank's part of the gradient."""
        assert self.parameter.grad is not None
        return local(self.parameter.grad)

    @property
    def is_split(self) -> bool:
        """True if stepping it takes other ranks."""
        return self.part is not None and self.part.is_split

    def positions(self, name: str) -> Tensor | None:
        """Positions of the elements of a state tensor, or of the "weight", in the whole; None where it is the whole."""
        if self.part is None or not self.part.is_split:
            return None
        if name == "weight":
            return positions(self.part.shape, self.part.ranges, self.weight.device)
        return positions(self.part.entries[name].shape, self.part.state_ranges(name), self.weight.device)

    @property
    def scale(self) -> float:
        """The factor on its update, beside the learning rate."""
        assert self.shape is not None
        whole = self.shape.global_shape
        if self.rule.is_spectral:
            # The root mean square of an update is then the scale, and its learning rate AdamW's, whatever the shape. No
            # part of the gradient is left out of it.
            size = effective_scale(self.group["scale"], whole.side, whole.side, self.rule.caps_scale)
            return size * math.sqrt(whole.channels)
        return effective_scale(self.group["scale"], self.shape.rank, whole.side, self.rule.caps_scale)


class Report(NamedTuple):
    """The outcome of a step, for the log."""

    finite: Tensor
    """True if the gradient was finite, and so the weight stepped."""
    gain: Tensor | None = None
    """Factors on the gradient, where the rule has them; summed up when somebody asks."""
    shrink: Tensor | None = None
    """Factors of the growth limiter, where the rule has one."""


def summary(reports: Iterable[Report]) -> dict[str, float]:
    """Numbers for a log, of the weights whose gradients were finite. Waits for the device."""
    finite = [report for report in reports if report.finite]
    gains = [float(report.gain.mean()) for report in finite if report.gain is not None]
    shrinks = [float(report.shrink.mean()) for report in finite if report.shrink is not None]
    numbers = {}
    if gains:
        numbers |= {"gain/mean": sum(gains) / len(gains), "gain/max": max(gains), "gain/min": min(gains)}
    if shrinks:
        limited = sum(shrink < 1 for shrink in shrinks)
        numbers |= {"limiter/active": limited / len(shrinks), "limiter/shrink": sum(shrinks) / len(shrinks)}
    return numbers
