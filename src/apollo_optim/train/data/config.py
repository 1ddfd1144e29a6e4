"""Options of the data: which text, and how it becomes tokens."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ...flags import Place, check_each

LARGEST_DOCUMENT = 2**25

# 256 bytes and the end of a document, so that every text can be encoded.
SMALLEST_VOCABULARY = 257
# The trainer makes room for all entries at once, and ends the process where there is none.
LARGEST_VOCABULARY = 2**20
MOST_WORKERS = 2**22
"""As many processes as Linux may have."""


def default_cache() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apollo-optim"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text of a run and its tokens."""

    data: Place = "python"
    """Files, folders or patterns, by commas; a Hugging Face org/name:config:split; or "python", its own library."""
    validation: Place | None = None
    """Text for validation, given like the data; by default documents held out of the data."""
    held_out: float | None = None
    """Share of the data held out when there is no validation text; by default about 2 MB, at most a tenth."""
    tokenizer: Place | None = None
    """A folder, tokenizer.json, sentencepiece .model or Hugging Face org/name; by default the model's, or a new one."""
    vocabulary: int = 4096
    """Entries of a tokenizer that is trained here."""
    text_field: str = "text"
    """Where JSON lines, parquet files and Hugging Face datasets keep the text."""
    source_field: str | None = None
    """Where they name a document's source, to validate by source; by default the file's name is its source."""
    cache: Path = field(default_factory=default_cache)
    """Folder for tokens and trained tokenizers, which are made once."""
    workers: int | None = None
    """Processes that tokenise; by default one for each core."""
    bad_lines: float = 0.01
    """Largest share of unreadable lines that is left out with a warning; above it they are an error."""
    max_document: int = LARGEST_DOCUMENT
    """Bytes of the longest line of JSON, or row, that is read; longer ones are taken for unreadable."""

    def check(self) -> None:
        """Raise ValueError for the first option that is not possible."""
        if not self.data.strip():
            raise ValueError(f"--data must name files, a folder, a Hugging Face dataset or 'python', got {self.data!r}")
        check_each(self, "a share between 0 and 1", lambda share: 0 < share < 1, "held_out")
        if self.held_out is not None and self.validation is not None:
            raise ValueError(
                f"--held-out {self.held_out} has no effect beside --validation {self.validation}: leave one of them out"
            )
        least, most = SMALLEST_VOCABULARY, LARGEST_VOCABULARY
        check_each(self, f"from {least} to {most:,}", lambda entries: least <= entries <= most, "vocabulary")
        processes = f"from 1 to {MOST_WORKERS:,}, or none for one for each core"
        check_each(self, processes, lambda count: 1 <= count <= MOST_WORKERS, "workers")
        # One more is read, and counted in 64 bits.
        check_each(self, "from 1 to 2**62 bytes", lambda length: 1 <= length <= 2**62, "max_document")
        check_each(self, "a share between 0 and 1", lambda share: 0 <= share <= 1, "bad_lines")
