"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import sys
from typing import TYPE_CHECKING, Protocol

from .metrics import Record

if TYPE_CHECKING:
    from rich.progress import TaskID


class Display(Protocol):
    """Shows a run from its first step here to its last."""

    def record(self, record: Record) -> None:
        """Show a line of the log."""
        ...

    def note(self, text: str) -> None:
        """Say something that is not a measurement."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def display(step: int, steps: int, first: bool) -> Display:
    """The display for this process: silent on all ranks but the first."""
    if not first:
        return Silence()
    return Live(step, steps) if sys.stderr.isatty() else Lines(steps)


class Silence:
    """Shows nothing."""

    def record(self, record: Record) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line of text per line of the log, for files and pipes."""

    def __init__(self, steps: int):
        self._steps = steps

    def record(self, record: Record) -> None:
        self.note(f"step {record['step']}/{self._steps}  {described(record)}{_remaining(record, self._steps)}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Live:
    """One line at the foot of a terminal that keeps moving; evaluations and notes scroll by above it."""

    def __init__(self, step: int, steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"),
            TextColumn("left"), TimeRemainingColumn(compact=True),
        )  # fmt: skip
        # A long window: the remaining time should not jump with every evaluation.
        self._progress = Progress(*columns, console=Console(stderr=True), speed_estimate_period=300)
        self._task: TaskID = self._progress.add_task("", total=steps, completed=step)
        self._progress.start()

    def record(self, record: Record) -> None:
        if record["kind"] == "train":
            self._progress.update(self._task, completed=record["step"], description=described(record))
        else:
            self.note(f"step {record['step']}  {described(record)}")

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def described(record: Record) -> str:
    """A record in words."""
    if record["kind"] == "validation":
        sources = record["perplexity_by_source"]
        split = "  ".join(f"{source} {value:.2f}" for source, value in sources.items()) if len(sources) > 1 else ""
        return f"validation loss {record['loss']:.4f}  ppl {record['perplexity']:.2f}{split and f'  ({split})'}"
    mfu = "" if record["mfu"] is None else f"  mfu {record['mfu']:.1%}"
    return (
        f"loss {record['loss']:.4f}  ppl {record['perplexity']:.2f}  lr {record['lr']:.2e}  "
        f"{counted(record['tokens_per_second'])} tok/s{mfu}  {in_bytes(record['memory'])}"
    )


def _remaining(record: Record, steps: int) -> str:
    """The time that the remaining steps need at the speed of the last ones."""
    if record["kind"] != "train":
        return ""
    tokens_per_step = record["tokens"] / record["step"]
    return f"  left {duration((steps - record['step']) * tokens_per_step / record['tokens_per_second'])}"


def duration(seconds: float) -> str:
    """Seconds as 3h12m, 4m05s or 12s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
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
