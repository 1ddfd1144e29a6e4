"""Where the lines of a run's log go: to the screen, to `metrics.jsonl`, and to whatever else was asked for."""

from collections.abc import Mapping
from typing import Any

from .config import Run
from .display import TrainingDisplay
from .folder import RunFolder
from .metrics import MetricsFile, Record
from .sinks import Sink, TensorBoard, Wandb


class Recorder:
    """Passes records on, on the first rank; the others keep nothing."""

    def __init__(self, folder: RunFolder, run: Run, step: int, shown: TrainingDisplay, options: Mapping[str, Any]):
        """Continue after `step`."""
        self.shown = shown
        self.sinks: list[Sink] = [MetricsFile(folder.metrics, step)]
        if run.tensorboard:
            self.sinks.append(TensorBoard(folder.tensorboard, step))
        if run.wandb:
            self.sinks.append(Wandb(run.wandb, folder.path, options))

    def record(self, record: Record) -> None:
        """Show and keep a line."""
        self.shown.record(record)
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:
                # A full disk must not end a run: the next lines may find room again.
                self.shown.screen.note(f"line of step {record['step']} not kept ({error})")

    def close(self) -> None:
        """Finish every place."""
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                self.shown.screen.note(f"the log may have lost its last lines ({error})")
