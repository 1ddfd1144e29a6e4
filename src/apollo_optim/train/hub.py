"""The Hugging Face hub: what may be the name of a repository there, and how libraries read one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from .troubles import troubles_named

NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w([\w.-]*\w)?", re.ASCII)
"""org/name, as the hub lets repositories be named."""
ENDINGS = frozenset({".txt", ".json", ".jsonl", ".parquet", ".arrow", ".zst", ".gz", ".model", ".gguf"})
"""Of files of text, tokenizers and models: no repository is named so."""
PATIENCE = 10.0
"""Seconds to wait for an answer. Libraries ask for up to a minute, and show every attempt."""


def may_be_on_hub(name: str) -> bool:
    """Whether what is not here may be a repository."""
    return NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in ENDINGS


@contextmanager
def troubles_of(what: str, name: str, advice: str = "", kind: Literal["model", "dataset"] = "model") -> Iterator[None]:
    """Turns whatever libraries raise over what `name` is, here or on the hub, into a ValueError that calls it `what`.

    A hub that does not answer is asked once, and what was fetched from it before is read all the same.
    """
    if Path(name).exists():
        with troubles_named(what, advice=advice):
            yield
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before, reached = constants.HF_HUB_OFFLINE, "could not be fetched from the Hugging Face hub"
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE)
    except HfHubHTTPError:
        pass  # an answer, too: the library that reads it says what it means
    except Exception:
        constants.HF_HUB_OFFLINE = True
        reached = "the Hugging Face hub cannot be reached, nor was it fetched from there before"
    try:
        with troubles_named(what, f"is no file or folder here, and {reached}", advice):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
