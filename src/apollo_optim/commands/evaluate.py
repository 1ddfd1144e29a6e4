"""`apollo eval`: the perplexity of a model on text, by source."""

import json
from dataclasses import dataclass
from typing import Any

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
            _print_table(found["sources"])
        return 0


def _print_table(sources: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    table.add_column("source")
    for heading in ("tokens", "loss", "perplexity"):
        table.add_column(heading, justify="right")
    for source, score in sources.items():
        table.add_row(source, f"{score['tokens']:,}", f"{score['loss']:.4f}", f"{score['perplexity']:.3f}")
    Console(highlight=False).print(table)
