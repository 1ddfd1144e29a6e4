"""`apollo pretrain`: train a language model from the start."""

from dataclasses import dataclass

from ..train.config import PretrainOptions
from ..train.pretrain import pretraining
from ..train.run import run


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainOptions):
    __doc__ = PretrainOptions.__doc__

    def execute(self) -> int:
        """Train; the exit status."""
        return run(self, pretraining)
