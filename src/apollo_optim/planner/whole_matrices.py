"""Optimizers that need a whole matrix in one place, as a planner sees them."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..variants import APOLLO
from .collectives import Traffic, merged
from .family import Family
from .layout import FIRST, Layout, Place
from .models import Weight

FLOAT32 = 4


@dataclass(frozen=True)
class Muon:
    """Momentum made orthogonal, matrix by matrix (`torch.optim.Muon`); our AdamW for the rest."""

    weight_dtype: torch.dtype
    state_dtype: torch.dtype
    """Of AdamW: the momentum is kept like its weight."""
    dealt: bool
    """Whether each matrix travels to one rank and its update back, or every matrix to every rank."""

    def state_bytes(self, weights: Sequence[Weight], layout: Layout, place: Place = FIRST) -> int:
        """State that the rank at `place` keeps once every weight has had a gradient."""
        momentum = layout.local_numbers(_matrices(weights), place) * self.weight_dtype.itemsize
        return momentum + _adamw(self).state_bytes(_rest(weights), layout, place)

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step, which is always the same."""
        sending = _dealt if self.dealt else _gathered
        matrices = sending(_matrices(weights), layout, self.weight_dtype.itemsize)
        return matrices + _adamw(self).traffic(_rest(weights), layout)

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """The largest matrix, its next iterate, and two products that are as large at most; or AdamW's step."""
        rest = _adamw(self).step_bytes(_rest(weights), layout)
        return max(4 * self.weight_dtype.itemsize * _largest(weights), rest)


@dataclass(frozen=True)
class Shampoo:
    """As its paper has it (Gupta et al., 2018), every matrix on one of the ranks that share it; AdamW for the rest.

    Kept in float32: statistics of both sides of a matrix, their inverse roots, and momentum.
    """

    weight_dtype: torch.dtype
    state_dtype: torch.dtype
    """Of AdamW."""

    def state_bytes(self, weights: Sequence[Weight], layout: Layout, place: Place = FIRST) -> int:
        """State that a rank keeps once every weight has had a gradient, one with as many matrices as any."""
        total = 0
        for (rows, columns, sharers), count in _shared(_matrices(weights), layout, place).items():
            total += -(-count // sharers) * FLOAT32 * (2 * (rows**2 + columns**2) + rows * columns)
        return total + _adamw(self).state_bytes(_rest(weights), layout, place)

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step, which is always the same: who has a matrix takes its roots too."""
        dealt = _dealt(_matrices(weights), layout, self.weight_dtype.itemsize)
        return dealt + _adamw(self).traffic(_rest(weights), layout)

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """The largest matrix, multiplied once and twice, in float32; or AdamW's step."""
        rest = _adamw(self).step_bytes(_rest(weights), layout)
        return max(3 * FLOAT32 * _largest(weights), rest)


def _adamw(optimizer: Muon | Shampoo) -> Family:
    return Family(APOLLO, None, optimizer.weight_dtype, optimizer.state_dtype)


def _matrices(weights: Iterable[Weight]) -> list[Weight]:
    return [weight for weight in weights if len(weight.shape) >= 2 and not weight.is_vocabulary]


def _rest(weights: Iterable[Weight]) -> list[Weight]:
    return [weight for weight in weights if len(weight.shape) < 2 or weight.is_vocabulary]


def _largest(weights: Iterable[Weight]) -> int:
    """Numbers of the largest matrix."""
    return max(math.prod(weight.shape[-2:]) for weight in _matrices(weights))


def _sharers(weight: Weight, layout: Layout) -> int:
    """Ranks among which each matrix of a weight is split."""
    part = layout.part(weight)
    return math.prod(part.mesh.size(axis) for split in part.splits[-2:] for axis in split)


def _shared(matrices: Iterable[Weight], layout: Layout, place: Place) -> Counter[tuple[int, int, int]]:
    """How many matrices a rank has a part of, by rows, columns, and how many ranks share each."""
    found: Counter[tuple[int, int, int]] = Counter()
    for weight in matrices:
        rows, columns = weight.shape[-2:]
        experts = layout.local_shape(weight, place)[0] if weight.is_experts else 1
        found[rows, columns, _sharers(weight, layout)] += experts
    return found


def _gathered(matrices: Sequence[Weight], layout: Layout, itemsize: int) -> list[Traffic]:
    """Every rank gathers every matrix that it has a part of."""
    traffic: list[Traffic] = []
    for weight in matrices:
        sharers = _sharers(weight, layout)
        if sharers > 1:
            size = math.prod(layout.local_shape(weight)) * sharers * itemsize
            traffic.append(Traffic("whole matrices", "all-gather", sharers, 1, size))
    return merged(traffic)


def _dealt(matrices: Sequence[Weight], layout: Layout, itemsize: int) -> list[Traffic]:
    """Matrices of one shape are dealt out to those who share them, one each at a time, and their updates dealt back."""
    traffic: list[Traffic] = []
    for (rows, columns, sharers), count in _shared(matrices, layout, FIRST).items():
        if sharers > 1:
            rounds, size = -(-count // sharers), count * -(-rows * columns // sharers) * itemsize
            traffic.append(Traffic("whole matrices", "all-to-all", sharers, 2 * rounds, 2 * size))
    return merged(traffic)
