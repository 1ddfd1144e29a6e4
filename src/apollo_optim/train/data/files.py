"""Finds the files that an option names, and hashes and writes files."""

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Literal

from ...flags import check_utf8
from ..atomic import flush_folder

Kind = Literal["text", "json", "parquet", "arrow"]

# The published C4 names its JSON lines .json.
KINDS: dict[str, Kind] = {
    ".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
COMPRESSIONS = (".zst", ".gz")
ACCEPTED = f"{', '.join(KINDS)}, each optionally with {' or '.join(COMPRESSIONS)}"

SPLITS = "dataset_dict.json"
SAVED = frozenset({SPLITS, "dataset_info.json", "state.json"})
"""Files without text that `save_to_disk` of a Hugging Face dataset writes beside its .arrow files."""

MOST_SOURCES = 32
"""With more sources than this perplexity is reported by folder: nobody would read a list by file."""

TYPICAL_COMPRESSION = 3
"""Bytes of text per byte of a compressed file, for estimates."""

MEMO_FROM_BYTES = 2**24
"""Smaller files are hashed each time."""

# "train-00003-of-00006" and "part_17" are pieces of "train" and "part"; "c4" and "enwik8" are whole names.
SHARD_NUMBER = re.compile(r"[-_.]\d+([-_.]?of[-_.]?\d+)?$")


@dataclass(frozen=True)
class TextFile:
    """A file of text, and the name by which its perplexity is reported."""

    path: Path
    source: str
    kind: Kind
    compression: str | None
    size: int

    @property
    def is_table(self) -> bool:
        """True if it has rows of named fields instead of lines."""
        return self.kind in ("parquet", "arrow")

    @property
    def text_bytes(self) -> int:
        """The approximate size of its text."""
        packed = self.compression is not None or self.kind == "parquet"
        return self.size * (TYPICAL_COMPRESSION if packed else 1)


def found_files(option: str, value: str) -> list[TextFile]:
    """The files that `value` names, in a fixed order; ValueError if there are none, or one is empty."""
    by_path: dict[Path, tuple[TextFile, str]] = {}
    for path in _paths(value):
        for file in _path_files(option, path):
            by_path.setdefault(file.path.resolve(), (file, _path_name(path)))
    files = [file for file, _ in by_path.values()]
    if not files:
        raise ValueError(f"{option} must name files or folders, got {value!r}")
    if len({file.source for file in files}) > MOST_SOURCES:
        files = [replace(file, source=name) for file, name in by_path.values()]
    return files


def is_there(value: str) -> bool:
    """True if all files, folders and patterns that `value` names exist."""
    return all(glob.glob(str(path), recursive=True) or path.exists() for path in _paths(value))


def absolute(value: str) -> str:
    """`value` with absolute paths."""
    return ",".join(str(path.absolute()) for path in _paths(value))


def _paths(value: str) -> list[Path]:
    whole = Path(value)
    return [whole] if value and whole.exists() else [Path(item.strip()) for item in value.split(",") if item.strip()]


def _path_files(option: str, path: Path) -> list[TextFile]:
    if path.is_file():
        return [_text_file(option, path)]
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.is_file() and _is_text(each.relative_to(path)))
        if any(_kind(each)[0] == "arrow" for each in found):
            _check_splits(option, found)
            found = [each for each in found if each.name not in SAVED and not _is_cache(each)]
        if not found:
            raise ValueError(f"{option} {str(path)!r}: no file of text in this folder; looked for {ACCEPTED}")
    else:
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        found = [match for match in matches if match.is_file() and _is_text(Path(match.name))]
        if not found:
            hint = "" if len(path.parts) > 1 else "; a Hugging Face dataset is named org/name"
            raise ValueError(f"{option} {str(path)!r}: no file matches; looked for {ACCEPTED}{hint}")
    return [_text_file(option, each) for each in found]


def _check_splits(option: str, found: list[Path]) -> None:
    """Raise ValueError if a saved dataset has several splits, as some of them are for tests."""
    for folder in (each.parent for each in found if each.name == SPLITS):
        splits = sorted({str(each.parent) for each in found if each.parent.parent == folder})
        if len(splits) > 1:
            raise ValueError(
                f"{option} {str(folder)!r} is a dataset of several splits: name those that are meant, by commas, of "
                f"{', '.join(splits)}"
            )


def _is_cache(path: Path) -> bool:
    """True for a file that `map` or `shuffle` of `datasets` has cached beside a dataset."""
    return path.suffix == ".arrow" and path.name.startswith("cache-")


def _is_text(path: Path) -> bool:
    """True if a file's name is that of a text file, and not hidden."""
    return _kind(path)[0] is not None and not any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> tuple[Kind | None, str | None]:
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else None
    named = path.with_suffix("") if compression else path
    return KINDS.get(named.suffix.lower()), compression


def _text_file(option: str, path: Path) -> TextFile:
    kind, compression = _kind(path)
    if kind is None:
        raise ValueError(f"{option} {str(path)!r}: unknown kind of file; accepted are {ACCEPTED}")
    check_utf8(f"{option}: the name of a file", str(path))
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{option}: {path} is empty: remove it, or fetch it again")
    stem = path.name[: -len("".join(path.suffixes[-2 if compression else -1 :]))]
    return TextFile(path, SHARD_NUMBER.sub("", stem) or stem, kind, compression, size)


def _path_name(path: Path) -> str:
    """The last part of a path that is no pattern."""
    parts = [part for part in path.absolute().parts if not any(c in part for c in "*?[")]
    return Path(parts[-1]).stem


def content_hash(parts: Iterable[bytes | str]) -> str:
    """A hash of several contents, each with its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def file_hashes(paths: Iterable[Path], cache: Path) -> list[str]:
    """The hash of each file's content; those of large files are kept in the cache."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_file_hash, paths, repeat(cache)))


def _file_hash(path: Path, cache: Path) -> str:
    small = path.stat().st_size < MEMO_FROM_BYTES
    return content_hash([path.read_bytes()]) if small else file_digest(path, cache)


def file_digest(path: Path, cache: Path) -> str:
    """BLAKE2b of a file's bytes, of 16 bytes; that of a large file is kept in the cache."""
    facts = path.stat()
    if facts.st_size < MEMO_FROM_BYTES:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    # Every change of the content changes ctime, which no program can set back.
    name = content_hash(
        [str(path.resolve()), *(str(f) for f in (facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns))]
    )
    memo = cache / "hashes" / name
    if memo.exists():
        return memo.read_text()
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    memo.parent.mkdir(parents=True, exist_ok=True)
    write_whole(memo, digest.hexdigest().encode())
    return digest.hexdigest()


def write_whole(path: Path, *contents: bytes | memoryview) -> None:
    """Write a file atomically, and flush it to the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            for content in contents:
                stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        with suppress(OSError):  # not every system can open and sync folders
            flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
