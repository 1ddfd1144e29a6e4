"""The folder of a run: what lies where, and whether it may be written to."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from .checkpoint import replace_text_
from .config import FREE, PretrainOptions, kept, saved_options
from .settings import check_unchanged, flat, save_settings, saved_settings, values_in

Value = TypeVar("Value")

LENGTH = "steps", "tokens"
"""Options that say how long a run is, one or the other: it may be resumed for longer."""
ALWAYS_SAVED = frozenset({"model", "data", "method", "seed", "batch_tokens"})
"""Some of the options that every run has saved: another program's `config.yaml` does not have all of them."""


class RunFolder:
    """Paths of a run."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "config.yaml"
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curves = path / "curves.png"
        self.model = path / "model"

    def check(self, options: PretrainOptions) -> None:
        """Raise ValueError where a run with these options cannot begin or go on here.

        To be called once more when the folder is locked: another process may have begun a run here meanwhile.
        """
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"--out {self.path} cannot be written to: {there} is not a folder, or not writable")
        if not self.settings.exists():
            self._check_free()
            if options.run.resume:
                raise ValueError(
                    f"--resume: there is no run in {self.path} to continue. Leave it out to begin one there, or give "
                    "--auto-resume for whichever it is"
                )
            return
        saved = self.saved()
        if not options.run.resumes:
            raise ValueError(
                f"{self.path} already holds a run; --resume continues it, and another --out keeps a new one apart"
            )
        before = {**flat(PretrainOptions()), **saved}
        longer = options.steps >= saved_options(before, self.settings).steps
        check_unchanged(before, kept(flat(options)), [*FREE, *LENGTH] if longer else FREE)

    def _check_free(self) -> None:
        """Raise ValueError where a new run would write over something: it writes its settings before all else."""
        places = self.facts, self.metrics, self.checkpoints, self.tensorboard, self.curves, self.model
        taken = [path.name for path in places if path.exists()]
        if taken:
            raise ValueError(
                f"--out {self.path} holds {' and '.join(taken)}, and no run that they would belong to: they are "
                "somebody's, and a run would write over them. Name another folder, or move them away"
            )

    def saved(self) -> dict[str, Any]:
        """The options of the run in this folder. ValueError where `config.yaml` does not hold them."""
        values = saved_settings(self.settings)
        missing = ", ".join(sorted(ALWAYS_SAVED - values.keys()))
        if missing:
            raise ValueError(
                f"{self.settings} was not written by a run: it lacks {missing}. Name another --out, or move it away"
            )
        return values

    def saved_values(self, command: type, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same as options of a command; those that say how long it is only where none of them is `given`."""
        self.saved()
        values = values_in(self.settings, command)
        longer = any(given.get(name) is not None for name in LENGTH)
        return {name: value for name, value in values.items() if not (longer and name in LENGTH)}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from training here at the same time; ValueError where one does. A killed process lets go.

        A folder that is made for this, and in which nothing is written meanwhile, goes again.
        """
        made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / ".lock"
        with lock.open("a") as file:
            try:
                _lock(file)
                if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
                    raise BlockingIOError  # one that has just let go took it away
            except BlockingIOError:
                raise ValueError(f"another process trains in {self.path} at this moment") from None
            try:
                yield
            finally:
                if made and [path.name for path in self.path.iterdir()] == [lock.name]:
                    with suppress(OSError):  # not every system removes what is open
                        lock.unlink()
                        self.path.rmdir()

    @contextmanager
    def written(self) -> Iterator[None]:
        """ValueError for what cannot be written here: the disk may be full, or no longer there."""
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"--out {self.path} cannot be written to: {error.strerror or error}. Make room, or name another folder"
            ) from error

    def write_settings(self, options: Mapping[str, Any]) -> None:
        """Keep the options of the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        save_settings(self.settings, kept(dict(options)))

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError where one of these is not what it was when the run began."""
        known = self._facts()
        for name, value in facts.items():
            if known.get(name, value) != value:
                raise ValueError(
                    f"the {name} is not the one that the run in {self.path} began with: its files have changed. Bring "
                    "them back, or begin another run in another --out"
                )

    def fact(self, name: str, default: Value) -> Value:
        """What `run.json` says of something, if it is of the kind of `default`, or else that."""
        value = self._facts().get(name, default)
        return value if isinstance(value, type(default)) else default

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`."""
        replace_text_(self.facts, json.dumps({**self._facts(), **facts}, indent=2) + "\n")

    def add_session(self, session: Mapping[str, Any]) -> None:
        """Add to `run.json` where and how the run began, or was resumed."""
        self.add_facts({"sessions": [*self.fact("sessions", list[Any]()), session]})

    def _facts(self) -> dict[str, Any]:
        if not self.facts.exists():
            return {}
        try:
            facts = json.loads(self.facts.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.facts} cannot be read as JSON: {error}; bring it back, or delete it") from error
        if not isinstance(facts, dict):
            raise ValueError(f"{self.facts} no longer holds facts about a run; bring it back, or delete it")
        return facts


def _lock(file: IO[str]) -> None:
    """BlockingIOError where another process has locked the file; nothing where there are no locks."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # some network file systems have none
