"""`apollo eval`: the perplexity of a model on text, by source."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from ..terminal import Column, table, width_of
from ..train.scoring import EvalOptions, scores


@dataclass(frozen=True, kw_only=True)
class Eval(EvalOptions):
    __doc__ = EvalOptions.__doc__

    def execute(self) -> int:
        """Print the perplexities; 0."""
        found = scores(self)
        if self.json:
            print(json.dumps(found, indent=2))
        else:
            print(table(_table(found["sources"]), width_of(sys.stdout)))
        return 0


def _table(sources: dict[str, dict[str, Any]]) -> list[Column]:
    scores = sources.values()
    return [
        Column("source", list(sources), left=True),
        Column("tokens", [f"{score['tokens']:,}" for score in scores], use=1),
        Column("loss", [f"{score['loss']:.4f}" for score in scores]),
        Column("perplexity", [f"{score['perplexity']:.3f}" for score in scores]),
    ]
