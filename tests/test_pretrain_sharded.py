"""`apollo pretrain --shard fsdp`: ranks that hold parts of every weight train as those that hold the whole."""

import os
import pickle
import shutil
import threading
from dataclasses import replace
from functools import partial
from time import sleep

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apollo_optim import APOLLO
from apollo_optim.cli import main
from apollo_optim.train.atomic import damage_of
from apollo_optim.train.checkpoint import Checkpointer, Checkpoints, Position, restore_
from apollo_optim.train.distributed_checkpoint import saved_tensors
from apollo_optim.train.ranks import joined
from pretraining import flattened, in_children, killed, log, outcome, resized, torchrun
from test_pretrain_ranks import by_copies, on_ranks, on_two_ranks

SPLIT = "--shard", "fsdp", "--rank", "4", "--micro-batch", "2", "--loss", "chunked"
"""With the loss that is the default on a GPU."""

pytestmark = pytest.mark.usefixtures("no_picture")


def weights(run):
    return load_file(run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def split(ground, tmp_path_factory):
    """A run of two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("split") / "run"
    assert on_two_ranks(lambda: ground.run(folder, *SPLIT)) == [0, 0]
    return folder


def test_split_weights_learn_what_whole_ones_do_and_are_resumed_bit_for_bit(ground, split, tmp_path):
    assert ground.run(tmp_path / "alone", "--rank", "4", "--micro-batch", "2") == 0
    shutil.copytree(split, tmp_path / "split")
    alone, parts = weights(tmp_path / "alone"), weights(tmp_path / "split")
    assert alone.keys() == parts.keys()
    for name, weight in alone.items():
        # Gradients add up in another order, and twelve steps of Adam's kind pass on what that changes.
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=1e-4)
    for one, other in zip(log(tmp_path / "alone"), log(tmp_path / "split"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)

    whole = outcome(tmp_path / "split")
    last = tmp_path / "split" / "checkpoints" / "step-00000012"
    part = last / "shards" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert damage_of(last) == "shards/__1_0.distcp is not what was written"
    assert on_two_ranks(lambda: ground.run(tmp_path / "split", *SPLIT, "--resume")) == [0, 0]
    assert outcome(tmp_path / "split") == whole

    # The same checkpoint goes on whole, on one rank.
    last.rename(tmp_path / "again")
    assert ground.run(tmp_path / "split", *SPLIT, "--shard", "ddp", "--resume") == 0
    for name, weight in weights(tmp_path / "split").items():
        torch.testing.assert_close(weight, parts[name], rtol=1e-3, atol=1e-4)


def test_split_weights_that_are_stepped_in_backward_learn_the_same_bit_for_bit(ground, tmp_path):
    # A batch at once: gradients of several are added up before they are averaged, or after.
    flags = *SPLIT, "--micro-batch", "4", "--steps", "6"
    for name, in_backward in (("ordinary", ()), ("inside", ("--step-in-backward",))):
        assert on_two_ranks(lambda n=name, f=in_backward: ground.run(tmp_path / n, *flags, *f)) == [0, 0]
    ordinary, inside = weights(tmp_path / "ordinary"), weights(tmp_path / "inside")
    assert ordinary.keys() == inside.keys()
    assert all(torch.equal(inside[name], weight) for name, weight in ordinary.items())


@pytest.mark.parametrize(("flags", "named"), [((), "torchrun"), (("--method", "sgd"), "sgd")])
def test_weights_that_cannot_be_split_are_an_error_before_anything_is_loaded(
    ground, tmp_path, capsys, monkeypatch, flags, named
):
    if flags:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert ground.run(tmp_path / "never", "--shard", "fsdp", *flags) == 2
    said = capsys.readouterr().err
    assert "--shard fsdp" in said
    assert named in said
    assert not (tmp_path / "never").exists()


def test_ranks_that_step_in_backward_train_int8_weights_as_one_does(ground, tmp_path):
    """Without DistributedDataParallel, which would hold all gradients, in twice the bytes of int8 weights."""
    flags = "--int8", "all", "--step-in-backward", "--rank", "4", "--micro-batch", "4", "--steps", "6"
    assert on_two_ranks(lambda: ground.run(tmp_path / "two", *flags)) == [0, 0]
    assert ground.run(tmp_path / "one", *flags) == 0
    for one, two in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        # A gradient's last bit may round a weight to the next of 255 codes.
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-2)


@pytest.mark.parametrize("int8", ["layers", pytest.param("all", marks=pytest.mark.slow)])
def test_int8_weights_are_split_saved_and_resumed_bit_for_bit(ground, tmp_path, int8):
    flags = *SPLIT, "--int8", int8, "--steps", "6"
    assert on_two_ranks(lambda: ground.run(tmp_path / "run", *flags)) == [0, 0]
    whole = outcome(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert on_two_ranks(lambda: ground.run(tmp_path / "run", *flags, "--resume")) == [0, 0]
    assert outcome(tmp_path / "run") == whole
    assert not any(name.endswith(("codes", "scale")) for name in weights(tmp_path / "run"))

    alone = *flags, "--shard", "ddp"
    assert ground.run(tmp_path / "alone", *alone) == 0
    for one, two in zip(log(tmp_path / "alone"), log(tmp_path / "run"), strict=True):
        # A gradient's last bit may round a weight to the next of 255 codes.
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-2)


def loses_a_rank_in_a_save(flags: list[str]) -> int:
    """A run of which the second rank is gone while it writes its part of the second checkpoint."""
    write, calls = FileSystemWriter.write_data, []

    def written(*arguments):
        calls.append(arguments)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            killed()
        return write(*arguments)

    FileSystemWriter.write_data = written
    return main(flags)


def test_a_rank_that_is_killed_while_it_writes_its_part_costs_nothing(ground, split, tmp_path):
    run = tmp_path / "run"
    flags = ground.flags(run, *SPLIT)
    assert in_children(lambda: torchrun(2, 0, loses_a_rank_in_a_save, flags)) == [1]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert by_copies([*flags, "--resume"], tmp_path / "resumed.log") == [0, 0]
    assert "resumed after step 4 of 12" in (tmp_path / "resumed.log").read_text()
    assert outcome(run) == outcome(split)
    assert not list((run / "checkpoints").glob(".*"))


POSITION = Position(step=3, micro_batch=1, world=2)


def trained(seed, mesh=None):
    """Sizes that ranks share unevenly, a weight by two names, and state in every shape."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(41, 9), nn.Linear(9, 13, bias=False), nn.Linear(13, 9), nn.Linear(9, 13, bias=False)
    )
    model[3].weight = model[1].weight
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = APOLLO(model.named_parameters(), lr=0.1, rank=2)
    take_step(model, optimizer)
    return model, optimizer


def take_step(model, optimizer):
    model(torch.ones(2, 41)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpointer_of(folder, training, ranks, warned):
    return Checkpointer(Checkpoints(folder, 2), *training, ranks, warned.append)


def save_in_passing(folder):
    """Saves on a full disk, then on one with room; training goes on before a byte is written."""
    with joined(torch.device("cpu")) as ranks:
        model, optimizer = trained(0, init_device_mesh("cpu", (ranks.world,)))
        warned, go_on = [], threading.Event()
        checkpointer = checkpointer_of(folder, (model, optimizer), ranks, warned)
        for number, room in enumerate((1000, 10_000)):  # less than one tensor, and more
            with resized(room):
                checkpointer.save(POSITION, None)
                checkpointer.wait()
            assert checkpointer.failed
            assert "the checkpoint of step 3 could not be written" in warned[number]
            assert "File too large" in warned[number]
            assert "there is none yet" in warned[number]
        ranks.barrier()
        assert not list(folder.iterdir())
        ranks.barrier()
        write = FileSystemWriter.write_data
        FileSystemWriter.write_data = lambda *arguments: go_on.wait(60) and write(*arguments)
        norm = optimizer.param_groups[0]["previous_norm"] = torch.ones(())
        stale = checkpointer.checkpoints.unfinished(POSITION.step) / "shards" / "__9_0.distcp"
        if ranks.first:
            stale.parent.mkdir(parents=True)
            stale.touch()
        checkpointer.save(POSITION, None)
        take_step(model, optimizer)
        norm.zero_()  # as clipping in backward writes to it
        assert checkpointer.checkpoints.steps() == []
        go_on.set()
        checkpointer.wait()
        ranks.barrier()
        assert checkpointer.checkpoints.steps() == [3]
        assert not checkpointer.failed
        # The same moment once more, but that nothing goes on meanwhile.
        model, optimizer = trained(0, init_device_mesh("cpu", (ranks.world,)))
        again = checkpointer_of(folder.with_name("again"), (model, optimizer), ranks, warned)
        FileSystemWriter.write_data = lambda *arguments: sleep(0.3) or write(*arguments)
        again.save(POSITION, None)
        again.save(replace(POSITION, step=4), None)
        if ranks.first:
            assert 3 in again.checkpoints.steps()  # each waits for the one before
        again.wait()
    return 0


def save_again(folder, to):
    """Restores on other ranks what was saved, and saves it."""
    with joined(torch.device("cpu")) as ranks:
        training = trained(1, init_device_mesh("cpu", (ranks.world,)))
        checkpointer = checkpointer_of(folder, training, ranks, [])
        position = checkpointer.last()
        assert position == POSITION
        checkpointer.restore_(position)
        saving = checkpointer_of(to, training, ranks, [])
        saving.save(POSITION, None)
        saving.wait()
    return 0


def test_parts_are_saved_beside_training_and_read_by_any_number_of_ranks(tmp_path):
    two, four = tmp_path / "two", tmp_path / "four"
    assert on_two_ranks(partial(save_in_passing, two)) == [0, 0]
    saved = saved_tensors(two / "step-00000003" / "shards")
    assert torch.load(two / "step-00000003" / "groups.pt")[0]["previous_norm"] == 1
    assert len(list((two / "step-00000003" / "shards").glob("*.distcp"))) == 2
    assert flattened(saved) == flattened(saved_tensors(tmp_path / "again" / "step-00000003" / "shards"))
    assert on_ranks(4, partial(save_again, two, four)) == [0] * 4
    assert flattened(saved_tensors(four / "step-00000003" / "shards")) == flattened(saved)
    assert len(list((four / "step-00000003" / "shards").glob("*.distcp"))) == 4

    model, optimizer = trained(1)
    restore_(model, optimizer, two / "step-00000003", rank=0)
    held = {f"model.{name}": weight for name, weight in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    held |= {f"optimizer.{index}.{name}": value for index in state for name, value in state[index].items()}
    assert flattened(held) == flattened(saved)

    for harm, named in [
        (pickle.dumps(Touch(tmp_path / "touched")), "names posix.mkdir"),
        (pickle.dumps(Metadata({"model.0.weight": BytesStorageMetadata()})), "BytesStorageMetadata"),
    ]:
        shutil.copytree(two / "step-00000003", tmp_path / "harmed", dirs_exist_ok=True)
        (tmp_path / "harmed" / "shards" / ".metadata").write_bytes(harm)
        with pytest.raises(ValueError, match=rf"shards is not what a run saves .*{named}"):
            restore_(model, optimizer, tmp_path / "harmed", rank=0)
    assert not (tmp_path / "touched").exists()


class Touch:
    """What makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
