"""Training runs that are killed at random moments and resumed: each ends bit for bit as one that was not.

    python tests/kills.py --kills 300 --seed 0 --kinds pretrain,ddp,fsdp,finetune

A run is killed while data is prepared, between and inside steps, inside saves and inside the export; the finished run
too, when it is resumed. Half of the kills come at a random moment and end all processes of the run, half at a random
access to a file, and end the process that made it.
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
from typing import Any, NamedTuple

from finetuning import TuningGround, make_tuning_ground
from pretraining import Ground, make_ground, outcome, torchrun

MOST_OF_A_RUN = 6
"""Kills, before it is left to end."""


class Kind(NamedTuple):
    """A command that is killed."""

    make_ground: Callable[[Path], Ground | TuningGround]
    flags: tuple[str, ...] = ()
    ranks: int = 1
    """Processes, under torchrun where they are several."""


KINDS = {
    "pretrain": Kind(make_ground),
    # Dropout, which each rank draws for itself, and clipping, which needs the gradients of all.
    "ddp": Kind(make_ground, ("--method", "lora", "--rank", "4", "--dropout", "0.1", "--clip", "0.5"), ranks=2),
    "fsdp": Kind(make_ground, ("--shard", "fsdp", "--rank", "4", "--micro-batch", "2"), ranks=2),
    "finetune": Kind(make_tuning_ground, ("--dropout", "0.2")),
}
PRELOADED = (
    "apollo_optim.train.pretrain", "apollo_optim.train.tuning.finetune", "transformers.models.llama.modeling_llama",
    "tokenizers", "peft", "torch.distributed.fsdp",
)  # fmt: skip
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "ctypes.dlsym"}
"""What Python tells of access to files, and of the exchange of folders, which is the system's own."""

LOST = "lost"
"""A file beside a run, of a process that has killed itself: torchrun has an exit status of its own for that."""

AtAccess = Callable[[int], None]
"""Called with the number of each access to a file of the run."""


class Runs:
    """Runs of one command, each in a folder of its own with its own cache."""

    def __init__(self, kind: Kind, ground: Ground | TuningGround, folder: Path):
        self.kind, self.ground, self.folder = kind, ground, folder
        for module in PRELOADED:
            importlib.import_module(module)  # here, and not by each run, which are copies of this process
        began = time.monotonic()
        self.accesses = self._counted("whole")
        self.seconds = time.monotonic() - began
        self.whole = outcome(folder / "whole" / "run")
        self.last = max((folder / "whole" / "run" / "checkpoints").glob("step-*")).name
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
        os.setpgid(child, child)  # here too: whoever comes first
        if seconds is not None:
            time.sleep(seconds)
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lost = place / LOST
        if not lost.exists():
            return status
        lost.unlink()
        assert status, f"{name} lost a process, and did not say so"
        return -signal.SIGKILL

    def check_model(self, name: str) -> None:
        """The model of a finished run is there, whole."""
        assert self._exported(name) == self.model, f"{name}: the model is not what was exported"

    def check(self, name: str) -> None:
        """The run ended as the one that nobody killed, and left nothing lying about."""
        assert outcome(self.folder / name / "run") == self.whole, f"{name}: not as uninterrupted"
        kept = ".lock", ".metadata"  # the second is a file of torch.distributed.checkpoint's
        left = [path for path in (self.folder / name / "run").rglob(".*") if path.name not in kept]
        left += (self.folder / name / "run").rglob("*.kept-*")
        assert not left, f"{name}: left {left}"

    def stage(self, name: str) -> str:
        """What a run was at when it was killed."""
        run = self.folder / name / "run"
        if not (run / "config.yaml").exists():
            return "preparing data"
        if (run / "checkpoints" / self.last).exists():
            return "export"
        return "save" if list(run.glob("checkpoints/.*")) else "training"

    def _exported(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / name / "run" / "model").iterdir()}

    def _counted(self, name: str) -> int:
        """Accesses to files by each process of a run that nobody kills."""
        count = self.folder / "count"
        status = self.end(name, note_to(count))
        assert status == 0, f"{name} ended with {status}: {(self.folder / name / 'log').read_text()}"
        return count.stat().st_size // self.kind.ranks

    def _work(self, place: Path, act: AtAccess) -> None:
        """In a copy of this process: the run, with its output in a file."""
        status = 99
        try:
            os.setpgid(0, 0)
            log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            watch_files(str(place), act)
            work = self.ground._replace(cache=place / "cache"), place / "run", (*self.kind.flags, "--auto-resume")
            if self.kind.ranks > 1:
                status = torchrun(self.kind.ranks, 0, train, *work)
            else:
                train(*work)
                status = 0
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


def train(ground: Ground | TuningGround, run: Path, flags: tuple[str, ...]) -> None:
    """The run, without the picture, which takes longer than training. SystemExit where it fails."""
    from apollo_optim.train import export
    from apollo_optim.train.data import prepare

    export.draw_curves = lambda lines, path: None
    prepare.SMALLEST_PART = 2**13  # so that there are several
    if status := ground.run(run, *flags):
        sys.exit(status)


def kill_at(access: int, place: Path) -> AtAccess:
    """Kills this process at an access, with no time for anything."""

    def act(number: int) -> None:
        if number == access:
            (place / LOST).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def killed_runs(kind: str, ground: Ground | TuningGround, folder: Path, kills: int, seed: int) -> Counter[str]:
    """How many kills came at which stage, at least `kills` in all. AssertionError where anything was lost."""
    runs = Runs(KINDS[kind], ground, folder)
    found: Counter[str] = Counter()
    number = 0
    while found.total() < kills:
        name = f"run-{number}"
        draw = random.Random(seed + number)
        print(f"{kind}, seed {seed + number}: {dict(found)}", file=sys.stderr, flush=True)
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
            access = draw.randint(1, runs.accesses_again if finished else runs.accesses)
            status = runs.end(name, kill_at(access, runs.folder / name))
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
    parser.add_argument("--kills", type=int, default=300, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    return parser.parse_args()


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    options = parsed()
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            ground = KINDS[kind].make_ground(Path(temporary) / "ground")
            stages = killed_runs(kind, ground, Path(temporary), options.kills, options.seed)
        print(f"{kind}: {stages.total()} kills, nothing lost: {dict(stages)}", flush=True)
