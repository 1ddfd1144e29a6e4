"""Windows of tokens as examples: every token is predicted from those before it in its window."""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from .data import Batches, TokenSet


class Windows:
    """Rows of `sequence` tokens with the token after each of them as its label."""

    def __init__(self, rows: Callable[[int, int], Tensor], sequence: int):
        self._rows, self.sequence = rows, sequence

    def rows(self, first: int, count: int) -> Tensor:
        return self._rows(first, count)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, :-1], rows[:, 1:]

    def targets(self, first: int, count: int) -> int:
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
