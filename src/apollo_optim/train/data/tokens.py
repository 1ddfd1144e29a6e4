"""Tokens in memory-mapped files, read in windows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .encode import Tokens


class TokenSet:
    """Tokens of several files as one long row, which windows of any length divide; the rest at its end is unused."""

    def __init__(self, shards: Sequence[Tokens], hashes: Sequence[str], largest_id: int):
        # Plain arrays of the same memory: a slice of a numpy.memmap takes several times as long to make.
        self.shards = [np.asarray(shard) for shard in shards]
        self.starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.hashes = tuple(hashes)
        """Of the files' content."""
        self.largest_id = largest_id

    def __len__(self) -> int:
        return int(self.starts[-1])

    def sequences(self, length: int) -> int:
        """How many whole windows of `length` tokens there are."""
        return len(self) // length

    def window(self, index: int, length: int) -> Tensor:
        """Window number `index` [length], int64."""
        return self.windows(np.array([index]), length)[0]

    def windows(self, indices: NDArray[np.int64], length: int) -> Tensor:
        """The windows of these numbers [count, length], int64."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.sequences(length)):
            raise IndexError(f"windows {indices.min()} to {indices.max()} of {self.sequences(length)}")
        result = np.empty((len(indices), length), dtype=np.int64)
        firsts = indices * length
        numbers = np.searchsorted(self.starts, firsts, side="right") - 1
        offsets = firsts - self.starts[numbers]
        for row, number, offset in zip(result, numbers.tolist(), offsets.tolist(), strict=True):
            piece = self.shards[number][offset : offset + length]
            row[: len(piece)] = piece
            filled = len(piece)
            while filled < length:
                number += 1
                piece = self.shards[number][: length - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
        return torch.from_numpy(result)

    def parted(self, tokens: int) -> "tuple[TokenSet, TokenSet]":
        """The first `tokens` tokens, and the rest."""
        number = int(np.searchsorted(self.starts, tokens, side="right")) - 1
        cut = tokens - int(self.starts[number])
        shards, hashes = self.shards, self.hashes
        begun = [shards[number][:cut]] if cut else []
        rest = [shards[number][cut:], *shards[number + 1 :]] if number < len(shards) else []
        marks = [f"{each} from {tokens}" for each in hashes[number:]]
        return (
            TokenSet([*shards[:number], *begun], [*hashes[:number], *marks[: len(begun)]], self.largest_id),
            TokenSet(rest, marks, self.largest_id),
        )
