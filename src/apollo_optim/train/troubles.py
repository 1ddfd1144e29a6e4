"""What libraries raise over the files of models and tokenizers, and systems over folders, said in one way."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w([\w.-]*\w)?", re.ASCII)
"""org/name, as the hub lets repositories be named."""
ENDINGS = frozenset({".txt", ".json", ".jsonl", ".parquet", ".arrow", ".zst", ".gz", ".model", ".gguf"})
"""Of files of text, tokenizers and models: no repository is named so."""
PATIENCE = 10.0
"""Seconds to wait for an answer. Libraries ask for up to a minute, and show every attempt."""


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


def may_be_on_hub(name: str) -> bool:
    """Whether what is not here may be a repository."""
    return NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in ENDINGS


@contextmanager
def troubles_of(what: str, name: str, advice: str = "", kind: Literal["model", "dataset"] = "model") -> Iterator[None]:
    """Turns whatever libraries raise over what `name` is, here or on the hub, into a ValueError that calls it `what`.

    A hub that does not answer is asked once, and what was fetched from it before is read all the same.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    failed, offline = "cannot be loaded", constants.HF_HUB_OFFLINE
    if not Path(name).exists():
        failed = "is no file or folder here, and could not be fetched from the Hugging Face hub"
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE)
        except HfHubHTTPError:
            pass  # an answer, too: the library that reads it says what it means
        except Exception:
            constants.HF_HUB_OFFLINE = True
            failed = "is no file or folder here, was not fetched before, and the Hugging Face hub cannot be reached"
    try:
        with troubles_named(what, failed, advice):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline


@contextmanager
def out_trouble_named(out: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names --out: the disk may be full, or no longer there."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written to: {error.strerror or error}. Make room, or name another place"
        ) from error


def make_out(folder: Path) -> None:
    """Make the folder of --out before the work that is to go there; ValueError where it cannot be."""
    with out_trouble_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
