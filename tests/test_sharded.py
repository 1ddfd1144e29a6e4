"""A sharded step is the whole one: every optimizer, every layout, on two and four processes."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apollo_optim import APOLLO, Artemis
from family import FAMILY, WITHOUT_MOMENTUM, Member, partly_slow
from layouts import COLUMNS, FSDP_OF_ROWS, INNER, LAYOUTS, ROWS, WHOLE, Case, Run, cases, mesh, shard, whole_cases

# The slow ones are put together from others: their basis is that of one of these, and what shares a gain is another's.
SLOW = (
    "fira-gaussian", "galore-gaussian", "structured-element", "apollo-svd", "mini-svd", "flora-svd", "structured-tensor"
)  # fmt: skip
ROWWISE = Member("rowwise", APOLLO, {"rank": None}, {"second_moment": "rowwise"})
# A 4-bit momentum has weights of its own below: blocks of 128 must not cross from one rank's columns to another's.
MEMBERS = [
    *(member for member in FAMILY if member.name != "artemis"),
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
    pytest.param(Extent(3, 2, ("fsdp and rows", "fsdp and columns")), id="3 steps"),
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
    ranks = dist.get_world_size()
    # Each rank steps some of the ordinary weights, by itself, and tells the others where they end.
    own = whole_cases(DTYPES)[dist.get_rank() :: ranks]
    whole, sharded = (Run(member, each, refresh_every=extent.refresh_every) for each in (own, extent.cases()))
    for step in range(extent.steps):
        whole.step(step)
        sharded.step(step)
    ends: list[dict[Case, Tensor]] = [{}] * ranks
    dist.all_gather_object(ends, {case: weight.detach() for case, weight in whole.weights.items()})
    return sharded.errors({case: weight for each in ends for case, weight in each.items()})


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize(
    "member", partly_slow(MEMBERS, quick=[member for member in MEMBERS if member.name not in SLOW]), ids=str
)
def test_sharded_steps_equal_whole_steps(ranks, member, extent):
    for errors in ranks.run(compared, member, extent):
        wrong = {case: error for case, error in errors.items() if not error <= tolerance(member, case.dtype)}
        assert wrong == {}


IN_4_BITS = {
    "rows": ((4,), (ROWS,), (9, 41)),
    "no rows": ((4,), (ROWS,), (5, 130)),
    "columns": ((4,), (COLUMNS,), (7, 512)),
    "tall": ((2,), (COLUMNS,), (300, 256)),
    "both": ((2, 2), (ROWS, COLUMNS), (9, 256)),
    "rows twice": ((2, 2), (FSDP_OF_ROWS, ROWS), (41, 9)),
    "experts and inner": ((2, 2), (ROWS, INNER), (3, 5, 256)),
    "conv": ((4,), (COLUMNS,), (6, 128, 2, 2)),
}
"""Mesh, placements and shape."""


def in_4_bits() -> dict[str, tuple[float, bool]]:
    """By layout: how far a sharded weight ends from a whole one, and whether its state is the same bytes."""
    found = {}
    for name, (on, placements, shape) in IN_4_BITS.items():
        generator = torch.Generator().manual_seed(7)
        start, *gradients = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        whole = nn.Parameter(start.clone())
        spread = nn.Parameter(shard(start, mesh(on), placements))
        optimizers = [Artemis([("w", weight)], lr=0.01, weight_decay=0.1) for weight in (whole, spread)]
        for gradient in gradients:
            whole.grad, spread.grad = gradient, shard(gradient, mesh(on), placements)
            for optimizer in optimizers:
                optimizer.step()
        ours, theirs = optimizers[0].state[whole], optimizers[1].state[spread]
        same = all(torch.equal(ours[key], theirs[key].full_tensor()) for key in ("exp_avg", "exp_avg_scale"))
        found[name] = float((spread.full_tensor() - whole).detach().abs().max()), same
    return found


def test_momentum_in_4_bits_is_the_same_on_every_mesh(ranks):
    """Each rank packs its own part; all orthogonalise the same matrix."""
    for found in ranks.run(in_4_bits):
        # The same operations on the same numbers.
        assert found == dict.fromkeys(IN_4_BITS, (0.0, True))


IN_8_BITS = {
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
"""Mesh, placements and shape."""


def in_8_bits(member: Member) -> dict[str, tuple[float, bool]]:
    """By layout: how far a sharded weight ends from a whole one, and whether its state is the same bytes."""
    found = {}
    for name, (on, placements, shape) in IN_8_BITS.items():
        generator = torch.Generator().manual_seed(7)
        start, *gradients = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
        whole = nn.Parameter(start.clone())
        spread = nn.Parameter(shard(start, mesh(on), placements))
        options = {"lr": 0.01, "weight_decay": 0.1, "state_dtype": torch.int8}
        optimizers = [
            member.build([{"params": [("w", weight)], "refresh_every": 3}], **options) for weight in (whole, spread)
        ]
        for gradient in gradients:
            whole.grad, spread.grad = gradient, shard(gradient, mesh(on), placements)
            for optimizer in optimizers:
                optimizer.step()
        ours, theirs = optimizers[0].state[whole], optimizers[1].state[spread]
        codes = [key for key in ours if key.startswith("exp_avg") and ours[key].dtype in (torch.int8, torch.uint8)]
        assert codes
        codes += [f"{key}_scale" for key in codes]
        same = all(torch.equal(ours[key], theirs[key].full_tensor()) for key in codes)
        # Checkpoints of either load into the other.
        for weight, saved in ((spread, optimizers[0]), (whole, optimizers[1])):
            loaded = member.build([{"params": [("w", weight)], "refresh_every": 3}], **options)
            loaded.load_state_dict(saved.state_dict())
            kept = loaded.state[weight]
            same = same and all(
                torch.equal(ours[key], kept[key].full_tensor() if weight is spread else kept[key]) for key in codes
            )
        found[name] = float((spread.full_tensor() - whole).detach().abs().max()), same
    return found


QUICK_IN_8_BITS = "apollo", "adamw"


@pytest.mark.parametrize(
    "member",
    partly_slow(
        [*FAMILY, ROWWISE],
        quick=[member for member in FAMILY if member.name in QUICK_IN_8_BITS],
    ),
    ids=str,
)
def test_moments_in_8_bits_are_the_same_on_every_mesh(ranks, member):
    """Random rounding goes by an element's place in the whole."""
    for found in ranks.run(in_8_bits, member):
        wrong = {name: each for name, each in found.items() if each[0] > 1e-12 or not each[1]}
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
