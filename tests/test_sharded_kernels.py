"""The kernels step a rank's part of a weight as the plain step does, in layouts with parts that are uneven or empty."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from interpreted import hasten
from layouts import Case, Run, part
from planned import Collectives
from twins import MEMBERS

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.parametrize("device", ["cpu"])]

# On four ranks the last has none of nine rows, of three experts and of five elements; on two, 19 columns and 41 rows
# are uneven. No part has rows shorter than eight, which no kernel takes.
SHAPES = {"wide": (9, 41), "tall": (41, 19), "experts": (3, 18, 20), "vector": (5,)}
ROWS = [("rows", name) for name in SHAPES]
# Of more channels than one program sums up, whether a rank has all of them or keeps the moments of a quarter.
LONG = {"long": (9, 4200)}
# Whose blocks of 4 bits no rank shares with another.
BLOCKS = {"blocks": (9, 512)}
PLACED = [
    *ROWS,
    ("columns", "wide"),
    ("fsdp and rows", "tall"),
    ("fsdp and columns", "wide"),
    ("fsdp and columns", "tall"),
    ("rows and inner", "experts"),
]
# The interpreter takes a tenth of a second per layout, weight and step, so most rules see only what is theirs.
COMPARED = {
    "apollo-4": PLACED,
    "apollo-1": [("rows", "wide"), ("fsdp and columns", "tall")],
    "mini": [*ROWS, ("rows and inner", "experts"), ("rows", "long")],
    # The moments of the last are split on both sides, which uneven ones of a projected weight are not.
    "structured-tensor": [
        ("rows", "wide"),
        ("rows", "experts"),
        ("fsdp and columns", "tall"),
        ("fsdp and columns", "wide"),
    ],
    "structured": [("rows", "tall"), ("columns", "wide")],
    "adafactor": [("rows", "wide"), ("rows", "tall"), ("columns", "wide"), ("fsdp and columns", "tall")],
    "adafactor-without-momentum": [("rows", "tall"), ("rows", "long")],
    "factored-adamw": [("rows", "wide"), ("rows", "tall"), ("columns", "blocks"), ("fsdp and columns", "blocks")],
}


def run_of(
    rule: str, placed: Iterable[tuple[str | None, str]], shapes: Mapping[str, tuple[int, ...]] = SHAPES, **options: Any
) -> Run:
    dtype = options.pop("dtype", torch.float32)
    return Run(MEMBERS[rule], [Case(*pair, dtype) for pair in placed], shapes, refresh_every=2, **options)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))


def compared(rule: str, placed: list[tuple[str, str]]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """After three steps and a refresh: errors of weights and state by the kernels, and both runs' statistics."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        # Upwards in one of them: a rank's share in what is projected has its sign.
        options = {"shapes": SHAPES | LONG | BLOCKS, "maximize": rule == "apollo-1"}
        fused, plain = (run_of(rule, placed, fused=fused, **options) for fused in (True, False))
        versions = [local(weight)._version for weight in fused.weights.values()]
        for step in range(3):
            fused.step(step)
            plain.step(step)
    # Autograd, which sees no kernel write, must be told.
    assert all(local(w)._version > old for w, old in zip(fused.weights.values(), versions, strict=True))
    errors = {}
    for case, weight in plain.weights.items():
        ours = fused.weights[case]
        errors[f"{case.layout} {case.name}"] = error(local(ours), local(weight))
        expected, state = plain.optimizer.state[weight], fused.optimizer.state[ours]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            errors[f"{case.layout} {case.name} {name}"] = error(local(state[name]), local(value))
    return errors, fused.optimizer.statistics(), plain.optimizer.statistics()


@pytest.mark.parametrize("rule", COMPARED)
def test_the_kernels_step_parts_as_the_plain_step_does(ranks, device, rule):
    # A channel of rank 1 divides by one number, which magnifies roundings (test_sharded).
    tolerance = 2e-5 if rule == "apollo-1" else 1e-6
    for errors, fused, plain in ranks.run(compared, rule, COMPARED[rule]):
        assert {key: value for key, value in errors.items() if not value <= tolerance} == {}
        assert fused == pytest.approx(plain, rel=1e-5)


def refused(rule: str, placed: list[tuple[str, str]]) -> int:
    """Take a step with a NaN on one rank; how many gradients were refused."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        run = run_of(rule, placed, fused=True)
        run.step(0)
        before = [local(weight).clone() for weight in run.weights.values()]
        norms = [local(state["last_norm"]).clone() for state in run.optimizer.state.values() if "last_norm" in state]
        run.step(1, spoilt=SHAPES)
        after = [local(state["last_norm"]) for state in run.optimizer.state.values() if "last_norm" in state]
        assert all(torch.equal(local(w), old) for w, old in zip(run.weights.values(), before, strict=True))
        assert all(torch.equal(new, old) for new, old in zip(after, norms, strict=True))
        for state in run.optimizer.state.values():
            assert all(bool(local(value).isfinite().all()) for value in state.values())
        run.step(2)
    moved = [not torch.equal(local(w), old) for w, old in zip(run.weights.values(), before, strict=True) if old.numel()]
    assert all(moved)
    assert all(bool(local(weight).isfinite().all()) for weight in run.weights.values())
    return run.optimizer.skipped()


@pytest.mark.parametrize(
    ("rule", "placed"),
    [
        ("apollo-4", [*ROWS, ("fsdp and columns", "wide")]),
        pytest.param("mini", [("rows", "wide"), ("rows", "tall")], marks=pytest.mark.slow),
        ("factored-adamw", [("rows", "wide"), ("rows", "tall")]),
    ],
    ids=["apollo-4", "mini", "factored-adamw"],
)
def test_a_nan_on_one_rank_leaves_every_part_of_the_weight_as_it_was(ranks, device, rule, placed):
    assert ranks.run(refused, rule, placed) == [len(placed)] * 4


def counted(rule: str) -> tuple[list[float], int]:
    """Steps that the device has counted for each weight, of three of which one was refused, and how many were."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        run = run_of(rule, ROWS, fused=True, capturable=True)
        for step in range(3):
            run.step(step, spoilt=SHAPES if step == 1 else ())
    return [float(state["step"]) for state in run.optimizer.state.values()], run.optimizer.skipped()


@pytest.mark.parametrize("rule", ["mini", "rowwise"])
def test_the_device_counts_the_steps_of_parts_that_are_empty_too(ranks, device, rule):
    assert ranks.run(counted, rule) == [([2.0] * len(ROWS), len(ROWS))] * 4


def mixed() -> tuple[float, int]:
    """Two weights of one optimizer, one by the kernels: the largest error beside a plain run, and collectives."""
    pairs = ("rows", "tall"), ("rows", "wide")
    plain = run_of("apollo-4", pairs, fused=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        run, other = run_of("apollo-4", pairs[:1], fused=True), run_of("apollo-4", pairs[1:], fused=False)
        (second,) = other.weights.values()
        run.optimizer.add_param_group({"params": [("wide", second)], "refresh_every": 2, "fused": False})
        run.weights |= other.weights
        for step in range(2):
            plain.step(step)
            with Collectives() as collectives:
                run.step(step)
    errors = [error(local(run.weights[case]), local(weight)) for case, weight in plain.weights.items()]
    return max(errors), sum(count for count, _ in collectives.seen.values())


def test_weights_by_the_kernels_and_others_talk_to_other_ranks_together(ranks, device):
    # A reduce-scatter and a gather of the wide weight, and one sum for both.
    for largest, collectives in ranks.run(mixed):
        assert largest <= 1e-6
        assert collectives == 3


def of_two_ranks() -> float:
    """The largest error of weights that are projected to different ranks, and so are in batches of their own."""
    shapes = {"wide": (9, 41), "broad": (10, 53)}
    runs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        for fused in (True, False):
            run, other = (run_of("apollo-4", [("rows", name)], shapes, fused=fused) for name in shapes)
            (second,) = other.weights.values()
            run.optimizer.add_param_group({"params": [("broad", second)], "rank": 1})
            run.weights |= other.weights
            run.step(0)
            runs.append(run)
    ours, plain = runs
    return max(error(local(ours.weights[case]), local(weight)) for case, weight in plain.weights.items())


def test_gains_that_are_gathered_together_go_each_to_its_batch(ranks, device):
    # A channel of rank 1 divides by one number, as above.
    assert max(ranks.run(of_two_ranks)) <= 2e-5


def refused_as_too_large(rule: str, layout: str | None, entry: float) -> int:
    """Whether a gradient is refused of which a rank holds more than float32 can add up, though of no channel."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        run = run_of(rule, [(layout, "tall")], fused=True)
        for case, weight in run.weights.items():
            weight.grad = case.placed(torch.full(SHAPES["tall"], entry))
        run.optimizer.step()
    return run.optimizer.skipped()


# Of the second, no rank has more than float32 can add up.
@pytest.mark.parametrize(("rule", "layout", "entry"), [("apollo-4", "rows", 3e18), ("adafactor", "columns", 9e17)])
def test_what_is_too_large_for_one_process_is_for_several(ranks, device, rule, layout, entry):
    of_parts, of_all = (ranks.run(refused_as_too_large, rule, each, entry) for each in (layout, None))
    assert of_parts == of_all == [1] * 4


# Parts that begin at whole tiles of 2048, or do not, or have rows that lie apart in the whole weight.
ROUNDED_SHAPES = {"pages": (3, 2048), "tall": (41, 60), "wide": (9, 130), "cube": (3, 4, 50)} | BLOCKS
ROUNDED = [
    ("rows", "pages"),
    ("rows", "tall"),
    ("columns", "wide"),
    ("fsdp and columns", "wide"),
    ("rows", "cube"),
    ("columns", "cube"),
]


WHOLE_ROWS = [("rows", name) for name in ("pages", "tall", "wide", "blocks")]
KEPT = "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"


def kept(run: Run) -> dict[str, dict[str, Tensor]]:
    """Ordinary weights and their moments, by the weight's name."""
    state = run.optimizer.state
    return {
        case.name: {"weight": weight.detach(), **{name: state[weight][name] for name in KEPT if name in state[weight]}}
        for case, weight in run.weights.items()
    }


def differing(rule: str, placed: list[tuple[str, str]], options: Mapping[str, Any]) -> dict[str, float]:
    """The share of this rank's elements that are not, bit for bit, those of a run of whole weights by the kernels."""
    options = {"fused": True, "dtype": torch.bfloat16, "state_dtype": torch.bfloat16, **options}
    names, ranks = list(dict.fromkeys(name for _, name in placed)), dist.get_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        sharded = run_of(rule, placed, ROUNDED_SHAPES, **options)
        # Each rank steps some of the ordinary weights, by itself, and tells the others where they end.
        own = names[dist.get_rank() :: ranks]
        whole = run_of(rule, [(None, name) for name in own], ROUNDED_SHAPES, **options) if own else None
        for step in range(2):
            sharded.step(step)
            if whole is not None:
                whole.step(step)
    ends: list[dict[str, dict[str, Tensor]]] = [{}] * ranks
    dist.all_gather_object(ends, {} if whole is None else kept(whole))
    expected = {name: tensors for each in ends for name, tensors in each.items()}
    found = {}
    for case, weight in sharded.weights.items():
        for name, theirs in expected[case.name].items():
            ours = weight if name == "weight" else sharded.optimizer.state[weight][name]
            different = local(ours) != part(theirs, ours.device_mesh, ours.placements)
            key = f"{case.layout} {case.name} {name}"
            found[key] = float(different.double().mean()) if different.numel() else 0.0
    return found


def test_narrow_weights_and_moments_round_by_their_place_in_the_whole_weight(ranks, device):
    # AdamW sums nothing, so every bit agrees.
    for shares in ranks.run(differing, "adamw", ROUNDED, {}):
        assert set(shares.values()) == {0.0}
    # As in test_sharded_contract: drawn by another place, half of them would differ.
    placed = [("rows", "tall"), ("rows", "wide"), ("columns", "wide")]
    summed = {"apollo-4": placed, "structured-tensor": placed[1:2], "adafactor": [*WHOLE_ROWS, *placed]}
    for rule, where in summed.items():
        for shares in ranks.run(differing, rule, where, {}):
            assert max(shares.values()) < 0.02


@pytest.mark.parametrize(
    ("rule", "state_dtype", "placed"),
    [
        ("adamw", torch.int8, [*WHOLE_ROWS, ("columns", "blocks")]),
        ("rowwise", torch.int8, WHOLE_ROWS),
        ("rowwise", torch.bfloat16, WHOLE_ROWS),
    ],
)
def test_blocks_and_rows_that_no_ranks_share_are_those_of_whole_weights(ranks, device, rule, state_dtype, placed):
    for shares in ranks.run(differing, rule, placed, {"state_dtype": state_dtype}):
        assert set(shares.values()) == {0.0}


@pytest.mark.parametrize("rule", ["adamw", "mini", "apollo-4", "factored-adamw"])
def test_rows_of_int8_weights_are_those_of_whole_ones(ranks, device, rule):
    # Gains are sums, which may differ in their last bit: that moves one code in a million, and none of these.
    for shares in ranks.run(differing, rule, [("rows", "tall"), ("rows", "wide")], {"group_size": 128}):
        assert set(shares.values()) == {0.0}


def refusal(rule: str, layout: str, name: str, shape: tuple[int, ...], state_dtype: torch.dtype = torch.float32) -> str:
    try:
        run_of(rule, [(layout, name)], {name: shape}, fused=True, state_dtype=state_dtype).step(0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_parts_that_no_kernel_takes_are_refused_by_name_on_every_rank(ranks, device):
    expected = {
        ("apollo-4", "rows twice", "wide", (9, 41)): "its smaller side is spread over several axes of a mesh",
        ("structured", "rows", "wide", (9, 41)): "its channels, of full rank, are spread over several ranks",
        ("adamw", "inner", "cube", (3, 4, 50)): "it is not projected, and spread over several ranks on dimension 2",
        ("mini-svd", "rows", "wide", (9, 41)): "projection='svd_lowrank' where a weight is spread over several ranks",
        ("artemis", "rows", "wide", (9, 41)): "='spectral' where a weight is spread over several ranks",
        ("rowwise", "columns", "wide", (9, 41)): "its rows, with a second moment each, are spread over several ranks",
        ("adamw", "columns", "wide", (9, 41), torch.int8): "blocks of its 8-bit moments are spread over several ranks",
        ("adamw", "rows", "cube", (3, 4, 50), torch.int8): "more than two dimensions, and is spread over several ranks",
        # 9 to a rank, but the last has 6.
        ("mini", "columns", "tall", (41, 33)): "rows shorter than 8",
    }
    for case, reason in expected.items():
        for message in ranks.run(refusal, *case):
            assert message.startswith("fused=True, but ")
            assert message.endswith(reason)
