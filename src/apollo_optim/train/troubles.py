"""What libraries raise over the files of models and tokenizers, and systems over folders, said in one way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def troubles_named(what: str, failed: str = "cannot be loaded", advice: str = "") -> Iterator[None]:
    """Turns whatever a library raises over a damaged file, or a hub out of reach, into a ValueError that names it.

    A package that is missing, and memory that is full, are no faults of a file.
    """
    try:
        yield
    except (ModuleNotFoundError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{what} comes with Python code of its own, which runs only with --trust-remote-code: look at it "
                "before you give that"
            ) from error
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{what} {failed} ({type(error).__name__}: {said}){advice}") from error


@contextmanager
def out_trouble_named(out: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names --out: the disk may be full, or no longer there."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written to: {error.strerror or error}. Make room, or name another place"
        ) from error
