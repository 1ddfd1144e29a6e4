"""`apollo pretrain`: train a language model from the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..train.config import PretrainOptions


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainOptions):
    __doc__ = PretrainOptions.__doc__

    @classmethod
    def check_flags(cls, flags: Sequence[str]) -> None:
        """Raise ValueError for a flag that there is not."""
        from ..train.settings import check_flags

        check_flags(flags, cls())

    def file_flags(self) -> list[str]:
        """Options of --config, as flags."""
        from ..train.settings import flags_in

        return flags_in(Path(self.config), self) if self.config else []

    def saved_flags(self) -> list[str]:
        """Options of the run that is to be resumed, as flags."""
        from ..train.folder import RunFolder

        folder = RunFolder(self.folder)
        return folder.saved_flags(self) if self.run.resumes and folder.settings.exists() else []

    def execute(self) -> int:
        """Train; the exit status."""
        from ..train.pretrain import pretrain

        return pretrain(self)
