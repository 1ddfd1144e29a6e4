"""`apollo pretrain --shard fsdp`: ranks that hold parts of every weight train as those that hold the whole."""

import pytest
import torch
from safetensors.torch import load_file

from pretraining import log, outcome
from test_pretrain_ranks import on_two_ranks

SPLIT = "--shard", "fsdp", "--rank", "4", "--micro-batch", "2", "--loss", "chunked"
"""With the loss that is the default on a GPU."""

pytestmark = pytest.mark.usefixtures("no_picture")


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def test_split_weights_learn_what_whole_ones_do_and_are_resumed_bit_for_bit(ground, tmp_path):
    assert ground.run(tmp_path / "alone", "--rank", "4", "--micro-batch", "2") == 0
    assert on_two_ranks(lambda: ground.run(tmp_path / "split", *SPLIT)) == [0, 0]
    alone, split = weights(tmp_path / "alone"), weights(tmp_path / "split")
    assert alone.keys() == split.keys()
    for name, weight in alone.items():
        # Gradients add up in another order, and twelve steps of Adam's kind pass on what that changes.
        torch.testing.assert_close(split[name], weight, rtol=1e-3, atol=1e-4)
    for one, other in zip(log(tmp_path / "alone"), log(tmp_path / "split"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)

    whole = outcome(tmp_path / "split")
    (tmp_path / "split" / "checkpoints" / "step-00000012").rename(tmp_path / "last")
    assert on_two_ranks(lambda: ground.run(tmp_path / "split", *SPLIT, "--resume")) == [0, 0]
    assert outcome(tmp_path / "split") == whole

    # The same checkpoint goes on whole, on one rank.
    (tmp_path / "split" / "checkpoints" / "step-00000012").rename(tmp_path / "again")
    assert ground.run(tmp_path / "split", *SPLIT, "--shard", "ddp", "--resume") == 0
    for name, weight in weights(tmp_path / "split").items():
        torch.testing.assert_close(weight, split[name], rtol=1e-3, atol=1e-4)


def test_split_weights_that_are_stepped_in_backward_learn_the_same_bit_for_bit(ground, tmp_path):
    # A batch at once: gradients of several are added up before they are averaged, or after.
    flags = *SPLIT, "--micro-batch", "4", "--steps", "6"
    for name, in_backward in (("ordinary", ()), ("inside", ("--step-in-backward",))):
        assert on_two_ranks(lambda n=name, f=in_backward: ground.run(tmp_path / n, *flags, *f)) == [0, 0]
    ordinary, inside = weights(tmp_path / "ordinary"), weights(tmp_path / "inside")
    assert ordinary.keys() == inside.keys()
    assert all(torch.equal(inside[name], weight) for name, weight in ordinary.items())


@pytest.mark.parametrize(
    ("flags", "named"), [((), "torchrun"), (("--method", "sgd"), "sgd"), (("--int8", "all"), "--int8 all")]
)
def test_weights_that_cannot_be_split_are_an_error_before_anything_is_loaded(
    ground, tmp_path, capsys, monkeypatch, flags, named
):
    if flags:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert ground.run(tmp_path / "never", "--shard", "fsdp", *flags) == 2
    said = capsys.readouterr().err
    assert "--shard fsdp" in said or "--int8" in said
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
