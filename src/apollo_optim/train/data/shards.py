"""Tokens on the disk: a folder of flat files and an `index.json` that says what is in them.

The format is simple enough to be written by any program:

    index.json      {"format": "apollo-tokens", "version": 1, "dtype": "uint16", "parts": [...]}
    *.bin           ids in `dtype` (uint16 or uint32, little-endian), documents one after another, each closed by the
                    end-of-document token
    tokenizer/      what AutoTokenizer loads; without it the tokenizer must be named

A part is {"train": SHARD, "validation": {SOURCE: SHARD, ...}}, either of which may be missing; a shard is
{"file": NAME, "tokens": COUNT} and may have "largest", its largest id, and "hash", of its bytes. Parts follow each
other. The rest of what our own index holds serves to continue a preparation: a file that the index does not name does
not exist.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .encode import Tokens
from .files import file_hashes, write_whole
from .tokens import TokenSet

FORMAT, VERSION = "apollo-tokens", 1
INDEX, TOKENIZER = "index.json", "tokenizer"
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    largest: int
    hash: str


@dataclass(frozen=True)
class Part:
    """Tokens that were written together."""

    train: Shard | None
    validation: dict[str, Shard]
    position: Any = None
    """Where in the source the next part begins."""
    documents: int = 0
    lines: int = 0
    bad: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Index:
    """What a folder of tokens holds."""

    dtype: str
    parts: tuple[Part, ...] = ()
    complete: bool = False
    """Whether the source has no more."""
    tokenizer: str | None = None
    """The tokenizer's fingerprint."""
    format: str = field(default=FORMAT)
    version: int = field(default=VERSION)

    @property
    def position(self) -> Any:
        return self.parts[-1].position if self.parts else None

    @property
    def train_tokens(self) -> int:
        return sum(part.train.tokens for part in self.parts if part.train)

    @property
    def validation_tokens(self) -> int:
        return sum(shard.tokens for part in self.parts for shard in part.validation.values())


def is_token_folder(path: Path) -> bool:
    """Whether a folder holds tokens and not text."""
    return (path / INDEX).is_file()


def written_shard(folder: Path, name: str, pieces: list[Tokens]) -> Shard:
    """A new file of tokens."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece.data)
    write_whole(folder / name, *(piece.data.cast("B") for piece in pieces))
    largest = max(int(piece.max()) for piece in pieces)
    return Shard(name, sum(len(piece) for piece in pieces), largest, digest.hexdigest())


def write_index(folder: Path, index: Index) -> None:
    """Replace the index of a folder, all at once."""
    write_whole(folder / INDEX, json.dumps(asdict(index)).encode())


def read_index(folder: Path, memory: Path) -> Index:
    """The index of a folder, every shard of it checked to be there whole; raises ValueError otherwise."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT or content["version"] != VERSION or content["dtype"] not in DTYPES:
            raise ValueError(f"expected format {FORMAT!r}, version {VERSION}, and dtype one of {DTYPES}")
        parts = tuple(_part(folder, part, content["dtype"], memory) for part in content["parts"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no index of tokens ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Index(content["dtype"], parts, bool(content.get("complete")), content.get("tokenizer"))


def _part(folder: Path, content: dict[str, Any], dtype: str, memory: Path) -> Part:
    train = content.get("train")
    validation = content.get("validation") or {}
    return Part(
        train and _shard(folder, train, dtype, memory),
        {source: _shard(folder, shard, dtype, memory) for source, shard in validation.items()},
        content.get("position"),
        content.get("documents", 0),
        content.get("lines", 0),
        content.get("bad", 0),
        tuple(content.get("examples", ())),
    )


def _shard(folder: Path, content: dict[str, Any], dtype: str, memory: Path) -> Shard:
    path = folder / content["file"]
    expected = content["tokens"] * np.dtype(dtype).itemsize
    actual = path.stat().st_size if path.is_file() else 0
    if actual != expected or expected == 0:
        raise ValueError(f"{path.name} has {actual:,} bytes where {content['tokens']:,} tokens take {expected:,}")
    largest = content.get("largest")
    if largest is None:
        largest = int(np.memmap(path, dtype=dtype, mode="r").max())
    return Shard(content["file"], content["tokens"], largest, content.get("hash") or file_hashes([path], memory)[0])


def token_set(folder: Path, dtype: str, shards: list[Shard]) -> TokenSet:
    """The tokens of some shards, as one."""
    arrays = [np.memmap(folder / shard.file, dtype=dtype, mode="r") for shard in shards]
    return TokenSet(arrays, [shard.hash for shard in shards], max((shard.largest for shard in shards), default=0))
