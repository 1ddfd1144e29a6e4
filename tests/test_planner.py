"""The planner on one process: shapes, state, activations, and the command that prints it all."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from apollo_optim import Artemis, optimizer_memory
from apollo_optim.cli import main
from apollo_optim.distributed import range_of
from apollo_optim.planner import optimizers
from apollo_optim.planner.activations import PITCH, Activations, Batch
from apollo_optim.planner.collectives import Traffic, copies_traffic, expert_traffic, tensor_traffic
from apollo_optim.planner.layout import FakeMesh, Layout, layout_of
from apollo_optim.planner.models import MODELS, Weight
from apollo_optim.planner.optimizers import CONTENDERS, Family, planned
from apollo_optim.planner.paper_figures import LISTED, kept_otherwise
from apollo_optim.planner.plan import model_plan, optimizer_plan
from apollo_optim.stepping.sharded import dealt_out
from planned import DENSE, MIXTURE, Live, bytes_of, hugging_face, saved_bytes
from planned import MODELS as SMALL

ALONE = Layout(gpus=1)
every_model = pytest.mark.parametrize("model", SMALL.values(), ids=SMALL)


def test_large_models_have_as_many_parameters_as_the_released_ones():
    counted = {
        name: sum(math.prod(weight.shape) for weight in MODELS[name].weights())
        for name in ("8b", "70b", "405b", "671b")
    }
    # DeepSeek-V3 without its biases of routing, which no gradient reaches.
    assert counted == {
        "8b": 8_030_261_248,
        "70b": 70_553_706_496,
        "405b": 405_853_388_800,
        "671b": 671_026_404_352,
    }


@every_model
def test_names_shapes_and_order_are_those_of_hugging_face(model):
    pytest.importorskip("transformers", minversion="5.0")  # until then experts were a module each
    with torch.device("meta"):
        theirs = [(name, tuple(weight.shape)) for name, weight in hugging_face(model).named_parameters()]
    assert [(weight.name, weight.shape) for weight in model.weights()] == theirs


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LISTED)
def test_state_of_a_whole_model_takes_the_bytes_that_were_planned(name, dtype, model):
    pytest.importorskip("transformers", minversion="5.0")
    candidate, real = LISTED[name], hugging_face(model, dtype)
    rank = 6 if candidate.takes_rank else candidate.ranks[0]
    build: Any = candidate.optimizer
    options = {} if name in ("factored-adamw", "artemis") else {"rank": rank, "state_dtype": torch.bfloat16}
    optimizer = stepped(build(real, **options), real)
    plan = optimizer_plan(model, ALONE, planned(name, 6, dtype, options.get("state_dtype")))
    assert plan.state == sum(bytes_of(value) for state in optimizer.state.values() for value in state.values())
    assert plan.traffic == plan.refresh_traffic == ()


def test_state_of_muon_takes_the_bytes_that_were_planned():
    from apollo_optim.train.optimizers import muon

    pytest.importorskip("transformers")
    real = hugging_face(DENSE, torch.bfloat16)
    values = {"lr": 1e-3, "embedding_lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, "seed": 0}
    optimizer = stepped(muon(real, values), real)
    plan = optimizer_plan(DENSE, ALONE, planned("muon", None, torch.bfloat16, torch.float32))
    assert plan.state == sum(bytes_of(value) for state in optimizer.state.values() for value in state.values())


def stepped(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer after its first step, when all of its state is there."""
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def test_matrices_are_dealt_out_whole_by_muon_and_shampoo():
    # Five matrices of 6 x 10 on four ranks: one has two of them. Each rank sends its quarters, and the updates back.
    weights = [Weight(f"{number}.weight", (6, 10), "none", "layer") for number in range(5)]
    layout = layout_of(DENSE, 4)
    shampoo = planned("shampoo", None, torch.bfloat16, torch.float32)
    assert shampoo.state_bytes(weights, layout) == 2 * 4 * (2 * (6**2 + 10**2) + 6 * 10)
    dealt = Traffic("whole matrices", "all-to-all", 4, 2 * 2, 2 * 2 * 5 * 15)
    assert shampoo.traffic(weights, layout) == [dealt]
    assert planned("muon-dealt", None, torch.bfloat16, torch.float32).traffic(weights, layout) == [dealt]
    # Rows of 6 in parts of 2, so 8 are gathered.
    gathered = Traffic("whole matrices", "all-gather", 4, 5, 2 * 5 * 8 * 10)
    muon = planned("muon", None, torch.bfloat16, torch.float32)
    assert muon.traffic(weights, layout) == [gathered]
    # Held besides are four matrices of bfloat16, and three of float32.
    assert (muon.step_bytes(weights, layout), shampoo.step_bytes(weights, layout)) == (4 * 2 * 60, 3 * 4 * 60)
    # Of eight experts each rank has two, whole.
    experts = [Weight("experts", (8, 6, 10), "none", "layer")]
    assert shampoo.state_bytes(experts, layout) == 2 * 4 * (2 * (6**2 + 10**2) + 6 * 10)
    assert shampoo.traffic(experts, layout) == []


@pytest.mark.parametrize("name", ["artemis-mini", "galore"])
def test_traffic_is_planned_in_the_order_in_which_weights_are_stepped(monkeypatch, name):
    """Which requests fill a bucket together depends on it."""
    weights = {str(number): Weight(str(number), (8 * number, 64), "none", "layer") for number in (2, 4, 1, 3)}
    plan, layout = planned(name, 4, torch.bfloat16, None), layout_of(DENSE, 4)
    assert isinstance(plan, Family)
    steps = dealt_out(plan.weight_step(weight, layout, False) for weight in weights.values())
    stepped = [plan.requests(weights[job.name], layout, False) for job in steps]
    monkeypatch.setattr(optimizers, "step_traffic", list)
    in_order = plan.traffic([*weights.values()], layout)
    costs = [[[request.cost for request in requests] for requests in found] for found in (in_order, stepped)]
    assert costs[0] == costs[1]
    order = {"artemis-mini": ["4", "3", "2", "1"], "galore": ["2", "4", "1", "3"]}
    assert [job.name for job in steps] == order[name]


def test_layers_and_experts_that_are_split_send_activations_and_tokens():
    """By hand: attention and MLP gather once and scatter once, embedding and head one of the two; and so backward."""
    heads, experts = layout_of(DENSE, 2, "tp"), layout_of(MIXTURE, 8, "fsdp+ep", expert=4)
    for recomputed, gathers, scatters, tokens in ((False, 14, 14, 4), (True, 20, 17, 6)):
        sent = tensor_traffic(DENSE, heads, 10, 2, recomputed)
        counts = {"all-gather": gathers, "reduce-scatter": scatters}
        size = 10 * 72 * 2
        assert sent == [Traffic("activations", kind, 2, count, count * size) for kind, count in counts.items()]
        # Two of three layers have experts, and a token goes to three of these.
        (sent,) = expert_traffic(MIXTURE, experts, 10, 2, recomputed)
        assert (sent.ranks, sent.count, sent.bytes) == (4, 2 * tokens, 2 * tokens * 10 * 3 * 64 * 2)


@pytest.mark.parametrize(("model", "narrow"), [(DENSE, 0), (replace(MIXTURE, experts=None), 26 + 18)], ids=SMALL)
def test_tensor_parallelism_splits_activations_but_for_what_is_gathered(model, narrow):
    model, batch = replace(model, vocabulary=204), Batch(sequences=2, sequence=5, checkpointing=False, loss="plain")
    whole, half = (Activations(model, batch, 2, tensor).saved for tensor in (1, 2))
    # Inputs of attention, MLP and head in bfloat16; narrow vectors of attention with their norms; labels.
    inputs, latent = 2 * model.hidden * (2 * model.layers + 1), (4 + 2 * 2) * narrow + 4 * 2 * (narrow > 0)
    assert 2 * half == whole + batch.tokens * (inputs + model.layers * latent + 8)


@pytest.mark.parametrize("sizes", [(2,), (3,), (8,), (2, 3), (3, 4)])
def test_parts_are_those_of_torch_chunk(sizes):
    axes = tuple(range(len(sizes)))
    for length in (1, 2, 3, 7, 8, 9, 24, 25):
        for places in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist():
            left = torch.arange(length)
            for size, place in zip(sizes, places, strict=True):
                chunks = left.chunk(size)
                left = chunks[place] if place < len(chunks) else left[:0]
            mesh: Any = FakeMesh(tuple(map(str, axes)), sizes)
            first, stop = range_of(length, axes, mesh, places)
            assert list(range(first, stop)) == left.tolist()


def test_bytes_that_are_sent_go_in_rings():
    assert Traffic("", "all-gather", 8, 1, 800).sent == 700
    assert Traffic("", "reduce-scatter", 8, 1, 800).sent == 700
    assert Traffic("", "all-to-all", 8, 1, 800).sent == 700
    assert Traffic("", "all-reduce", 8, 1, 800).sent == 1400


def test_gradients_of_copies_travel_in_the_buckets_of_ddp():
    # A bucket is full from 1 MiB on, those after it from 25 MiB on: 1, 13 + 13, and 3 MiB, from the last to the first.
    mebibyte = 2**18
    sizes = [3, 13, 13, 1]
    weights = [Weight(str(size), (size * mebibyte,), "none", "layer") for size in sizes]
    (traffic,) = copies_traffic(weights, layout_of(DENSE, 4, "ddp"), 4)
    assert (traffic.count, traffic.bytes) == (3, 30 * 2**20)


def forward(model: Any, batch: Batch, vocabulary: int) -> Callable[[], Tensor]:
    """The loss of a real model on a batch."""
    from apollo_optim.train.losses import Objective

    objective = Objective(model, batch.loss, batch.chunk)
    tokens = torch.randint(vocabulary, (batch.sequences, batch.sequence + 1))
    return lambda: objective(tokens[:, :-1], tokens[:, 1:])


every_loss = pytest.mark.parametrize(
    ("loss", "chunk"), [("plain", 50), ("chunked", 50), ("chunked", 144)], ids=["plain", "chunked", "in one chunk"]
)


def test_the_plan_is_of_the_chunks_that_the_loss_takes():
    losses = pytest.importorskip("apollo_optim.train.losses")
    assert (Batch.chunk, PITCH) == (losses.CHUNK, losses.PITCH)


# What is left out, positions and indices of experts, does not grow with widths, which are a hundredth of real ones.
@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("model", "tolerance"), [(DENSE, 0.01), (MIXTURE, 0.08)], ids=SMALL)
def test_a_forward_pass_saves_what_was_planned(model, tolerance, dtype, loss, chunk):
    pytest.importorskip("transformers", minversion="5.0")
    batch = Batch(sequences=3, sequence=48, checkpointing=False, loss=loss, chunk=chunk)
    real = hugging_face(model, dtype)
    measured = saved_bytes(real, forward(real, batch, model.vocabulary))
    assert Activations(model, batch, dtype.itemsize).saved == pytest.approx(measured, rel=tolerance)


@every_loss
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@every_model
def test_the_worst_moment_of_a_training_step_is_within_a_tenth_of_the_plan(model, checkpointing, loss, chunk):
    pytest.importorskip("transformers", minversion="5.0")
    batch = Batch(sequences=3, sequence=48, checkpointing=checkpointing, loss=loss, chunk=chunk)
    real = hugging_face(model)
    if checkpointing:
        real.gradient_checkpointing_enable({"use_reentrant": False})
    objective = forward(real, batch, model.vocabulary)
    objective().backward()
    with Live() as live:
        for weight in real.parameters():
            weight.detach().mul_(1)
            weight.grad.mul_(1)
        objective().backward()
    plan = model_plan(model, ALONE, batch, torch.float32, torch.float32)
    assert plan.weights + plan.gradients + plan.activations + plan.buffers == pytest.approx(live.peak, rel=0.1)


# On twelve GPUs nothing of these models is shared evenly.
UNEVEN = {
    "fsdp": (DENSE, layout_of(DENSE, 12)),
    "fsdp by channels": (MIXTURE, layout_of(MIXTURE, 12, split="channels")),
    "hsdp": (DENSE, layout_of(DENSE, 12, "hsdp", replicas=2)),
    "hsdp of one group": (DENSE, layout_of(DENSE, 4, "hsdp")),
    "fsdp+tp": (DENSE, layout_of(DENSE, 12, "fsdp+tp", tensor=2)),
    "hsdp+tp": (DENSE, layout_of(DENSE, 12, "hsdp+tp", tensor=2, replicas=3)),
    "fsdp+ep": (MIXTURE, layout_of(MIXTURE, 12, "fsdp+ep", expert=4)),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_the_parts_of_all_ranks_add_up_to_the_weight(case):
    model, layout = UNEVEN[case]
    for weight in model.weights():
        mesh, part = layout.mesh(weight.is_experts), layout.part(weight)
        axes = {axis for split in part.splits for axis in split}
        places = itertools.product(*(range(size) if axis in axes else (0,) for axis, size in enumerate(mesh.sizes)))
        parts = [math.prod(stop - first for first, stop in part.ranges_at(place)) for place in places]
        assert sum(parts) == math.prod(weight.shape)
        assert max(parts) == layout.local_numbers([weight])


def planned_data(capsys, *arguments: str) -> dict[str, Any]:
    assert main(["memory", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_only_a_basis_that_is_computed_from_the_gradient_has_it_gathered():
    for name, more in (("flora", False), ("galore", True)):
        plan = optimizer_plan(DENSE, layout_of(DENSE, 4), planned(name, 6, torch.float32, None))
        usual, refresh = (
            sum(each.bytes for each in traffic if each.kind == "all-gather")
            for traffic in (plan.traffic, plan.refresh_traffic)
        )
        assert (refresh > usual) == more


@pytest.mark.parametrize("moments", [(), ("--state-dtype", "bf16"), ("--state-dtype", "int8")], ids=" ".join)
def test_one_gpu_of_a_plan_holds_what_is_counted_without_one(capsys, moments):
    held = planned_data(capsys, "1m", "--gpus", "1", *moments)["optimizers"]
    counted = planned_data(capsys, "1m", *(moments or ("--state-dtype", "fp32")))["models"]
    known = {row["optimizer"]: row for row in reversed(counted)}  # of several ranks the first, which is planned
    # By default Artemis-Mini keeps its momentum in bfloat16, which nothing but its own class says.
    found = {row["optimizer"]: row["state"] for row in held if moments or row["optimizer"] != "artemis-mini"}
    assert {name: found[name] for name in known if name in found} == {
        name: row["state"]["adamw"] for name, row in known.items() if name in found
    }
    assert {row["optimizer"]: row["rank"] for row in held} == {
        "adamw": None,
        "muon": None,
        "muon-dealt": None,
        "shampoo": None,
        "galore": 0.25,
        "fira": 0.25,
        "flora": 0.25,
        "apollo": 0.25,
        "apollo-mini": 1,
        "factored-adamw": None,
        "artemis": None,
        "artemis-mini": 1 / 64,
    }
    layers = [weight.shape for weight in MODELS["1m"].weights() if not weight.is_vocabulary]
    assert known["artemis"]["state"]["uncounted"] == optimizer_memory(layers, Artemis, dtype=torch.bfloat16)
    assert (known["artemis"]["rank"], known["artemis-mini"]["rank"], known["apollo"]["rank"]) == (None, 2, 32)


def test_moments_that_are_kept_otherwise_are_told_by_dtype():
    shown = "adamw", "muon", "factored-adamw", "artemis", "artemis-mini"
    in_4_bits = "of layers under Factored AdamW and Artemis in 4 bits"
    assert kept_otherwise(shown, None, torch.float32) == f"{in_4_bits}, under Artemis-Mini in bfloat16"
    assert kept_otherwise(shown, torch.int8, torch.int8) == in_4_bits
    assert kept_otherwise(shown[:2], None, torch.float32) == ""


def test_a_rank_is_for_those_that_take_one(capsys):
    usual, asked = (
        {row["optimizer"]: (row["rank"], row["state"]) for row in planned_data(capsys, "1m", *rank)["models"]}
        for rank in ((), ("--rank", "8"))
    )
    without = "adamw", "apollo-mini", "factored-adamw", "artemis"
    assert {name: asked[name] for name in without} == {name: usual[name] for name in without}
    assert {asked[name][0] for name in set(asked) - set(without)} == {8}


def test_splitting_channels_leaves_norms_only(capsys):
    arguments = ("--model", "70b", "--gpus", "64", "--optimizer", "apollo")
    rows, channels = (planned_data(capsys, *arguments, "--split", split) for split in ("rows", "channels"))
    assert {each["what"] for each in rows["optimizers"][0]["traffic"]} == {
        "projected gradients",
        "gains, steps or gradients",
        "norms",
    }
    # By hand: 4 numbers of 8 bytes for each of 560 matrices, 1 for each of 163 other weights, in one collective.
    (norms,) = channels["optimizers"][0]["traffic"]
    assert (norms["kind"], norms["count"], norms["bytes"]) == ("all-reduce", 1, 8 * (4 * 560 + 163))
    # The side of keys, values and down projections is split by rows: 256 x 8192 twice and 2048 x 28672, 80 layers.
    (scatter,) = (each for each in rows["optimizers"][0]["traffic"] if each["kind"] == "reduce-scatter")
    assert scatter["bytes"] == 80 * 4 * (2 * 256 * 8192 + 2048 * 28672)


def test_scales_of_blocks_that_cross_ranks_are_sent_twice(capsys):
    found = planned_data(capsys, "--model", "7b", "--gpus", "8", "--optimizer", "apollo", "--state-dtype", "int8")
    (scales,) = (each for each in found["optimizers"][0]["traffic"] if each["what"] == "scales of 8-bit moments")
    # Of 96 matrices of 11008 channels, 86 blocks in each of 1024 rows, two moments; 4096 channels are 4 blocks a rank.
    assert scales["bytes"] == 2 * 96 * 2 * 1024 * 86 * 4


def test_a_gpu_holds_its_share_of_the_model_by_hand(capsys):
    found = planned_data(capsys, "--model", "70b", "--gpus", "64", "--optimizer", "adamw")
    # Everything divides by 64. Two moments in float32 for each weight, and a step and a seed for each of 723.
    assert found["weights"] == found["gradients"] == 2 * 70_553_706_496 // 64
    assert found["optimizers"][0]["state"] == 8 * 70_553_706_496 // 64 + 12 * 723
    assert found["tokens"] == 64 * 4096
    # 80 layers gathered twice and the rest once; each gradient reduced.
    assert [(each["kind"], each["count"]) for each in found["traffic"]] == [("all-gather", 161), ("reduce-scatter", 81)]
    rest = 2 * 128_256 * 8192 + 8192
    assert found["traffic"][0]["bytes"] == 2 * (2 * (70_553_706_496 - rest) + rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "fsdp"), "--shard fsdp has no effect without --gpus"),
        (("--activation-checkpointing",), "--activation-checkpointing has no effect without --gpus"),
        (("--gpus", "8"), "--gpus needs --model"),
        (("--gpus", "0", "--model", "7b"), "--gpus must be at least 1, got 0"),
        (("--gpus", "8", "--model", "71b"), "--model '71b' is unknown; did you mean '671b'?"),
        (("--gpus", "8", "--model", "7b", "--shard", "fdsp"), "--shard 'fdsp' is unknown; did you mean 'fsdp'?"),
        (("--gpus", "8", "--model", "7b", "--split", "row"), "--split 'row' is unknown; did you mean"),
        (("--gpus", "8", "--model", "7b", "--loss", "chunk"), "--loss 'chunk' is unknown; did you mean 'chunked'?"),
        (("--gpus", "8", "--model", "7b", "--optimizer", "moun"), "did you mean 'muon'?"),
        (("--gpus", "8", "--model", "7b", "--optimizer", "muon", "--rank", "4"), "--rank has no effect on muon"),
        (("--gpus", "8", "--model", "7b", "--sequence", "0"), "--sequence must be at least 1, got 0"),
        (("--gpus", "12", "--model", "7b", "--shard", "fsdp+tp"), "--tensor-gpus 8 does not divide 12 GPUs; 6 does"),
        (
            ("--gpus", "8", "--model", "7b", "--replicas", "2"),
            "--replicas has no effect with --shard fsdp; it is for hsdp",
        ),
        (("--gpus", "8", "--model", "7b", "--shard", "hsdp", "--replicas", "0"), "--replicas 0 does not divide 8 GPUs"),
        (("--gpus", "8", "--model", "7b", "--shard", "fsdp+tp", "--tensor-gpus", "-2"), "--tensor-gpus -2 does not"),
        (("--gpus", "8", "--model", "7b", "--tensor-gpus", "2"), "--tensor-gpus has no effect with --shard fsdp"),
        (("--gpus", "8", "--model", "7b", "--shard", "ddp", "--split", "channels"), "--split has no effect with"),
        (("--gpus", "16", "--model", "70b", "--shard", "tp"), "cannot share the model's 8 heads of keys and values; 8"),
        (("--gpus", "64", "--model", "70b", "--shard", "fsdp+ep"), "needs a model with experts"),
        (
            ("--gpus", "96", "--model", "671b", "--shard", "fsdp+ep", "--expert-gpus", "48"),
            "--expert-gpus 48 cannot share the model's 256 experts evenly; 16 can",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, arguments, message):
    assert main(["memory", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_every_optimizer_is_in_the_table(capsys):
    assert main(["memory", "--model", "671b", "--gpus", "256", "--shard", "fsdp+ep"]) == 0
    out = capsys.readouterr().out
    assert all(f" {label} " in out for label in CONTENDERS.values())
    assert "tokens to experts" in out
