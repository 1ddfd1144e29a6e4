"""Results of tasks: kept item by item, summed up with standard errors, and shown in a table."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..terminal import Column
from ..train.atomic import replace_text_
from ..train.data.files import content_hash
from ..train.troubles import out_trouble_named
from .tasks import CATEGORY, MMLU_CATEGORIES, SUITES, EvalTask, MultipleChoice

Scores = dict[str, Any]
"""Scores of a task or of a part: `items`, and metrics, each with its standard error."""
METRICS = "acc", "acc_norm"


class ItemLog:
    """The results of a task's items in a file of JSON lines, from which a killed evaluation goes on."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        """The file's name has a hash of all that decides the results, so that no other evaluation is mixed in."""
        self.settings = settings
        key = content_hash([json.dumps(settings, sort_keys=True)])[:12]
        self.path = folder / f"{name}.{key}.jsonl"
        self.summary = folder / f"{name}.{key}.json"
        self.items: dict[int, Any] = self._read()

    def _read(self) -> dict[int, Any]:
        """The items in the file. A last line that was cut short is removed from it."""
        if not self.path.exists():
            return {}
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            return {line["item"]: line for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not as an evaluation wrote it ({error}); remove it") from None

    def add(self, items: Mapping[int, Mapping[str, Any]]) -> None:
        """Append items to the file."""
        lines = {item: {"item": item, **found} for item, found in items.items()}
        with out_trouble_named(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines.values()))
        self.items |= lines

    def finish(self, scores: Scores) -> None:
        """Write the summary, with the settings."""
        with out_trouble_named(self.path.parent):
            replace_text_(self.summary, json.dumps({**scores, "settings": self.settings}, indent=2) + "\n")

    @property
    def finished(self) -> Scores | None:
        """The scores in the summary; None if the task is not done."""
        if not self.summary.exists():
            return None
        found = json.loads(self.summary.read_text(encoding="utf-8"))
        return {name: value for name, value in found.items() if name != "settings"}


def judged(question: MultipleChoice, log_likelihoods: Sequence[float]) -> dict[str, Any]:
    """The result of an item whose answer is the likeliest, in all (acc) or per character (acc_norm)."""
    normed = [each / length for each, length in zip(log_likelihoods, question.lengths, strict=True)]
    return {
        "log_likelihoods": list(log_likelihoods),
        "answer": question.answer,
        "acc": int(_likeliest(log_likelihoods) == question.answer),
        "acc_norm": int(_likeliest(normed) == question.answer),
    }


def _likeliest(values: Sequence[float]) -> int:
    """The number of the highest value, the first of equal ones."""
    return values.index(max(values))


def mean_with_error(values: Sequence[float], name: str) -> Scores:
    """The mean of a metric over items, and its standard error, which is None for a single item."""
    count, mean = len(values), sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else None
    return {name: mean, f"{name}_stderr": error}


def summed_up(task: EvalTask, items: Sequence[Mapping[str, Any]], subjects: Sequence[str]) -> Scores:
    """The scores of a task from all of its items; for MMLU also by category and subject."""
    found = _scores(task, items)
    if task.suite != "mmlu":
        return found
    by_subject: dict[str, list[Mapping[str, Any]]] = {}
    for subject, item in zip(subjects, items, strict=True):
        by_subject.setdefault(subject, []).append(item)
    categories = {
        category: [item for subject in members for item in by_subject.get(subject, ())]
        for category, members in MMLU_CATEGORIES.items()
    }
    return {
        **found,
        "parts": {name: _scores(task, some) for name, some in categories.items() if some},
        "subjects": {name: _scores(task, by_subject[name]) for name in CATEGORY if name in by_subject},
    }


def _scores(task: EvalTask, items: Sequence[Mapping[str, Any]]) -> Scores:
    found: Scores = {"items": len(items), **mean_with_error([item["acc"] for item in items], "acc")}
    if task.normed:
        found |= mean_with_error([item["acc_norm"] for item in items], "acc_norm")
    if any("text" in item for item in items):
        found["unanswered"] = sum(item["found"] is None for item in items)
    return found


def averages(tasks: Mapping[str, Scores], suites: Sequence[str]) -> dict[str, Scores]:
    """The mean over the tasks of each suite, without weights; acc stands in for acc_norm where a task has none."""
    found: dict[str, Scores] = {}
    for suite in suites:
        members = [tasks[task.name] for task in SUITES[suite]]
        if len(members) > 1:
            found[suite] = {"items": sum(each["items"] for each in members)}
            for metric in METRICS if any("acc_norm" in each for each in members) else METRICS[:1]:
                found[suite] |= _average(members, metric)
    return found


def _average(members: Sequence[Scores], metric: str) -> Scores:
    count, names = len(members), [metric if metric in each else "acc" for each in members]
    values = [each[name] for name, each in zip(names, members, strict=True)]
    errors = [each[f"{name}_stderr"] for name, each in zip(names, members, strict=True)]
    return {
        metric: sum(values) / count,
        f"{metric}_stderr": None if None in errors else math.hypot(*errors) / count,
    }


def task_table(found: Mapping[str, Any]) -> list[Column]:
    """A line for each task, with MMLU's categories under it, and the averages of suites."""
    rows: list[tuple[str, Scores]] = []
    for name, scores in found["tasks"].items():
        rows.append((name, scores))
        rows += [(f"  {name}", part) for name, part in scores.get("parts", {}).items()]
    rows += [(f"{suite} average", scores) for suite, scores in found["averages"].items()]
    metrics = (key for _, scores in rows for key in scores if f"{key}_stderr" in scores)
    extra = dict.fromkeys(key for key in metrics if key not in METRICS)
    columns = [Column("task", [name for name, _ in rows], left=True)]
    columns.append(Column("items", [_count(scores.get("items")) for _, scores in rows], use=1))
    for metric in (*METRICS, *extra):
        if any(metric in scores for _, scores in rows):
            columns.append(Column(metric, [_number(scores.get(metric), metric) for _, scores in rows]))
            errors = [_number(scores.get(f"{metric}_stderr"), metric) for _, scores in rows]
            columns.append(Column("±", errors, use=2))
    if any("unanswered" in scores for _, scores in rows):
        columns.append(Column("unanswered", [_count(scores.get("unanswered")) for _, scores in rows], use=3))
    return columns


def score_table(sources: Mapping[str, Mapping[str, Any]]) -> list[Column]:
    """A line with the perplexity of each source."""
    scores = sources.values()
    return [
        Column("source", list(sources), left=True),
        Column("tokens", [f"{score['tokens']:,}" for score in scores], use=1),
        Column("loss", [f"{score['loss']:.4f}" for score in scores]),
        Column("perplexity", [f"{score['perplexity']:.3f}" for score in scores]),
    ]


def _number(value: float | None, metric: str) -> str:
    """A score as text; accuracies in percent."""
    if value is None:
        return ""
    return f"{100 * value:.2f}" if metric in METRICS else f"{value:.4f}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
