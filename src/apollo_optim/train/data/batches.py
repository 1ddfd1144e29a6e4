"""The rows that a step trains on: a function of where it is in the run, and of nothing that must be saved."""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .shards import TokenSet

Batch = tuple[Tensor, ...]
"""What an objective is called with: tokens, labels, and perhaps where they are."""


class Batches:
    """The corpus in windows of `length` tokens, in a random order of each epoch's own."""

    def __init__(self, tokens: TokenSet, length: int, seed: int):
        if tokens.sequences(length) == 0:
            raise ValueError(f"too little text: {len(tokens):,} tokens are less than one sequence of {length}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self.sequences = tokens.sequences(length)
        """In one epoch."""

    def rows(self, first: int, count: int) -> Tensor:
        """Sequences number `first` to `first + count` of the run [count, length], int64.

        A rank takes its own of these numbers, so that what is trained on does not depend on how many ranks there are.
        """
        indices = np.arange(first, first + count, dtype=np.int64)
        return self.tokens.windows(shuffled(indices, self.sequences, self.seed), self.length)


def prefetched(
    load: Callable[[int], Batch], first: int, last: int | None = None, *, ahead: int = 4, pin: bool | None = None
) -> Generator[Batch, None, None]:
    """`load(number)` from `first` up to but not including `last`, or for ever, made in a thread up to `ahead` before.

    They come in pinned memory if `pin`, by default where there is CUDA. Closing the generator stops the thread.
    """
    pinned = torch.cuda.is_available() if pin is None else pin

    def loaded(number: int) -> Batch:
        batch = load(number)
        return tuple(each.pin_memory() for each in batch) if pinned else batch

    numbers = iter(count(first) if last is None else range(first, last))
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        waiting: deque[Future[Batch]] = deque(thread.submit(loaded, number) for number in islice(numbers, ahead))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(thread.submit(loaded, number) for number in islice(numbers, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


class Windows:
    """Rows of `sequence` tokens with the token after each of them as its label."""

    def __init__(self, rows: Callable[[int, int], Tensor], sequence: int):
        self._rows, self.sequence = rows, sequence

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        rows = self._rows(first, count)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def targets(self, first: int, count: int) -> int:
        return count * self.sequence

    def tokens(self, first: int, count: int) -> int:
        return count * self.sequence


def shuffled_windows(tokens: TokenSet, sequence: int, seed: int) -> Windows:
    """Windows for training, in an order that a seed decides."""
    return Windows(Batches(tokens, sequence + 1, seed).rows, sequence)


def windows_in_order(
    sets: Mapping[str, TokenSet], sequence: int, tokens_at_most: int
) -> dict[str, tuple[Windows, int]]:
    """Windows for evaluation by source, with how many to read; sources shorter than one window are left out."""
    most = max(tokens_at_most // sequence, 1)
    counts = {name: min(tokens.sequences(sequence + 1), most) for name, tokens in sets.items()}
    return {name: (_in_order(sets[name], sequence), count) for name, count in counts.items() if count}


def _in_order(tokens: TokenSet, sequence: int) -> Windows:
    return Windows(lambda first, count: tokens.windows(np.arange(first, first + count), sequence + 1), sequence)


ROUNDS = 8
"""Rounds of the Feistel network: four make it hard to tell from a random order; small orders profit from more."""

Words = NDArray[np.uint64]


def mixed(words: Words) -> Words:
    """Each word scattered over its 64 bits (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shuffled(indices: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """For each index of an endless walk through `count` things, the thing: every one once in each epoch, in an order of
    the epoch's own.

    A Feistel network permutes the cells of a square of side**2 >= count cells; a result beyond `count` is permuted
    again until it is below, which keeps the whole a permutation (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). The square has at most 2 * side - 1 cells too many, so that this is rare.
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
