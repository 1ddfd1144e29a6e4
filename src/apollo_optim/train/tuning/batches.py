"""Batches of examples of different lengths: padded to the longest, or packed side by side."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.batches import Batch, shuffled
from ..losses import IGNORED
from .answers import AnswerSet

Numbers = NDArray[np.int64]
Order = Callable[[Numbers], Numbers]
"""Maps places in an endless order to examples."""

Layout = Literal["padded", "packed", "marked"]
"""padded: each example has its own row. packed: examples share rows, kept apart by a mask. marked: the same by a kernel
that takes their starts.
"""

MULTIPLE = 32
"""The length of rows is a multiple of this: few lengths for a compiler, and full tiles."""

FILLED, LABELS, STARTS = 64, 16, 8
"""Lists of labels and of starts are padded to this many elements more than a multiple of FILLED. A compiler takes sizes
that are equal once to be equal always, so the lists are never as long as each other, or as a row.
"""

GROUPED = 32
"""Number of batches whose examples are sorted by length together."""


class AnswerRows:
    """Examples in some order, for the training loop: rows of tokens, and labels of the answers."""

    def __init__(self, answers: AnswerSet, order: Order, packed: int | None, marked: bool = False):
        """`packed` is the length of rows of packed examples, or more if an example is longer; None for a row each,
        padded to the longest. With `marked`, batches include the starts of examples.
        """
        self.answers, self.order, self.packed, self.marked = answers, order, packed, marked
        self._targets, self._lengths = answers.targets, answers.lengths

    def batch(self, first: int, count: int) -> Batch:
        """Tokens [rows, length], labels [N] and their places [N] in the flattened rows; if packed also positions
        [rows, length], and if marked also the starts of examples.

        The host lists the places, because it would have to wait for the device to count them.
        """
        numbers = self.order(np.arange(first, first + count))
        if self.packed is None:
            groups = [[number] for number in numbers]
        else:
            longest = int(self._lengths[numbers].max())
            groups = packs(numbers, self._lengths, max(self.packed, longest))
        tokens, labels, positions = self._filled(groups)
        places = (labels.flatten() != IGNORED).nonzero()[:, 0]
        learned = _filled_up(labels.flatten()[places], IGNORED, LABELS), _filled_up(places, 0, LABELS)
        if self.packed is None:
            return tokens, *learned
        if not self.marked:
            return tokens, *learned, positions
        starts = torch.cat(((positions.flatten() == 0).nonzero()[:, 0], torch.tensor([tokens.numel()])))
        return tokens, *learned, positions, _filled_up(starts.to(torch.int32), tokens.numel(), STARTS)

    def targets(self, first: int, count: int) -> int:
        return int(self._targets[self.order(np.arange(first, first + count))].sum())

    def tokens(self, first: int, count: int) -> int:
        """The tokens of those examples that the model reads, without padding."""
        return int(self._lengths[self.order(np.arange(first, first + count))].sum())

    def _filled(self, groups: list[list[int]]) -> Tensor:
        """Tokens, labels and positions of a row for each group. Padding is like one more example, without labels."""
        longest = max(int(self._lengths[group].sum()) for group in groups)
        length = -(-longest // MULTIPLE) * MULTIPLE
        if self.packed is not None and len(groups) > 1:
            length = max(self.packed, length)  # so that nearly all batches have one size, for a compiler
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


def _filled_up(values: Tensor, value: int, more: int) -> Tensor:
    """The values, padded by `value` to `more` elements more than a multiple of FILLED."""
    return nn.functional.pad(values, (0, (more - len(values)) % FILLED), value=value)


def packs(numbers: Numbers, lengths: Numbers, capacity: int) -> list[list[int]]:
    """Pack the examples into groups of at most `capacity` tokens: first fit, the longest first."""
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
    """Each example once in each epoch, in an order that depends on the seed and the epoch."""
    return lambda places: shuffled(places, count, seed)


def grouped_order(lengths: Numbers, batch: int, seed: int) -> Order:
    """The same, but the examples of a batch have similar lengths.

    The examples of every `GROUPED` consecutive batches are sorted by length, and these batches shuffled.
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
    """Each example once, the shortest first, for evaluation."""
    ranks = np.argsort(lengths, kind="stable")
    return lambda places: ranks[places]


@torch.no_grad()
def sees_others(objective: nn.Module, device: torch.device, marked: bool) -> bool:
    """True if an example in a packed row changes the loss of another, found by trying with a few tokens.

    Models of transformers recognise packed examples by positions that begin again, unless they have no positions, or
    make their own.
    """
    half = torch.arange(1, 6, device=device)
    labels = torch.cat((torch.full_like(half, IGNORED), half))[None]
    training = objective.training
    objective.eval()
    apart = {"positions": torch.arange(5, device=device).repeat(2)[None]}
    if marked:
        apart["starts"] = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    losses = [objective(torch.cat((first, half))[None], labels, **apart) for first in (half, half.flip(0))]
    objective.train(training)
    return not torch.equal(*losses)
