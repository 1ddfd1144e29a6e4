"""`apollo eval`: the perplexity of a model on text, by source, or its answers to multiple-choice tasks."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from ..evaluation.evaluate import TaskOptions, task_scores
from ..evaluation.perplexity import EvalOptions, scores
from ..evaluation.report import task_table
from ..flags import check_unused
from ..terminal import Column, table, width_of


@dataclass(frozen=True, kw_only=True)
class Eval(EvalOptions):
    __doc__ = EvalOptions.__doc__

    task: TaskOptions = field(default_factory=TaskOptions)

    def execute(self) -> int:
        """Print the perplexities, or the scores of the tasks; 0."""
        if self.task.tasks is None:
            check_unused(self.task, "without --tasks")
            found = scores(self)
            columns = _table(found["sources"])
        else:
            found = task_scores(self, self.task)
            columns = task_table(found)
        print(json.dumps(found, indent=2) if self.json else table(columns, width_of(sys.stdout)))
        return 0


def _table(sources: dict[str, dict[str, Any]]) -> list[Column]:
    scores = sources.values()
    return [
        Column("source", list(sources), left=True),
        Column("tokens", [f"{score['tokens']:,}" for score in scores], use=1),
        Column("loss", [f"{score['loss']:.4f}" for score in scores]),
        Column("perplexity", [f"{score['perplexity']:.3f}" for score in scores]),
    ]
