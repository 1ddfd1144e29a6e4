"""`apollo bench`: optimizer steps measured on this machine."""

from dataclasses import dataclass

from ..evidence.benches import BenchOptions, bench


@dataclass(frozen=True, kw_only=True)
class Bench(BenchOptions):
    __doc__ = BenchOptions.__doc__

    def execute(self) -> int:
        """Measure and write; 0."""
        return bench(self)
