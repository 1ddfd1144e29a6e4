"""`apollo compare`: several methods under the same conditions, and the report on them."""

from dataclasses import dataclass

from ..evidence.compare import CompareOptions, compare


@dataclass(frozen=True, kw_only=True)
class Compare(CompareOptions):
    __doc__ = CompareOptions.__doc__

    def execute(self) -> int:
        """Train and write the report; the exit status."""
        return compare(self)
