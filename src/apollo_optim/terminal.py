"""Text that fits a terminal: the least useful parts are left out, and no number is cut."""

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeVar

Part = TypeVar("Part", "LinePart", "Column")


def width_of(stream: TextIO) -> int | None:
    """The width of the terminal behind a stream; None for a file or a pipe, which take lines of any length."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
    except (OSError, ValueError):
        return 80  # a terminal that does not tell its width


@dataclass(frozen=True)
class LinePart:
    """A piece of a line."""

    text: str
    use: int = 0
    """If there is no room for all, parts with the smallest use above 0 are left out first; 0 always stays."""


def fitted(parts: Sequence[LinePart], width: int | None) -> str:
    """The parts that fit beside each other, in their order."""
    kept = _fitting([part for part in parts if part.text], lambda part: len(part.text), width)
    return "  ".join(part.text for part in kept)


def _fitting(parts: Sequence[Part], size: Callable[[Part], int], width: int | None) -> list[Part]:
    """The parts that fit beside each other with two spaces between them, the least useful left out first."""
    kept = list(parts)
    while width is not None and sum(2 + size(part) for part in kept) > width + 2:
        optional = [part for part in kept if part.use > 0]
        if not optional:
            break
        kept.remove(min(optional, key=lambda part: part.use))
    return kept


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    """May have several lines."""
    cells: Sequence[str]
    left: bool = False
    """True if cells begin at the left; numbers end at the right."""
    use: int = 0
    """As in `LinePart`."""

    @property
    def width(self) -> int:
        return max(map(len, (*self.heading.split("\n"), *self.cells)))


def table(columns: Sequence[Column], width: int | None) -> str:
    """A table of the columns that fit, and a line that names the others."""
    kept = _fitting(columns, lambda column: column.width, None if width is None else width - 1)  # after a space
    height = max(column.heading.count("\n") for column in kept) + 1
    headings = [[""] * (height - column.heading.count("\n") - 1) + column.heading.split("\n") for column in kept]
    rows = [*zip(*headings, strict=True), *zip(*(column.cells for column in kept), strict=True)]
    lines = [" " + "  ".join(_aligned(cell, each) for cell, each in zip(row, kept, strict=True)) for row in rows]
    left_out = [column.heading.replace("\n", " ") for column in columns if column not in kept]
    note = f"(no room for: {'; '.join(left_out)}. A wider terminal shows all)" if left_out else ""
    return "\n".join([*(line.rstrip() for line in lines), *([wrapped(note, width)] if note else [])])


def _aligned(cell: str, column: Column) -> str:
    return cell.ljust(column.width) if column.left else cell.rjust(column.width)


def wrapped(text: str, width: int | None) -> str:
    """Prose wrapped to a terminal's width; as it is if `width` is None."""
    if width is None:
        return text
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.split("\n"))


def duration(seconds: float) -> str:
    """Seconds as 12d04h, 3h12m, 4m05s or 12s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def counted(number: float) -> str:
    """A count with three digits and K, M, B or T."""
    for unit in ("", "K", "M", "B"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def in_bytes(number: float) -> str:
    """Bytes in units of 10^3, 10^6 or 10^9, as `apollo memory` counts them."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.0f} MB" if number >= 1e7 else f"{number / 1e3:.0f} kB"
