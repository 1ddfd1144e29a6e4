"""Tokens on the disk: a folder of flat files and an `index.json` that says what is in them.

The format is simple enough to be written by any program:

    index.json      {"format": "apollo-tokens", "version": 1, "dtype": "uint16", "parts": [...]}
    *.bin           ids in `dtype` (uint16 or uint32, little-endian), documents one after another, each closed by the
                    end-of-document token
    tokenizer/      what AutoTokenizer loads; without it the tokenizer must be named

A part is {"train": SHARD, "validation": {SOURCE: SHARD, ...}}, either of which may be missing; a shard is
{"file": NAME, "tokens": COUNT} and may have "largest", its largest id, and "hash", of its bytes (BLAKE2b of 16 bytes,
in hexadecimal). Parts follow each other. Beside NAME may lie NAME.crc32: the CRC-32 of every 64 KiB of it, as uint32.
The rest of what our own index holds serves to continue a preparation: a file that the index does not name does not
exist.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .encode import Tokens
from .files import file_digest, file_hashes, write_whole

FORMAT, VERSION = "apollo-tokens", 1
INDEX, TOKENIZER, SUMS = "index.json", "tokenizer", ".crc32"
DTYPES = ("uint16", "uint32")

MOST_SHARDS = 30_000
"""Files mapped into memory at once; Linux allows a process some 65,000 maps."""


@dataclass(frozen=True)
class Shard:
    """A file of tokens."""

    file: str
    tokens: int
    largest: int
    hash: str


@dataclass(frozen=True)
class TokenPart:
    """Shards that were written together."""

    train: Shard | None
    validation: dict[str, Shard]
    position: Any = None
    """The position in the source at which the next part begins."""
    documents: int = 0
    lines: int = 0
    bad: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Index:
    """The `index.json` of a folder of tokens."""

    dtype: str
    parts: tuple[TokenPart, ...] = ()
    complete: bool = False
    """True at the end of the source."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint."""
    format: str = FORMAT
    version: int = VERSION

    @property
    def position(self) -> Any:
        return self.parts[-1].position if self.parts else None

    @property
    def train_tokens(self) -> int:
        return sum(part.train.tokens for part in self.parts if part.train)

    @property
    def validation_tokens(self) -> int:
        return sum(shard.tokens for part in self.parts for shard in part.validation.values())

    @property
    def tokens(self) -> int:
        return self.train_tokens + self.validation_tokens


def is_token_folder(path: Path) -> bool:
    """True if a folder has tokens instead of text."""
    return (path / INDEX).is_file()


def written_shard(folder: Path, name: str, pieces: list[Tokens]) -> Shard:
    """Write a file of tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece.data)
    contents = [piece.data.cast("B") for piece in pieces]
    write_whole(folder / name, *contents)
    write_whole(folder / f"{name}{SUMS}", checksums(contents).tobytes())
    largest = max(int(piece.max()) for piece in pieces)
    return Shard(name, sum(len(piece) for piece in pieces), largest, digest.hexdigest())


def write_index(folder: Path, index: Index) -> None:
    """Replace the index of a folder atomically."""
    write_whole(folder / INDEX, json.dumps(asdict(index)).encode())


def read_index(folder: Path, cache: Path) -> Index:
    """The index of a folder; ValueError if it or a shard is damaged."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or content["version"] != VERSION or content["dtype"] not in DTYPES:
            raise ValueError(f"expected format {FORMAT!r}, version {VERSION}, and dtype one of {DTYPES}")
        shards = sum(1 + len(part.get("validation") or ()) for part in content["parts"])
        if shards > MOST_SHARDS:
            raise ValueError(f"it has {shards:,} shards, of at most {MOST_SHARDS:,}: put more tokens into each file")
        parts = tuple(_part(folder, part, content["dtype"], cache) for part in content["parts"])
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no index of tokens ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Index(content["dtype"], parts, bool(content.get("complete")), content.get("tokenizer"))


def _part(folder: Path, content: dict[str, Any], dtype: str, cache: Path) -> TokenPart:
    train = content.get("train")
    validation = content.get("validation") or {}
    return TokenPart(
        train and _shard(folder, train, dtype, cache),
        {source: _shard(folder, shard, dtype, cache) for source, shard in validation.items()},
        content.get("position"),
        content.get("documents", 0),
        content.get("lines", 0),
        content.get("bad", 0),
        tuple(content.get("examples", ())),
    )


def _shard(folder: Path, content: dict[str, Any], dtype: str, cache: Path) -> Shard:
    path = folder / content["file"]
    tokens = content["tokens"]
    if type(tokens) is not int:
        raise ValueError(f"tokens of {path.name} must be an integer, got {tokens!r}")
    expected = tokens * np.dtype(dtype).itemsize
    actual = path.stat().st_size if path.is_file() else 0
    if actual != expected or expected == 0:
        raise ValueError(f"{path.name} has {actual:,} bytes where {tokens:,} tokens take {expected:,}")
    largest = content.get("largest")
    if largest is None:
        largest = int(np.memmap(path, dtype=dtype, mode="r").max())
    elif type(largest) is not int:
        raise ValueError(f"largest of {path.name} must be an integer, got {largest!r}")
    return Shard(content["file"], tokens, largest, _checked_hash(path, content.get("hash"), cache))


def _checked_hash(path: Path, expected: str | None, cache: Path) -> str:
    """The hash of a file's content; ValueError if it is not the expected one."""
    if expected is not None and _sums_of(path) is not None:
        return expected  # the checksum of each piece is compared when it is read
    if expected is None:
        return file_hashes([path], cache)[0]
    actual = file_digest(path, cache)
    if expected != actual:
        raise ValueError(f"{path.name} is not what was written: its hash is {actual}, and not {expected}")
    return actual


def _sums_of(path: Path) -> NDArray[np.uint32] | None:
    """The checksums of a file's pieces; None if there are none, or not one for each piece."""
    sums = path.with_name(f"{path.name}{SUMS}")
    if not sums.is_file() or sums.stat().st_size != -(-path.stat().st_size // PIECE_BYTES) * 4:
        return None
    return np.fromfile(sums, dtype="<u4")


PIECE_BYTES = 2**16
"""Bytes per checksum: about as many as a system reads ahead, so that comparing hardly reads more."""


def checksums(contents: Iterable[memoryview]) -> NDArray[np.uint32]:
    """The CRC-32 of each piece of a file with these contents."""
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
    """The tokens of a file. Reading a damaged piece raises ValueError, if there are checksums."""

    def __init__(self, path: Path, dtype: str):
        sums = _sums_of(path)
        self.path = path
        # A plain array of the same memory, because slicing a numpy.memmap is several times slower.
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
                    f"are not what was written. Restore it; or, if it is in a cache, remove {self.path.parent}, and "
                    "the same command tokenises the text again"
                )
        self._unread[begin:end] = False


class TokenSet:
    """The tokens of several files as one sequence, divided into windows; a rest at the end is unused."""

    def __init__(self, shards: Sequence[Tokens | MappedTokens], hashes: Sequence[str], largest_id: int):
        self.shards = list(shards)
        self.starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.hashes = tuple(hashes)
        """Hashes of the files' content."""
        self.largest_id = largest_id

    def __len__(self) -> int:
        return int(self.starts[-1])

    def sequences(self, length: int) -> int:
        """The number of complete windows of `length` tokens."""
        return len(self) // length

    def windows(self, indices: NDArray[np.int64], length: int) -> Tensor:
        """The windows with these numbers [count, length], int64."""
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


def token_set(folder: Path, dtype: str, shards: list[Shard]) -> TokenSet:
    """The tokens of some shards."""
    mapped = [MappedTokens(folder / shard.file, dtype) for shard in shards]
    return TokenSet(mapped, [shard.hash for shard in shards], max((shard.largest for shard in shards), default=0))
