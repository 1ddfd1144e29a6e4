"""`apollo compare`: runs of several methods on the same data from the same first weights, and the report on them."""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, ClassVar

from ..choices import chosen
from ..flags import Place, built, file_values, option_name
from ..terminal import Column, table, width_of, wrapped
from ..train.atomic import replace_text_
from ..train.config import flat, plain
from ..train.data.config import Data
from ..train.methods import METHODS
from ..train.pretrain import PretrainOptions
from ..train.ranks import world_size
from ..train.run import DIVERGED, FINISHED, End, RunFolder
from ..train.troubles import make_out, out_trouble_named
from .report import flags_for, verdict, write_report
from .runs import PERPLEXITY, QUANTITIES, SPEED, RunGroup, grouped_runs, recorded_run, recorded_runs

OF_ONE_RUN = "method", "seed", "out", "resume", "auto_resume"
"""Options that a comparison sets for each run."""
SHARED = frozenset({"config", "model", "steps", "tokens", *OF_ONE_RUN, *(each.name for each in fields(Data))})
"""Options that no method can have to itself."""
NOTHING_LOGGED = "no report: every run diverged before the first line of its log"
PROBE_STEPS = 20
"""Steps by which a method is timed if runs are given minutes."""
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class Compare(PretrainOptions):
    """Train by several methods, one after another, on the same data from the same first weights, and write a report."""

    WITHOUT: ClassVar[tuple[str, ...]] = OF_ONE_RUN

    out: Place | None = None
    """Folder of the runs and of report.html; by default runs/compare-MODEL. What is there already is gone on with."""
    methods: tuple[str, ...] = ("adamw", "apollo", "apollo-mini")
    """By commas, each with options of its own after a colon: adamw,apollo:lr=1e-2,rank=8,apollo:rank=32,galore. Any option of `apollo pretrain` that is not of the data or the model; those given as flags are for all methods."""  # noqa: E501
    seeds: tuple[int, ...] = (0,)
    """By commas: every method is run with each."""
    minutes: float | None = None
    """Training time of each run, in place of --steps and --tokens: each method is timed first, and takes the steps that fit."""  # noqa: E501

    @property
    def folder(self) -> Path:
        """The folder of the runs and of the report."""
        return Path(self.out or f"runs/compare-{Path(self.model.model).stem}")

    def execute(self) -> int:
        """Train and write the report; the exit status, 0 where every run came to its end."""
        import plotly  # noqa: F401  # before hours of work, not after them

        _check(self)
        runs = planned_runs(self, None if self.minutes is None else _steps_in(self, self.minutes))
        status = train_all(runs, run_apart)
        if status in (FINISHED, DIVERGED):
            _finish(self, [run.options.folder for run in runs])
        return status


@dataclass(frozen=True)
class MethodChoice:
    """A method with options of its own."""

    method: str
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Values by name, as typed."""

    @property
    def label(self) -> str:
        """A name for its folders, which does not depend on the other methods."""
        parts = (self.method, *(f"{name}-{value}" for name, value in self.options.items()))
        return re.sub(r"[^\w.,+-]", "_", "-".join(parts))

    def values(self) -> dict[str, Any]:
        """Its options as `PretrainOptions` has them; ValueError for one that is unknown or that all methods share."""
        for name in self.options:
            if option_name(name) in SHARED:
                raise ValueError(f"--methods {self.method}: {name} is the same for every method of a comparison")
        return file_values(PretrainOptions, self.options, f"--methods {self.method}") | {"method": self.method}


def method_choices(texts: Sequence[str]) -> list[MethodChoice]:
    """The methods of a list by commas. Commas also separate a method's options, and the numbers of an option."""
    found: list[MethodChoice] = []
    last = ""
    for part in (part.strip() for text in texts for part in text.split(",")):
        method, colon, option = ("", "", part) if _continues(part) else part.partition(":")
        if method:
            found.append(MethodChoice(chosen("--methods", method, METHODS)))
        if not found or (colon and not option):
            raise ValueError(f"--methods must be methods with options, as in adamw,apollo:lr=1e-2,rank=8; got {part!r}")
        name, given, value = option.partition("=")
        if given and name:
            last = name.strip()
            found[-1].options[last] = value.strip()
        elif option and last in found[-1].options:
            found[-1].options[last] += f",{option}"
        elif option:
            raise ValueError(f"--methods {found[-1].method}: {option!r} is no option with a value, as in lr=1e-2")
    labels = [choice.label for choice in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"--methods has {label} more than once")
    return found


def _continues(part: str) -> bool:
    """True if a part of the list belongs to the method before it: it is an option or another number of one."""
    return "=" in part.partition(":")[0] or re.fullmatch(r"[\d.eE+-]+", part) is not None


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison."""

    label: str
    """The label of its method."""
    options: PretrainOptions

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.options.run.seed}"

    @property
    def end(self) -> End | None:
        """How it ended; None if it can go on."""
        return RunFolder(self.options.folder).end(self.options.steps)


def planned_runs(options: Compare, steps: Mapping[str, int] | None = None) -> list[PlannedRun]:
    """Every run, seed by seed. `steps` has each method's number of steps, by label, if they differ."""
    if len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds must differ, got {','.join(map(str, options.seeds))}")
    runs: list[PlannedRun] = []
    for seed in options.seeds:
        for choice in method_choices(options.methods):
            folder = options.folder / f"{choice.label}-seed-{seed}"
            own = {"seed": seed, "out": str(folder), "auto_resume": True, "config": None}
            own |= {} if steps is None else {"steps": steps[choice.label], "tokens": None}
            runs.append(PlannedRun(choice.label, built(PretrainOptions, flat(options) | choice.values() | own)))
    return runs


def train_all(runs: Sequence[PlannedRun], train: Callable[[PretrainOptions], int]) -> int:
    """Train the runs that have not ended, and return the exit status of the first that was stopped or failed.

    A run that diverges is a result: the others go on.
    """
    for run in runs:
        RunFolder(run.options.folder).check(run.options.resolved(resuming=False))
    failed = FINISHED
    for number, run in enumerate(runs, start=1):
        if run.end is not None:
            say(f"[{number}/{len(runs)}] {run.name}: {run.end} before, kept")
            failed = DIVERGED if run.end == "diverged" else failed
            continue
        say(f"[{number}/{len(runs)}] {run.name}")
        status = train(run.options)
        if status not in (FINISHED, DIVERGED):
            say(f"{run.name} ended with status {status}; the same command goes on from here")
            return status
        failed = status or failed
    return failed


def _check(options: Compare) -> None:
    """Raise ValueError for options that cannot be, before any run begins."""
    if world_size() > 1:
        raise ValueError("apollo compare starts its runs itself, on one device: start it without torchrun")
    if options.minutes is not None:
        if not 0 < options.minutes < math.inf:
            raise ValueError(f"--minutes must be above 0 and finite, got {options.minutes:g}")
        if options.schedule.steps is not None or options.schedule.tokens is not None:
            raise ValueError("--minutes, --steps and --tokens each say how long runs are; give one of them")
    for run in planned_runs(options if options.minutes is None else _probe(options)):
        try:
            run.options.check(1)
        except ValueError as error:
            raise ValueError(f"{run.label}: {error}") from None


def _finish(options: Compare, folders: Sequence[Path]) -> None:
    """Write the report, and print its table."""
    logged, silent = recorded_runs(folders)
    if not logged:
        say(NOTHING_LOGGED)
        return
    runs = list(logged.values())
    report = options.folder / "report.html"
    write_report(runs, report, silent)
    groups, width = grouped_runs(runs), width_of(sys.stdout)
    print(table(_columns(groups), width))
    print(wrapped(" ".join([verdict(groups), *silent]), width))
    print(f" report  {report}")


def _columns(groups: Sequence[RunGroup]) -> list[Column]:
    columns = [Column("method", [group.name for group in groups], left=True)]
    for place, quantity in enumerate(QUANTITIES):
        numbers = [group.measured(quantity) for group in groups]
        cells = ["-" if number is None else quantity.shown(number.mean) for number in numbers]
        columns.append(Column(quantity.heading.replace(" ", "\n"), cells, use=len(QUANTITIES) - place))
        spreads = ["" if number is None else quantity.spread(number) for number in numbers]
        if quantity is PERPLEXITY and any(spreads):
            columns.append(Column("over\nseeds", spreads))
    return columns


def _steps_in(options: Compare, minutes: float) -> dict[str, int]:
    """Steps of each method that take so long here, by label, as found when the comparison first began."""
    kept = options.folder / "steps.json"
    try:
        known = json.loads(kept.read_text()) if kept.exists() else {}
        steps: dict[str, int] = dict(known.get(f"{minutes:g}", {}))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{kept} is not as a comparison wrote it ({error}); remove it") from None
    for label in (choice.label for choice in method_choices(options.methods)):
        if label not in steps:
            make_out(options.folder)
            say(f"{label}: timing {PROBE_STEPS} steps")
            steps[label] = max(round(60 * minutes / _seconds_of_a_step(options, label)), 1)
            with out_trouble_named(options.folder):
                replace_text_(kept, json.dumps(known | {f"{minutes:g}": steps}, indent=2) + "\n")
    return steps


def _probe(options: Compare) -> Compare:
    """The comparison with as many steps as methods are timed by."""
    return replace(options, schedule=replace(options.schedule, steps=PROBE_STEPS))


def _seconds_of_a_step(options: Compare, label: str) -> float:
    with TemporaryDirectory() as folder:
        quiet = replace(options.run, log_every=5, quiet=True)
        only = replace(_probe(options), seeds=options.seeds[:1], out=folder, run=quiet)
        run = next(run for run in planned_runs(only) if run.label == label)
        status = run_apart(run.options)
        if status != FINISHED:
            raise ValueError(f"{label} could not be timed: its run ended with status {status}")
        speed = SPEED.of(recorded_run(run.options.folder))
    assert speed is not None
    return options.schedule.batch_tokens / speed


def run_apart(options: PretrainOptions) -> int:
    """The exit status of a run in a process of its own, so that its peak of memory is its own."""
    command = [sys.executable, "-m", "apollo_optim", "pretrain", *flags_for(plain(flat(options)))]
    with subprocess.Popen(command, preexec_fn=_end_with_parent()) as process, _passed_on(process):
        return process.wait()


def _end_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that on Linux has the child get SIGTERM when its parent ends, even if that is killed."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def follow() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the prctl
            os.kill(os.getpid(), signal.SIGTERM)

    return follow


@contextmanager
def _passed_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the run, which then saves and ends."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Print to standard error, since standard output is for results."""
    print(text, file=sys.stderr, flush=True)
