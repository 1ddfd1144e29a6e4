"""Tokens in memory-mapped files, read in windows, each piece compared with its checksum when it is first read."""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .encode import Tokens

PIECE_BYTES = 2**16
"""Bytes of a file that have one checksum: about what a system reads ahead, so that comparing reads hardly more."""


def checksums(contents: Iterable[memoryview]) -> NDArray[np.uint32]:
    """The CRC-32 of each piece of a file that holds these contents one after another."""
    sums: list[int] = []
    filled = 0
    for content in contents:
        while content:
            if filled == 0:
                sums.append(0)
            part = content[: PIECE_BYTES - filled]
            sums[-1] = zlib.crc32(part, sums[-1])
            filled = (filled + len(part)) % PIECE_BYTES
            content = content[len(part) :]
    return np.array(sums, dtype="<u4")


class MappedTokens:
    """The tokens of a file. Reading from a piece of it that is not what was written raises ValueError."""

    def __init__(self, path: Path, dtype: str, sums: NDArray[np.uint32] | None = None):
        """Nothing is compared where there are no `sums`."""
        self.path = path
        # A plain array of the same memory: a slice of a numpy.memmap takes several times as long to make.
        self._tokens: Tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
        self._sums = sums
        self._unread = np.ones(0 if sums is None else len(sums), dtype=bool)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, places: slice) -> Tokens:
        tokens = self._tokens[places]
        first, last, _ = places.indices(len(self))
        begin, end = first * tokens.itemsize // PIECE_BYTES, -(-last * tokens.itemsize // PIECE_BYTES)
        if self._unread[begin:end].any():
            self._check(begin, end)
        return tokens

    def _check(self, begin: int, end: int) -> None:
        assert self._sums is not None
        content = self._tokens.view(np.uint8)
        for number in range(begin, end):
            piece = content[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            if self._unread[number] and zlib.crc32(piece.data) != self._sums[number]:
                raise ValueError(
                    f"{self.path} is damaged: bytes {number * PIECE_BYTES:,} to {number * PIECE_BYTES + len(piece):,} "
                    f"are not what was written. Bring it back; or, if it is in a cache, remove {self.path.parent}, and "
                    "the same command tokenises the text anew"
                )
        self._unread[begin:end] = False


class TokenSet:
    """Tokens of several files as one long row, which windows of any length divide; the rest at its end is unused."""

    def __init__(self, shards: Sequence[Tokens | MappedTokens], hashes: Sequence[str], largest_id: int):
        self.shards = list(shards)
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
