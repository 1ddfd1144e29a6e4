"""A training run from its command to its exit status: its folder, options, log and ends.

A training command is a `TrainingOptions` and a function that makes a `Task` of it, as `pretrain.py` has them, which it
passes to `run`. The rest is the same for all commands: a run that is resumed takes its options from its folder
(`TrainingOptions.with_files`), which is locked and compared with them (`RunFolder`); `Loop` restores the last whole
checkpoint and goes on from there; the first rank keeps the log, and at the end calls the task's `finish`.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import torch

from .atomic import finish_exchange_, replace_text_
from .checkpoint import POSITION, Checkpointer, Checkpoints, seed_generators
from .config import (
    SETTINGS,
    TrainingOptions,
    check_unchanged,
    flat,
    is_tuned,
    read_yaml,
    save_settings,
    saved_options,
)
from .display import Display, TrainingDisplay
from .loop import Loop, Task
from .metrics import DivergedError, MetricsFile, model_bytes, records
from .model import silence_libraries
from .model_files import has_tokenizer
from .ranks import Ranks, joined, world_size
from .sinks import MLflow, Recorder, Sink, TensorBoard, TrackedRun
from .troubles import out_trouble_named

Options = TypeVar("Options", bound=TrainingOptions)
Value = TypeVar("Value")

FINISHED, STOPPED, DIVERGED, NOT_EXPORTED = 0, 75, 76, 74
"""Exit statuses: finished; saved and to be resumed; diverged; trained but not exported."""

End = Literal["finished", "diverged"]
"""The end of a run that is not to be resumed."""


def run(
    options: Options,
    prepare: Callable[[Options, "RunFolder", Ranks, Display], Task],
    places: Mapping[str, str] | None = None,
) -> int:
    """Begin or resume a run; returns its exit status.

    `prepare` makes the task, on every rank. Its options have the paths of this machine; the folder keeps the paths as
    they were typed. `places` are where the files of a new run are, by option, where they were typed in another folder.
    """
    folder = RunFolder(options.folder)
    typed, options = folder.resolved(options, places)
    with joined(options.run.place()) as ranks, ExitStack() as stack:
        screen = stack.enter_context(Display(quiet=options.run.quiet or not ranks.first))
        folder.check(typed)
        if ranks.first:
            with out_trouble_named(folder.path):
                stack.enter_context(folder.locked())
                finish_exchange_(folder.model)
            folder.check(typed)
        _set_up(options)
        task = prepare(options, folder, ranks, screen)
        folder.check_facts(task.unchanging)
        ranks.barrier()
        if ranks.first:
            with out_trouble_named(folder.path):
                folder.write_settings(typed)
                sessions = [*folder.fact("sessions", list[Any]()), provenance(ranks.device, ranks.world)]
                facts = {**task.unchanging, **task.facts, "places": options.places(), "sessions": sessions}
                if Checkpoints(folder.checkpoints, options.run.keep).steps():
                    # It brings the options of its groups back, whatever this version's defaults are.
                    facts["groups"] = folder.fact("groups", facts["groups"])
                if options.run.shard == "ddp":  # with FSDP this rank holds only a part
                    facts |= model_bytes(task.prepared.model, options.run.step_in_backward)
                folder.add_facts({**facts, "diverged": False})
        # Last, so that loading and building may draw anything. Each rank has its own seed.
        seed_generators(options.run.seed + ranks.rank)
        status = Runner(options, folder, task, ranks, screen).exit_status()
        ranks.barrier()
        return status


def _set_up(options: TrainingOptions) -> None:
    """Choose deterministic algorithms if asked for, and silence libraries."""
    if options.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
    silence_libraries()


class Runner:
    """Trains a prepared task, keeps its log, and finishes it."""

    def __init__(self, options: TrainingOptions, folder: "RunFolder", task: Task, ranks: Ranks, screen: Display):
        self.options, self.folder, self.task, self.ranks, self.screen = options, folder, task, ranks, screen
        self.checkpoints = Checkpoints(folder.checkpoints, options.run.keep)

    def exit_status(self) -> int:
        """Train to the end and finish the task on the first rank; returns the exit status."""
        self.screen(f"{self.task.description}\nthe run's folder: {self.folder.path}")
        for note in self.task.notes:
            self.say(note)
        prepared = self.task.prepared
        checkpointer = Checkpointer(self.checkpoints, prepared.model, prepared.optimizer, self.ranks, self.say)
        loop = Loop(self.task, self.options, checkpointer, self.ranks)
        if loop.begins_at == self.options.steps:
            self.say(
                f"all {self.options.steps} steps were taken before, and the model is exported again. To train on, give "
                "--resume and more --steps"
            )
        elif loop.begins_at:
            self.screen(f"resumed after step {loop.begins_at} of {self.options.steps}{loop.moved}")
        elif self.folder.metrics.exists():
            self.screen("the run has no checkpoint yet, and begins at its first step again")
        status = self._trained(loop)
        if status != FINISHED or not self.ranks.first:
            return status
        try:
            self.task.finish()
        except BrokenPipeError:
            raise  # the model is exported, and nobody reads the summary
        except OSError as error:
            self.say(
                f"trained, but neither the last checkpoint nor the model could be written ({error}); --resume "
                f"{self._goes_on()}"
                if checkpointer.failed
                else f"trained and saved, but the model could not be exported ({error}); --resume tries again"
            )
            return NOT_EXPORTED
        return FINISHED

    def say(self, text: str) -> None:
        """Show a note, on the first rank only."""
        if self.ranks.first:
            self.screen.note(text)

    def _trained(self, loop: Loop) -> int:
        shown = recorder = None
        if self.ranks.first:
            compiles = self.ranks.device.type == "cuda"
            shown = TrainingDisplay(self.screen, loop.begins_at, self.options.steps, compiles)
            recorder = Recorder(self._sinks(loop.begins_at), shown)
        # All ranks must come to the same decisions.
        earlier = self.ranks.shared(records(self.folder.metrics) if self.ranks.first else [])
        try:
            # The other ranks keep no log.
            stopped = loop.train(recorder.record if recorder else lambda record: None, earlier, shown)
        except DivergedError as error:
            loop.checkpointer.wait()
            self.say(self._diverged(error))
            if self.ranks.first:
                with suppress(OSError):  # a full disk does not change the exit status
                    self.folder.add_facts({"diverged": True})
            return DIVERGED
        finally:
            if recorder:
                recorder.close()
            self.screen.close()
        if stopped is not None:
            saved = not loop.checkpointer.failed
            how, what = ("saved", "goes on") if saved else ("not saved", self._goes_on())
            self.say(f"stopped by {stopped} and {how}: the same command with --resume {what}")
            return STOPPED
        return FINISHED

    def _goes_on(self) -> str:
        """The effect of --resume, in words, if the last checkpoint could not be written."""
        return "goes on from the checkpoint before" if self.checkpoints.steps() else "begins anew"

    def _sinks(self, step: int) -> list[Sink]:
        """The sinks of the log, continued after `step`."""
        asked, folder = self.options.run, self.folder
        sinks: list[Sink] = [MetricsFile(folder.metrics, step)]
        if asked.tensorboard:
            sinks.append(TensorBoard(folder.tensorboard, step))
        if asked.mlflow:
            sinks.append(MLflow(asked.mlflow, folder.path, flat(self.options)))
        trackers = {"wandb": asked.wandb, "trackio": asked.trackio}
        return sinks + [TrackedRun(name, to, folder.path, flat(self.options)) for name, to in trackers.items() if to]

    def _diverged(self, error: DivergedError) -> str:
        """The message on a diverged step: its number, its sequences, and the last good checkpoint."""
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


class RunFolder:
    """The files of a run, and `run.json`, in which facts about it are kept."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / SETTINGS
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curves = path / "curves.png"
        self.model = path / "model"

    @property
    def is_tuned(self) -> bool:
        """True if the run was begun by `apollo finetune`."""
        values = read_yaml(self.settings)
        return isinstance(values, dict) and is_tuned(values)

    @property
    def places(self) -> dict[str, str]:
        """Absolute paths of the files and folders that options named at the last start, by option."""
        return self.fact("places", dict[str, str]())

    def resolved(self, options: Options, places: Mapping[str, str] | None = None) -> tuple[Options, Options]:
        """The options as the folder keeps them, with defaults resolved; and the same with paths as they are here.

        Of a new run files are looked for at `places`. ValueError for the first option that is not possible.
        """
        resuming = options.goes_on
        typed = options.resolved(resuming)
        here = typed.located(self.places if resuming else places or {})
        here.check(world_size())
        return typed, here

    def check(self, options: TrainingOptions) -> None:
        """Raise ValueError if a run with these options cannot begin or go on here.

        Call it again once the folder is locked: another process may have begun a run here meanwhile.
        """
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"--out {self.path} cannot be written to: {there} is not a folder, or not writable")
        if not self.settings.exists():
            self._check_free()
            if options.run.resume:
                raise ValueError(
                    f"--resume: there is no run in {self.path} to continue. Leave out --resume to begin one; "
                    "--auto-resume resumes a run if there is one, and begins one otherwise"
                )
            return
        saved = saved_options(self.settings, type(options))
        if not options.run.resumes:
            raise ValueError(
                f"{self.path} already holds a run; give --resume to continue it, or another --out for a new run"
            )
        check_unchanged(saved, options, self.places)

    def _check_free(self) -> None:
        """Raise ValueError if a new run would overwrite files. Those of a run always come with its settings."""
        places = self.facts, self.metrics, self.checkpoints, self.tensorboard, self.curves, self.model
        taken = [path.name for path in places if path.exists()]
        if taken:
            raise ValueError(
                f"--out {self.path} holds {' and '.join(taken)}, and no run that they would belong to; a new run would "
                "overwrite them. Name another folder, or move them away"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for training; ValueError if another process has locked it. A kill releases the lock.

        A folder that was created for the lock is removed again if nothing else was written into it.
        """
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / ".lock"
        with lock.open("a") as file:
            # The process that has just released the lock may have removed the file.
            if not (_locked(file) and lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
                raise ValueError(f"another process trains in {self.path} at this moment")
            try:
                yield
            finally:
                with suppress(OSError):  # the folder may be gone, and not every system removes what is open
                    if made and [path.name for path in self.path.iterdir()] == [lock.name]:
                        lock.unlink()
                        self.path.rmdir()

    def write_settings(self, options: TrainingOptions) -> None:
        """Save the options of the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        save_settings(self.settings, options)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError if one of these facts has another value than when the run began."""
        known = self.known()
        for name, value in facts.items():
            if known.get(name, value) != value:
                raise ValueError(
                    f"the {name} is not the one that the run in {self.path} began with: its files have changed. "
                    "Restore them, or begin a new run in another --out"
                )

    def fact(self, name: str, default: Value) -> Value:
        """The value in `run.json`; `default` if there is none of its type."""
        value = self.known().get(name, default)
        return value if isinstance(value, type(default)) else default

    def result(self, steps: int) -> dict[str, Any]:
        """The result of a run; empty unless it has taken so many steps."""
        result = self.fact("result", dict[str, Any]())
        return result if result.get("steps", 0) >= steps else {}

    def end(self, steps: int) -> End | None:
        """How a run of so many steps ended; None if it can go on."""
        if self.result(steps):
            return "finished"
        return "diverged" if self.fact("diverged", False) else None

    def command(self) -> list[str]:
        """The words of the command that began the run."""
        sessions = self.fact("sessions", list[Any]())
        return list(sessions[0]["command"]) if sessions else sys.argv

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`."""
        replace_text_(self.facts, json.dumps({**self.known(), **facts}, indent=2) + "\n")

    def known(self) -> dict[str, Any]:
        """The content of `run.json`: machine, versions, sizes, and the result once the run has ended."""
        if not self.facts.exists():
            return {}
        try:
            facts = json.loads(self.facts.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.facts} cannot be read as JSON: {error}; restore it, or delete it") from error
        if not isinstance(facts, dict):
            raise ValueError(f"{self.facts} no longer holds facts about a run; restore it, or delete it")
        return facts


def exported_model(option: str, folder: str) -> Path | None:
    """The folder of the model that the run in `folder` has exported; None if no run is there.

    ValueError for a run without a model.
    """
    run = RunFolder(Path(folder))
    if holds_model(run.model):
        return run.model
    if not run.settings.exists():
        return None
    if run.fact("diverged", False):
        raise ValueError(f"{option} {folder} has no model: the run diverged, and none is exported then")
    if run.result(1) and (run.path.parent / "sweep.json").exists():
        raise ValueError(
            f"{option} {folder} has no model any more: of several learning rates, only the best one's is kept, "
            f"{run.path.parent / 'model'}"
        )
    raise ValueError(
        f"{option} {folder} has no model yet: it is exported when the run ends; --resume the run to finish it"
    )


def holds_model(folder: Path) -> bool:
    """True if a folder has a model or adapters for one."""
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def tokenizer_folder(option: str, folder: str) -> str:
    """The folder of a model's tokenizer: its own, or for a checkpoint that of the exported model of its run."""
    if not Path(folder, POSITION).exists():
        return folder
    exported = RunFolder(Path(folder).resolve().parent.parent).model
    if not has_tokenizer(exported):
        raise ValueError(
            f"{option} {folder} is a checkpoint, which has no tokenizer, and {exported}, which would have it, is not "
            "exported before the run ends"
        )
    return str(exported)


def _locked(file: IO[str]) -> bool:
    """Lock a file, if no other process has; True as well on systems without locks.

    `filelock` would fall back to lock files there, and that of a killed process would lock out other machines.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass  # not a Unix; some network file systems
    return True


LIBRARIES = "apollo-optim", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "peft", "torchao"


def provenance(device: torch.device, world: int) -> dict[str, Any]:
    """Versions, machine and command, to reproduce the result."""
    return {
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {library: found for library in LIBRARIES if (found := _version(library))},
        "commit": commit(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "ranks": world,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The git commit of this package, with "+" for uncommitted changes; None outside of a repository."""
    describe = "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
