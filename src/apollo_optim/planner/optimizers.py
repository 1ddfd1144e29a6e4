"""The optimizers that can be planned: the state each keeps, what its step holds, and the collectives it sends."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from ..core.orthogonal import products_at_once
from ..core.rule import Rule
from ..core.shape import Rank
from ..distributed import Entry, Part
from ..llama import VOCABULARY
from ..param_groups import Vocabulary
from ..state import arithmetic_dtype, check_blocks, matrices_of, rule_of, state_entries
from ..stepping import sharded
from ..stepping.collectives import BUCKET_BYTES, Request
from ..stepping.plain import refresh_by_host
from ..stepping.weight import WeightStep
from .activations import FLOAT32
from .collectives import Traffic, merged, request_bytes, requests_of, step_traffic
from .layout import Layout
from .models import Weight
from .paper_figures import LISTED, Candidate

# Measured, to within a factor of two (tests/test_planner_ranks.py): a step is seldom the worst moment.
ROUNDING_WORK = 60
"""Bytes for each number of the weight that is being stepped, if it is rounded: indices and random draws among them."""
REQUEST_COPIES = 6
"""Copies of what waits to be sent: projected, padded, packed."""


@dataclass(frozen=True)
class Family:
    """An optimizer of this library. It is AdamW if the rank is None."""

    candidate: Candidate
    rank: Rank
    weight_dtype: torch.dtype
    state_dtype: torch.dtype | None
    """None for its own default."""
    vocabulary: Vocabulary | None = None
    """The rule of embedding and head; None for its own."""

    @cached_property
    def _groups(self) -> Sequence[Mapping[str, Any]]:
        """The options for the weights of layers, and for the vocabulary."""
        layers, words = (nn.Parameter(torch.empty(1, 1, dtype=self.weight_dtype, device="meta")) for _ in range(2))
        groups = [
            {"params": [layers], **self.candidate.options(self.rank, self.state_dtype)},
            {"params": [words], **self.candidate.vocabulary_options(self.vocabulary, self.state_dtype)},
        ]
        # Drawing numbers to round takes half of a step on meta tensors, and changes nothing that is kept or sent.
        member: Any = self.candidate.optimizer  # each takes arguments of its own
        return member(groups, rounding="nearest").param_groups

    def _group(self, weight: Weight) -> Mapping[str, Any]:
        return self._groups[weight.is_vocabulary]

    def _rule(self, weight: Weight) -> Rule:
        return rule_of(weight.shape, self._group(weight))

    def _entries(self, weight: Weight) -> Mapping[str, Entry]:
        return state_entries(weight.shape, self.weight_dtype, self._group(weight))

    def _part(self, weight: Weight, layout: Layout) -> Part:
        group = self._group(weight)
        part = layout.part(weight, matrices_of(weight.shape, group), self._entries(weight))
        check_blocks(weight.name, part, group)
        return part

    def _state_shapes(self, weight: Weight, part: Part) -> dict[str, tuple[int, ...]]:
        """The shapes of a weight's state on the rank that holds `part`."""
        entries = self._entries(weight).items()
        return {name: part.local_shape(name) if entry.dims else entry.shape for name, entry in entries}

    def state_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """State that the first rank keeps once every weight has had a gradient."""
        total = 0
        for weight, count in Counter(map(_nameless, weights)).items():
            shapes, entries = self._state_shapes(weight, self._part(weight, layout)), self._entries(weight)
            total += count * sum(math.prod(shape) * entries[name].dtype.itemsize for name, shape in shapes.items())
        return total

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step; `refresh` for one that begins new bases."""
        in_turn = sorted(weights, key=lambda weight: sharded.turn_key(self._rule(weight), weight.shape))
        return step_traffic(self.requests(weight, layout, refresh) for weight in in_turn)

    def requests(self, weight: Weight, layout: Layout, refresh: bool) -> Sequence[Request]:
        """The requests that the step of a weight makes of other ranks."""
        return _requests(self, _nameless(weight), layout, refresh)

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
            rule=self._rule(weight),
            dtype=arithmetic_dtype(self.weight_dtype, group["state_dtype"]),
            group=group,
            part=part,
        )

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """Bytes that its step holds besides: what waits for all norms or to be sent, and the work on one weight."""
        narrow = self.weight_dtype.itemsize < FLOAT32
        waiting = requested = largest = multiplied = 0
        for weight, count in Counter(map(_nameless, weights)).items():
            for request in self.requests(weight, layout, False):
                if request.kind in ("max", "scatter", "reduce"):
                    requested += count * request_bytes(request)
            largest = max(largest, math.prod(layout.local_shape(weight)))
            part, rule = self._part(weight, layout), self._rule(weight)
            waiting += count * FLOAT32 * _measured_numbers(part, rule)
            multiplied = max(multiplied, _multiplied_bytes(part, rule))
        work = (ROUNDING_WORK if narrow else FLOAT32) * largest
        return waiting + REQUEST_COPIES * min(requested, BUCKET_BYTES) + multiplied + work


def _nameless(weight: Weight) -> Weight:
    """The weight under a name that is the same for all weights of its kind, so that each kind is planned once."""
    return replace(weight, name=VOCABULARY[0] if weight.is_vocabulary else "weight", unit="")


def _measured_numbers(part: Part, rule: Rule) -> int:
    """Numbers of a low-rank gradient and its step, if they are kept until all norms are known, and of Fira's basis."""
    matrix = part.local_matrix
    if matrix is None or not part.axes("SC"):
        return 0
    if rule.is_spectral or (rule.granularity == "element" and not rule.residual):
        return 0
    low = 2 * math.prod(part.local_shape("exp_avg"))
    return low + (math.prod((*matrix.batch, matrix.rank, matrix.side)) if rule.residual else 0)


def _multiplied_bytes(part: Part, rule: Rule) -> int:
    """Bytes to orthogonalise a matrix: gathered, at norm 1, the next iterate, and products of the smaller side."""
    matrix = part.local_matrix
    if matrix is None or not rule.is_spectral:
        return 0
    whole = matrix.global_shape
    squares = products_at_once(whole.side, whole.channels) * whole.side**2
    return math.prod(matrix.batch) * torch.bfloat16.itemsize * (5 * whole.side * whole.channels + squares)


@lru_cache(maxsize=1024)
def _requests(optimizer: Family, weight: Weight, layout: Layout, refresh: bool) -> Sequence[Request]:
    step = optimizer.weight_step(weight, layout, refresh)
    if not step.is_split:
        return ()
    if refresh and not refresh_by_host(step):
        return optimizer.requests(weight, layout, False)
    return requests_of(sharded.step_(step))


@dataclass(frozen=True)
class MatrixOptimizer:
    """Muon or Shampoo on every matrix, and our AdamW on the other weights.

    Muon is `torch.optim.Muon`: it makes the momentum of a matrix orthogonal. Shampoo is as in its paper (Gupta et al.,
    2018): it keeps, in float32, statistics of both sides of a matrix, their inverse roots, and momentum.
    """

    name: str
    """muon gathers every matrix on every rank; muon-dealt and shampoo deal each to one rank, and its update back."""
    weight_dtype: torch.dtype
    """Muon's momentum has it too."""
    adamw_dtype: torch.dtype

    @property
    def _adamw(self) -> Family:
        return Family(LISTED["adamw"], None, self.weight_dtype, self.adamw_dtype)

    def state_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """State that the first rank keeps once every weight has had a gradient."""
        matrices, rest = _divided(weights)
        if self.name == "shampoo":
            kept = _shampoo_bytes(matrices, layout)
        else:
            kept = layout.local_numbers(matrices) * self.weight_dtype.itemsize
        return kept + self._adamw.state_bytes(rest, layout)

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step, which is always the same."""
        matrices, rest = _divided(weights)
        sent = _gathered if self.name == "muon" else _dealt
        return sent(matrices, layout, self.weight_dtype.itemsize) + self._adamw.traffic(rest, layout)

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """Bytes that its step holds besides: several matrices as large as the largest, or those of AdamW's step."""
        matrices, rest = _divided(weights)
        largest = max(math.prod(weight.shape[-2:]) for weight in matrices)
        # Shampoo's matrix, multiplied once and twice; Muon's matrix, its next iterate, and two products.
        per_number = 3 * FLOAT32 if self.name == "shampoo" else 4 * self.weight_dtype.itemsize
        return max(per_number * largest, self._adamw.step_bytes(rest, layout))


Planned = Family | MatrixOptimizer
"""An optimizer of a whole model, on weights of given dtypes."""


def _divided(weights: Iterable[Weight]) -> tuple[list[Weight], list[Weight]]:
    """The matrices of the layers, and the other weights."""
    kinds: dict[bool, list[Weight]] = {True: [], False: []}
    for weight in weights:
        kinds[len(weight.shape) >= 2 and not weight.is_vocabulary].append(weight)
    return kinds[True], kinds[False]


def _shampoo_bytes(matrices: Iterable[Weight], layout: Layout) -> int:
    """Shampoo's state on a rank that is dealt as many matrices as any."""
    return sum(
        -(-count // sharers) * FLOAT32 * (2 * (rows**2 + columns**2) + rows * columns)
        for (rows, columns, sharers), count in _shared(matrices, layout).items()
    )


def _sharers(weight: Weight, layout: Layout) -> int:
    """The number of ranks that each matrix of a weight is split among."""
    part = layout.part(weight)
    return math.prod(part.mesh.size(axis) for split in part.splits[-2:] for axis in split)


def _shared(matrices: Iterable[Weight], layout: Layout) -> Counter[tuple[int, int, int]]:
    """The number of matrices of which a rank has a part, by their rows, columns and number of ranks that share each."""
    found: Counter[tuple[int, int, int]] = Counter()
    for weight in matrices:
        rows, columns = weight.shape[-2:]
        experts = layout.local_shape(weight)[0] if weight.is_experts else 1
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
    """Ranks that share matrices of one shape are dealt one whole matrix each at a time, and deal the updates back."""
    traffic: list[Traffic] = []
    for (rows, columns, sharers), count in _shared(matrices, layout).items():
        if sharers > 1:
            rounds, size = -(-count // sharers), count * -(-rows * columns // sharers) * itemsize
            traffic.append(Traffic("whole matrices", "all-to-all", sharers, 2 * rounds, 2 * size))
    return merged(traffic)


CONTENDERS = {
    "adamw": LISTED["adamw"].label,
    "muon": "Muon",
    "muon-dealt": "Muon, dealt out",
    "shampoo": "Shampoo",
    **{name: candidate.label for name, candidate in LISTED.items() if name != "adamw"},
}
"""The optimizers that can be planned: their names, and their labels in tables."""


def planned(
    name: str,
    rank: Rank,
    weight_dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    vocabulary: Vocabulary | None = None,
) -> Planned:
    """The optimizer of this name, at `rank` or else its paper's, and with its own state dtype if that is None.

    `vocabulary` is for optimizers of this library, each of which has its own if that is None.
    """
    if name not in LISTED:
        return MatrixOptimizer(name, weight_dtype, state_dtype or torch.float32)
    return Family(LISTED[name], rank_of(name, rank), weight_dtype, state_dtype, vocabulary)


def takes_rank(name: str) -> bool:
    return name in LISTED and LISTED[name].takes_rank


def rank_of(name: str, rank: Rank) -> Rank:
    """The rank of an optimizer: as asked for, or the paper's if none was, or if it takes none."""
    if name not in LISTED:
        return None
    return rank if rank is not None and takes_rank(name) else LISTED[name].ranks[0]
