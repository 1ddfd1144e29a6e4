"""A sharded step is the whole one: every optimizer, every layout, on two and four processes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from apollo_optim import APOLLO
from family import FAMILY, Member
from layouts import Case, Run, cases, whole_cases

STEPS = 30
MEMBERS = [*FAMILY, Member("apollo-1", APOLLO, {"rank": 1})]


DTYPES = torch.float32, torch.float64


def tolerance(member: Member, dtype: torch.dtype) -> float:
    """Sums in another order differ by a few float32 roundings.

    A channel of rank 1 divides by one number, and an SVD by gaps between singular values, which magnify them.
    """
    if dtype == torch.float64:
        return 1e-12
    return 2e-5 if member.uses_svd or member.options.get("rank") == 1 else 1e-6


def compared(member: Member) -> dict[Case, float]:
    """How far each weight of this rank is from the run of ordinary weights after `STEPS` steps."""
    ranks = dist.get_world_size()
    # Each rank steps some of the ordinary weights, by itself, and tells the others where they end.
    whole, sharded = Run(member, whole_cases(DTYPES)[dist.get_rank() :: ranks]), Run(member, cases(DTYPES))
    for step in range(STEPS):
        whole.step(step)
        sharded.step(step)
    ends: list[dict[Case, Tensor]] = [{}] * ranks
    dist.all_gather_object(ends, {case: weight.detach() for case, weight in whole.weights.items()})
    return sharded.errors({case: weight for each in ends for case, weight in each.items()})


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_sharded_steps_equal_whole_steps(ranks, member):
    for errors in ranks.run(compared, member):
        wrong = {case: error for case, error in errors.items() if not error <= tolerance(member, case.dtype)}
        assert wrong == {}
