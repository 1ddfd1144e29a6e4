"""Two ranks train as one does, and a run of two that loses one of them is resumed bit for bit."""

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from apollo_optim.cli import main
from apollo_optim.train import atomic
from apollo_optim.train.loop import Trainer
from apollo_optim.train.ranks import Ranks, joined
from apollo_optim.train.run import STOPPED
from pretraining import advancing, in_children, killed, log, outcome, torchrun

pytestmark = pytest.mark.usefixtures("no_picture")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def as_rank(rank, world, port, work):
    """What torchrun does for a process of so many."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    return work()


def on_ranks(world: int, work) -> list[int]:
    """Exit statuses of so many copies of this process that do `work` together."""
    port = str(free_port())
    return in_children(*(partial(as_rank, rank, world, port, work) for rank in range(world)))


def on_two_ranks(work) -> list[int]:
    return on_ranks(2, work)


def test_two_ranks_learn_what_one_does_up_to_rounding(ground, tmp_path):
    # Updates of SGD are as exact as its gradients: sums of some hundred float32 numbers in another order, twelve times.
    options = ("--method", "sgd", "--clip", "0.5", "--micro-batch", "2")
    assert ground.run(tmp_path / "one", *options) == 0
    assert on_two_ranks(lambda: ground.run(tmp_path / "two", *options)) == [0, 0]
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
    for alone, shared in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        assert alone["step"] == shared["step"]
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def loses_a_rank(flags: list[str]) -> int:
    """A run of which the second rank is gone after nine steps."""
    Trainer.advance = advancing(9, killed, rank=1)
    return main(flags)


def loses_the_first_in_a_save(flags: list[str]) -> int:
    """A run of which the first rank is gone when the files of its second checkpoint are there, and not yet whole."""
    write, calls = atomic.write_manifest, []

    def written(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            killed()
        write(*arguments)

    atomic.write_manifest = written
    return main(flags)


def by_torchrun(flags: list[str], log_to: Path) -> list[int]:
    """The exit status of `torchrun` with two processes that run the command with these flags."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log_to.open("w") as output:
        done = subprocess.run([*launcher, "-m", "apollo_optim", *flags], stdout=output, stderr=output, timeout=300)
    return [done.returncode]


def by_copies(flags: list[str], log_to: Path) -> list[int]:
    """The exit statuses of copies of this process that do the same: they import nothing again, and begin sooner."""

    def work() -> int:
        with log_to.open("a") as sys.stderr:
            return main(flags)

    return on_two_ranks(work)


# Dropout, which each rank draws for itself, and clipping, which needs the gradients of all.
SHARED = ("--method", "lora", "--rank", "4", "--dropout", "0.1", "--clip", "0.5", "--micro-batch", "2")


@pytest.fixture(scope="module")
def whole(ground, tmp_path_factory):
    """What a run of two ranks ends with when nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert on_two_ranks(lambda: ground.run(folder, *SHARED)) == [0, 0]
    return outcome(folder)


@pytest.mark.parametrize(
    ("loses", "saved", "goes_on"),
    [
        (loses_a_rank, 8, by_copies),
        (loses_the_first_in_a_save, 4, by_copies),
        pytest.param(loses_a_rank, 8, by_torchrun, marks=pytest.mark.slow),
        pytest.param(loses_the_first_in_a_save, 4, by_torchrun, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_under_torchrun_costs_nothing(ground, whole, tmp_path, loses, saved, goes_on):
    flags = ground.flags(tmp_path / "run", *SHARED)
    assert in_children(lambda: torchrun(2, 0, loses, flags)) == [1]
    assert not (tmp_path / "run" / "model").exists()
    assert set(goes_on([*flags, "--resume"], tmp_path / "resumed.log")) == {0}
    shown = (tmp_path / "resumed.log").read_text()
    assert f"resumed after step {saved} of 12" in shown
    if goes_on is by_torchrun:
        assert "find_unused_parameters" not in shown, "DistributedDataParallel warns of what is meant"
    assert outcome(tmp_path / "run") == whole


def test_a_signal_to_one_rank_stops_both_at_one_step_and_another_number_may_go_on(
    ground, tmp_path, monkeypatch, capsys
):
    advance = Trainer.advance

    def advanced(self, *arguments, **options):
        if self.step == 4 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advanced)
        assert on_two_ranks(lambda: ground.run(tmp_path / "run", "--micro-batch", "auto")) == [STOPPED, STOPPED]
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").exists()
    assert ground.run(tmp_path / "run", "--micro-batch", "auto", "--resume") == 0
    assert "resumed after step 5 of 12, on 1 ranks after 2" in capsys.readouterr().err


def test_ranks_agree_on_flags_numbers_and_values(tmp_path):
    def work():
        with joined(torch.device("cpu")) as ranks:
            assert ranks.any(ranks.rank == 1)
            assert not ranks.any(False)
            assert ranks.least(10 - ranks.rank) == 9
            assert ranks.shared(f"from {ranks.rank}") == "from 0"
            assert ranks.gathered(ranks.rank) == [0, 1]
            assert ranks.sum_(torch.tensor([1.0, ranks.rank])).tolist() == [2.0, 1.0]
            with ranks.first_alone():
                if ranks.first:
                    (tmp_path / "made").touch()
                assert (tmp_path / "made").exists()
        return 0

    assert on_two_ranks(work) == [0, 0]


def test_a_rank_alone_agrees_with_itself():
    alone = Ranks(rank=0, world=1, device=torch.device("cpu"))
    assert alone.any(True)
    assert (alone.least(3), alone.shared("x"), alone.gathered(1)) == (3, "x", [1])
    assert alone.sum_(torch.tensor([2.0])).tolist() == [2.0]
