"""The rows of each step, as a function of its number alone, so that there is no state to save."""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .encode import in_order
from .shards import TokenSet

Batch = tuple[Tensor, ...]
"""The arguments of the objective: tokens, labels, and perhaps positions."""


def prefetched(
    load: Callable[[int], Batch], numbers: Iterable[int], *, ahead: int = 4, pin: bool = False
) -> Generator[Batch, None, None]:
    """`load(number)` for each number, up to `ahead` in advance by a thread, which ends when the generator is closed.

    With `pin` the batches are in pinned memory.
    """

    def loaded(number: int) -> Batch:
        batch = load(number)
        return tuple(each.pin_memory() for each in batch) if pin else batch

    return in_order(ThreadPoolExecutor(1, thread_name_prefix="batches"), loaded, numbers, 1 + ahead)


class Windows:
    """A text in rows of `sequence` tokens, labelled with the token after each.

    With a `seed` they are endless, in another random order in each epoch; without one in the order of the text.
    """

    def __init__(self, text: TokenSet, sequence: int, seed: int | None = None):
        self.text, self.sequence, self.seed = text, sequence, seed

    def rows(self, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count`, with the label of the last token [count, sequence + 1], int64.

        Ranks share these numbers, so that the rows of a batch do not depend on the number of ranks.
        """
        length, indices = self.sequence + 1, np.arange(first, first + count, dtype=np.int64)
        if self.seed is not None:
            indices = shuffled(indices, self.text.sequences(length), self.seed)
        return self.text.windows(indices, length)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(first, count)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def targets(self, first: int, count: int) -> int:
        return count * self.sequence

    def tokens(self, first: int, count: int) -> int:
        return count * self.sequence


def windows_in_order(
    sets: Mapping[str, TokenSet], sequence: int, tokens_at_most: int
) -> dict[str, tuple[Windows, int]]:
    """Windows for evaluation by source, and how many to read; without sources shorter than a window."""
    most = max(tokens_at_most // sequence, 1)
    counts = {name: min(tokens.sequences(sequence + 1), most) for name, tokens in sets.items()}
    return {name: (Windows(sets[name], sequence), count) for name, count in counts.items() if count}


ROUNDS = 8
"""Rounds of the Feistel network. Four are hard to tell from a random order, but small orders need more."""

Words = NDArray[np.uint64]


def mixed(words: Words) -> Words:
    """A hash of each word (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shuffled(indices: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """The items at these indices of an endless shuffle of `count` items, in another order in each epoch.

    A Feistel network permutes a square of side**2 >= count cells; a result of `count` or more is permuted again, which
    keeps it a permutation (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). At most 2 * side - 1
    cells are too many, so that this is rare.
    """
    epochs = (indices // count).astype(np.uint64)
    keys = mixed(mixed(np.full_like(epochs, seed)) + epochs * np.uint64(0x9E3779B97F4A7C15))
    places = (indices % count).astype(np.uint64)
    beyond = np.ones(len(places), dtype=bool)
    while beyond.any():
        places[beyond] = _permuted(places[beyond], _side(count), keys[beyond])
        beyond = places >= count
    return places.astype(np.int64)


def _side(count: int) -> int:
    side = int(np.sqrt(count))
    while side * side < count:
        side += 1
    return side


def _permuted(cells: Words, side: int, keys: Words) -> Words:
    left, right = cells // np.uint64(side), cells % np.uint64(side)
    for number in range(ROUNDS):
        noise = mixed(keys + mixed(right + np.uint64(number << 32)))
        left, right = right, (left + noise % np.uint64(side)) % np.uint64(side)
    return left * np.uint64(side) + right
