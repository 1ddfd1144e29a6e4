"""What every training command does around its session: the screen, the log, and how a run may end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .checkpoint import Checkpoints
from .config import Run
from .display import Display, TrainingDisplay
from .folder import RunFolder
from .keeper import Keeper
from .loop import Rhythm
from .metrics import DivergedError, Record, records
from .ranks import Ranks
from .recorder import Recorder
from .schedule import Schedule
from .session import Session, Subject

FINISHED, STOPPED, DIVERGED, NOT_EXPORTED = 0, 75, 76, 74
"""Exit statuses: done; saved and to be resumed; the loss was not finite; trained, but not exported."""


class Options(Protocol):
    """What a training command is asked for, as far as it matters here."""

    @property
    def run(self) -> Run: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def steps(self) -> int: ...


class Runner:
    """A run whose parts are all there."""

    def __init__(self, options: Options, folder: RunFolder, subject: Subject, ranks: Ranks, screen: Display):
        self.options, self.folder, self.subject, self.ranks, self.screen = options, folder, subject, ranks, screen
        self.checkpoints = Checkpoints(folder.checkpoints, options.run.keep)

    def exit_status(self, described: Mapping[str, Any], finish: Callable[[Sequence[Record]], None]) -> int:
        """Train to the end and call `finish` on the first rank with the lines of the log; how that went.

        `described` is what the log is headed with where it is kept elsewhere.
        """
        optimizer = self.subject.prepared.optimizer
        keeper = Keeper(self.checkpoints, self.subject.prepared.model, optimizer, self.ranks, self.say)
        session = Session(self.subject, self.options.schedule, self.options.steps, keeper, self.ranks)
        if session.begins_at == self.options.steps:
            self.say(
                f"all {self.options.steps} steps were taken before, and the model is exported again. To train on, give "
                "--resume and more --steps"
            )
        elif session.begins_at:
            self.screen(f"resumed after step {session.begins_at} of {self.options.steps}{session.moved}")
        status = self._trained(session, keeper, described)
        if status != FINISHED or not self.ranks.first:
            return status
        try:
            finish(records(self.folder.metrics))
        except OSError as error:
            self.say(
                f"trained, but neither the last checkpoint nor the model could be written ({error}); --resume goes on "
                "from the checkpoint before"
                if keeper.failed
                else f"trained and saved, but the model could not be exported ({error}); --resume tries again"
            )
            return NOT_EXPORTED
        return FINISHED

    def say(self, text: str) -> None:
        """Tell the person, once for all ranks."""
        if self.ranks.first:
            self.screen.note(text)

    def _trained(self, session: Session, keeper: Keeper, described: Mapping[str, Any]) -> int:
        run, ranks = self.options.run, self.ranks
        shown = recorder = None
        if ranks.first:
            compiles = ranks.device.type == "cuda"
            shown = TrainingDisplay(self.screen, session.begins_at, self.options.steps, compiles)
            recorder = Recorder(self.folder, run, session.begins_at, shown, described)
        # The other ranks must come to the same decisions.
        earlier = ranks.shared(records(self.folder.metrics) if ranks.first else [])
        rhythm = Rhythm(log=run.log_every, evaluate=run.eval_every, save=run.save_every)
        try:
            stopped = session.train(recorder.record if recorder else _ignored, rhythm, earlier, shown)
        except DivergedError as error:
            self.say(self._diverged(error))
            return DIVERGED
        finally:
            if recorder:
                recorder.close()
            self.screen.close()
        if stopped is not None:
            how = "and not saved" if keeper.failed else "and saved"
            where = " from the checkpoint before" if keeper.failed else ""
            self.say(f"stopped by {stopped} {how}: the same command with --resume goes on{where}")
            return STOPPED
        return FINISHED

    def _diverged(self, error: DivergedError) -> str:
        """What is known of a step that went wrong."""
        rows = self.options.schedule.batch_rows
        first = (error.step - 1) * rows
        steps = self.checkpoints.steps()
        good = (
            f"the last good checkpoint is {self.checkpoints.path(steps[-1])}" if steps else "nothing was saved before"
        )
        return (
            f"{error}: it was on sequences {first} to {first + rows - 1} of the run's order (seed "
            f"{self.options.run.seed}). Training ended; {good}"
        )


def _ignored(record: Record) -> None:
    """Ranks beside the first keep no log."""
