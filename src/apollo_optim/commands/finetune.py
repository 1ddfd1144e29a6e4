"""`apollo finetune`: train a language model further, on instructions and answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..train.tuning.config import FinetuneOptions
from ..train.tuning.finetune import finetune


@dataclass(frozen=True, kw_only=True)
class Finetune(FinetuneOptions):
    __doc__ = FinetuneOptions.__doc__

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then those of the run that is to be resumed."""
        if given.get("steps") is not None and given.get("epochs") is not None:
            raise ValueError(
                f"--steps {given['steps']} and --epochs {given['epochs']} say the same thing; leave one out"
            )
        return super().with_files(given)

    def execute(self) -> int:
        """Train; the exit status."""
        return finetune(self)
