"""`apollo pretrain` with less memory: weights stepped in backward, int8 weights, and few second moments."""

import json

import pytest
import torch
from safetensors.torch import load_file

from apollo_optim.train.model import Model, built_model
from pretraining import STEPS, log, outcome

NARROW = (
    "--int8", "all", "--step-in-backward", "--vocabulary-state", "rowwise",
    "--method", "apollo-mini", "--lr", "0.01", "--steps", "40",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.mark.parametrize("micro_batch", ["8", "4"], ids=["one backward a step", "two"])
def test_a_run_that_steps_in_backward_is_the_ordinary_one(ground, tmp_path, micro_batch):
    flags = "--rank", "4", "--micro-batch", micro_batch
    assert ground.run(tmp_path / "ordinary", *flags) == 0
    assert ground.run(tmp_path / "in backward", *flags, "--step-in-backward") == 0
    ordinary, ours = outcome(tmp_path / "ordinary"), outcome(tmp_path / "in backward")
    assert {line.pop("grad_norm", None) for line in ours["log"]} == {None}
    for line in ordinary["log"]:
        line.pop("grad_norm", None)
    assert ours == ordinary


def test_clipping_by_the_previous_norm_is_resumed_exactly(ground, tmp_path):
    flags = "--rank", "4", "--step-in-backward", "--clip-previous", "0.5"
    assert ground.run(tmp_path / "run", *flags) == 0
    whole = outcome(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000012").rename(tmp_path / "last")
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert outcome(tmp_path / "run") == whole
    assert ground.run(tmp_path / "free", "--rank", "4", "--step-in-backward") == 0
    assert outcome(tmp_path / "free")["weights"] != whole["weights"]


def test_int8_weights_train_resume_exactly_and_are_exported_wide(ground, tmp_path):
    assert ground.run(tmp_path / "run", *NARROW) == 0
    losses = [line["loss"] for line in log(tmp_path / "run") if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    last = load_file(tmp_path / "run" / "checkpoints" / "step-00000040" / "model.safetensors")
    assert last["lm_head.weight.codes"].dtype == torch.int8
    exported = built_model(Model(model=str(tmp_path / "run" / "model")), 300, "cpu", 0)
    wide = last["lm_head.weight.codes"].float() * last["lm_head.weight.scale"]
    torch.testing.assert_close(exported.lm_head.weight.data, wide, rtol=1e-6, atol=0)

    whole = outcome(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000040").rename(tmp_path / "last")
    assert ground.run(tmp_path / "run", *NARROW, "--resume") == 0
    assert outcome(tmp_path / "run") == whole


def test_state_by_rows_and_columns_is_a_fraction_of_that_by_elements(ground, tmp_path):
    sizes = {}
    for kind in ("adamw", "rowwise", "factored", "factored-adamw"):
        flags = "--method", "apollo-mini", "--vocabulary-state", kind, "--steps", str(STEPS)
        assert ground.run(tmp_path / kind, *flags) == 0
        sizes[kind] = json.loads((tmp_path / kind / "run.json").read_text())["result"]["state_bytes"]
    # Of two moments for each of its numbers the vocabulary keeps the first, and one number a row.
    assert sizes["rowwise"] < 0.6 * sizes["adamw"]
    # Factored it keeps neither, but a number for each row and column: of 300 x 32, and there are two such matrices.
    assert sizes["adamw"] - sizes["factored"] == 2 * 4 * (2 * 300 * 32 - (300 + 32))
    # Beside these the last keeps half a byte for each number, and 4 for each row, which is shorter than a block.
    assert sizes["factored-adamw"] - sizes["factored"] == 2 * 300 * (32 // 2 + 4)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--step-in-backward", "--clip", "1.0"), ("--clip 1.0", "--clip-previous")),
        (("--clip-previous", "1.0"), ("--clip-previous", "--step-in-backward")),
        (("--state-device", "cpu", "--step-in-backward"), ("--state-device cpu", "--step-in-backward")),
        (("--step-in-backward", "--method", "sgd"), ("--step-in-backward", "sgd", "apollo-mini")),
        (("--int8", "all", "--method", "adamw-torch"), ("--int8 all", "adamw-torch", "adamw")),
        (("--method", "sgd", "--vocabulary-state", "rowwise"), ("--vocabulary-state", "sgd")),
    ],
)
def test_ways_to_save_memory_that_contradict_are_errors_before_anything_is_loaded(
    ground, tmp_path, capsys, flags, named
):
    assert ground.run(tmp_path / "never", *flags) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in named)
    assert not (tmp_path / "never").exists()


def test_in_place_of_clipping_no_option_is_advised_that_the_method_does_not_take(ground, tmp_path, capsys):
    assert ground.run(tmp_path / "never", "--method", "artemis", "--step-in-backward", "--clip", "1.0") == 2
    assert "--growth-limit" not in capsys.readouterr().err
