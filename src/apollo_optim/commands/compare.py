"""`apollo compare`: several methods under the same conditions, and the report on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..evidence.compare import CompareOptions, compare
from ..train.config import with_config


@dataclass(frozen=True, kw_only=True)
class Compare(CompareOptions):
    __doc__ = CompareOptions.__doc__

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config."""
        return with_config(cls, given)

    def execute(self) -> int:
        """Train and write the report; the exit status."""
        return compare(self)
