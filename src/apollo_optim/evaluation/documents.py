"""Documents of tasks: found in a folder, read, and made into questions."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..train.data.files import COMPRESSIONS, TextFile, found_files
from ..train.data.readers import breakage_named, opened, table_batches
from .tasks import Fields, MultipleChoice

ENDINGS = tuple(kind + packed for kind in (".jsonl", ".json", ".parquet") for packed in ("", *COMPRESSIONS))


def found_file(places: Sequence[str], task: str, folder: Path) -> Path:
    """The first of a task's files that is there, under any ending; ValueError where there is none."""
    for place in places:
        for ending in ENDINGS:
            if (path := folder / f"{place}{ending}").is_file():
                return path
    raise ValueError(
        f"--task-data {folder} has no documents of {task}: looked for {' and '.join(places)}, with the endings "
        f"{', '.join(ENDINGS)}"
    )


def documents(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The documents of a file, the first `limit` of them: JSON lines, one JSON list, or parquet."""
    (file,) = found_files("--task-data", str(path))
    with breakage_named(file):
        rows = _rows(file) if file.is_table else _json_rows(file)
        found = list(islice(rows, limit))
    if not found:
        raise ValueError(f"--task-data: {path} holds no documents")
    return found


def _rows(file: TextFile) -> Iterator[dict[str, Any]]:
    for _, batch, _ in table_batches(file):
        yield from batch.to_pylist()


def _json_rows(file: TextFile) -> Iterator[dict[str, Any]]:
    with opened(file) as (stream, _):
        listed = stream.peek(1)[:1] == b"["
        rows = enumerate(_json(stream.read(), f"{file.path}"), 1) if listed else _lines(stream, file.path)
        for number, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"--task-data: {file.path}, document {number} is no JSON object but {str(row)[:60]}")
            yield row


def _lines(stream: Any, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield number, _json(line, f"{path}, line {number}")


def _json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--task-data: {place} is not JSON: {error}") from None


def questions(docs: Sequence[Fields], path: Path, question: Callable[[Fields], MultipleChoice]) -> list[MultipleChoice]:
    """Every document as a question; ValueError for the first that cannot be one."""
    found: list[MultipleChoice] = []
    for number, doc in enumerate(docs, 1):
        try:
            found.append(question(doc))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            missing = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"--task-data: {path}, document {number} is no question of this task: {missing}. Its fields are "
                f"{', '.join(doc)}"
            ) from error
    return found
