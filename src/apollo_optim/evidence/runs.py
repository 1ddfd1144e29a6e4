"""Runs read back from their folders. Those that differ only in their seed form a group."""

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..flags import said
from ..terminal import counted, duration, in_bytes
from ..train.config import flat, plain, saved_options
from ..train.metrics import Record, median_speed, records
from ..train.pretrain import PretrainOptions
from ..train.run import End, RunFolder
from ..train.tuning.config import FinetuneOptions, TuningMethod

NO_MATTER = frozenset({
    "seed", "method_seed", "cache", "workers", "bad_lines", "save_every", "keep", "tensorboard", "wandb", "trackio",
    "mlflow",
})  # fmt: skip
"""Options in which the runs of a group may differ: the seeds, and those that decide nothing about results."""
OF_METHODS = frozenset(field.name for field in fields(TuningMethod))
CLOSE = 0.03
"""With one seed each, methods whose numbers differ by a smaller share than this cannot be told apart."""


@dataclass(frozen=True)
class RecordedRun:
    """A run as it is in its folder, finished or not."""

    path: Path
    settings: Mapping[str, Any]
    """Every option, by name."""
    facts: Mapping[str, Any]
    """The contents of `run.json`: machine, versions, sizes, and the result if the run has ended."""
    lines: Sequence[Record]
    """Its log."""
    end: End | None = None
    """Its end; None if it can go on."""

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def session(self) -> Mapping[str, Any]:
        """Machine, versions and command of its last process."""
        sessions = self.facts.get("sessions") or [{}]
        return sessions[-1]

    @cached_property
    def trained(self) -> list[Record]:
        return [line for line in self.lines if line["kind"] == "train"]

    @property
    def step_tokens(self) -> float:
        """Tokens of an optimizer step, in fine-tuning their mean, since examples differ in length."""
        last = self.trained[-1]
        return self.settings.get("batch_tokens") or last["tokens"] / last["step"]

    @cached_property
    def validated(self) -> list[Record]:
        """The log's evaluations, with the tokens and seconds of training before each."""
        return [
            {**line, "tokens": round(line["step"] * self.step_tokens), "seconds": self._seconds_at(line["step"])}
            for line in self.lines
            if line["kind"] == "validation"
        ]

    @property
    def timed(self) -> list[Record]:
        """All lines in the order of their steps, each with tokens and seconds."""
        return sorted([*self.trained, *self.validated], key=lambda line: line["step"])

    def _seconds_at(self, step: int) -> float:
        """Seconds of training before a step: interpolated between lines of the log, extrapolated after the last."""
        known = {0: 0.0, **{line["step"]: line["seconds"] for line in self.trained}}
        before = max(each for each in known if each <= step)
        after = min((each for each in known if each > step), default=None)
        if after is None:
            return known[before] * step / before if before else 0.0
        return known[before] + (known[after] - known[before]) * (step - before) / (after - before)


def recorded_run(path: Path) -> RecordedRun:
    """The run in a folder; ValueError where there is none."""
    folder = RunFolder(path)
    if not folder.settings.exists():
        raise ValueError(f"{folder.settings} is missing")
    command = FinetuneOptions if folder.is_tuned else PretrainOptions
    options = saved_options(folder.settings, command)
    lines, end = records(folder.metrics), folder.end(options.steps)
    return RecordedRun(path, plain(flat(options)), folder.known(), lines, end)


def recorded_runs(folders: Sequence[Path]) -> tuple[dict[Path, RecordedRun], list[str]]:
    """The runs with a log, by folder, and a sentence on each other one: its log has no line, or it is damaged."""
    runs: dict[Path, RecordedRun] = {}
    silent: list[str] = []
    for folder in folders:
        try:
            run = recorded_run(folder)
        except ValueError as error:
            silent.append(f"{folder} is left out: {' '.join(str(error).split())}.")
            continue
        if run.trained:
            runs[folder] = run
        else:
            before = "diverged before the first line of" if run.end == "diverged" else "has no line in"
            silent.append(f"{folder} {before} its log.")
    return runs, silent


def found_runs(paths: Sequence[Path]) -> tuple[list[RecordedRun], list[str]]:
    """The runs in these folders or in folders inside them, and sentences as of `recorded_runs`.

    ValueError for a path without runs, and if no run has a log.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        inside = [log.parent for log in sorted(path.glob("**/metrics.jsonl"))]
        if not inside and not RunFolder(path).settings.exists():
            raise ValueError(f"{path} is no run with a log: {RunFolder(path).settings} is missing")
        for folder in [path] if path in inside or not inside else inside:
            folders.setdefault(folder.resolve(), folder)
    logged, silent = recorded_runs(list(folders.values()))
    if not logged:
        raise ValueError(f"there is nothing to report: {' '.join(silent)}")
    return list(logged.values()), silent


@dataclass(frozen=True)
class Measured:
    """A quantity measured with each seed of a group."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class CurvePoint:
    """A point of a group's curve: means over the seeds, with the lowest and highest value."""

    step: int
    tokens: int
    seconds: float
    value: Measured


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but their seed."""

    name: str
    runs: Sequence[RecordedRun]

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.runs[0].settings

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the first finished run, if there is one, or else of the first run."""
        return next((run.facts for run in self.runs if run.end == "finished"), self.runs[0].facts)

    @property
    def shown(self) -> Sequence[RecordedRun]:
        """The runs that count: those that have ended, or all if none has. Unfinished ones would bend the means."""
        return [run for run in self.runs if run.end is not None] or self.runs

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.shown]

    @property
    def on_gpu(self) -> bool:
        return bool(self.runs[0].session.get("cuda"))

    @property
    def diverged(self) -> bool:
        """True if one of its runs diverged."""
        return any(run.end == "diverged" for run in self.runs)

    def measured(self, quantity: "Quantity") -> Measured | None:
        """The quantity in each run that has it; None if none has."""
        values = [value for run in self.shown if (value := quantity.of(run)) is not None]
        return Measured(values) if values else None

    def curve(self, kind: str, key: str) -> list[CurvePoint]:
        """The points at steps that every run has logged, without infinite values."""
        logs = [{line["step"]: line for line in run.timed if line["kind"] == kind} for run in self.shown]
        steps = sorted(set[int]().union(*logs).intersection(*logs))
        points = [
            CurvePoint(
                step=step,
                tokens=logs[0][step]["tokens"],
                seconds=statistics.fmean(log[step]["seconds"] for log in logs),
                value=Measured([log[step][key] for log in logs]),
            )
            for step in steps
        ]
        return [point for point in points if math.isfinite(point.value.high)]


def grouped_runs(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Groups of runs that differ only in their seed, in the order given, each with the shortest telling name."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        key = {name: value for name, value in run.settings.items() if name not in NO_MATTER}
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    members = list(groups.values())
    names = _names([group[0].settings for group in members])
    return [RunGroup(name, sorted(group, key=lambda run: run.seed)) for name, group in zip(names, members, strict=True)]


def _names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The method of each group, with the options in which groups of that method differ."""
    names: list[str] = []
    for own in settings:
        others = [other for other in settings if other["method"] == own["method"]]
        apart = [name for name in differing(others) if own.get(name) is not None]
        names.append(" ".join([own["method"], *(f"{name.replace('_', '-')} {said(own[name])}" for name in apart)]))
    return names


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options, other than those of `NO_MATTER`, that are not the same in all of these."""
    named = dict.fromkeys(name for each in settings for name in each if name not in NO_MATTER)
    return [name for name in named if any(each.get(name) != settings[0].get(name) for each in settings)]


@dataclass(frozen=True)
class Quantity:
    """A quantity that runs are compared by."""

    heading: str
    of: Callable[[RecordedRun], float | None]
    """Its value in a run; None if that is not known."""
    shown: Callable[[float], str]
    better: Callable[[Sequence[float]], float] = min
    exact: bool = False
    """True if it is counted exactly, so that any difference counts."""

    def spread(self, measured: Measured) -> str:
        """The range over the seeds in words; empty if its ends look the same."""
        low, high = self.shown(measured.low), self.shown(measured.high)
        return f"{low} to {high}" if low != high else ""

    def is_behind(self, other: Measured, best: Measured) -> bool:
        """True if it differs from the best by more than seeds do."""
        if self.exact:
            return other.mean != best.mean
        if min(len(other.values), len(best.values)) > 1:
            return other.low > best.high or other.high < best.low
        return abs(other.mean - best.mean) > CLOSE * abs(best.mean)


def _last(lines: Sequence[Record], key: str) -> float | None:
    return lines[-1][key] if lines else None


def significant(value: float, digits: int = 4) -> str:
    """A number with at least so many digits, and without a power of ten."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


PERPLEXITY = Quantity("validation perplexity", lambda run: _last(run.validated, "perplexity"), significant)
SPEED = Quantity("tokens per second", lambda run: median_speed(run.trained), counted, better=max)
STEP_TIME = Quantity(
    "step",
    lambda run: 1e3 * run.step_tokens / median_speed(run.trained),
    lambda value: f"{significant(value, 3)} ms",
)
MEMORY = Quantity("peak memory", lambda run: max(line["memory"] for line in run.trained), in_bytes)
STATE = Quantity("optimizer state", lambda run: run.facts.get("result", {}).get("state_bytes"), in_bytes, exact=True)

QUANTITIES: tuple[Quantity, ...] = (
    PERPLEXITY,
    Quantity("training loss", lambda run: _last(run.trained, "loss"), lambda value: f"{value:.4f}"),
    Quantity("training time", lambda run: _last(run.trained, "seconds"), duration),
    STEP_TIME,
    SPEED,
    MEMORY,
    STATE,
)
"""The columns of the table."""

KINDS: dict[str, str] = {"weights": "weight_bytes", "gradients": "gradient_bytes", "optimizer state": "state_bytes"}
"""Kinds of memory, with their names in `run.json`."""
REST = "activations and the rest"
"""The kind that fills the memory up to its peak."""


def memory_kinds(group: RunGroup) -> dict[str, float]:
    """Bytes by kind of memory at the peak, as far as runs tell. On a CPU the rest is mostly libraries, and left out."""
    peak = group.measured(MEMORY)
    assert peak is not None
    told = {**group.facts, **group.facts.get("result", {})}
    held = {kind: told.get(name) for kind, name in KINDS.items()}
    known = {kind: float(size) for kind, size in held.items() if size is not None}
    if known and not group.on_gpu:
        return known
    # The peak is 0 on a system that does not tell it.
    return known | {REST: max(peak.mean - sum(known.values()), 0.0)}


LOG_COLUMNS = (
    "kind", "step", "tokens", "seconds", "loss", "perplexity", "lr", "grad_norm", "tokens_per_second", "mfu", "memory",
)  # fmt: skip


def log_csv(groups: Sequence[RunGroup]) -> str:
    """The lines of all logs as CSV."""
    rows = [
        {"name": group.name, "method": run.settings["method"], "seed": run.seed, "run": str(run.path), **line}
        for group in groups
        for run in group.runs
        for line in run.timed
    ]
    return csv_text(["name", "method", "seed", "run", *LOG_COLUMNS], rows)


def result_csv(groups: Sequence[RunGroup]) -> str:
    """CSV with a line for each run: its results, its machine and its options."""
    named = dict.fromkeys(name for group in groups for name in group.settings)
    settings = [name for name in named if name not in ("method", "seed")]
    machine = ["device", "python", "commit", "began"]
    headings = [quantity.heading for quantity in QUANTITIES]
    rows = [
        {"name": group.name, "run": str(run.path), "finished": run.end == "finished", **run.settings, **run.session}
        | {quantity.heading: quantity.of(run) for quantity in QUANTITIES}
        for group in groups
        for run in group.runs
    ]
    return csv_text(["name", "method", "seed", "run", "finished", *headings, *machine, *settings], rows)


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """These columns of the rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
