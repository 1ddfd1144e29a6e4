"""Other places that a run's numbers go to: TensorBoard and Weights & Biases."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .metrics import Record


class Sink(Protocol):
    """Takes the lines of the log."""

    def write(self, record: Record) -> None:
        """Keep a line."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def check_sinks(tensorboard: bool, wandb: str | None) -> None:
    """Raise ValueError where one is asked for whose library is missing."""
    for asked, flag, library in ((tensorboard, "--tensorboard", "tensorboard"), (wandb, "--wandb", "wandb")):
        if asked and find_spec(library) is None:
            raise ValueError(f"{flag} needs {library}, which is not installed: pip install {library}, or leave it out")


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Events that an interrupted run wrote beyond this step are hidden: they will be written again.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run at Weights & Biases, the same one after a resume: it is named by the run's folder."""

    def __init__(self, project: str, folder: Path, configuration: Mapping[str, Any]):
        import wandb  # pyrefly: ignore[missing-import]

        self._run = wandb.init(
            project=project, id=folder.name, dir=str(folder), config=dict(configuration), resume="allow"
        )

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by name: train/loss, validation/perplexity/<source>, ..."""
    found: dict[str, float] = {}
    for key, value in record.items():
        parts = (
            {f"perplexity/{source}": each for source, each in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        numbers = {name: each for name, each in parts.items() if isinstance(each, (int, float)) and name != "step"}
        found |= {f"{record['kind']}/{name}": each for name, each in numbers.items()}
    return found
