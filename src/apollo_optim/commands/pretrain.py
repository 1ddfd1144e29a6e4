"""`apollo pretrain`: train a language model from the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..train.config import PretrainOptions


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainOptions):
    __doc__ = PretrainOptions.__doc__

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then those of the run that is to be resumed."""
        from ..train.run import with_files

        return with_files(cls, given)

    def execute(self) -> int:
        """Train; the exit status."""
        from ..train.pretrain import pretraining
        from ..train.run import run

        return run(self, pretraining)
