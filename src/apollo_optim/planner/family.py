"""The optimizers of this library as a planner sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..core.rule import Rule
from ..core.shape import Rank
from ..optimizer import ProjectedOptimizer
from ..param_groups import Vocabulary
from ..state import matrices_of, rule_of, state_entries
from ..stepping.collectives import BUCKET_BYTES
from .collectives import Traffic, merged
from .layout import FIRST, Layout, Place
from .models import Weight
from .parts import Part
from .requests import KINDS, collectives, requests

FLOAT32 = 4

# Measured, to within a factor of two (tests/test_planner_ranks.py): a step is seldom the worst moment.
ROUNDING_WORK = 60
"""Bytes for each number of the weight in work, where that is rounded: places and draws among them."""
REQUEST_COPIES = 6
"""Copies of what waits to be sent: projected, padded, packed."""

WHAT = {
    "scatter": "projected gradients",
    "reduce": "projected gradients",
    "gather": "gains, steps or gradients",
    "sum": "norms",
}
"""What each kind of request is for."""


@dataclass(frozen=True)
class Family:
    """One of ours; AdamW where the rank is None, and always on the vocabulary unless that is factored."""

    optimizer: type[ProjectedOptimizer]
    rank: Rank
    weight_dtype: torch.dtype
    state_dtype: torch.dtype
    vocabulary: Vocabulary = "adamw"

    @cached_property
    def _groups(self) -> Sequence[Mapping[str, Any]]:
        """Options of the weights of layers, and of the vocabulary."""
        member: Any = self.optimizer  # each takes arguments of its own
        layers, words = (nn.Parameter(torch.empty(1, 1, dtype=self.weight_dtype, device="meta")) for _ in range(2))
        vocabulary = {} if self.vocabulary == "adamw" else {"second_moment": self.vocabulary}
        groups = [{"params": [layers]}, {"params": [words], "rank": None, **vocabulary}]
        return member(groups, rank=self.rank, state_dtype=self.state_dtype).param_groups

    def _group(self, weight: Weight) -> Mapping[str, Any]:
        return self._groups[weight.is_vocabulary]

    def _rule(self, weight: Weight) -> Rule:
        return rule_of(self._group(weight))

    def _part(self, weight: Weight, layout: Layout) -> Part:
        return Part(weight.shape, matrices_of(weight.shape, self._group(weight)), layout.splits(weight))

    def state_bytes(self, weights: Sequence[Weight], layout: Layout, place: Place = FIRST) -> int:
        """State that the rank at `place` keeps once every weight has had a gradient."""
        total = 0
        for weight in weights:
            part = self._part(weight, layout)
            entries = state_entries(weight.shape, self.weight_dtype, self._group(weight))
            total += sum(part.numbers(entry.dims, place) * entry.dtype.itemsize for entry in entries.values())
        return total

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step; `refresh` for one that begins new bases."""
        itemsize = self.weight_dtype.itemsize
        steps = [requests(self._part(weight, layout), self._rule(weight), itemsize, refresh) for weight in weights]
        return merged(
            Traffic(WHAT[each.kind], KINDS[each.kind], each.axis.size, 1, each.bytes) for each in collectives(steps)
        )

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """What waits for the norms of all weights, what waits to be sent, and the work on one weight."""
        narrow = self.weight_dtype.itemsize < FLOAT32
        waiting = requested = largest = 0
        for weight in weights:
            part = self._part(weight, layout)
            asked = requests(part, self._rule(weight), self.weight_dtype.itemsize, False)
            requested += sum(each.bytes for each in asked if each.kind in ("scatter", "reduce"))
            largest = max(largest, part.numbers("W"))
            waiting += FLOAT32 * _measured_numbers(part, self._rule(weight))
        work = (ROUNDING_WORK if narrow else FLOAT32) * largest
        return waiting + REQUEST_COPIES * min(requested, BUCKET_BYTES) + work


def _measured_numbers(part: Part, rule: Rule) -> int:
    """Of a low-rank gradient and its step, where norms are measured before all is kept; of a residual's basis."""
    if part.matrix is None or not part.axes("SC"):
        return 0
    low = 2 * part.numbers("ESC" if part.matrix.full_rank else "ERP")
    if rule.residual:
        return low + part.numbers("ERS")
    return low if rule.granularity != "element" else 0
