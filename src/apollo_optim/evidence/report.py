"""The report on runs: which method is ahead, by how much and at what cost, and how to repeat each run."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..flags import options_of, said
from ..terminal import counted
from ..train.config import plain
from ..train.pretrain import PretrainOptions
from .figures import report_figures
from .page import chips, downloads, key, plot, typed, write_page
from .runs import (
    CLOSE,
    KINDS,
    OF_METHODS,
    PERPLEXITY,
    QUANTITIES,
    REST,
    Measured,
    Quantity,
    RecordedRun,
    RunGroup,
    differing,
    grouped_runs,
    log_csv,
    memory_kinds,
    result_csv,
)

OF_PERPLEXITY = frozenset({"data", "validation", "held_out", "tokenizer", "vocabulary"})
"""Options that decide which tokens a perplexity is of."""
FILES = {"curves.csv": "Curves as CSV", "runs.csv": "Results and options as CSV"}


def write_report(runs: Sequence[RecordedRun], path: Path, remarks: Sequence[str] = ()) -> None:
    """Write the page on these runs, with remarks on runs that have no log."""
    groups = grouped_runs(runs)
    body = "\n".join(
        (
            _head(groups, remarks),
            chips([group.name for group in groups]),
            f"<h2>Results</h2>{_table(groups)}",
            _curves(),
            _costs(groups),
            _runs(groups),
            f"<h2>Data</h2>{downloads(FILES)}",
        )
    )
    files = dict(zip(FILES, (log_csv(groups), result_csv(groups)), strict=True))
    write_page(path, f"{_subject(groups)} · apollo report", body, report_figures(groups), files)


def _subject(groups: Sequence[RunGroup]) -> str:
    """The models and the texts, absolute paths cut to their ends."""
    models, texts = (
        [*dict.fromkeys(_end(str(group.settings[name])) for group in groups)] for name in ("model", "data")
    )
    return f"{', '.join(models)} on {', '.join(texts)}"


def _end(text: str) -> str:
    return "/".join(Path(text).parts[-2:]) if Path(text).is_absolute() else text


def _head(groups: Sequence[RunGroup], remarks: Sequence[str]) -> str:
    runs = [run for group in groups for run in group.runs]
    tokens = [*dict.fromkeys(run.trained[-1]["tokens"] for run in runs)]
    facts = [
        f"{len(groups)} method{'s' * (len(groups) > 1)}",
        f"{len(runs)} run{'s' * (len(runs) > 1)}",
        f"{' to '.join(counted(count) for count in sorted({min(tokens), max(tokens)}))} tokens each",
        ", ".join(dict.fromkeys(_machine(run) for run in runs)),
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*_notes(groups), *remarks))
    return (
        f'<h1>{escape(_subject(groups))}</h1><p class="soft">{escape(" · ".join(fact for fact in facts if fact))}</p>'
        f'<p class="verdict">{escape(verdict(groups))}</p>' + (f'<div class="notes">{notes}</div>' if notes else "")
    )


def _machine(run: RecordedRun) -> str:
    session = run.session
    ranks, threads = session.get("ranks", 1), session.get("threads")
    if session.get("cuda"):
        return f"{ranks} x {session['device']}" if ranks > 1 else session["device"]
    return f"{session['device']}, {threads} thread{'s' * (threads != 1)}" if "device" in session else ""


def _candidates(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Groups that can be the best: the finished ones, or if there are none, those that did not diverge."""
    finished = [group for group in groups if all(run.end == "finished" for run in group.shown)]
    return finished or [group for group in groups if not group.diverged]


def _best(quantity: Quantity, candidates: Sequence[RunGroup]) -> Measured | None:
    """The best of the groups by its mean."""
    found = [measured for group in candidates if (measured := group.measured(quantity)) is not None]
    if not found:
        return None
    best = quantity.better([measured.mean for measured in found])
    return next(measured for measured in found if measured.mean == best)


def verdict(groups: Sequence[RunGroup]) -> str:
    """A text on which group has the lowest perplexity, how far the others are behind, and which diverged."""
    diverged = "".join(f" {group.name} diverged." for group in groups if group.diverged)
    whole = [group for group in groups if not group.diverged]
    found = [(group, measured) for group in whole if (measured := group.measured(PERPLEXITY)) is not None]
    if not found:
        return f"No run to compare has been evaluated yet.{diverged}"
    found.sort(key=lambda pair: pair[1].mean)
    (first, best), *others = found
    text = f"{first.name} has a validation perplexity of {PERPLEXITY.shown(best.mean)}"
    if not others:
        return f"{text}.{diverged}"
    behind = ", ".join(f"{group.name} {other.mean / best.mean - 1:+.1%}" for group, other in others)
    text = f"{text}, the lowest; {behind}."
    tied: dict[str, list[str]] = {}
    for group, other in others:
        if not PERPLEXITY.is_behind(other, best):
            alone = min(len(other.values), len(best.values)) == 1
            why = f"with one seed, differences below {CLOSE:.0%} say little" if alone else "their seeds overlap"
            tied.setdefault(why, []).append(group.name)
    told = [f" {' and '.join(names)} cannot be told from {first.name} here: {why}." for why, names in tied.items()]
    return text + "".join(told) + diverged


def _notes(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Warnings on what makes the comparison unfair."""
    other = [name for name in differing([group.settings for group in groups]) if name not in OF_METHODS]
    if other:
        options = ", ".join(f"{name} ({', '.join(_values(groups, name))})" for name in other)
        apart = " Perplexities of other text or tokens do not compare." if OF_PERPLEXITY & set(other) else ""
        yield f"The runs differ in more than how they train: {options}.{apart}"
    if len({run.facts.get("corpus", run.facts.get("examples")) for group in groups for run in group.runs}) > 1:
        yield "The runs did not read the same tokens."
    machines = dict.fromkeys(_machine(run) for group in groups for run in group.runs)
    if len(machines) > 1:
        yield f"The runs are of several machines, so times and memory do not compare: {'; '.join(machines)}."
    for group in groups:
        for run in group.runs:
            if run.end != "finished":
                last = f"step {run.trained[-1]['step']} is its last"
                what = "diverged" if run.end == "diverged" else "has not come to its end"
                apart = "" if run in group.shown else " It is in no mean, and no curve."
                yield f"{run.path} {what}: {last}.{apart}"


def _values(groups: Sequence[RunGroup], name: str) -> list[str]:
    return [*dict.fromkeys(said(group.settings.get(name)) for group in groups)]


def _table(groups: Sequence[RunGroup]) -> str:
    candidates = _candidates(groups)
    known = {quantity: best for quantity in QUANTITIES if (best := _best(quantity, candidates)) is not None}
    compared = candidates if len(groups) > 1 else []
    heads = "".join(f"<th>{escape(quantity.heading)}</th>" for quantity in known)
    rows = "".join(
        f'<tr data-group="{number}"><td><span><span class="dot"></span><span class="name">{escape(group.name)}</span>'
        f"<small>{_seeds(group)}</small></span></td>"
        + "".join(_cell(quantity, group, best, group in compared) for quantity, best in known.items())
        + "</tr>"
        for number, group in enumerate(groups)
    )
    spread = (
        "<p class='soft'>Means over seeds, and from the lowest to the highest of them. The best of a column is marked; "
        "green without a mark cannot be told from it: the seeds overlap, or there is one of them and less than "
        f"{CLOSE:.0%} between the two.</p>"
    )
    return f"<table><thead><tr><th>method</th>{heads}</tr></thead><tbody>{rows}</tbody></table>{spread}"


def _seeds(group: RunGroup) -> str:
    return f"seed{'s' * (len(group.seeds) > 1)} {', '.join(map(str, group.seeds))}"


def _cell(quantity: Quantity, group: RunGroup, best: Measured, compared: bool) -> str:
    measured = group.measured(quantity)
    label = f'data-label="{escape(quantity.heading)}"'
    if measured is None:
        return f"<td {label}>-</td>"
    look = ""
    if compared:
        look = "best" if measured.mean == best.mean else "" if quantity.is_behind(measured, best) else "tied"
    spread = f"<small>{escape(quantity.spread(measured))}</small>" if quantity.spread(measured) else ""
    return f'<td {label} class="{look}"><span>{escape(quantity.shown(measured.mean))}{spread}</span></td>'


def _curves() -> str:
    plots = (
        plot("loss-tokens", "Training loss against tokens"),
        plot("loss-seconds", "Training loss against time"),
        plot("perplexity-tokens", "Validation perplexity against tokens"),
        plot("perplexity-seconds", "Validation perplexity against time"),
    )
    return (
        f'<h2>Curves</h2><div class="grid">{"".join(plots)}</div>'
        "<p class='soft'>Lines are means over seeds, bands go from the lowest seed to the highest. Time is that of "
        "training steps: evaluations and checkpoints are not in it.</p>"
    )


def _costs(groups: Sequence[RunGroup]) -> str:
    kinds = dict.fromkeys(kind for group in groups for kind in memory_kinds(group))
    on_cpu = any(not group.on_gpu for group in groups)
    process = " On a CPU the peak is the process's, libraries included: bars have what is counted." if on_cpu else ""
    partly = "" if KINDS.keys() <= kinds.keys() else " Runs of an earlier version tell less of what their memory held."
    plots = (
        plot("memory", f"Memory{' at its peak' * (REST in kinds)}, by what it holds", key(kinds), wide=True),
        plot("step", "Time of a step"),
        plot("speed", "Throughput"),
    )
    return (
        f'<h2>Costs</h2><div class="grid">{"".join(plots)}</div>'
        f"<p class='soft'>A step is forward, backward and the optimizer's. Medians over the lines of the log.{process}"
        f"{partly}</p>"
    )


def _runs(groups: Sequence[RunGroup]) -> str:
    """The section of every group. If all have the same machine and versions, those are shown once above."""
    environments = [_environment(group.runs[0]) for group in groups]
    same = all(each == environments[0] for each in environments)
    parts = [
        _group(number, group, {} if same else environment)
        for number, (group, environment) in enumerate(zip(groups, environments, strict=True))
    ]
    return "".join(("<h2>Runs</h2>", _facts(environments[0]) if same else "", *parts))


def _environment(run: RecordedRun) -> dict[str, str | None]:
    session = run.session
    versions = ", ".join(f"{name} {version}" for name, version in session.get("versions", {}).items())
    return {
        "machine": " · ".join(filter(None, (_machine(run), session.get("platform")))),
        "versions": " · ".join(filter(None, (f"Python {session['python']}" if "python" in session else "", versions))),
        "commit": session.get("commit"),
    }


def _facts(known: Mapping[str, Any]) -> str:
    facts = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in known.items() if value)
    return f"<dl>{facts}</dl>"


def _group(number: int, group: RunGroup, environment: Mapping[str, str | None]) -> str:
    """The commands that repeat a group's runs, and all that is known of them."""
    known = {
        "parameters": counted(group.facts["parameters"]) if "parameters" in group.facts else None,
        "recipe": group.facts.get("recipe"),
        **environment,
        "began": ", ".join(str(each.session["began"]) for each in group.runs if "began" in each.session),
        "folders": ", ".join(str(each.path) for each in group.runs),
    }
    used = group.facts.get("method")
    options = {**group.settings, **(used if isinstance(used, dict) else {})}
    shown = "".join(
        f"<div><span>{escape(name.replace('_', '-'))}</span><b>{escape(said(value))}</b></div>"
        for name, value in options.items()
        if value is not None and name != "seed"
    )
    commands = "".join(typed(repeat_command(each)) for each in group.runs)
    return (
        f'<section data-group="{number}"><h3><span class="dot"></span> {escape(group.name)}</h3>{commands}'
        f"{_facts(known)}"
        f"<details><summary>All options</summary><div class='columns'>{shown}</div></details></section>"
    )


ALWAYS_TOLD = frozenset({"model", "data", "method", "batch_tokens", "eval_tokens", "seed"})
"""Options that a command has even at their defaults, which depend on the machine or are worth seeing."""
OF_PRETRAINING = "pretrain", "compare", "analyze"
"""Commands whose runs `apollo pretrain` can repeat."""


def repeat_command(run: RecordedRun) -> list[str]:
    """The command line that repeats a run: made from its options, or as typed if another command trained it."""
    _, *typed = run.session.get("command") or [""]
    if typed and typed[0] not in OF_PRETRAINING:
        return ["apollo", *typed]
    return ["apollo", "pretrain", *flags_for(run.settings), "--out", str(run.path)]


def flags_for(settings: Mapping[str, Any]) -> list[str]:
    """The flags for these options, without those at their defaults."""
    flags: list[str] = []
    for name, option in options_of(PretrainOptions).items():
        value = settings.get(name, plain(option.default))
        if name in ALWAYS_TOLD or value != plain(option.default):
            flags += [option.flag, "none" if value is None else said(value)]
    return flags
