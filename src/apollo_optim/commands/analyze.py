"""`apollo analyze`: the paper's figures, measured anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..evidence.analyses import AnalyzeOptions, analyze, quick_values


@dataclass(frozen=True, kw_only=True)
class Analyze(AnalyzeOptions):
    __doc__ = AnalyzeOptions.__doc__

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then those that the analysis has by itself."""
        values = super().with_files(given)
        quick = quick_values(values["what"])
        if values.get("tokens") is not None:
            del quick["steps"]
        return quick | values

    def execute(self) -> int:
        """Measure and write; the exit status."""
        return analyze(self)
