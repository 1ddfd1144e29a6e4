"""`apollo pretrain`: train a language model from the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..flags import built
from ..train.config import PretrainOptions
from ..train.folder import RunFolder
from ..train.settings import values_in


@dataclass(frozen=True, kw_only=True)
class Pretrain(PretrainOptions):
    __doc__ = PretrainOptions.__doc__

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a command line, then those of --config, then those of the run that is to be resumed."""
        values = dict(given)
        if values.get("config"):
            values = values_in(Path(values["config"]), cls) | values
        options = built(cls, values)
        folder = RunFolder(options.folder)
        resumes = options.run.resumes and folder.settings.exists()
        return folder.saved_values(cls, values) | values if resumes else values

    def execute(self) -> int:
        """Train; the exit status."""
        from ..train.pretrain import pretrain

        return pretrain(self)
