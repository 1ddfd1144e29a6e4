"""Files and folders that are complete or not there: written aside, hashed, flushed to the disk, and renamed."""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

Writer = Callable[[Path], object]
"""Fills the folder that it is given."""

Fingerprint = dict[str, Any]
"""Size and hash of a file."""

MANIFEST = "manifest.json"
UNFINISHED, UNWANTED, REPLACED = ".unfinished-", ".unwanted-", ".replaced-"
CHUNK = 1 << 24


def damage_of(folder: Path, reader: int = 0, readers: int = 1) -> str | None:
    """The first difference between the files of a folder and its manifest; None if there is none.

    Each of several readers checks some of the files.
    """
    expected = listed_files(folder)
    if not expected:
        return f"{MANIFEST} cannot be read"
    for name, saved in list(expected.items())[reader::readers]:
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != saved.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes of {saved.get('bytes')}"
        if digest(path) != saved.get("sha256"):
            return f"{name} is not what was written"
    return None


def replace_folder_(folder: Path, write: Writer) -> Path | None:
    """Replace a folder atomically by what `write` writes, and a manifest.

    If somebody has changed or added files in the old folder, it is kept under another name, which is returned.
    """
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with os_errors(folder.name):
        write(unfinished)
    write_manifest(unfinished, {})
    aside = None
    if not folder.exists():
        os.replace(unfinished, folder)
    elif _is_as_written(folder):
        exchange_(unfinished, folder)
        remove_folder_(unfinished)
    else:
        aside = kept_name(folder)
        os.replace(unfinished, aside)
        exchange_(aside, folder)
    flush_folder(folder.parent)
    return aside


def exchange_(one: Path, other: Path) -> None:
    """Swap the names of two folders: atomically if the system can, else so that `finish_exchange_` can repair it."""
    if not _swapped(one, other):
        between = other.with_name(f"{REPLACED}{other.name}")
        os.replace(other, between)
        os.replace(one, other)
        os.replace(between, one)


def finish_exchange_(folder: Path) -> None:
    """Repair an exchange that was interrupted: put the old folder back, or remove it if the new one is in place."""
    between = folder.with_name(f"{REPLACED}{folder.name}")
    if not between.exists():
        return
    if not folder.exists():
        os.replace(between, folder)
    elif _is_as_written(between):
        remove_folder_(between)
    else:
        os.replace(between, kept_name(folder))


def _swapped(one: Path, other: Path) -> bool:
    """Swap two names atomically. Returns False, with nothing changed, if the system cannot."""
    if os.name != "posix":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2"):  # Linux; not every file system has it
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return libc.renameat2(here, paths[0], here, paths[1], exchange) == 0
    if hasattr(libc, "renamex_np"):  # macOS
        return libc.renamex_np(*paths, 2) == 0  # RENAME_SWAP
    return False


def kept_name(path: Path) -> Path:
    """A free name beside `path`, to keep what is there."""
    number = 1
    while (free := path.with_name(f"{path.name}.kept-{number}")).exists():
        number += 1
    return free


def _is_as_written(folder: Path) -> bool:
    """True if a folder has exactly the files of its manifest, undamaged."""
    return file_names(folder) <= {*listed_files(folder), MANIFEST} and damage_of(folder) is None


def remove_folder_(path: Path) -> None:
    """Remove a folder if it exists, and what an earlier call that was killed has left."""
    unwanted = path.with_name(f"{UNWANTED}{path.name.lstrip('.')}")
    shutil.rmtree(unwanted, ignore_errors=True)
    if path.exists():
        os.replace(path, unwanted)
        shutil.rmtree(unwanted, ignore_errors=True)


def replace_text_(path: Path, text: str) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    unfinished.write_text(text, encoding="utf-8")
    flush(unfinished)
    os.replace(unfinished, path)


@contextmanager
def os_errors(name: str) -> Iterator[None]:
    """Raise failures to write as OSError, whatever a library makes of them."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{name}: {error}") from error
    except RuntimeError as error:
        # torch.save replaces the file's error by one of its archive writer.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    except Exception as error:
        if type(error) is not Exception:  # which tokenizers raises of a file
            raise
        raise OSError(f"{name}: {error}") from error


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; a no-op on systems where folders cannot be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_manifest(folder: Path, facts: Mapping[str, Any], known: Mapping[str, Fingerprint] | None = None) -> None:
    """Flush the files of a folder to the disk, and list them with their sizes and hashes in its manifest.

    Files that are `known` were flushed and hashed by the ranks that wrote them. OSError if one of them is missing:
    another machine may have written it to a disk of its own.
    """
    files = dict(known or {})
    names = file_names(folder)
    if missing := sorted(files.keys() - names):
        raise OSError(f"{missing[0]} is not in {folder}: all ranks must write to one file system")
    for name in sorted(names - files.keys()):
        flush(folder / name)
        files[name] = fingerprint(folder / name)
    manifest = {**facts, "files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    flush(folder / MANIFEST)
    for inside in sorted({(folder / name).parent for name in names} | {folder}):
        flush_folder(inside)


def fingerprint(path: Path) -> Fingerprint:
    """Size and hash of a file, as in a manifest."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def file_names(folder: Path) -> set[str]:
    """Relative paths of all files in a folder and its subfolders."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; empty if it cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The files in a folder's manifest, with size and hash; empty if it cannot be read."""
    files = read_manifest(folder).get("files")
    sound = isinstance(files, dict) and all(isinstance(each, dict) for each in files.values())
    return files if sound else {}
