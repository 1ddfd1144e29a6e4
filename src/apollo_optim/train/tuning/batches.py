"""Examples of many lengths as batches: padded to the longest, or packed side by side so that none sees another."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batches import shuffled
from ..losses import IGNORED
from .answers import AnswerSet

Numbers = NDArray[np.int64]
Order = Callable[[Numbers], Numbers]
"""The examples at some places of an endless walk through all of them."""

MULTIPLE = 32
"""Rows are as long as a multiple of this: few lengths for a compiler to meet, and tiles that are full."""

GROUPED = 32
"""Batches whose examples are sorted by length together."""


class AnswerRows:
    """Examples in some order, as a training loop reads them: rows of tokens, with labels where an answer is."""

    def __init__(self, answers: AnswerSet, order: Order, packed: int | None):
        """`packed`: tokens of a row that examples share, or of their longest if that is more; None for a row each,
        padded to the longest.
        """
        self.answers, self.order, self.packed = answers, order, packed
        self._targets, self._lengths = answers.targets, answers.lengths

    def rows(self, first: int, count: int) -> Tensor:
        """Tokens and labels, [2, rows, length], or also positions where examples share rows, [3, rows, length]."""
        numbers = self.order(np.arange(first, first + count))
        if self.packed is None:
            return self._filled([[number] for number in numbers])[:2]
        longest = int(self._lengths[numbers].max())
        return self._filled(packs(numbers, self._lengths, max(self.packed, longest)))

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What the objective is called with."""
        return rows.unbind(0)

    def targets(self, first: int, count: int) -> int:
        return int(self._targets[self.order(np.arange(first, first + count))].sum())

    def tokens(self, first: int, count: int) -> int:
        """Tokens that a model reads in those examples, without what rows are filled up with."""
        return int(self._lengths[self.order(np.arange(first, first + count))].sum())

    def _filled(self, groups: list[list[int]]) -> Tensor:
        """A row for each group of examples. What is left of it is like an example more, of which nothing is learned."""
        longest = max(int(self._lengths[group].sum()) for group in groups)
        length = -(-longest // MULTIPLE) * MULTIPLE
        if self.packed is not None and len(groups) > 1:
            length = max(self.packed, length)  # the same for nearly all batches, where a compiler looks on
        rows = torch.zeros(3, len(groups), length, dtype=torch.int64)
        rows[1] = IGNORED
        for row, group in enumerate(groups):
            place = 0
            for number in group:
                ids, learned = self.answers.example(number)
                part = slice(place, place + len(ids) - 1)
                rows[0, row, part] = torch.from_numpy(ids[:-1].astype(np.int64))
                rows[1, row, part] = torch.from_numpy(np.where(learned[1:], ids[1:], IGNORED).astype(np.int64))
                rows[2, row, part] = torch.arange(len(ids) - 1)
                place = part.stop
            rows[2, row, place:] = torch.arange(length - place)
        return rows


def packs(numbers: Numbers, lengths: Numbers, capacity: int) -> list[list[int]]:
    """The examples in groups of at most `capacity` tokens: each, the longest first, into the first that has room."""
    groups: list[list[int]] = []
    room: list[int] = []
    for number in sorted(numbers.tolist(), key=lambda number: -lengths[number]):
        length = int(lengths[number])
        place = next((place for place, free in enumerate(room) if free >= length), None)
        if place is None:
            groups.append([number])
            room.append(capacity - length)
        else:
            groups[place].append(number)
            room[place] -= length
    return groups


def shuffled_order(count: int, seed: int) -> Order:
    """Every example once in each epoch, in an order that the seed and the epoch decide."""
    return lambda places: shuffled(places, count, seed)


def grouped_order(lengths: Numbers, batch: int, seed: int) -> Order:
    """The same, but the examples of a batch are about as long as each other.

    Of every `GROUPED` batches that follow each other the examples are sorted by length, and the batches taken in an
    order of their own: a batch may be of long examples or of short ones.
    """
    span = GROUPED * batch

    @lru_cache(maxsize=4)
    def sorted_span(number: int) -> Numbers:
        members = shuffled(np.arange(number * span, (number + 1) * span), len(lengths), seed)
        members = members[np.argsort(lengths[members], kind="stable")].reshape(GROUPED, batch)
        return members[shuffled(np.arange(GROUPED), GROUPED, seed + number)].reshape(-1)

    def order(places: Numbers) -> Numbers:
        found = [sorted_span(place // span)[place % span] for place in places.tolist()]
        return np.asarray(found, dtype=np.int64)

    return order


def by_length(lengths: Numbers) -> Order:
    """Every example once, the shortest first: for evaluation."""
    ranks = np.argsort(lengths, kind="stable")
    return lambda places: ranks[places]


@torch.no_grad()
def sees_others(objective: nn.Module, device: torch.device) -> bool:
    """Whether an example of a packed row changes the loss of another in it: tried with a few tokens.

    Models of transformers find packed examples by positions that begin again. Those that know no positions, or make
    them up themselves, do not.
    """
    half = torch.arange(1, 6, device=device)
    labels = torch.cat((torch.full_like(half, IGNORED), half))[None]
    training = objective.training
    objective.eval()
    positions = torch.arange(5, device=device).repeat(2)[None]
    losses = [objective(torch.cat((first, half))[None], labels, positions) for first in (half, half.flip(0))]
    objective.train(training)
    return not torch.equal(*losses)
