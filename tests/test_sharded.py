"""A sharded step is the whole one: every optimizer, every layout, on two and four processes."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from apollo_optim import APOLLO
from family import FAMILY, WITHOUT_MOMENTUM, Member, partly_slow
from layouts import LAYOUTS, Case, Run, cases, whole_cases

# The slow ones differ from others in what is no matter of parts: a basis that needs no gradient, and AdamW's rule.
SLOW = "fira-gaussian", "galore-gaussian", "structured-element"
MEMBERS = [*FAMILY, WITHOUT_MOMENTUM, Member("apollo-1", APOLLO, {"rank": 1})]
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
    pytest.param(Extent(6, 3, ("rows", "columns of two", "fsdp and rows", "fsdp and columns")), id="6 steps"),
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
