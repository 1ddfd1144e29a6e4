"""What a person sees of a preparation: a bar in a terminal, quiet lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

SECONDS_BETWEEN_LINES = 10.0


@runtime_checkable
class Progress(Protocol):
    """Takes lines to show, and how far the work is."""

    def __call__(self, line: str) -> None: ...

    def advance(self, share: float, text: str) -> None: ...


class Lines:
    """Progress as lines for `show`, one in ten seconds at most."""

    def __init__(self, show: Callable[[str], None]):
        self.show = show
        self.last = time.monotonic()

    def __call__(self, line: str) -> None:
        self.show(line)

    def advance(self, share: float, text: str) -> None:
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.show(f"{text} ({share:.0%})")


class Bar:
    """Progress as a bar in a terminal, lines above it."""

    def __init__(self, bars: "Bars"):
        self.bars = bars
        self.task = bars.add_task("", total=1.0, visible=False)

    def __call__(self, line: str) -> None:
        self.bars.console.print(line, highlight=False, markup=False)

    def advance(self, share: float, text: str) -> None:
        self.bars.update(self.task, completed=share, description=text, visible=True)


def progress_of(report: "Callable[[str], None] | Progress") -> Progress:
    """`report` itself if it knows bars, else lines through it."""
    return report if isinstance(report, Progress) else Lines(report)


@contextmanager
def shown_progress(show: Callable[[str], None] | None = None) -> Iterator[Progress]:
    """A bar on standard error if that is a terminal and rich is there, else lines through `show`."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
    except ImportError:
        bars = None
    else:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        bars = Bars(*columns, console=Console(stderr=True), transient=True)
    if bars is None or not bars.console.is_terminal:
        yield Lines(show or (lambda line: print(line, file=sys.stderr)))
    else:
        with bars:
            yield Bar(bars)
