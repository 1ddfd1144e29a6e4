"""Stepping in backward on several ranks: how it begins and ends, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from apollo_optim import APOLLO, APOLLOMini, step_in_backward
from runs import Snapshot, bits, snapshot
from test_in_backward_ranks import own_batch, some_batches, train
from test_in_backward_refused import process_group
from training import batch, model_of, one


def begun_apart() -> tuple[list[bytes], list[bytes]]:
    """Weights and buffers that each rank drew for itself, before and after."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    model[1].running_mean.fill_(dist.get_rank())
    before = [bits(tensor) for tensor in model.state_dict().values()]
    step_in_backward(model, APOLLOMini(model), group="world")
    return before, [bits(tensor) for tensor in model.state_dict().values()]


def test_ranks_begin_with_what_the_first_has(ranks):
    answers = ranks.run(begun_apart)
    assert answers[0][0] != answers[1][0]
    assert [after for _, after in answers] == [answers[0][0]] * 4


def refused(make: Callable[[int], tuple[nn.Module, Any]]) -> None:
    with pytest.raises(ValueError, match="the ranks of group do not train the same"):
        step_in_backward(*make(dist.get_rank()), group="world")


def of_another_width(rank: int) -> tuple[nn.Module, Any]:
    model = nn.Linear(4 + rank // 3, 4)
    return model, APOLLOMini(model)


def of_another_seed(rank: int) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 4)
    return model, APOLLOMini(model, seed=rank)


def in_another_order(rank: int) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 4)
    return model, APOLLOMini(list(model.parameters())[:: -1 if rank else 1])


@pytest.mark.parametrize("make", [of_another_width, of_another_seed, in_another_order])
def test_models_that_differ_between_ranks_are_refused_on_all(ranks, make):
    ranks.run(refused, make)


def ended_early() -> tuple[Snapshot, Snapshot]:
    """Handles taken away after a step, and between backward and the step."""
    runs = [one() for _ in range(2)]
    for (model, optimizer), early in zip(runs, (False, True), strict=True):
        handle = step_in_backward(model, optimizer, group="world")
        model(own_batch(0)).backward()
        if not early:
            optimizer.step()
        handle.remove()
        optimizer.step()
    (_, late), (_, early) = runs
    return snapshot(late), snapshot(early)


def test_a_handle_that_goes_applies_what_is_on_its_way(ranks):
    for late, early in ranks.run(ended_early):
        assert early == late


def steps_without_a_batch() -> tuple[bool, int]:
    """Whether steps between batches change nothing, and how many weights checkpointing makes state for."""
    model, optimizer = one()
    step_in_backward(model, optimizer, group="world")
    get_optimizer_state_dict(model, optimizer)
    made = len(optimizer.state)
    train(model, optimizer, some_batches, range(2))
    before = snapshot(optimizer)
    optimizer.step()
    optimizer.step()
    return snapshot(optimizer) == before, made


def test_a_step_by_itself_does_nothing_on_any_rank(ranks):
    assert ranks.run(steps_without_a_batch) == [(True, len(list(model_of().parameters())))] * 4


def a_rank_without_data() -> list[bytes]:
    model, optimizer = one()
    step_in_backward(model, optimizer, group="world")
    for number in range(3):
        if dist.get_rank() != number:
            model(own_batch(number)).backward()
        optimizer.step()
    return snapshot(optimizer).weights


def test_a_rank_that_has_no_batch_counts_as_zeros_and_keeps_nobody_waiting(ranks):
    answers = ranks.run(a_rank_without_data)
    assert answers == [answers[0]] * 4


def second_backward() -> bool:
    """Whether a second backward before the step is refused, and its gradients leave the first's alone."""
    runs = [one() for _ in range(2)]
    for (model, optimizer), twice in zip(runs, (False, True), strict=True):
        step_in_backward(model, optimizer, group="world")
        model(own_batch(0)).backward()
        if twice:
            # The weights have been stepped, and the graph is a new one.
            with pytest.raises(RuntimeError, match=r"a second backward came before optimizer\.step"):
                model(own_batch(1)).backward()
        optimizer.step()
    (_, once), (_, again) = runs
    return snapshot(once) == snapshot(again)


def test_a_second_backward_is_refused_and_changes_nothing_that_travels(ranks):
    assert ranks.run(second_backward) == [True] * 4


def sparse_gradient() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    step_in_backward(model, APOLLO(model.parameters(), rank=None), group="world")
    with pytest.raises(RuntimeError, match=r"a weight \(9, 4\) has a sparse gradient; make it dense"):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused(ranks):
    ranks.run(sparse_gradient)


def test_a_group_needs_ranks():
    model, optimizer = one()
    with pytest.raises(ValueError, match=r"group='world' needs torch.distributed: call init_process_group\(\) first"):
        step_in_backward(model, optimizer, group="world")
    with process_group():
        with pytest.raises(ValueError, match=r'group must be "world".*got \'all\''):
            step_in_backward(model, optimizer, group="all")
        step_in_backward(model, optimizer, group="world")
        model(batch(0)).backward()
        assert all(weight.grad is None for weight in model.parameters()), "one rank has nobody to wait for"


def several_devices() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"group needs all weights .* on one device, got \['cpu', 'meta'\]"):
        step_in_backward(model, APOLLOMini(model), group="world")


def test_weights_on_several_devices_are_refused(ranks):
    ranks.run(several_devices)
