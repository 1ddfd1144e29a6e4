"""The screen of a run: notes that scroll by, and its progress in a live line at the foot of a terminal."""

import sys
import threading
import time
from collections.abc import Callable, Sequence

from ..terminal import LinePart, counted, duration, fitted, in_bytes, width_of
from .metrics import Record

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows lines through `show`, by default nowhere; lines on progress at most every ten seconds."""

    def __init__(self, show: Callable[[str], None] = lambda line: None):
        self.show = show
        self.last = time.monotonic()

    def __call__(self, line: str) -> None:
        self.last = time.monotonic()
        self.show(line)

    def advance(self, share: float, text: str) -> None:
        """Report that `share` of the work is done."""
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self(f"{text} ({share:.0%})")


class Display(Progress):
    """Standard error, with progress in a live line; if it is no terminal, in a line now and then.

    A quiet display shows notes only.
    """

    def __init__(self, quiet: bool = False):
        super().__init__(self.note)
        self.quiet = quiet
        self._foot: Sequence[LinePart] = ()
        self._began = time.monotonic()
        self._lock = threading.Lock()  # notes on signals come from another thread

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, line: str) -> None:
        if not self.quiet:
            super().__call__(line)

    def note(self, text: str) -> None:
        """Show a line above the live one."""
        with self._lock:
            self._write(f"{self._cleared()}{text}\n{self._drawn()}")

    def advance(self, share: float, text: str) -> None:
        if not sys.stderr.isatty():
            super().advance(share, text)
        elif share > 0:
            left = (time.monotonic() - self._began) * (1 - share) / share
            self.foot([LinePart(f"{share:.0%}"), LinePart(text, use=1), LinePart(f"left {duration(left)}")])

    def foot(self, parts: Sequence[LinePart]) -> None:
        """Show these in the live line."""
        if not self.quiet:
            with self._lock:
                self._foot = parts
                self._write(self._cleared() + self._drawn())

    def close(self) -> None:
        """Leave the terminal as it was."""
        with self._lock:
            before, self._foot, self._began = self._cleared(), (), time.monotonic()
            self._write(before)

    def _cleared(self) -> str:
        return "\r\x1b[K" if self._foot else ""

    def _drawn(self) -> str:
        width = width_of(sys.stderr)
        return fitted(self._foot, None if width is None else width - 1) if self._foot else ""

    def _write(self, text: str) -> None:
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()


class TrainingDisplay:
    """Shows the lines of a run's log, and the time that the rest will take."""

    def __init__(self, screen: Display, step: int, steps: int, compiles: bool):
        """The run goes from `step` to `steps`; if it `compiles`, the first step does not count for the speed."""
        self.screen, self.steps = screen, steps
        self._first, self._waits = step, compiles
        self._since: tuple[float, float] | None = None
        """Time and steps from which the speed is measured."""
        self._pace: float | None = None
        """Seconds per step."""
        self._parts: Sequence[LinePart] = ()

    def reached(self, done: float) -> None:
        """Report that so many steps are done, with a fraction for micro-batches of the current step."""
        self._measure(done, time.monotonic())
        left = self._left(done)
        where = f"step {int(done)}/{self.steps}"
        if sys.stderr.isatty():
            self.screen.foot([LinePart(where), *self._parts, LinePart(left)])
        elif left:
            self.screen.advance(done / self.steps, f"{where}  {left}")

    def record(self, record: Record) -> None:
        """Show a line of the log."""
        where, parts = LinePart(f"step {record['step']}/{self.steps}"), described(record)
        if record["kind"] != "train":
            self.screen(fitted([where, *parts], None))
            return
        self._parts = parts
        line = [where, *parts, LinePart(self._left(record["step"]))]
        if sys.stderr.isatty():
            self.screen.foot(line)
        else:
            self.screen(fitted(line, None))

    def _measure(self, done: float, now: float) -> None:
        if self._since is None:
            self._since = now, done
            return
        began, before = self._since
        ends_first = before == self._first and done >= self._first + 1
        if done > before and not (self._waits and before == self._first):
            self._pace = (now - began) / (done - before)
        if ends_first:
            self._since = now, done

    def _left(self, done: float) -> str:
        """The time left at the speed so far; empty while that is unknown."""
        return "" if self._pace is None else f"left {duration(self._pace * (self.steps - done))}"


def described(record: Record) -> list[LinePart]:
    """A record in words, each with its use where space is short."""
    if record["kind"] == "validation":
        sources = record["perplexity_by_source"]
        split = "  ".join(f"{source} {value:.2f}" for source, value in sources.items()) if len(sources) > 1 else ""
        return [
            LinePart(f"validation loss {record['loss']:.4f}"),
            LinePart(f"ppl {record['perplexity']:.2f}"),
            LinePart(f"({split})" if split else ""),
        ]
    mfu = "" if record["mfu"] is None else f"mfu {record['mfu']:.1%}"
    return [
        LinePart(f"loss {record['loss']:.4f}", use=6),
        LinePart(f"ppl {record['perplexity']:.2f}", use=4),
        LinePart(f"lr {record['lr']:.2e}", use=1),
        LinePart(f"{counted(record['tokens_per_second'])} tok/s", use=5),
        LinePart(mfu, use=3),
        LinePart(in_bytes(record["memory"]), use=2),
    ]
