"""`apollo analyze`: the paper's figures and tables of how methods behave, measured anew.

Some analyses look into a training (`watched.py`). The others are sets of runs, and a set is data: its methods with
their options, and how their results are drawn.
"""

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..choices import chosen
from ..flags import built
from ..terminal import counted
from ..train.config import flat
from ..train.display import Display
from ..train.loop import Task
from ..train.methods import Method
from ..train.metrics import records, result_of
from ..train.pretrain import PretrainOptions, pretraining
from ..train.ranks import Ranks
from ..train.run import DIVERGED, FINISHED, RunFolder
from ..train.run import run as run_training
from ..train.troubles import make_out
from .compare import NOTHING_LOGGED, OF_ONE_RUN, Compare, PlannedRun, planned_runs, run_apart, say, train_all
from .figures import CURVES, add_trace, curve_figure, error_bars, figure
from .page import Finding, publish
from .runs import CLOSE, PERPLEXITY, Measured, RecordedRun, RunGroup, recorded_runs
from .watched import ratio, setting, sharpness, spectrum

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

QUICK = {
    "sequence": 64, "batch_tokens": 512, "vocabulary": 1024, "eval_tokens": 4096, "log_every": 5, "save_every": 10**9,
    "eval_every": 10**9, "recipe": "auto", "quiet": True,
}  # fmt: skip
"""Defaults of an analysis: enough to see it work on a CPU, in a minute or so."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs whose results are drawn together."""

    title: str
    paper: str
    """The paper's result on the same question."""
    series: Mapping[str, Mapping[str, str]]
    """By name of the series and place on the axis: a method with its options, as `apollo compare` takes them."""
    reference: Mapping[str, str] = field(default_factory=dict[str, str])
    """By name: a method that all series are compared with."""
    axis: str = ""
    drawn: Literal["lines", "points", "loss", "perplexity"] = "lines"
    """The drawing: perplexities across the axis, as lines or points, or the runs' curves of loss or perplexity."""
    steps: int = 30
    evaluations: int = 1

    @property
    def places(self) -> list[str]:
        """The places on the axis."""
        return list(dict.fromkeys(at for each in self.series.values() for at in each))

    def methods(self) -> dict[tuple[str, str], str]:
        """The methods by series and place; the place of a reference is empty."""
        placed = {(name, at): method for name, each in self.series.items() for at, method in each.items()}
        return {(name, ""): method for name, method in self.reference.items()} | placed


def _ranks(method: str) -> dict[str, str]:
    """A method at three ranks, the last that of the paper's tables."""
    return {name: method.format(rank=rank) for name, rank in {"1": 1, "S/16": 0.0625, "S/4": 0.25}.items()}


SWEEPS: dict[str, Sweep] = {
    "rank": Sweep(
        title="Perplexity against rank",
        paper="on LLaMA-60M GaLore needs a quarter of the width to match AdamW, and is far behind below it; APOLLO "
        "loses little, and with one factor for the tensor (Mini) next to nothing even at rank 1.",
        series={
            "apollo": _ranks("apollo:rank={rank},scale=auto"),
            "one factor for the tensor": _ranks("apollo-mini:rank={rank},scale=auto"),
            "galore": _ranks("galore:rank={rank}"),
            "fira": _ranks("fira:rank={rank}"),
        },
        reference={"adamw": "adamw"},
        axis="rank",
        steps=12,
    ),
    "projection": Sweep(
        title="SVD or random projection",
        paper="GaLore falls far behind with a random projection; APOLLO and Mini do as well with one as with an SVD.",
        series={
            projection: {
                method: f"{method}:projection={projection}" for method in ("galore", "fira", "apollo", "apollo-mini")
            }
            for projection in ("svd", "gaussian")
        },
        reference={"adamw": "adamw"},
        drawn="points",
        steps=20,
    ),
    "granularity": Sweep(
        title="One factor for a channel or for the tensor",
        paper="perplexities of LLaMA-60M: AdamW 34.06, GaLore 34.88; APOLLO with SVD 31.26 by channel and 31.77 by "
        "tensor; APOLLO 31.55 and 32.10.",
        series={
            granularity: {
                "APOLLO with SVD": f"apollo:projection=svd,granularity={granularity}",
                "APOLLO": f"apollo:granularity={granularity}",
            }
            for granularity in ("channel", "tensor")
        },
        reference={"adamw": "adamw", "galore": "galore"},
        drawn="points",
    ),
    "limiter": Sweep(
        title="The norm-growth limiter",
        paper="one factor for a channel does as well as AdamW, but its loss spikes early; the limiter takes the spike "
        "away, slightly better than clipping does (LLaMA-130M: 24.43 without, 24.11 with, AdamW 25.08).",
        series={
            "with the limiter": {"": "structured-adamw"},
            "with clipping": {"": "structured-adamw:growth_limit=off,clip=1.0"},
            "with neither": {"": "structured-adamw:growth_limit=off"},
        },
        reference={"adamw": "adamw"},
        drawn="loss",
        steps=40,
    ),
    "crossover": Sweep(
        title="Fira early, APOLLO later",
        paper="on LLaMA-350M Fira is ahead early in the training, and APOLLO catches up and passes it in the end.",
        series={"apollo": {"": "apollo"}, "fira": {"": "fira"}},
        reference={"adamw": "adamw"},
        drawn="perplexity",
        steps=40,
        evaluations=5,
    ),
}  # fmt: skip

WATCHED: dict[str, tuple[Callable[..., Finding], tuple[str, ...], int]] = {
    "ratio": (ratio, ("apollo",), 60),
    "spectrum": (spectrum, ("apollo",), 60),
    "sharpness": (sharpness, ("sgd", "adamw", "apollo", "apollo-mini"), 40),
}
"""Analyses that look into trainings: the function, the methods, and the default number of steps."""


@dataclass(frozen=True, kw_only=True)
class Analyze(PretrainOptions):
    """Measure one of the paper's figures anew, at any size: a page with plots, and a CSV."""

    WITHOUT: ClassVar[tuple[str, ...]] = (*OF_ONE_RUN, *({each.name for each in fields(Method)} - {"state_device"}))

    what: str
    """ratio, spectrum, sharpness: what a training looks like from inside; rank, projection, granularity, limiter, crossover: sets of runs."""  # noqa: E501
    out: Path = Path("runs/analysis")
    """Folder of the page and the CSV, named after the analysis; sets of runs are kept beside them, and go on."""
    seeds: tuple[int, ...] = (0,)
    """By commas. Analyses of one training take the first; sets of runs take all, and show the spread."""

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then the defaults of the analysis."""
        values = super().with_files(given)
        quick = quick_values(values["what"])
        if values.get("tokens") is not None:
            del quick["steps"]
        options = built(cls, values)
        if options.has_tokens or options._tokenizer() is not None:
            del quick["vocabulary"]
        return quick | values

    def execute(self) -> int:
        """Measure and write; the exit status."""
        import plotly  # noqa: F401  # before the work, not after it

        if self.what in SWEEPS:
            status, finding = _swept(self, SWEEPS[self.what])
            if finding is None:
                return status
        else:
            measure, methods, _ = WATCHED[self.what]
            runs = [_one(self, method) for method in methods]
            for run in runs:
                run.check(1)
            make_out(self.out)
            status, finding = FINISHED, measure(*runs)
        publish(finding, self.out, self.what)
        return status


def quick_values(what: str) -> dict[str, Any]:
    """The default options of an analysis."""
    chosen("the analysis", what, (*WATCHED, *SWEEPS))
    steps = SWEEPS[what].steps if what in SWEEPS else WATCHED[what][2]
    # A spike of the loss lasts a step or two.
    drawn = {"log_every": 1} if what in SWEEPS and SWEEPS[what].drawn == "loss" else {}
    return {**QUICK, "steps": steps, **drawn}


def _one(options: Analyze, method: str) -> PretrainOptions:
    values = flat(options) | {"method": method, "seed": options.seeds[0], "out": None}
    return built(PretrainOptions, values).resolved(resuming=False)


def _swept(options: Analyze, sweep: Sweep) -> tuple[int, Finding | None]:
    """The exit status of a set of runs, and its finding; None if it was stopped or no run has a log."""
    runs = _compared(options, sweep)
    for run in runs:
        run.options.check(1)
    # Several runs in one process share what it has imported; on a GPU they would share its compiler's caches as well.
    status = train_all(runs, run_here if options.run.place().type == "cpu" else run_apart)
    if status not in (FINISHED, DIVERGED):
        return status, None
    logged, silent = recorded_runs([run.options.folder for run in runs])
    if not logged:
        say(NOTHING_LOGGED)
        return status, None
    groups = _groups(sweep.methods(), [logged.get(run.options.folder) for run in runs])
    return status, _finding(options, sweep, groups, silent)


def _compared(options: Analyze, sweep: Sweep) -> list[PlannedRun]:
    """The runs of a set, planned as a comparison of its methods."""
    values = flat(options) | {"methods": tuple(sweep.methods().values()), "seeds": options.seeds}
    values |= {"out": str(options.out / options.what), "eval_every": max(options.steps // sweep.evaluations, 1)}
    return planned_runs(built(Compare, values))


def run_here(options: PretrainOptions) -> int:
    """The exit status of a run in this process, without its output."""
    with redirect_stdout(io.StringIO()):
        return run_training(options.resolved(resuming=False), _only_measured)


def _only_measured(options: PretrainOptions, folder: RunFolder, ranks: Ranks, screen: Display) -> Task:
    """A pretraining task that keeps only its numbers: exporting the model and drawing curves would take longer."""
    task = pretraining(options, folder, ranks, screen)

    def finish() -> None:
        folder.add_facts({"result": result_of(records(folder.metrics), task.prepared.optimizer)})

    return replace(task, finish=finish)


Groups = dict[tuple[str, str], RunGroup]


def _groups(methods: Mapping[tuple[str, str], str], runs: Sequence[RecordedRun | None]) -> Groups:
    """A group of runs for each method, named after its series. `runs` has None for a run without a log."""
    return {
        place: RunGroup(place[0], [run for run in runs[number :: len(methods)] if run is not None])
        for number, place in enumerate(methods)
    }


def _finding(options: Analyze, sweep: Sweep, groups: Groups, silent: Sequence[str]) -> Finding:
    perplexities = {place: group.measured(PERPLEXITY) for place, group in groups.items()}
    names = [*sweep.series, *sweep.reference]
    return Finding(
        title=sweep.title,
        verdict=VERDICTS[sweep.drawn](sweep, groups),
        paper=sweep.paper,
        setting=f"{setting(options)}, seed{'s' * (len(options.seeds) > 1)} {', '.join(map(str, options.seeds))}",
        names=names,
        figures=_figures(sweep, names, groups, perplexities),
        table=_table(sweep, names, perplexities),
        rows=[row for place, group in groups.items() for run in group.runs for row in _rows(sweep, place, run)],
        caution=" ".join([*silent, *_cautions(options, groups)]),
        reading=_reading(options, sweep),
    )


def _rows(sweep: Sweep, place: tuple[str, str], run: RecordedRun) -> list[dict[str, Any]]:
    """A run's rows of the CSV: every line of its log if curves are drawn, or else its end."""
    name, at = place
    own = {"series": name, "at": at, "method": sweep.methods()[place], "seed": run.seed}
    if sweep.drawn in CURVES:
        return [own | {key: line[key] for key in CURVE_COLUMNS} for line in run.timed]
    last = run.trained[-1]
    ended = {"training_loss": last["loss"], "steps": last["step"], "tokens": last["tokens"]}
    return [own | {"perplexity": PERPLEXITY.of(run), **ended}]


CURVE_COLUMNS = "kind", "step", "tokens", "seconds", "loss", "perplexity"
UNKNOWN = "(not known: runs diverged)"


def _changes(pairs: Mapping[str, tuple[Measured | None, Measured | None]]) -> str:
    """The change of each perplexity, with insignificant changes listed separately."""
    told: list[str] = []
    unsure: list[str] = []
    for name, (before, after) in pairs.items():
        if before is not None and after is not None:
            change = f"{name} {after.mean / before.mean - 1:+.1%}"
            (told if PERPLEXITY.is_behind(after, before) else unsure).append(change)
    parts = [", ".join(told), f"too little to tell it from none: {', '.join(unsure)}" if unsure else ""]
    return "; ".join(filter(None, parts)) or UNKNOWN


def _across_places(sweep: Sweep, groups: Groups) -> str:
    first, *_, last = next(iter(sweep.series.values()))
    pairs = {
        name: (groups[name, last].measured(PERPLEXITY), groups[name, first].measured(PERPLEXITY))
        for name in sweep.series
    }
    return f"from {sweep.axis} {last} down to {first} the perplexity changes by {_changes(pairs)}."


def _across_series(sweep: Sweep, groups: Groups) -> str:
    (before, places), (after, _) = sweep.series.items()
    pairs = {at: (groups[before, at].measured(PERPLEXITY), groups[after, at].measured(PERPLEXITY)) for at in places}
    return f"with {after} in place of {before} the perplexity changes by {_changes(pairs)}."


def _spikes(sweep: Sweep, groups: Groups) -> str:
    """The largest rise of each method's training loss above its lowest so far."""
    told: list[str] = []
    for (name, _), group in groups.items():
        losses = [[line["loss"] for line in run.trained] for run in group.runs]
        rises = [now - low for each in losses for now, low in zip(each, itertools.accumulate(each, min), strict=True)]
        told += [f"{name} {max(rises):.2f}"] if rises else []
    return (
        f"the training loss rises above its lowest so far by at most {', '.join(told)}. Batches differ, so that any "
        "loss may rise a little."
    )


def _leads(sweep: Sweep, groups: Groups) -> str:
    """The perplexity of the first series relative to that of the second, at each evaluation."""
    one, other = sweep.series
    curves = [groups[name, ""].curve("validation", "perplexity") for name in (one, other)]
    told = [
        f"{ours.value.mean / theirs.value.mean - 1:+.1%} at {counted(ours.tokens)}"
        for ours, theirs in zip(*curves, strict=False)  # one that diverged has fewer
    ]
    return f"the perplexity of {one}, against that of {other}, by tokens: {', '.join(told) or UNKNOWN}."


VERDICTS: dict[str, Callable[[Sweep, Groups], str]] = {
    "lines": _across_places,
    "points": _across_series,
    "loss": _spikes,
    "perplexity": _leads,
}


def _reading(options: Analyze, sweep: Sweep) -> str:
    across = sweep.drawn in ("lines", "points")
    shares = "S is the smaller side of a weight. " if sweep.axis == "rank" else ""
    dashes = f"Dashes are for {' and '.join(sweep.reference)}. " if across and sweep.reference else ""
    spread = (
        f"{'Bars' if across else 'Bands'} go from the lowest seed to the highest." if len(options.seeds) > 1 else ""
    )
    return shares + dashes + spread


def _cautions(options: Analyze, groups: Groups) -> list[str]:
    """Warnings on runs that are too short, or have too few seeds, to tell methods apart."""
    remarks: list[str] = []
    parameters = max(group.facts["parameters"] for group in groups.values() if group.runs)
    tokens = options.steps * options.schedule.batch_tokens
    if tokens < parameters:
        remarks.append(
            f"{counted(tokens)} tokens are fewer than the model has parameters ({counted(parameters)}): most of such a "
            "run is warm-up, and its order of methods is not that of longer runs."
        )
    found = sorted(
        (measured for group in groups.values() if (measured := group.measured(PERPLEXITY)) is not None),
        key=lambda measured: measured.mean,
    )
    if any(not PERPLEXITY.is_behind(worse, better) for better, worse in itertools.pairwise(found)):
        one = f", being within {CLOSE:.0%} of each other: with one seed that says little: give --seeds."
        why = one if len(options.seeds) == 1 else ": their seeds overlap."
        remarks.append(f"Some of these cannot be told apart{why}")
    return remarks


Perplexities = Mapping[tuple[str, str], Measured | None]


def _table(sweep: Sweep, names: Sequence[str], found: Perplexities) -> list[dict[str, Any]]:
    """A row of perplexities for each series, with a column for each place."""

    def cell(name: str, at: str) -> str | None:
        measured = found.get((name, at)) or found.get((name, ""))
        if measured is None:
            return None
        spread = PERPLEXITY.spread(measured)
        return PERPLEXITY.shown(measured.mean) + (f" ({spread})" if spread else "")

    heads = {at: f"{sweep.axis} {at}".strip() or "validation perplexity" for at in sweep.places}
    return [{"": name} | {heads[at]: cell(name, at) for at in sweep.places} for name in names]


def _figures(sweep: Sweep, names: Sequence[str], groups: Groups, found: Perplexities) -> dict[str, "Figure"]:
    if sweep.drawn in CURVES:
        ordered = [groups[name, ""] for name in names]
        what = CURVES[sweep.drawn][1].capitalize()
        against = {"tokens": "against tokens", "seconds": "against time"}
        return {f"{what} {said}": curve_figure(ordered, sweep.drawn, axis) for axis, said in against.items()}
    draw = _lines if sweep.drawn == "lines" else _points
    return {f"Validation perplexity{' against ' + sweep.axis if sweep.axis else ''}": draw(sweep, names, found)}


def _lines(sweep: Sweep, names: Sequence[str], found: Perplexities) -> "Figure":
    made = figure(hovermode="x unified")
    for number, name in enumerate(names):
        drawn = name in sweep.series
        at = {place: found[name, place if drawn else ""] for place in sweep.places}
        look = {"mode": "lines+markers"} if drawn else {"paint": "theory"}
        _add_known(made, number, name, at, hovertemplate="%{y:.4~f}", **look)
    made.update_xaxes(title_text=sweep.axis, type="category")
    made.update_yaxes(title_text="validation perplexity")
    return made


def _points(sweep: Sweep, names: Sequence[str], found: Perplexities) -> "Figure":
    """Points beside each other. Bars would have to begin at zero, and differences of a few percent would not show."""
    made, places = figure(hovermode="closest"), sweep.places
    for number, name in enumerate(names):
        hover = f"%{{y:.4~f}}<extra>{name}</extra>"
        if name in sweep.series:
            beside = 0.2 * (number - (len(sweep.series) - 1) / 2)
            at = {x + beside: found[name, place] for x, place in enumerate(places)}
            _add_known(made, number, name, at, hovertemplate=hover, mode="markers", marker={"size": 11})
        else:
            level = None if (reference := found[name, ""]) is None else reference.mean
            add_trace(made, number, name, [-0.5, len(places) - 0.5], [level] * 2, hovertemplate=hover, paint="theory")
    made.update_yaxes(title_text="validation perplexity")
    made.update_xaxes(
        tickvals=list(range(len(places))), ticktext=places, range=[-0.5, len(places) - 0.5], zeroline=False
    )
    return made


def _add_known(made: "Figure", number: int, name: str, at: Mapping[Any, Measured | None], **look: Any) -> None:
    """Draw the means that are known, with their spread over the seeds."""
    known = {place: measured for place, measured in at.items() if measured is not None}
    means, low, high = ([getattr(each, which) for each in known.values()] for which in ("mean", "low", "high"))
    spread = error_bars(means, low, high, visible=any(len(each.values) > 1 for each in known.values()))
    add_trace(made, number, name, list(known), means, error_y=spread, **look)
