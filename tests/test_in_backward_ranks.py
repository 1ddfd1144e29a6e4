"""Stepping in backward on several ranks: the numbers of DistributedDataParallel, without its gradients."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.in_backward.averaging import IN_FLIGHT
from family import BY_NAME, DISTINCT, FAMILY, Member, partly_slow
from runs import Snapshot, snapshot
from training import batch, model_of, one

Uses = Callable[[int, int], bool]
"""Whether a rank uses all of the model in a batch."""


def some_batches(number: int, rank: int) -> bool:
    return number % 3 != 1


def some_ranks(number: int, rank: int) -> bool:
    """Also so that the order of the first rank's first batch lacks what others have."""
    return (number + rank) % 2 == 1


@cache
def pairs() -> list[dist.ProcessGroup]:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def own_pair() -> dist.ProcessGroup:
    """Two of the four ranks, this one among them: the sum of two numbers does not depend on their order."""
    return pairs()[dist.get_rank() // 2]


def own_batch(number: int) -> Tensor:
    """What this rank learns from."""
    return batch(10 * number + dist.get_rank())


def train(model: nn.Module, optimizer: Any, uses: Uses, steps: range) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in steps:
        model(own_batch(number), uses(number, dist.get_rank())).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def in_both_ways(member: Member, dtype: torch.dtype, uses: Uses) -> tuple[Snapshot, Snapshot]:
    """What this rank has after some steps by DistributedDataParallel, and by ours."""
    (first, ordinary), (second, in_backward) = (one(member, dtype=dtype) for _ in range(2))
    wrapped = DistributedDataParallel(first, process_group=own_pair(), find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_in_backward(second, in_backward, group=own_pair())
        train(second, in_backward, uses, range(4))
    train(wrapped, ordinary, uses, range(4))
    return snapshot(ordinary), snapshot(in_backward)


# Gradients are averaged alike for every member, and how each is stepped in backward test_in_backward.py shows.
@pytest.mark.parametrize(
    ("member", "dtype"),
    partly_slow(
        [(member, dtype) for member in FAMILY for dtype in (torch.float32, torch.bfloat16)],
        quick=[
            (BY_NAME["apollo"], torch.float32),
            (BY_NAME["flora"], torch.bfloat16),
        ],
    ),
    ids=str,
)
def test_the_numbers_are_those_of_distributed_data_parallel(ranks, member: Member, dtype: torch.dtype):
    """Bit for bit, across a refresh, by the same loop; every third batch does without a layer."""
    answers = ranks.run(in_both_ways, member, dtype, some_batches)
    for ordinary, in_backward in answers:
        assert in_backward == ordinary
    assert answers[0] == answers[1] != answers[2] == answers[3]


def with_averages_and_alone(member: Member, dtype: torch.dtype) -> tuple[Snapshot, Snapshot]:
    """What it has after steps under DistributedDataParallel, and after steps alone by the same averages."""
    (first, under), (second, alone) = (one(member, dtype=dtype) for _ in range(2))
    wrapped = DistributedDataParallel(first, process_group=own_pair(), broadcast_buffers=False)
    for number in range(4):
        wrapped(own_batch(number)).backward()
        for weight, other in zip(first.parameters(), second.parameters(), strict=True):
            other.grad = None if weight.grad is None else weight.grad.clone()
        for optimizer in (under, alone):
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(under), snapshot(alone)


# Flora, Fira and APOLLO take steps that grow with the gradient, and pass on whatever differs in it.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "member", partly_slow(DISTINCT, quick=[BY_NAME[name] for name in ("apollo", "flora")]), ids=str
)
def test_a_step_under_distributed_data_parallel_is_that_of_the_average(ranks, member: Member, dtype: torch.dtype):
    """Bit for bit. A gradient of the whole batch is another: its sums are rounded in another order."""
    for under, alone in ranks.run(with_averages_and_alone, member, dtype):
        assert under == alone


def test_ranks_may_use_different_weights(ranks):
    """A weight that only the other rank has a gradient of is stepped on both."""
    answers = ranks.run(in_both_ways, BY_NAME["apollo"], torch.float32, some_ranks)
    for ordinary, in_backward in answers:
        assert in_backward == ordinary
    assert answers[0] == answers[1]


FIRST_RANKS_WAY = 6, 0, 3, 1, 4, 2, 5


def parts_in_the_end() -> list[list[int]]:
    """Which weights are stepped together after some batches; ranks go through them in different orders."""
    model = nn.ParameterList(torch.ones(4) for _ in range(6)).append(torch.ones(8))
    optimizer = APOLLO(model, rank=None)
    number_of = {weight: number for number, weight in enumerate(model)}
    parts: list[list[int]] = []
    step_part_ = optimizer._step_part_
    optimizer._step_part_ = lambda each: (parts.append([number_of[weight] for weight in each]), step_part_(each))[1]
    step_in_backward(model, optimizer, group="world")
    for number in range(4):
        parts.clear()
        x = torch.ones(())
        for each in FIRST_RANKS_WAY if dist.get_rank() == 0 else range(7):
            x = x * model[each].sum().tanh()
        if number > 0 or dist.get_rank() > 0:
            x.backward()
        optimizer.step()
    return parts


def test_ranks_step_together_what_comes_together_on_the_first_as_soon_as_it_has_a_batch(ranks):
    assert ranks.run(parts_in_the_end) == [[[5, 2], [4, 1], [3, 0], [6]]] * 4


def written_by_hand() -> tuple[Snapshot, Snapshot]:
    (first, ordinary), (second, in_backward) = (one(BY_NAME["apollo"]) for _ in range(2))
    second.requires_grad_(False)
    step_in_backward(second, in_backward, group="world")
    for model, optimizer, size in ((first, ordinary, 1.5), (second, in_backward, dist.get_rank())):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, size)
        optimizer.step()
    return snapshot(ordinary), snapshot(in_backward)


def test_gradients_that_are_written_to_frozen_weights_are_averaged_too(ranks):
    for ordinary, in_backward in ranks.run(written_by_hand):
        assert in_backward == ordinary


# On four ranks, against gradients that are averaged by hand.


def averaged_by_hand(model: nn.Module) -> None:
    """The same sums as ours: with more than two ranks their order depends on the size of what is added up."""
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad /= 4
            dist.all_reduce(weight.grad)


def accumulated_in_both_ways() -> tuple[Snapshot, Snapshot]:
    (first, ordinary), (second, in_backward) = (one(BY_NAME["apollo"]) for _ in range(2))
    handle = step_in_backward(second, in_backward, group="world")
    for number in range(0, 6, 2):
        for model in (first, second):
            with handle.accumulate():
                model(own_batch(number)).backward()
            # What only the earlier backward has a gradient of is averaged and stepped too.
            model(own_batch(number + 1), False).backward()
        averaged_by_hand(first)
        for optimizer in (ordinary, in_backward):
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(ordinary), snapshot(in_backward)


def test_only_the_last_backward_of_a_batch_averages(ranks):
    answers = ranks.run(accumulated_in_both_ways)
    assert [in_backward == ordinary for ordinary, in_backward in answers] == [True] * 4
    assert all(answer == answers[0] for answer in answers)


def clipped_norms(limit: float | None) -> tuple[list[float], list[float], list[bytes]]:
    """The norms this rank keeps, those of the gradients averaged by hand, and its weights at the end."""
    model, optimizer = one()
    handle = step_in_backward(model, optimizer, group="world", clip_norm=limit)
    found, expected = [], []
    for number in range(3):
        twin = model_of()
        twin.load_state_dict(model.state_dict())
        twin(own_batch(number)).backward()
        averaged_by_hand(twin)
        expected.append(float(nn.utils.get_total_norm(weight.grad for weight in twin.parameters())))
        model(own_batch(number)).backward()
        optimizer.step()
        found.append(float(optimizer.param_groups[0]["previous_norm"]))
    handle.remove()
    return found, expected, snapshot(optimizer).weights


def test_clipping_goes_by_the_norm_of_the_mean(ranks):
    answers = ranks.run(clipped_norms, 0.01)
    for found, expected, weights in answers:
        # Float32 sums of some thousand squares in another order.
        assert found == pytest.approx(expected, rel=1e-6)
        assert weights == answers[0][2]
    assert ranks.run(clipped_norms, 1e6)[0][2] != answers[0][2]


# Memory.


GLOO_THREADS = 2
LAYER = 4
"""Weights of one."""
WAITING = 2
"""Of the three beside its matrix, which is as large as a bucket may be, those that wait for the third."""


class Deep(nn.Module):
    """Layers in the order of their use, like a transformer's."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def gradients_alive(batches: int) -> list[int]:
    """The most gradients that were there at one time in each batch."""
    model = Deep(8)
    optimizer = APOLLO(model, rank=2)
    seen: list[StorageWeakRef] = []
    counts: list[int] = []

    def count(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(StorageWeakRef(weight.grad.untyped_storage()))
        counts.append(sum(not gradient.expired() for gradient in seen))

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(count)
    step_in_backward(model, optimizer, group="world")
    found = []
    for _ in range(batches):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        assert all(gradient.expired() for gradient in seen)
        found.append(max(counts))
        counts.clear()
    return found


def test_few_gradients_are_there_at_a_time(ranks):
    """Those that travel or wait and the one that comes; in the first batch, whose order is a guess, a layer's too.

    Each of gloo's two threads may keep a finished one until it looks for the next.
    """
    for first, *later in ranks.run(gradients_alive, 3):
        assert all(IN_FLIGHT + 1 <= most <= IN_FLIGHT + 1 + GLOO_THREADS + WAITING for most in later)
        assert IN_FLIGHT + 1 <= first <= IN_FLIGHT + 1 + GLOO_THREADS + WAITING + LAYER
