"""Folders of files that are whole or not there: written aside, hashed, flushed to the disk, and renamed into place."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

Writer = Callable[[Path], None]
"""Writes one file at the path it is given."""

MANIFEST = "manifest.json"
UNFINISHED, UNWANTED = ".unfinished-", ".unwanted-"
CHUNK = 1 << 24


class Checkpoints:
    """The checkpoints of a run, a folder each. A step that is listed was saved in full; `latest` also reads it back."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return sorted(int(match[1]) for path in found if (match := re.fullmatch(r"step-(\d{8,})", path.name)))

    def save(self, step: int, writers: Mapping[str, Writer], validation: float | None = None) -> Path:
        """The new checkpoint's folder. OSError, with nothing changed, where it cannot be written."""
        unfinished = self.folder / f"{UNFINISHED}{step:08d}"
        self._forget(unfinished)
        unfinished.mkdir(parents=True)
        try:
            for name, write in writers.items():
                _write(unfinished / name, write)
            manifest = {"step": step, "validation": validation, "files": _sums(unfinished)}
            _write(unfinished / MANIFEST, lambda path: _write_text(path, json.dumps(manifest, indent=2)))
            _flush_folder(unfinished)
            self._forget(self.path(step))  # one that a resumed run found damaged
            os.replace(unfinished, self.path(step))
            _flush_folder(self.folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._prune()
        return self.path(step)

    def latest(self, warn: Callable[[str], None]) -> int | None:
        """The last step that reads back as it was written; None without any.

        Damaged ones are passed over, with a warning. ValueError where all of them are damaged.
        """
        self.clear_leftovers()
        steps = self.steps()
        for step in reversed(steps):
            damage = damage_of(self.path(step))
            if damage is None:
                return step
            warn(f"{self.path(step)} is damaged ({damage}); falling back to the one before it")
        if steps:
            raise ValueError(f"every checkpoint in {self.folder} is damaged; remove the folder to begin anew")
        return None

    def best(self) -> int | None:
        """The step with the lowest validation loss of those that were evaluated when they were saved."""
        scores = {step: _manifest(self.path(step)).get("validation") for step in self.steps()}
        known = {step: score for step, score in scores.items() if score is not None}
        return min(known, key=lambda step: known[step]) if known else None

    def clear_leftovers(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        for path in self.folder.glob(".un*-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best()}:
            self._forget(self.path(step))

    def _forget(self, path: Path) -> None:
        """Remove a folder so that at no moment half of it carries its name."""
        if path.exists():
            unwanted = self.folder / f"{UNWANTED}{path.name.lstrip('.')}"
            shutil.rmtree(unwanted, ignore_errors=True)
            os.replace(path, unwanted)
            shutil.rmtree(unwanted, ignore_errors=True)


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if they are as they were written."""
    expected = _manifest(folder).get("files")
    if expected is None:
        return f"{MANIFEST} cannot be read"
    for name, saved in expected.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != saved["bytes"]:
            return f"{name} has {path.stat().st_size} bytes of {saved['bytes']}"
        if _digest(path) != saved["sha256"]:
            return f"{name} is not what was written"
    return None


def replace_folder_(folder: Path, write: Writer) -> None:
    """Fill `folder` with what `write` writes into the one it is given; at no moment is it half full."""
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with _os_errors(folder.name):
        write(unfinished)
    for path in unfinished.rglob("*"):
        if path.is_file():
            _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    _flush_folder(folder.parent)


def replace_text_(path: Path, text: str) -> None:
    """Write a file that is the old one or the new one at any moment."""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    _write_text(unfinished, text)
    _flush(unfinished)
    os.replace(unfinished, path)


def _write(path: Path, write: Writer) -> None:
    """One file, on the disk."""
    with _os_errors(path.name):
        write(path)
        _flush(path)


@contextmanager
def _os_errors(name: str) -> Iterator[None]:
    """Any failure to write is an OSError, whatever a library made of it."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{name}: {error}") from error
    except RuntimeError as error:
        # torch.save meets the file's error inside its archive writer and raises one of its own over it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make names in a folder last; on systems where folders cannot be opened there is nothing to do."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sums(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(folder.iterdir())}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; empty where that cannot be read."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
