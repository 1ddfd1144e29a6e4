"""Errors of libraries and of the system, as ValueErrors that name the file, the repository or the option."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w([\w.-]*\w)?", re.ASCII)
"""The names that repositories may have on the hub: org/name."""
ENDINGS = frozenset({".txt", ".json", ".jsonl", ".parquet", ".arrow", ".zst", ".gz", ".model", ".gguf"})
"""Suffixes of files, which names of repositories do not have."""
PATIENCE = 10.0
"""Seconds to wait for the hub. Libraries retry for up to a minute, and show every attempt."""


@contextmanager
def troubles_named(what: str, failed: str = "cannot be loaded", advice: str = "") -> Iterator[None]:
    """Turn whatever a library raises over a file or a repository into a ValueError that names it.

    Missing packages and a lack of memory are not the file's fault, and are raised as they are.
    """
    try:
        yield
    except (ModuleNotFoundError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "trust_remote_code=True" in str(error):
            raise ValueError(
                f"{what} comes with Python code of its own, which runs only with --trust-remote-code: read it before "
                "you trust it"
            ) from error
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{what} {failed} ({type(error).__name__}: {said}){advice}") from error


def may_be_on_hub(name: str) -> bool:
    """True if this may be the name of a repository on the hub."""
    return NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in ENDINGS


@contextmanager
def troubles_of(what: str, name: str, advice: str = "", kind: Literal["model", "dataset"] = "model") -> Iterator[None]:
    """Turn whatever libraries raise over a file or repository `name` into a ValueError that calls it `what`.

    If the hub does not answer at once, only what was fetched from it before is used.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    failed, offline = "cannot be loaded", constants.HF_HUB_OFFLINE
    if not Path(name).exists():
        failed = "is no file or folder here, and could not be fetched from the Hugging Face hub"
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE)
        except HfHubHTTPError:
            pass  # also an answer; the library that loads the repository will say what it means
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
    """Turn an OSError, such as a full disk, into a ValueError that names --out."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be written to: {error.strerror or error}. Make room, or name another place"
        ) from error


def make_out(folder: Path) -> None:
    """Make the folder of --out before the work begins; ValueError if that fails."""
    with out_trouble_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
