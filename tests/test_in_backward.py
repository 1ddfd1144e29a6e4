"""Stepping in backward: the ordinary mode's numbers, without its gradients."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from apollo_optim import APOLLO, APOLLOMini, step_in_backward
from family import BY_NAME, DISTINCT, FAMILY, Member, partly_slow
from runs import bits, snapshot
from training import batch, model_of, one, pair, train

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)


# The same numbers.


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_numbers_are_the_ordinary_modes(member: Member, dtype: torch.dtype):
    """Bit for bit, across a refresh, by the same loop with the same scheduler, and without a warning."""
    (first, ordinary), (second, in_backward) = (one(member, dtype=dtype) for _ in range(2))
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, range(5))
        assert float(optimizer.state[model.seldom.weight]["step"]) == 3
        assert float(optimizer.state[model.embed.weight]["step"]) == 5
    assert snapshot(in_backward) == snapshot(ordinary)


@every_optimizer
def test_the_modes_can_take_turns(member: Member):
    (first, ordinary), (second, mixed) = pair(member)
    train(first, ordinary, range(6))
    for start in (0, 2, 4):
        handle = step_in_backward(second, mixed)
        train(second, mixed, range(start, start + 1))
        handle.remove()
        handle.remove()
        train(second, mixed, range(start + 1, start + 2))
    assert snapshot(mixed) == snapshot(ordinary)


def test_a_handle_that_was_removed_leaves_the_next_one_alone():
    model, optimizer = one()
    first = step_in_backward(model, optimizer)
    first.remove()
    step_in_backward(model, optimizer)
    first.remove()
    model(batch(0)).backward()
    assert all(weight.grad is None for weight in model.parameters())


def test_a_compiled_model_steps_in_backward():
    """Compiled without fusing anything, so that the gradients are the same to the last bit."""
    (first, ordinary), (second, in_backward) = pair(BY_NAME["apollo"])
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        for number in range(2):
            compiled(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert snapshot(in_backward) == snapshot(ordinary)


def test_under_compiled_autograd_a_step_that_was_forgotten_is_noticed():
    """It drops the call at the end of a backward, which tells elsewhere whether that has failed."""
    (first, ordinary), (second, in_backward) = pair(BY_NAME["apollo"])
    step_in_backward(second, in_backward)

    def backward(model: nn.Module, number: int) -> None:
        with compiled_autograd._enable(torch.compile(backend="eager")):
            model(batch(number)).backward()

    for model, optimizer in ((first, ordinary), (second, in_backward)):
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
    assert snapshot(in_backward) == snapshot(ordinary)
    backward(second, 3)
    with pytest.raises(RuntimeError, match=r"a second backward came before optimizer\.step\(\)"):
        backward(second, 4)


def test_a_backward_inside_autocast_steps_as_one_outside():
    (first, ordinary), (second, in_backward) = pair(BY_NAME["apollo"])
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        for number in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert snapshot(in_backward) == snapshot(ordinary)


@every_optimizer
def test_an_option_that_changes_counts_from_the_next_backward(member: Member):
    (first, ordinary), (second, in_backward) = pair(member)
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        train(model, optimizer, range(2))
        optimizer.param_groups[0].update(lr=0.5, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-2, refresh_every=2)
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "scale": 0.7 if member.takes_scale else 1.0}
        train(model, optimizer, range(2, 4))
    assert snapshot(in_backward) == snapshot(ordinary)


def test_a_group_that_is_replaced_by_another_dict_counts_from_the_next_backward():
    """Also where its options are those that are read at every step, by which no plan can tell it."""
    (first, ordinary), (second, in_backward) = pair()
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        train(model, optimizer, range(2))
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "weight_decay": 0.3}
        train(model, optimizer, range(2, 4))
    assert snapshot(in_backward) == snapshot(ordinary)


def test_gradients_that_are_not_finite_are_skipped_and_counted_as_ever():
    (first, ordinary), (second, in_backward) = pair()
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        hook = model.down.weight.register_hook(lambda grad: grad * torch.inf)
        train(model, optimizer, range(2))
        hook.remove()
        train(model, optimizer, range(2, 4))
        assert optimizer.skipped() == 2
    assert snapshot(in_backward) == snapshot(ordinary)
    assert in_backward.statistics() == pytest.approx(ordinary.statistics())


# Gradients.


def test_backward_steps_every_weight_once_and_leaves_no_gradient():
    model, optimizer = one()
    start = {name: bits(weight) for name, weight in model.named_parameters()}
    step_in_backward(model, optimizer)
    model(batch(0)).backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert {float(optimizer.state[weight]["step"]) for weight in model.parameters()} == {1}
    after = {name: bits(weight) for name, weight in model.named_parameters()}
    assert [name for name in start if after[name] == start[name]] == []


def test_weights_that_a_batch_does_not_use_are_left_alone():
    model, optimizer = one()
    step_in_backward(model, optimizer)
    before = bits(model.seldom.weight)
    train(model, optimizer, range(1, 2))
    assert bits(model.seldom.weight) == before
    assert model.seldom.weight not in optimizer.state


def test_a_step_by_itself_does_nothing():
    model, optimizer = one()
    step_in_backward(model, optimizer)
    train(model, optimizer, range(2))
    before = snapshot(optimizer)
    optimizer.step()
    optimizer.step()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("trained", [True, False])
def test_a_step_applies_and_frees_gradients_that_are_still_there(trained: bool):
    (first, ordinary), (second, in_backward) = pair()
    second.requires_grad_(trained)
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        for number, weight in enumerate(model.parameters()):
            weight.grad = torch.full_like(weight, number / 10)
        optimizer.step()
    assert all(weight.grad is None for weight in second.parameters())
    assert snapshot(in_backward) == snapshot(ordinary)


def test_parameters_that_the_optimizer_does_not_have_keep_their_gradients():
    model = model_of()
    some = {name: weight for name, weight in model.named_parameters() if name.startswith("up")}
    optimizer = APOLLO(list(some.items()), rank=4)
    step_in_backward(model, optimizer)
    model(batch(0)).backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is None} == set(some)


def test_two_optimizers_share_a_model():
    outcomes = []
    for in_backward in (False, True):
        model = model_of()
        named = list(model.named_parameters())
        optimizers = [APOLLO(named[:3], rank=4), APOLLOMini(named[3:])]
        if in_backward:
            for optimizer in optimizers:
                step_in_backward(model, optimizer)
        for number in range(3):
            model(batch(number)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        outcomes.append([snapshot(optimizer) for optimizer in optimizers])
    assert outcomes[0] == outcomes[1]


def test_a_frozen_weight_and_a_group_that_comes_later_are_stepped_by_step():
    (first, ordinary), (second, in_backward) = pair()
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        model.up.weight.requires_grad_(False)
        if optimizer is in_backward:
            step_in_backward(model, optimizer)
        model(batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.up.weight.requires_grad_()
        model.late = nn.Linear(12, 12)
        nn.init.ones_(model.late.weight)
        nn.init.ones_(model.late.bias)
        optimizer.add_param_group({"params": list(model.late.named_parameters())})
        for number in range(2):
            (model(batch(number)) + model.late(model.embed(batch(number))).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(optimizer.state[model.up.weight]["step"]) == 2
        assert float(optimizer.state[model.late.weight]["step"]) == 2
    assert snapshot(in_backward) == snapshot(ordinary)


# Accumulation.


@every_optimizer
def test_accumulation_is_the_ordinary_modes(member: Member):
    """Also of a weight that the last backward of the batch does not use."""
    (first, ordinary), (second, in_backward) = pair(member)
    handle = step_in_backward(second, in_backward)
    for number in range(3):
        for micro in range(3):
            (first(batch(3 * number + micro), micro != 2) / 3).backward()
        ordinary.step()
        ordinary.zero_grad()

        with handle.accumulate():
            for micro in range(2):
                (second(batch(3 * number + micro)) / 3).backward()
        assert all(weight.grad is not None for weight in second.parameters())
        (second(batch(3 * number + 2), False) / 3).backward()
        assert {name for name, weight in second.named_parameters() if weight.grad is not None} == {
            "seldom.weight",
            "seldom.bias",
        }
        in_backward.step()
    assert snapshot(in_backward) == snapshot(ordinary)


def test_a_batch_that_only_accumulates_is_stepped_by_step():
    (first, ordinary), (second, in_backward) = pair()
    handle = step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        for number in range(3):
            with handle.accumulate():
                model(batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert snapshot(in_backward) == snapshot(ordinary)
    assert in_backward.statistics() == ordinary.statistics()


def test_accumulation_inside_accumulation_ends_with_the_outer_one():
    model, optimizer = one()
    handle = step_in_backward(model, optimizer)
    with handle.accumulate():
        with handle.accumulate():
            pass
        model(batch(0)).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_loop_can_be_asked_whether_it_accumulates():
    (first, ordinary), (second, in_backward) = pair()
    last = [False]
    step_in_backward(second, in_backward, accumulating=lambda: not last[0])
    for number in range(6):
        last[0] = number % 2 == 1
        for model in (first, second):
            model(batch(number)).backward()
        assert all((weight.grad is None) == last[0] for weight in second.parameters())
        if last[0]:
            for optimizer in (ordinary, in_backward):
                optimizer.step()
                optimizer.zero_grad()
    assert snapshot(in_backward) == snapshot(ordinary)


def test_a_closure_is_called_once_and_its_backward_steps():
    (first, ordinary), (second, in_backward) = pair()
    step_in_backward(second, in_backward)
    train(first, ordinary, range(1))
    calls = []

    def closure():
        in_backward.zero_grad()
        loss = second(batch(0))
        loss.backward()
        calls.append(loss.item())
        return loss

    assert in_backward.step(closure).item() == calls[0]
    assert len(calls) == 1
    assert snapshot(in_backward).weights == snapshot(ordinary).weights
