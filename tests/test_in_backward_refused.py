"""Stepping in backward: what is refused, with an error that says why, and with nothing changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apollo_optim import APOLLOMini, step_in_backward
from family import BY_NAME
from runs import bits, snapshot
from training import batch, model_of, one, optimizer_of, pair, train
from twins import on_both

Block = Callable[[Tensor], Tensor]
SECOND = r"a second backward came before optimizer.step\(\)"


@on_both
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_second_backward_without_a_step_is_refused_and_changes_nothing(accumulates: bool, device: str):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
    optimizer = APOLLOMini(model)
    handle = step_in_backward(model, optimizer)
    x = torch.ones(1, 8, device=device)
    model(x).sum().backward()
    before = snapshot(optimizer)
    loss = model(x).sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=SECOND), handle.accumulate() if accumulates else nullcontext():
            loss.backward(retain_graph=True)
        assert snapshot(optimizer) == before
        assert all(weight.grad is None for weight in model.parameters())
    optimizer.step()
    assert snapshot(optimizer) == before
    model(x).sum().backward()
    assert float(optimizer.state[model[0].weight]["step"]) == 2


def test_a_second_backward_is_refused_where_it_first_meets_a_weight_of_its_own():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    optimizer = APOLLOMini(model)
    step_in_backward(model, optimizer)
    x = torch.ones(1, 8)
    model["a"](x).sum().backward()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=SECOND):
        model["b"](model["a"](x)).sum().backward()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("nested", [False, True])
def test_activation_checkpointing_changes_nothing(nested: bool):
    def wrap(block: Block, x: Tensor) -> Tensor:
        inner = partial(checkpoint, block, use_reentrant=False) if nested else block
        return checkpoint(inner, x, use_reentrant=False)

    (first, plain), (second, checkpointed) = one(BY_NAME["apollo"]), one(BY_NAME["apollo"], wrap=wrap)
    for model, optimizer in ((first, plain), (second, checkpointed)):
        step_in_backward(model, optimizer)
        train(model, optimizer, range(4))
    assert snapshot(checkpointed) == snapshot(plain)


@on_both
def test_reentrant_checkpointing_is_refused(device: str):
    """At the first layer it meets, which is left as it was."""
    model = model_of(wrap=partial(checkpoint, use_reentrant=True)).to(device)
    optimizer = optimizer_of(BY_NAME["apollo"], model)
    step_in_backward(model, optimizer)
    inside = [weight for module in (model.up, model.norm, model.down) for weight in module.parameters()]
    before = [bits(weight) for weight in inside]
    loss = model(batch(0).to(device))
    with pytest.raises(RuntimeError, match=r"a backward inside another one.* use_reentrant=False"):
        loss.backward()
    assert [bits(weight) for weight in inside] == before


def test_reentrant_checkpointing_accumulates():
    """And so can be had, at the ordinary mode's memory."""
    first, ordinary = one()
    second, in_backward = one(wrap=partial(checkpoint, use_reentrant=True))
    handle = step_in_backward(second, in_backward)
    with handle.accumulate():
        second(batch(0)).backward()
    in_backward.step()
    first(batch(0)).backward()
    ordinary.step()
    assert snapshot(in_backward) == snapshot(ordinary)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients_are_refused():
    model, optimizer = one()
    step_in_backward(model, optimizer)
    before = snapshot(optimizer)
    loss = model(batch(0))
    with pytest.raises(RuntimeError, match=r"cannot go with backward\(create_graph=True\)"):
        loss.backward(create_graph=True)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_refused(unscale: bool):
    model, optimizer = one()
    handle = step_in_backward(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"GradScaler cannot be used with step_in_backward.*bfloat16"):
        scaler.step(optimizer)
    optimizer.step()

    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batch(1))).backward()
    off.step(optimizer)
    off.update()
    handle.remove()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(2))).backward()
    scaler.step(optimizer)
    assert float(optimizer.state[model.embed.weight]["step"]) == 3


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel_is_refused():
    model, optimizer = one()
    with process_group():
        wrapped = nn.parallel.DistributedDataParallel(model)
        for outer in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(ValueError, match="wrapped in DistributedDataParallel, whose buckets hold"):
                step_in_backward(outer, optimizer)


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_distributed_data_parallel_that_comes_later_is_noticed(gradient_as_bucket_view: bool):
    """By the gradients that it writes when those that it was to average are gone."""
    model = nn.Linear(16, 16)
    optimizer = APOLLOMini(model)
    step_in_backward(model, optimizer)
    with process_group():
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
        wrapped(torch.ones(2, 16)).sum().backward()
        before = snapshot(optimizer)
        with pytest.raises(RuntimeError, match=r"\(16, 16\) has a gradient again.*DistributedDataParallel"):
            optimizer.step()
        assert snapshot(optimizer) == before


def test_offloaded_weights_are_refused_by_name(monkeypatch):
    model, optimizer = one()
    # Which they are where a mesh is of GPUs.
    monkeypatch.setattr("apollo_optim.in_backward.checks.is_offloaded", lambda weight: weight is model.up.weight)
    with pytest.raises(ValueError, match=r"up.weight is sharded and offloaded to the host.*without CPUOffloadPolicy"):
        step_in_backward(model, optimizer)


def test_an_optimizer_that_is_not_the_models_is_refused():
    (model, optimizer), (other, _) = pair()
    with pytest.raises(ValueError, match=r"experts \(3, 12, 10\) is in the optimizer, but not in the model"):
        step_in_backward(other, optimizer)
    with pytest.raises(ValueError, match=r"optimizer must be one of this library's.* got AdamW"):
        step_in_backward(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got \[Parameter"):
        step_in_backward(list(model.parameters()), optimizer)
    train(model, optimizer, range(1))


def test_a_second_handle_is_refused():
    model, optimizer = one()
    handle = step_in_backward(model, optimizer)
    with pytest.raises(ValueError, match=r"stepped in backward already: call remove\(\)"):
        step_in_backward(model, optimizer)
    handle.remove()
    step_in_backward(model, optimizer)


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan"), "1", True, torch.ones(2)])
def test_a_clip_norm_that_cannot_be_is_refused(limit: Any):
    model, optimizer = one()
    with pytest.raises(ValueError, match=r"clip_norm must be a number > 0, or None for no clipping, got"):
        step_in_backward(model, optimizer, clip_norm=limit)
