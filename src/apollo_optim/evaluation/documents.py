"""Documents of tasks: finding them in a folder, reading them, and making them questions."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..train.data.files import COMPRESSIONS, found_files
from ..train.data.readers import breakage_named
from ..train.tuning.conversations import BadExampleError, numbered_records
from .tasks import Fields, MultipleChoice

ENDINGS = tuple(kind + packed for kind in (".jsonl", ".json", ".parquet") for packed in ("", *COMPRESSIONS))


def found_file(places: Sequence[str], task: str, folder: Path) -> Path:
    """The first of these places that exists with one of `ENDINGS`; ValueError if none does."""
    for place in places:
        for ending in ENDINGS:
            if (path := folder / f"{place}{ending}").is_file():
                return path
    raise ValueError(
        f"--task-data {folder} has no documents of {task}: looked for {' and '.join(places)}, with the endings "
        f"{', '.join(ENDINGS)}"
    )


def documents(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` documents of a file: JSON lines, one JSON list, or parquet."""
    (file,) = found_files("--task-data", str(path))
    found: list[dict[str, Any]] = []
    with breakage_named(file):
        for number, record in islice(numbered_records(file), limit):
            if isinstance(record, BadExampleError):
                raise ValueError(f"--task-data: {path}, line {number} is {record}")
            if not isinstance(record, dict):
                raise ValueError(f"--task-data: {path}, document {number} is no JSON object but {str(record)[:60]}")
            found.append(record)
    if not found:
        raise ValueError(f"--task-data: {path} holds no documents")
    return found


def questions(docs: Sequence[Fields], path: Path, question: Callable[[Fields], MultipleChoice]) -> list[MultipleChoice]:
    """A question for each document; ValueError for the first that cannot be one."""
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
