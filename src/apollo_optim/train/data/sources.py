"""Sources of text: local files, Python's own library, or a Hugging Face dataset, all read as the same batches."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

from ..troubles import may_be_on_hub, troubles_of
from .config import Data
from .files import TextFile, content_hash, file_hashes, found_files
from .readers import BATCH_BYTES, RecordBatch, Row, file_batches, row_of

PYTHON = "python"


class Source(Protocol):
    """Text that is read in batches, from the beginning or from the position of an earlier batch."""

    name: str
    identity: str
    """A hash of the content, as far as it is known before reading."""
    text_bytes: int | None
    """The approximate size of the text, if known."""
    read_bytes: int
    """`read` of the last batch, if `text_bytes` is known."""

    def batches(self, position: Any = None) -> Iterator[RecordBatch]: ...

    def sample(self, limit: int) -> Iterator[RecordBatch]:
        """About `limit` bytes of batches from all over the text."""
        ...


class Files:
    """Local files, one after another."""

    def __init__(self, name: str, files: list[TextFile], data: Data):
        self.name = name
        self.files = files
        self.data = data
        hashes = file_hashes([file.path for file in files], data.cache)
        # Without the folder: a corpus stays the same when it is moved.
        labels = [f"{file.kind} {file.compression} {file.source}" for file in files]
        self.identity = content_hash([*labels, *hashes])
        self.text_bytes: int | None = sum(file.text_bytes for file in files)
        self.read_bytes = sum(file.size for file in files)

    def batches(self, position: Any = None) -> Iterator[RecordBatch]:
        first, start = position or (0, 0)
        before = sum(file.size for file in self.files[:first])
        for number, file in enumerate(self.files[first:], first):
            for batch in file_batches(file, start, self.data):
                yield replace(batch, position=[number, batch.position], read=before + batch.read)
            before, start = before + file.size, 0

    def sample(self, limit: int) -> Iterator[RecordBatch]:
        share = limit // len(self.files)
        for file in self.files:
            yield from _first(file_batches(file, 0, self.data), share)


class PythonLibrary:
    """The modules of Python's standard library and the pages of its language reference, a document each."""

    name = PYTHON

    # Tables, converters, tests and other packages: nothing that a person would read.
    UNREAD = frozenset(
        {"__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data"}
        | {"site-packages", "test", "tests", "turtledemo"}
    )

    def __init__(self) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        paths = sorted(self._paths(library))
        if not paths:
            raise ValueError(
                f"--data python: this Python has no sources in {library}: name files, a folder or a dataset"
            )
        self.documents = {"library": [path.read_bytes() for path in paths], "topics": _topics()}
        self.identity = content_hash(text for name in self.documents for text in (name.encode(), *self.documents[name]))
        self.read_bytes = sum(len(text) for texts in self.documents.values() for text in texts)
        self.text_bytes: int | None = self.read_bytes

    def _paths(self, folder: Path) -> Iterator[Path]:
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in self.UNREAD]
            yield from (Path(place, name) for name in names if name.endswith(".py"))

    def batches(self, position: Any = None) -> Iterator[RecordBatch]:
        number = read = 0
        for source, documents in self.documents.items():
            for records in _grouped(documents):
                number += 1
                read += sum(len(text) for text in records)
                if number > (position or 0):
                    yield RecordBatch(f"Python's {source}", source, "text", records, 1, number, read)

    def sample(self, limit: int) -> Iterator[RecordBatch]:
        yield from self.batches()


def _topics() -> list[bytes]:
    """The pages of the language reference that `help()` shows; not every distribution has them."""
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


def is_local(value: str) -> bool:
    """True if `value` names files, existing or not, and no dataset on the hub."""
    return Path(value).exists() or not may_be_on_hub(value.partition(":")[0])


def check_place(option: str, value: str) -> None:
    """Raise ValueError if `value` names files that do not exist."""
    if is_local(value):
        found_files(option, value)


def source_of(option: str, value: str, data: Data) -> Source:
    """The source that `value` names: Python's library, local files, or a Hugging Face dataset."""
    if value == PYTHON:
        return PythonLibrary()
    if is_local(value):
        return Files(value, found_files(option, value), data)
    return HubDataset(option, value, data)


def _first(batches: Iterator[RecordBatch], limit: int) -> Iterator[RecordBatch]:
    """The first batches, up to about `limit` bytes."""
    for batch in batches:
        yield batch
        texts = [text for text, _ in batch.records] if batch.kind == "row" else batch.records
        limit -= sum(len(text or b"") for text in texts)
        if limit <= 0:
            return


DEFAULT_SPLIT = "train"


class HubDataset:
    """A Hugging Face dataset, named org/name, org/name:config or org/name:config:split, in its own order."""

    text_bytes: int | None = None
    read_bytes = 0

    def __init__(self, option: str, value: str, data: Data):
        name, _, rest = value.partition(":")
        config, _, split = rest.partition(":")
        self.option = option
        self.name = value
        self.label = name.rpartition("/")[2]
        self.path = name, config or None, split or DEFAULT_SPLIT
        self.data = data
        self.identity = f"hub {name}:{config}:{split or DEFAULT_SPLIT}"

    def batches(self, position: Any = None) -> Iterator[RecordBatch]:
        dataset = self.opened()
        row = 0
        if position is not None:
            state, row = position
            dataset.load_state_dict(state)
        examples = iter(dataset)
        while records := self._records(examples, row):
            first, row = row + 1, row + len(records)
            yield RecordBatch(self.name, self.label, "row", records, first, [dataset.state_dict(), row], 0)

    def sample(self, limit: int) -> Iterator[RecordBatch]:
        yield from _first(self.batches(), limit)

    def _records(self, examples: Iterator[dict[str, Any]], row: int) -> list[Row]:
        """The next batch of examples."""
        text_field, source_field = self.data.text_field, self.data.source_field
        records: list[Row] = []
        length = 0
        while length < BATCH_BYTES:
            try:
                example = next(examples, None)
            except Exception as error:
                raise ValueError(
                    f"{self.option} {self.name!r} stopped after {row + len(records):,} rows "
                    f"({type(error).__name__}: {error}): run the same command again to continue"
                ) from error
            if example is None:
                break
            for option, field in (("--text-field", text_field), ("--source-field", source_field)):
                if field is not None and field not in example:
                    raise ValueError(f"{self.name} has no field {field!r} ({option}); it has: {', '.join(example)}")
            text = example[text_field]
            if not isinstance(text, (str, bytes, NoneType)):  # as in all other rows
                kind = type(text).__name__
                raise ValueError(f"{self.name}: --text-field {text_field!r} holds {kind}, not text")
            records.append(row_of(text, example[source_field] if source_field else None, self.data))
            length += len(records[-1][0] or "")
        return records

    def opened(self) -> Any:
        """The streamed dataset, with all fields."""
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f"{self.option} {self.name!r} is no file or folder here; as a Hugging Face dataset it needs: "
                "pip install datasets"
            ) from error
        name, config, split = self.path
        advice = ". Without a network, fetch the dataset's files elsewhere and name their folder"
        with troubles_of(f"{self.option} {self.name!r}", name, advice, "dataset"):
            return datasets.load_dataset(name, config, split=split, streaming=True)
