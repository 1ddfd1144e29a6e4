"""A sharded step is the whole one: every optimizer, every layout, on two and four processes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from apollo_optim import APOLLO, Artemis, FactoredAdamW
from apollo_optim.optimizer import ProjectedOptimizer
from family import BY_NAME, FAMILY, WITHOUT_MOMENTUM, Member, partly_slow
from layouts import COLUMNS, FSDP_OF_ROWS, INNER, LAYOUTS, ROWS, WHOLE, Case, Run, cases, mesh, part, shard, whole_after
from ranks import of_the_first

# The slow ones are put together from others: their basis is that of one of these, and what shares a gain is another's;
# Artemis is compared below with its momentum in 4 bits.
SLOW = (
    "fira-gaussian", "galore-gaussian", "structured-element", "apollo-svd", "mini-svd", "flora-svd",
    "structured-tensor", "apollo-tensor", "apollo-1", "artemis-wide", "apollo-svd-lowrank",
)  # fmt: skip
ROWWISE = Member("rowwise", APOLLO, {"rank": None}, {"second_moment": "rowwise"})
# A 4-bit momentum has weights of its own below: blocks of 128 must not cross from one rank's columns to another's.
MEMBERS = [
    *(member for member in FAMILY if not member.in_4_bits),
    WITHOUT_MOMENTUM,
    ROWWISE,
    Member("apollo-1", APOLLO, {"rank": 1}),
]
DTYPES = torch.float32, torch.float64


class Extent(NamedTuple):
    """How far a comparison goes. A wrong part shows in float64, in any layout; float32 has other tolerances only."""

    steps: int
    refresh_every: int
    float32: tuple[str, ...]
    """Layouts in which weights are float32 as well."""

    def cases(self) -> list[Case]:
        return cases(DTYPES[1:]) + cases(DTYPES[:1], self.float32)


EXTENTS = [
    # Two bases, and a step between them: what a wrong one moves shows in the step that moves it.
    pytest.param(Extent(3, 2, ("fsdp and columns",)), id="3 steps"),
    pytest.param(Extent(30, 10, tuple(LAYOUTS)), id="30 steps", marks=pytest.mark.slow),
]


def tolerance(member: Member, dtype: torch.dtype) -> float:
    """Sums in another order differ by a few float32 roundings.

    A channel of rank 1 divides by one number, and an SVD by gaps between singular values, which magnify them.
    """
    if dtype == torch.float64:
        return 1e-12
    return 2e-5 if member.uses_svd or member.options.get("rank") == 1 else 1e-6


def compared(member: Member, extent: Extent) -> dict[Case, float]:
    """How far each weight of this rank ends from that of a run of ordinary weights."""
    sharded = Run(member, extent.cases(), refresh_every=extent.refresh_every)
    for step in range(extent.steps):
        sharded.step(step)
    return sharded.errors(whole_after(extent.steps, member, DTYPES, refresh_every=extent.refresh_every))


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize(
    "member", partly_slow(MEMBERS, quick=[member for member in MEMBERS if member.name not in SLOW]), ids=str
)
def test_sharded_steps_equal_whole_steps(ranks, member, extent):
    for errors in ranks.run(compared, member, extent):
        wrong = {case: error for case, error in errors.items() if not error <= tolerance(member, case.dtype)}
        assert wrong == {}


def sharded_anew(member: Member) -> dict[Case, float]:
    """How far weights are from whole ones that were split by rows at one step, and by columns at the next."""
    run = Run(member, [Case("rows", name, torch.float64) for name in ("wide", "tall")])
    run.step(0)
    for weight in run.weights.values():
        held = weight.detach()
        assert isinstance(held, DTensor)
        torch.utils.swap_tensors(weight, nn.Parameter(held.redistribute(placements=[COLUMNS])))
    run.weights = {case._replace(layout="columns"): weight for case, weight in run.weights.items()}
    run.step(1)
    return run.errors(whole_after(2, member, DTYPES[1:]))


def test_a_weight_that_is_sharded_anew_between_steps_takes_its_state_along(ranks):
    for errors in ranks.run(sharded_anew, BY_NAME["flora"]):
        assert max(errors.values()) <= tolerance(BY_NAME["flora"], torch.float64)


Layouts = dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]]
"""Mesh, placements and shape."""


class Trained(NamedTuple):
    """Weights by layout, and the state that an optimizer has of all."""

    weights: dict[str, nn.Parameter]
    state: dict[str, Any]


Build = Callable[[list[tuple[str, nn.Parameter]]], ProjectedOptimizer]


def named(weights: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """All under one name, hence with one seed: prefixes of wrappers do not count."""
    return [("module." * number + "w", weight) for number, weight in enumerate(weights.values())]


def trained(build: Build, layouts: Layouts, steps: int) -> tuple[Trained, Trained]:
    """Weights that are spread, and whole ones, by the same gradients."""
    numbers = {
        name: torch.randn(1 + steps, *shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        for name, (_, _, shape) in layouts.items()
    }

    def train(place: Callable[[str, Tensor], Tensor]) -> Trained:
        starts, *gradients = ({name: place(name, each[n]) for name, each in numbers.items()} for n in range(1 + steps))
        weights = {name: nn.Parameter(start) for name, start in starts.items()}
        optimizer = build(named(weights))
        for grads in gradients:
            for name, weight in weights.items():
                weight.grad = grads[name]
            optimizer.step()
        return Trained(weights, optimizer.state_dict())

    spread = train(lambda name, tensor: shard(tensor, mesh(layouts[name][0]), layouts[name][1]))
    return spread, of_the_first(lambda: train(lambda _, tensor: tensor.clone()))


def error(spread: Tensor, whole: Tensor) -> float:
    """How far what this rank holds is from that part of a whole tensor."""
    assert isinstance(spread, DTensor)
    assert spread.shape == whole.shape
    expected = part(whole.detach(), spread.device_mesh, spread.placements)
    difference = (spread.to_local().detach().double() - expected.double()).abs()
    return float(difference.max()) if difference.numel() else 0.0


IN_4_BITS: Layouts = {
    "rows": ((4,), (ROWS,), (9, 41)),
    "no rows": ((4,), (ROWS,), (5, 130)),
    "columns": ((4,), (COLUMNS,), (7, 512)),
    "tall": ((2,), (COLUMNS,), (300, 256)),
    "both": ((2, 2), (ROWS, COLUMNS), (9, 256)),
    "rows twice": ((2, 2), (FSDP_OF_ROWS, ROWS), (41, 9)),
    "experts and inner": ((2, 2), (ROWS, INNER), (3, 5, 256)),
    "conv": ((4,), (COLUMNS,), (6, 128, 2, 2)),
}


def in_4_bits(optimizer: type[Artemis] | type[FactoredAdamW]) -> dict[str, tuple[float, float, float]]:
    """By layout: how far a sharded weight, the codes of its momentum and their scales end from those of a whole one."""
    spread, whole = trained(lambda weights: optimizer(weights, lr=0.01, weight_decay=0.1), IN_4_BITS, steps=2)
    found = {}
    for number, (name, weight) in enumerate(spread.weights.items()):
        ours, theirs = whole.state["state"][number], spread.state["state"][number]
        codes, scale = (error(theirs[key], ours[key]) for key in ("exp_avg", "exp_avg_scale"))
        found[name] = error(weight, whole.weights[name]), codes, scale
    return found


@pytest.mark.parametrize(("optimizer", "most"), [(Artemis, 0.0), (FactoredAdamW, 1e-12)])
def test_momentum_in_4_bits_is_the_same_on_every_mesh(ranks, optimizer, most):
    """Each rank packs its own part. Sums of squares are added up in another order; products are of the same matrix."""
    for found in ranks.run(in_4_bits, optimizer):
        wrong = {name: each for name, each in found.items() if not (each[0] <= most and each[1] == 0 and each[2] == 0)}
        assert wrong == {}


IN_8_BITS: Layouts = {
    "rows": ((4,), (ROWS,), (9, 512)),
    "tall": ((4,), (ROWS,), (512, 9)),
    "columns": ((2,), (COLUMNS,), (512, 256)),
    "of two": ((2,), (ROWS,), (5, 256)),
    "hybrid": ((2, 2), (WHOLE, ROWS), (11, 256)),
    "fsdp and rows": ((2, 2), (FSDP_OF_ROWS, ROWS), (512, 9)),
    "fsdp and columns": ((2, 2), (ROWS, COLUMNS), (9, 512)),
    "experts": ((4,), (ROWS,), (3, 9, 14)),
    "vector": ((4,), (ROWS,), (512,)),
    # Blocks of 128 that cross ranks: LLaMA-2-7B's 11008 rows on 16 of them, and what divides by nothing.
    "tall across": ((4,), (ROWS,), (688, 9)),
    "tall unevenly": ((4,), (ROWS,), (301, 9)),
    "wide across": ((4,), (ROWS,), (9, 301)),
    "columns across": ((4,), (COLUMNS,), (9, 768)),
    "inside one block": ((4,), (ROWS,), (41, 9)),
    "hybrid across": ((2, 2), (WHOLE, ROWS), (300, 9)),
    "fsdp and rows across": ((2, 2), (FSDP_OF_ROWS, ROWS), (308, 9)),
    "fsdp and columns across": ((2, 2), (ROWS, COLUMNS), (9, 300)),
    "experts and inner across": ((2, 2), (ROWS, INNER), (3, 9, 300)),
    "vector across": ((4,), (ROWS,), (300,)),
    "vector of no blocks": ((4,), (ROWS,), (5,)),
}


def in_8_bits(member: Member) -> dict[str, tuple[float, bool]]:
    """By layout: how far a sharded weight ends from a whole one, and whether its state is the same bytes."""

    def build(weights: list[tuple[str, nn.Parameter]]) -> ProjectedOptimizer:
        group = {"params": weights, "refresh_every": 2}
        return member.build([group], lr=0.01, weight_decay=0.1, state_dtype=torch.int8)

    spread, whole = trained(build, IN_8_BITS, steps=3)
    # Checkpoints of either load into the other.
    into_spread, into_whole = build(named(spread.weights)), build(named(whole.weights))
    into_spread.load_state_dict(whole.state)
    into_whole.load_state_dict(spread.state)
    found = {}
    for number, (name, weight) in enumerate(spread.weights.items()):
        ours, narrow = whole.state["state"][number], (torch.int8, torch.uint8)
        codes = [key for key, value in ours.items() if key.startswith("exp_avg") and value.dtype in narrow]
        assert codes
        codes += [f"{key}_scale" for key in codes]
        same = all(torch.equal(ours[key], into_whole.state[whole.weights[name]][key]) for key in codes)
        for theirs in (spread.state["state"][number], into_spread.state[weight]):
            same = same and not any(error(theirs[key], ours[key]) for key in codes)
        found[name] = error(weight, whole.weights[name]), same
    return found


@pytest.mark.parametrize(
    "member",
    partly_slow(
        [*FAMILY, ROWWISE],
        quick=[BY_NAME["apollo"]],  # which steps the vectors as AdamW does
    ),
    ids=str,
)
def test_moments_in_8_bits_are_the_same_on_every_mesh(ranks, member):
    """Random rounding goes by an element's place in the whole."""
    for found in ranks.run(in_8_bits, member):
        wrong = {name: each for name, each in found.items() if not each[0] <= 1e-12 or not each[1]}
        assert wrong == {}


def refused_columns() -> str:
    weight = nn.Parameter(shard(torch.ones(9, 768), mesh((4,)), (COLUMNS,)))
    weight.grad = shard(torch.ones(9, 768), mesh((4,)), (COLUMNS,))
    optimizer = Artemis([("w", weight)])
    with pytest.raises(ValueError, match=r"Give its group state_dtype=torch.bfloat16") as caught:
        optimizer.step()
    return str(caught.value)


def test_blocks_of_4_bits_that_would_cross_ranks_are_refused_by_name(ranks):
    for message in ranks.run(refused_columns):
        assert message.startswith("w (9, 768): the 768 columns of its exp_avg are split among 4 ranks")
        assert message.endswith("a multiple of 128 columns: among 2 ranks, in a mesh that replicates over the others")
        assert "with state_dtype='nf4' every 128" in message
