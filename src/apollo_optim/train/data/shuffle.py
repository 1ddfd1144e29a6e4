"""Random orders that need no memory: any place of a permutation is computed by itself."""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Of the network: four make it hard to tell from a random order; small orders profit from more."""

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
