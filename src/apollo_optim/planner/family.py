"""The optimizers of this library as a planner sees them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from ..core.rule import Rule
from ..core.shape import Rank
from ..distributed import Part
from ..llama import VOCABULARY
from ..optimizer import ProjectedOptimizer
from ..state import Entry, arithmetic_dtype, projected_shape, state_entries
from ..stepping import sharded
from ..stepping.collectives import BUCKET_BYTES, Request
from ..stepping.plain import refresh_by_host
from ..stepping.weight import WeightStep
from .collectives import Traffic, request_bytes, requests_of, step_traffic
from .layout import FIRST, Layout, Place
from .models import Weight

FLOAT32 = 4

# Measured, to within a factor of two (tests/test_planner_ranks.py): a step is seldom the worst moment.
ROUNDING_WORK = 60
"""Bytes for each number of the weight in work, where that is rounded: places and draws among them."""
REQUEST_COPIES = 6
"""Copies of what waits to be sent: projected, padded, packed."""


@dataclass(frozen=True)
class Family:
    """An optimizer of this library; AdamW where the rank is None, and always on the vocabulary."""

    optimizer: type[ProjectedOptimizer]
    rank: Rank
    weight_dtype: torch.dtype
    state_dtype: torch.dtype

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        """The options of a group of projected weights."""
        member: Any = self.optimizer  # each takes arguments of its own
        sample = nn.Parameter(torch.empty(1, 1, dtype=self.weight_dtype, device="meta"))
        return member([sample], rank=self.rank, state_dtype=self.state_dtype).param_groups[0]

    @cached_property
    def _adamw_options(self) -> Mapping[str, Any]:
        return {**self._options, "rank": None}

    @cached_property
    def _rule(self) -> Rule:
        return Rule.of(self._options)

    def _group(self, weight: Weight) -> Mapping[str, Any]:
        return self._adamw_options if weight.is_vocabulary else self._options

    def _entries(self, weight: Weight) -> Mapping[str, Entry]:
        return state_entries(weight.shape, self.weight_dtype, self._group(weight))

    def _part(self, weight: Weight, layout: Layout, place: Place = FIRST) -> Part:
        dims = {name: entry.dims for name, entry in self._entries(weight).items()}
        return layout.part(weight, place, projected_shape(weight.shape, self._group(weight)), dims)

    def _state_shapes(self, weight: Weight, part: Part) -> dict[str, tuple[int, ...]]:
        """The shapes of a weight's state on the rank that holds `part`."""
        entries = self._entries(weight).items()
        return {name: part.local_shape(name) if entry.dims else entry.shape for name, entry in entries}

    def state_bytes(self, weights: Sequence[Weight], layout: Layout, place: Place = FIRST) -> int:
        """State that the rank at `place` keeps once every weight has had a gradient."""
        total = 0
        for weight in weights:
            shapes, entries = self._state_shapes(weight, self._part(weight, layout, place)), self._entries(weight)
            total += sum(math.prod(shape) * entries[name].dtype.itemsize for name, shape in shapes.items())
        return total

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step; `refresh` for one that begins new bases."""
        return step_traffic(self.requests(weight, layout, refresh) for weight in weights)

    def requests(self, weight: Weight, layout: Layout, refresh: bool) -> Sequence[Request]:
        """What the step of one weight asks of other ranks."""
        # The same for all weights that differ in their names alone.
        name = VOCABULARY[0] if weight.is_vocabulary else "weight"
        return _requests(self, replace(weight, name=name, unit=""), layout, refresh)

    def weight_step(self, weight: Weight, layout: Layout, refresh: bool) -> WeightStep:
        """The step of the first rank's part of a weight, on meta tensors; `refresh` for one that begins a new basis."""
        group, part = self._group(weight), self._part(weight, layout)
        parameter = torch.empty(layout.local_shape(weight), dtype=self.weight_dtype, device="meta")
        parameter.grad = torch.empty_like(parameter)
        shapes, entries = self._state_shapes(weight, part), self._entries(weight)
        state = {
            name: torch.zeros(shapes[name], dtype=entry.dtype, device="cpu" if entry.on_host else "meta")
            for name, entry in entries.items()
        }
        state["step"].fill_(group["refresh_every"] if refresh else 1)
        return WeightStep(
            name=weight.name,
            parameter=parameter,
            state=state,
            shape=part.local_matrix,
            rule=Rule.of(group),
            dtype=arithmetic_dtype(self.weight_dtype, self.state_dtype),
            group=group,
            part=part,
        )

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """What waits for the norms of all weights, what waits to be sent, and the work on one weight."""
        narrow = self.weight_dtype.itemsize < FLOAT32
        waiting = requested = largest = 0
        for weight in weights:
            for kind, axis, tensor, _ in self.requests(weight, layout, False):
                requested += request_bytes(kind, axis.size, tensor) if kind in ("scatter", "reduce") else 0
            largest = max(largest, math.prod(layout.local_shape(weight)))
            waiting += FLOAT32 * self._measured_numbers(self._part(weight, layout))
        work = (ROUNDING_WORK if narrow else FLOAT32) * largest
        return waiting + REQUEST_COPIES * min(requested, BUCKET_BYTES) + work

    def _measured_numbers(self, part: Part) -> int:
        """Of a low-rank gradient and its step, where norms are measured before all is kept; of a residual's basis."""
        matrix = part.local_matrix
        if matrix is None or not part.axes("SC"):
            return 0
        low = 2 * math.prod(part.local_shape("exp_avg"))
        if self._rule.residual:
            return low + math.prod((*matrix.batch, matrix.rank, matrix.side))
        return low if self._rule.granularity != "element" else 0


@lru_cache(maxsize=1024)
def _requests(optimizer: Family, weight: Weight, layout: Layout, refresh: bool) -> Sequence[Request]:
    step = optimizer.weight_step(weight, layout, refresh)
    if not step.is_split:
        return ()
    if refresh and not refresh_by_host(step):
        return optimizer.requests(weight, layout, False)
    return requests_of(sharded.step_(step))
