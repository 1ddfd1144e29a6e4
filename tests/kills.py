"""Training runs that are killed at random moments and resumed: each ends bit for bit as one that was not.

    python tests/kills.py --kills 300 --seed 0

A run is killed while data is prepared, between and inside steps, inside saves and inside the export; the finished run
too, when it is resumed. Half of the kills come at a random moment, half at a random access to a file.
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretraining import STEPS, Ground, make_ground, outcome

MOST_OF_A_RUN = 6
"""Kills, before it is left to end."""
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "ctypes.dlsym"}
"""What Python tells of access to files, and of the exchange of folders, which is the system's own."""

AtAccess = Callable[[int], None]
"""Called with the number of each access to a file of the run."""


class Runs:
    """Runs of one command, each in a folder of its own with its own cache."""

    def __init__(self, ground: Ground, folder: Path):
        self.ground, self.folder = ground, folder
        for module in ("apollo_optim.train.pretrain", "transformers.models.llama.modeling_llama", "tokenizers"):
            importlib.import_module(module)  # here, and not by each run, which are copies of this process
        began = time.monotonic()
        self.accesses = self._counted("whole")
        self.seconds = time.monotonic() - began
        self.whole = outcome(folder / "whole" / "run")
        self.model = self._exported("whole")
        self.accesses_again = self._counted("whole")
        """Of a finished run that is resumed."""

    def end(self, name: str, act: AtAccess, seconds: float | None = None) -> int:
        """How the run called `name` ended, begun or resumed, and killed after so many seconds."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            self._work(place, act)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def check_model(self, name: str) -> None:
        """The model of a finished run is there, whole."""
        assert self._exported(name) == self.model, f"{name}: the model is not what was exported"

    def check(self, name: str) -> None:
        """The run ended as the one that nobody killed, and left nothing lying about."""
        assert outcome(self.folder / name / "run") == self.whole, f"{name}: not as uninterrupted"
        left = [path for path in (self.folder / name / "run").rglob(".*") if path.name != ".lock"]
        left += (self.folder / name / "run").rglob("*.kept-*")
        assert not left, f"{name}: left {left}"

    def stage(self, name: str) -> str:
        """What a run was at when it was killed."""
        run = self.folder / name / "run"
        if not (run / "config.yaml").exists():
            return "preparing data"
        if (run / "checkpoints" / f"step-{STEPS:08d}").exists():
            return "export"
        return "save" if list(run.glob("checkpoints/.*")) else "training"

    def _exported(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name / "run" / "model").iterdir()}

    def _counted(self, name: str) -> int:
        """Accesses to files of a run that nobody kills."""
        count = self.folder / "count"
        status = self.end(name, note_to(count))
        assert status == 0, f"{name} ended with {status}: {(self.folder / name / 'log').read_text()}"
        return count.stat().st_size

    def _work(self, place: Path, act: AtAccess) -> None:
        """In a copy of this process: the run, with its output in a file."""
        status = 99
        try:
            log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            watch_files(str(place), act)
            status = main(self.ground._replace(cache=place / "cache"), place / "run")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def note_to(path: Path) -> AtAccess:
    """Writes a byte for each access, so that they can be counted from another process."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def act(number: int) -> None:
        os.write(handle, b".")

    return act


def watch_files(place: str, act: AtAccess) -> None:
    """Call `act` at each access to a file below `place`, and before folders are exchanged."""
    number = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if event in EVENTS and (event == "ctypes.dlsym" or str(arguments[0]).startswith(place)):
            number += 1
            act(number)

    sys.addaudithook(hook)


def main(ground: Ground, run: Path) -> int:
    """The exit status of the run, without the picture, which takes longer than training."""
    from apollo_optim.train import pretrain
    from apollo_optim.train.data import prepare

    pretrain.draw_curves = lambda lines, path: None
    prepare.SMALLEST_PART = 2**13  # so that there are several
    return ground.run(run, "--auto-resume")


def kill_at(access: int) -> AtAccess:
    """Kills this process at an access, with no time for anything."""

    def act(number: int) -> None:
        if number == access:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def killed_runs(ground: Ground, folder: Path, kills: int, seed: int) -> Counter[str]:
    """How many kills came at which stage, at least `kills` in all. AssertionError where anything was lost."""
    runs = Runs(ground, folder)
    found: Counter[str] = Counter()
    number = 0
    while found.total() < kills:
        name = f"run-{number}"
        draw = random.Random(seed + number)
        print(f"seed {seed + number}: {dict(found)}", file=sys.stderr, flush=True)
        most = min(draw.randint(1, MOST_OF_A_RUN), kills - found.total())
        found += _killed_run(runs, name, draw, most)
        runs.check(name)
        shutil.rmtree(folder / name)
        number += 1
    return found


def _killed_run(runs: Runs, name: str, draw: random.Random, most: int) -> Counter[str]:
    """Stages at which a run was killed, at most so many times, before it was left to end."""
    found: Counter[str] = Counter()
    finished = False
    while found.total() < most:
        if draw.random() < 0.5:
            status = runs.end(name, lambda number: None, draw.uniform(0, runs.seconds))
        else:
            status = runs.end(name, kill_at(draw.randint(1, runs.accesses_again if finished else runs.accesses)))
        if status == -signal.SIGKILL:
            found["finished" if finished else runs.stage(name)] += 1
        else:
            assert status == 0, f"{name} ended with {status}: {(runs.folder / name / 'log').read_text()}"
            finished = True
        if finished:
            runs.check_model(name)
    status = runs.end(name, lambda number: None)
    assert status == 0, f"{name} ended with {status}: {(runs.folder / name / 'log').read_text()}"
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    options = parsed()
    with tempfile.TemporaryDirectory() as temporary:
        stages = killed_runs(make_ground(Path(temporary) / "ground"), Path(temporary), options.kills, options.seed)
    print(f"{stages.total()} kills, nothing lost: {dict(stages)}")
