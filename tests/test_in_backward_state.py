"""Stepping in backward: what is saved and loaded, and clipping by the norm that is."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import quantize_weights_
from apollo_optim.stepping import plain
from apollo_optim.stepping.weight import Report, WeightStep
from family import BY_NAME, DISTINCT, FAMILY, Member, partly_slow
from runs import snapshot
from training import Model, batch, model_of, one, optimizer_of, pair, train

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)


@every_optimizer
def test_a_checkpoint_goes_from_either_mode_to_either(member: Member):
    model, whole = one(member)
    train(model, whole, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": whole.state_dict()}, saved)
    train(model, whole, range(2, 5))
    for in_backward in (False, True):
        saved.seek(0)
        loaded = torch.load(saved, weights_only=True)
        resumed = model_of()
        optimizer = optimizer_of(member, resumed)
        if in_backward:
            handle = step_in_backward(resumed, optimizer)
            train(resumed, optimizer, range(1))
        resumed.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(resumed, optimizer, range(2, 5))
        assert snapshot(optimizer) == snapshot(whole)
        if in_backward:
            again = optimizer_of(member, resumed)
            handle.remove()
            again.load_state_dict(optimizer.state_dict())
            assert snapshot(again) == snapshot(whole)


@every_optimizer
def test_distributed_checkpoints_first_step_only_makes_state(member: Member):
    """torch.distributed.checkpoint has a fresh optimizer step on zeros, to learn what there is to load."""
    (model, optimizer), (other, resumed) = pair(member)
    step_in_backward(model, optimizer)
    step_in_backward(other, resumed)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other.load_state_dict(model.state_dict())
    before = snapshot(resumed).weights
    get_optimizer_state_dict(other, resumed)
    assert snapshot(resumed).weights == before
    assert all({"step", "seed"} <= resumed.state[weight].keys() for weight in other.parameters())
    set_optimizer_state_dict(other, resumed, saved)
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert snapshot(resumed)[:2] == snapshot(optimizer)[:2]


def test_copies_are_in_the_ordinary_mode():
    model, optimizer = one()
    step_in_backward(model, optimizer)
    train(model, optimizer, range(2))
    other, twin = copy.deepcopy((model, optimizer))
    other(batch(2)).backward()
    assert all(weight.grad is not None for weight in other.parameters())
    assert snapshot(twin) == snapshot(optimizer)
    twin.step()
    model(batch(2)).backward()
    optimizer.step()
    assert snapshot(twin) == snapshot(optimizer)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_cannot_be_copied(copied):
    handle = step_in_backward(*one())
    with pytest.raises(TypeError, match=r"belongs to its model and cannot be copied: copy model and optimizer"):
        copied(handle)


def test_state_that_is_emptied_begins_anew():
    (first, ordinary), (second, in_backward) = pair()
    step_in_backward(second, in_backward)
    for model, optimizer in ((first, ordinary), (second, in_backward)):
        train(model, optimizer, range(2))
        optimizer.state[model.up.weight].clear()
        train(model, optimizer, range(2, 4))
        assert float(optimizer.state[model.up.weight]["step"]) == 2
    assert snapshot(in_backward) == snapshot(ordinary)


# Clipping.

LIMIT = 0.05
"""Below every gradient norm of these runs."""


def clipped_by_hand(model: Model, optimizer: ProjectedOptimizer, steps: range, previous: Tensor) -> Tensor:
    """Each batch by the norm of the one before, in the ordinary mode."""
    for number in steps:
        model(batch(number), number % 3 != 1).backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in grads]).norm()
        assert norm > 2 * LIMIT
        for grad in grads:
            grad.mul_((LIMIT / (previous + 1e-6)).clamp(max=1.0).float() if previous > 0 else 1.0)
        previous = norm
        optimizer.step()
        optimizer.zero_grad()
    return previous


def test_clip_norm_clips_by_the_norm_of_the_previous_batch():
    (first, ordinary), (second, in_backward) = pair(BY_NAME["adamw"])
    step_in_backward(second, in_backward, clip_norm=LIMIT)
    norm = torch.tensor(0.0, dtype=torch.float64)
    for number in range(4):
        norm = clipped_by_hand(first, ordinary, range(number, number + 1), norm)
        second(batch(number), number % 3 != 1).backward()
        in_backward.step()
        # A norm in float32 of less than a thousand numbers: a few roundings, of it and of the factor.
        torch.testing.assert_close(
            in_backward.param_groups[0]["previous_norm"].double(), norm, rtol=1e-6, atol=0, check_dtype=False
        )
        for ours, expected in zip(second.parameters(), first.parameters(), strict=True):
            state, reference = in_backward.state.get(ours, {}), ordinary.state.get(expected, {})
            assert state.keys() == reference.keys()
            # Of the gradients themselves; AdamW's weights divide by their size.
            torch.testing.assert_close(state.get("exp_avg"), reference.get("exp_avg"), rtol=1e-5, atol=1e-8)


def test_what_divides_is_above_the_norm_as_in_torch():
    model = nn.ParameterList([nn.Parameter(torch.ones(1))])
    optimizer = APOLLO(model, rank=None, betas=(0.5, 0.999))
    step_in_backward(model, optimizer, clip_norm=5e-7)
    for _ in range(2):
        (1e-6 * model[0].sum()).backward()
        optimizer.step()
    # The first gradient is taken as it is, and of the second a quarter: 5e-7 / (1e-6 + 1e-6).
    assert optimizer.state[model[0]]["exp_avg"].item() == pytest.approx(0.25e-6 + 0.125e-6)


def test_a_clipped_model_may_be_widened():
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    optimizer = APOLLO(model, rank=None)
    step_in_backward(model, optimizer, clip_norm=1.0)
    for _ in range(2):
        (2 * model[0].sum()).backward()
        optimizer.step()
        assert float(optimizer.param_groups[0]["previous_norm"]) == pytest.approx(2 * 3**0.5)
        model.double()


def test_a_first_group_may_be_empty():
    model = nn.Linear(16, 32)
    optimizer = APOLLO([{"params": []}, {"params": list(model.parameters())}], rank=4)
    step_in_backward(model, optimizer, clip_norm=1.0)
    before = model.weight.detach().clone()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_limit_that_no_norm_reaches_changes_no_bit():
    (first, ordinary), (second, in_backward) = pair()
    step_in_backward(second, in_backward, clip_norm=1e6)
    train(first, ordinary, range(4))
    train(second, in_backward, range(4))
    assert snapshot(in_backward)[:2] == snapshot(ordinary)[:2]


def test_a_clipped_run_resumes_from_a_distributed_checkpoint():
    (model, optimizer), (resumed, again) = pair()
    for each, over in ((model, optimizer), (resumed, again)):
        step_in_backward(each, over, clip_norm=LIMIT)
    train(model, optimizer, range(2))
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, again, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    train(model, optimizer, range(2, 4))
    train(resumed, again, range(2, 4))
    assert snapshot(again)[:2] == snapshot(optimizer)[:2]


@pytest.mark.parametrize("handle_first", [False, True])
def test_a_clipped_run_resumes_bit_for_bit(handle_first: bool):
    (model, optimizer), (resumed, again) = pair()
    step_in_backward(model, optimizer, clip_norm=LIMIT)
    train(model, optimizer, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    if handle_first:
        step_in_backward(resumed, again, clip_norm=LIMIT)
    resumed.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    if not handle_first:
        step_in_backward(resumed, again, clip_norm=LIMIT)
    train(model, optimizer, range(2, 4))
    train(resumed, again, range(2, 4))
    assert snapshot(again) == snapshot(optimizer)


def test_the_norm_of_a_clipped_batch_counts_every_weight_once_and_finite_ones_only():
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, dtype=torch.float64))])
    optimizer = APOLLO(model, rank=None)
    handle = step_in_backward(model, optimizer, clip_norm=1.0)

    def norm_after(*factors: float) -> float:
        for factor in factors[:-1]:
            with handle.accumulate():
                (factor * (model[0].sum() + model[1].sum())).backward()
        (factors[-1] * (model[0].sum() + model[1].sum())).backward()
        optimizer.step()
        return float(optimizer.param_groups[0]["previous_norm"])

    assert norm_after(2.0) == pytest.approx(2 * 14**0.5)
    assert norm_after(1.0, 2.0) == pytest.approx(3 * 14**0.5)
    model[1].register_hook(lambda grad: grad * torch.inf)
    assert norm_after(2.0) == pytest.approx(2 * 12**0.5)
    assert optimizer.skipped() == 1
    before = float(optimizer.param_groups[0]["previous_norm"])
    optimizer.step()
    assert float(optimizer.param_groups[0]["previous_norm"]) == before
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert "previous_norm" not in optimizer.param_groups[0]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_model_that_is_let_go_is_freed(clip_norm: float | None):
    model, optimizer = one(BY_NAME["apollo"])
    step_in_backward(model, optimizer, clip_norm=clip_norm)
    train(model, optimizer, range(2))
    left = [weakref.ref(weight) for weight in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [weight() for weight in left] == [None] * len(left)


def test_an_optimizer_whose_handle_is_removed_is_freed_at_once():
    """Without the garbage collector, which may come late."""
    model, optimizer = one(BY_NAME["apollo"])
    handle = step_in_backward(model, optimizer, clip_norm=1.0)
    train(model, optimizer, range(2))
    handle.remove()
    left = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del handle, optimizer
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_sparse_gradient_is_refused(clip_norm: float | None):
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = optimizer_of(BY_NAME["apollo"], table)
    step_in_backward(table, optimizer, clip_norm=clip_norm)
    with pytest.raises(RuntimeError, match=r"weight.* has a sparse gradient; make it dense"):
        table(torch.tensor([1, 2])).sum().backward()


def test_a_model_of_int8_weights_may_be_moved_afterwards():
    """Where one is moved, torch swaps its weights for others and forgets their hooks."""
    model = quantize_weights_(model_of(), group_size=8)
    optimizer = optimizer_of(BY_NAME["apollo"], model)
    step_in_backward(model, optimizer)
    model.to("cpu")
    model(batch(0)).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == []
    with pytest.raises(RuntimeError, match="a second backward came before optimizer"):
        model(batch(1)).backward()


def test_a_model_outlives_the_optimizer_that_stepped_it():
    model, optimizer = one(BY_NAME["apollo"])
    step_in_backward(model, optimizer)
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match="stepped in backward by another optimizer"):
        step_in_backward(model, optimizer_of(BY_NAME["mini"], model))
    del optimizer
    # Whether it has been collected or not.
    again = optimizer_of(BY_NAME["mini"], model)
    step_in_backward(model, again)
    train(model, again, range(1, 3))
    other, ordinary = one(BY_NAME["apollo"])
    train(other, ordinary, range(1))
    ordinary = optimizer_of(BY_NAME["mini"], other)
    train(other, ordinary, range(1, 3))
    assert snapshot(again) == snapshot(ordinary)


def test_a_bucket_whose_step_fails_is_not_stepped_again(monkeypatch: pytest.MonkeyPatch):
    model, optimizer = one(BY_NAME["apollo"])
    step_in_backward(model, optimizer)
    train(model, optimizer, range(1))
    step_ = plain.step_
    calls = []

    def failing(job: WeightStep) -> Report:
        calls.append(job)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return step_(job)

    monkeypatch.setattr(plain, "step_", failing)
    with pytest.raises(torch.OutOfMemoryError):
        model(batch(1)).backward()
    monkeypatch.setattr(plain, "step_", step_)
    optimizer.step()
    assert int(optimizer.state[calls[0].parameter]["step"]) == 2
    assert all(weight.grad is None for weight in model.parameters())
