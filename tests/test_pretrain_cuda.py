"""A run on a GPU that is killed and resumed ends as if nothing had happened, bit for bit, with --deterministic."""

import signal
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apollo_optim import APOLLO
from apollo_optim.distributed import local
from apollo_optim.train import export
from apollo_optim.train.checkpoint import Checkpointer, Checkpoints, Position
from apollo_optim.train.loop import Trainer
from apollo_optim.train.ranks import Ranks
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
    export.draw_curves = lambda lines, path: None
    sys.exit(ground.run(folder, "--device", "cuda", "--deterministic", *flags))


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_is_as_uninterrupted(method: str, tmp_path: Path):
    ground, flags = make_ground(tmp_path / "ground"), METHODS[method]
    assert run(ground, tmp_path / "whole", flags) == 0
    assert run(ground, tmp_path / "parts", flags, last=9) == -signal.SIGKILL
    assert run(ground, tmp_path / "parts", (*flags, "--resume")) == 0
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def _save_and_restore_parts(folder: Path) -> None:
    """Of one rank, which holds all of every part: DTensors on the GPU are saved as of the moment, and come back."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=0, world_size=1)
    ranks, mesh = Ranks(rank=0, world=1, device=device), init_device_mesh("cuda", (1,))

    def training(seed: int) -> Checkpointer:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64, bias=False)).bfloat16().to(device)
        fully_shard(model, mesh=mesh)
        optimizer = APOLLO(model.named_parameters(), lr=0.1, rank=4)
        checkpointer = Checkpointer(Checkpoints(folder / "checkpoints", 1), model, optimizer, ranks, pytest.fail)
        take_step(checkpointer)
        return checkpointer

    def take_step(checkpointer: Checkpointer) -> None:
        inputs = torch.ones(2, 256, device=device, dtype=torch.bfloat16)
        checkpointer.model(inputs).square().sum().backward()
        checkpointer.optimizer.step()
        checkpointer.optimizer.zero_grad()

    def held(checkpointer: Checkpointer) -> list[bytes]:
        states = checkpointer.optimizer.state_dict()["state"]
        tensors = [*checkpointer.model.parameters(), *(each for state in states.values() for each in state.values())]
        return [local(tensor).detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]

    saved, position = training(0), Position(step=1, micro_batch=1, world=1)
    expected = held(saved)
    saved.save(position, None)
    take_step(saved)
    saved.wait()
    assert held(saved) != expected
    other = training(1)
    assert other.last() == position
    other.restore_(position)
    assert held(other) == expected
    dist.destroy_process_group()


@pytest.mark.cuda
def test_parts_on_a_gpu_are_saved_beside_training_and_come_back(tmp_path: Path):
    process = get_context("spawn").Process(target=_save_and_restore_parts, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
