"""Where text comes from: local files, this Python's library, a Hugging Face dataset. Each gives the same batches."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from .config import Reading
from .files import TextFile, content_hash, file_hashes, found_files, looks_like_a_file
from .readers import BATCH_BYTES, Batch, file_batches

PYTHON = "python"


class Source(Protocol):
    """Text that can be read in batches, from the beginning or from a position that a batch gave."""

    name: str
    identity: str
    """Of the content, as far as it can be known before all is read."""
    text_bytes: int | None
    """About how much text there is, where that is known."""
    read_bytes: int
    """What the last batch's `read` will be, where `text_bytes` is known."""

    def batches(self, position: Any = None) -> Iterator[Batch]: ...

    def sample(self, limit: int) -> Iterator[Batch]:
        """Batches from all over the text, about `limit` bytes."""
        ...


class Files:
    """The documents of local files, one file after another."""

    def __init__(self, name: str, files: list[TextFile], memory: Path, reading: Reading):
        self.name = name
        self.files = files
        self.reading = reading
        hashes = file_hashes([file.path for file in files], memory)
        # Not the folder: a corpus that was moved is the same.
        labels = [f"{file.kind} {file.compression} {file.source}" for file in files]
        self.identity = content_hash([*labels, *hashes])
        self.text_bytes: int | None = sum(file.text_bytes for file in files)
        self.read_bytes = sum(file.size for file in files)

    def batches(self, position: Any = None) -> Iterator[Batch]:
        first, start = position or (0, 0)
        before = sum(file.size for file in self.files[:first])
        for number, file in enumerate(self.files[first:], first):
            for batch in file_batches(file, start, *self.reading):
                yield _moved(batch, [number, batch.position], before + batch.read)
            before, start = before + file.size, 0

    def sample(self, limit: int) -> Iterator[Batch]:
        share = limit // len(self.files)
        for file in self.files:
            taken = 0
            for batch in file_batches(file, 0, *self.reading):
                yield batch
                taken += _length(batch)
                if taken >= share:
                    break


class PythonLibrary:
    """The sources of this Python's standard library and the pages of its language reference: a document each."""

    name = PYTHON

    # Tables, programs that convert or test others, and what other packages installed: not what a person would read.
    UNREAD = frozenset(
        {"__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data"}
        | {"site-packages", "test", "tests", "turtledemo"}
    )

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        paths = sorted(self._paths(library))
        if not paths:
            raise ValueError(
                f"data 'python': this Python has no sources in {library}: name files, a folder or a dataset"
            )
        self.documents = {"library": [path.read_bytes() for path in paths], "topics": _topics()}
        self.identity = content_hash(text for name in self.documents for text in (name.encode(), *self.documents[name]))
        self.read_bytes = sum(len(text) for texts in self.documents.values() for text in texts)
        self.text_bytes: int | None = self.read_bytes

    def _paths(self, folder: Path) -> Iterator[Path]:
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in self.UNREAD]
            yield from (Path(place, name) for name in names if name.endswith(".py"))

    def batches(self, position: Any = None) -> Iterator[Batch]:
        number = read = 0
        for source, documents in self.documents.items():
            for records in _grouped(documents):
                number += 1
                read += sum(len(text) for text in records)
                if number > (position or 0):
                    yield Batch(f"Python's {source}", source, "text", records, 1, number, read)

    def sample(self, limit: int) -> Iterator[Batch]:
        yield from self.batches()


def _topics() -> list[bytes]:
    """Pages of the language reference, as `help()` shows them; not every distribution has them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name].encode() for name in sorted(topics)]


def _grouped(documents: list[bytes]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    length = 0
    for document in documents:
        group.append(document)
        length += len(document)
        if length >= BATCH_BYTES:
            yield group
            group = []
            length = 0
    if group:
        yield group


def _is_local(value: str) -> bool:
    return Path(value).expanduser().exists() or looks_like_a_file(value)


def check_place(option: str, value: str) -> None:
    """Raise ValueError where `value` names files and there are none."""
    if _is_local(value):
        found_files(option, value)


def source_of(option: str, value: str, memory: Path, reading: Reading) -> Source:
    """What `value` names: the library of Python, files that are here, or else a Hugging Face dataset."""
    if value == PYTHON:
        return PythonLibrary()
    if _is_local(value):
        return Files(value, found_files(option, value), memory, reading)
    from .hub import HubDataset

    return HubDataset(option, value, reading)


def _moved(batch: Batch, position: Any, read: int) -> Batch:
    return Batch(batch.place, batch.source, batch.kind, batch.records, batch.first_line, position, read)


def _length(batch: Batch) -> int:
    if batch.kind == "row":
        return sum(len(text or b"") for text, _ in batch.records)
    return sum(len(record) for record in batch.records)
