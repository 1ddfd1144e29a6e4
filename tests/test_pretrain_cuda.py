"""A run on a GPU that is killed and resumed ends as if nothing had happened, bit for bit, with --deterministic."""

import signal
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from apollo_optim.train import pretrain
from apollo_optim.train.loop import Trainer
from pretraining import Ground, advancing, killed, make_ground, outcome

METHODS = {
    "apollo": ("--method", "apollo", "--rank", "4", "--refresh-every", "5"),
    "int8 in backward": (
        "--method", "apollo-mini", "--int8", "all", "--step-in-backward", "--micro-batch", "8",
        "--vocabulary-state", "rowwise",
    ),
}  # fmt: skip


def run(ground: Ground, folder: Path, flags: tuple[str, ...], last: int | None = None) -> int:
    """How a run in a process of its own ended, that is killed after its step `last`."""
    # Algorithms are chosen for a whole process, and a process that has used a GPU cannot fork.
    process = get_context("spawn").Process(target=_run, args=(ground, folder, flags, last))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(ground: Ground, folder: Path, flags: tuple[str, ...], last: int | None) -> None:
    if last is not None:
        Trainer.advance = advancing(last, killed)
    pretrain.draw_curves = lambda lines, path: None
    sys.exit(ground.run(folder, "--device", "cuda", "--deterministic", *flags))


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_is_as_uninterrupted(method: str, tmp_path: Path):
    ground, flags = make_ground(tmp_path / "ground"), METHODS[method]
    assert run(ground, tmp_path / "whole", flags) == 0
    assert run(ground, tmp_path / "parts", flags, last=9) == -signal.SIGKILL
    assert run(ground, tmp_path / "parts", (*flags, "--resume")) == 0
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
