"""Sinks of a run's log beside its own file: TensorBoard, Weights & Biases, Trackio, MLflow, and the screen."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .display import TrainingDisplay
from .metrics import MetricsFile, Record


class Sink(Protocol):
    """Takes the lines of the log."""

    def write(self, record: Record) -> None:
        """Log a line."""

    def close(self) -> None:
        """Finish the log."""


def check_sinks(libraries: Iterable[str]) -> None:
    """Raise ValueError for a library, named as its flag, that is not installed."""
    for library in libraries:
        if find_spec(library) is None:
            raise ValueError(
                f"--{library} needs {library}, which is not installed: pip install {library}, or leave it out"
            )


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Hides events that an interrupted run wrote beyond this step; they will be written again.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def run_name(folder: Path) -> str:
    """A unique name for the run in this folder, the same after a resume."""
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{folder.name}-{place}"


class TrackedRun:
    """A run at Weights & Biases or Trackio, the same one after a resume."""

    def __init__(self, library: str, project: str, folder: Path, configuration: Mapping[str, Any]):
        own = {"id": run_name(folder), "dir": str(folder)}
        if library == "trackio":
            own = {"name": run_name(folder), "embed": False}
        init = import_module(library).init
        self._run = init(project=project, config=dict(configuration), resume="allow", **own)

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, where MLFLOW_TRACKING_URI says; the same one after a resume."""

    def __init__(self, experiment: str, folder: Path, configuration: Mapping[str, Any]):
        import mlflow  # pyrefly: ignore[missing-import]

        name = run_name(folder)
        mlflow.set_experiment(experiment)
        earlier = mlflow.search_runs(
            experiment_names=[experiment],
            filter_string=f"attributes.run_name = '{name}'",
            max_results=1,
            output_format="list",
        )
        self._mlflow = mlflow
        mlflow.start_run(run_id=earlier[0].info.run_id if earlier else None, run_name=name)
        if not earlier:
            # A parameter cannot be changed later, as options of a resumed run can.
            mlflow.log_params({key: str(value) for key, value in configuration.items()})

    def write(self, record: Record) -> None:
        self._mlflow.log_metrics(scalars(record), step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


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


class Recorder:
    """Shows every record, and passes it to the sinks; only the first rank has one.

    A full disk or an unreachable tracker does not end a run: later lines may succeed.
    """

    def __init__(self, sinks: Sequence[Sink], shown: TrainingDisplay):
        self.sinks, self.shown = sinks, shown

    def record(self, record: Record) -> None:
        """Show and log a line."""
        self.shown.record(record)
        self._of_each(lambda sink: sink.write(record), f"line of step {record['step']} not kept")

    def close(self) -> None:
        """Close all sinks."""
        self._of_each(lambda sink: sink.close(), "the log may have lost its last lines")

    def _of_each(self, act: Callable[[Sink], None], lost: str) -> None:
        for sink in self.sinks:
            try:
                act(sink)
            except Exception as error:
                if isinstance(sink, MetricsFile) and not isinstance(error, OSError):  # a tracker may raise anything
                    raise
                self.shown.screen.note(f"{lost} ({error})")
