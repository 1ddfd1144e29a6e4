"""Every optimizer works in the loops people write: schedulers, scaling, clipping, options that change on the way."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from apollo_optim import APOLLO
from family import BY_NAME, DISTINCT, FAMILY, partly_slow
from runs import SHAPES, built, gradient, run, snapshot, weights

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)

FEW = {name: SHAPES[name] for name in ("wide", "tall", "norm")}
ONE = {"wide": SHAPES["wide"]}


SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=8),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20, cycle_momentum=True),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "sequence": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, T_max=5)],
        milestones=[3],
    ),
    "swa": lambda opt: swa_utils.SWALR(opt, swa_lr=0.5, anneal_epochs=4),
}


def scheduled(optimizer, name):
    """A scheduler's step that every kind takes: the plateau's loss never falls."""
    scheduler = SCHEDULERS[name](optimizer)
    return (lambda: scheduler.step(1.0)) if name == "plateau" else scheduler.step


@every_optimizer
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torch_adamw(member, scheduler):
    named, by_hand = weights(ONE), weights(ONE)
    optimizer, manual = built(member, named), built(member, by_hand)
    betas = optimizer.param_groups[0]["betas"]
    reference = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.01, betas=betas)
    advance, advance_reference = scheduled(optimizer, scheduler), scheduled(reference, scheduler)
    for step in range(8):
        (group,), (expected,) = optimizer.param_groups, reference.param_groups
        assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])
        manual.param_groups[0].update(lr=expected["lr"], betas=expected["betas"])
        run(optimizer, named, [step])
        run(manual, by_hand, [step])
        reference.step()
        advance()
        advance_reference()
    assert snapshot(optimizer).weights == snapshot(manual).weights


@every_optimizer
def test_a_scheduler_resumes_with_the_optimizer(member):
    named, other = weights(FEW), weights(FEW)
    optimizer, resumed = built(member, named), built(member, other)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    for step in range(4):
        run(optimizer, named, [step])
        scheduler.step()
    resumed_scheduler = lr_scheduler.OneCycleLR(resumed, max_lr=0.1, total_steps=20)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    with torch.no_grad():
        for name, weight in other.items():
            weight.copy_(named[name])
    for step in range(4, 8):
        run(optimizer, named, [step])
        run(resumed, other, [step])
        scheduler.step()
        resumed_scheduler.step()
    assert snapshot(resumed) == snapshot(optimizer)


@every_optimizer
def test_a_checkpoint_from_before_there_was_a_scheduler_loads_after_one_was_made(member):
    # A scheduler adds keys to the groups ("initial_lr", "max_lr"); they are no part of what must agree.
    named, other = weights(FEW), weights(FEW)
    optimizer, resumed = built(member, named), built(member, other)
    run(optimizer, named, range(2))
    lr_scheduler.OneCycleLR(resumed, max_lr=0.1, total_steps=20)
    resumed.load_state_dict(optimizer.state_dict())
    assert snapshot(resumed).state == snapshot(optimizer).state


@every_optimizer
def test_grad_scaler_unscales_and_skips_overflowing_steps(member):
    # Scaling by a power of two is exact, so the scaled run must equal one that never saw the overflow, bit for bit.
    named, other = weights(FEW), weights(FEW)
    optimizer, plain = built(member, named), built(member, other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(sum((weight * gradient(name, step, weight)).sum() for name, weight in named.items())).backward()
        if step == 2:
            named["tall"].grad[1, 1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    run(plain, other, [0, 1, 3, 4])
    assert snapshot(optimizer) == snapshot(plain)
    assert scaler.get_scale() == 2.0**9
    assert optimizer.skipped() == 0


@every_optimizer
def test_float16_autocast_trains_float32_weights_through_a_grad_scaler(member):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
    inputs, targets = torch.randn(64, 16), torch.randn(64, 8)
    optimizer, scaler = member.build(model, lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loss():
        with torch.autocast("cpu", dtype=torch.float16):
            return nn.functional.mse_loss(model(inputs), targets)

    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    # Twenty steps of 0.01 over weights of size 1/4: every member has left the start well behind.
    assert loss().item() < first
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@every_optimizer
def test_clipping_before_the_step_is_a_step_on_the_clipped_gradient(member):
    named, other = weights(FEW), weights(FEW)
    optimizer, plain = built(member, named), built(member, other)
    for step in range(5):
        for (name, weight), twin in zip(named.items(), other.values(), strict=True):
            weight.grad = gradient(name, step, weight)
            twin.grad = weight.grad.clone()
        norm = nn.utils.clip_grad_norm_(named.values(), max_norm=0.5)
        for twin in other.values():
            twin.grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        plain.step()
    assert snapshot(optimizer) == snapshot(plain)


CHANGES = [
    {"lr": 0.5},
    {"lr": torch.tensor(0.5)},
    {"weight_decay": 0.3},
    {"betas": (0.5, 0.6)},
    {"eps": 1e-2},
    {"maximize": True},
    {"scale": 0.7},
    {"scale": "auto"},
    {"refresh_every": 2},
    {"growth_limit": None},
    {"growth_limit": 1.001},
]


@every_optimizer
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_an_option_changed_mid_run_counts_from_the_next_step_and_survives_a_checkpoint(member, change):
    named = weights(ONE)
    optimizer = built(member, named)
    run(optimizer, named, range(2))
    optimizer.param_groups[0].update(change)
    if "scale" in change and not member.takes_scale:
        with pytest.raises(ValueError, match=r"scale=.* cannot go with .*projection='identity'.* Use scale=1.0"):
            run(optimizer, named, range(2, 3))
        return
    # Loaded, the option is there from the first step on.
    others = copy.deepcopy(named)
    loaded = built(member, others)
    loaded.load_state_dict(optimizer.state_dict())
    run(optimizer, named, range(2, 5))
    run(loaded, others, range(2, 5))
    assert snapshot(optimizer).weights == snapshot(loaded).weights


def test_a_dtype_of_state_may_be_given_by_its_name_between_steps():
    snapshots = []
    for dtype in ("bfloat16", torch.bfloat16):
        named = weights(ONE)
        optimizer = APOLLO(named.items())
        run(optimizer, named, range(2))
        optimizer.param_groups[0]["state_dtype"] = dtype
        run(optimizer, named, range(2, 5))
        assert optimizer.state[named["wide"]]["exp_avg"].dtype == torch.bfloat16
        snapshots.append(snapshot(optimizer))
    assert snapshots[0] == snapshots[1]


@pytest.mark.parametrize("member", [m for m in FAMILY if m.limits_growth and m.name != "adamw"], ids=str)
def test_a_limiter_switched_on_mid_run_limits_from_then_on(member):
    # Momentum after two gradients is 0.19 of one, which the third cancels but for 1%: a step far smaller than the
    # fourth wants to be. Nothing comes before the third, which is the first to be limited.
    named = weights(ONE)
    optimizer = built(member, named, growth_limit=None)
    shrinks = []
    for step, factor in enumerate((1.0, 1.0, -1.7, 1.0)):
        if step == 2:
            optimizer.param_groups[0]["growth_limit"] = 1.01
        named["wide"].grad = gradient("wide", 0, named["wide"]) * factor
        optimizer.step()
        shrinks.append(optimizer.statistics()["limiter/shrink"])
    assert shrinks[:3] == [1, 1, 1]
    assert shrinks[3] < 0.5
    resumed = built(member, weights(ONE))
    resumed.load_state_dict(optimizer.state_dict())
    assert snapshot(resumed).state == snapshot(optimizer).state


FORGETTING = {
    "clear all": lambda optimizer, weight: optimizer.state.clear(),
    "delete": lambda optimizer, weight: optimizer.state.pop(weight),
    "empty": lambda optimizer, weight: optimizer.state[weight].clear(),
    "replace": lambda optimizer, weight: optimizer.state.update({weight: {}}),
    "replace all": lambda optimizer, weight: setattr(optimizer, "state", defaultdict(dict)),
}


@every_optimizer
@pytest.mark.parametrize("how", FORGETTING)
def test_state_that_is_thrown_away_begins_anew(member, how):
    named = weights(ONE)
    optimizer = built(member, named)
    run(optimizer, named, range(4))
    twins = copy.deepcopy(named)
    fresh = built(member, twins)
    FORGETTING[how](optimizer, named["wide"])
    run(optimizer, named, range(4, 6))
    run(fresh, twins, range(4, 6))
    assert snapshot(optimizer) == snapshot(fresh)


def test_state_is_made_anew_beside_what_somebody_else_keeps_there():
    named = weights(ONE)
    optimizer = built(BY_NAME["apollo"], named)
    run(optimizer, named, range(2))
    state = optimizer.state[named["wide"]]
    state.clear()
    state["ema"] = torch.ones(3)
    run(optimizer, named, range(2, 3))
    assert int(state["step"]) == 1
    assert torch.equal(state["ema"], torch.ones(3))


@every_optimizer
def test_a_tensor_learning_rate_steps_as_the_number(member):
    # float64: the tensor is multiplied in where the number is a factor of one fused addition, at most two roundings
    # per element and step.
    named, other = weights(dtype=torch.float64), weights(dtype=torch.float64)
    lr = torch.tensor(0.01, dtype=torch.float64)
    run(built(member, named, lr=lr), named, range(5))
    run(built(member, other), other, range(5))
    for name, weight in named.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-13, atol=1e-14)


@every_optimizer
def test_a_tensor_learning_rate_is_read_at_every_step(member):
    named = weights()
    lr = torch.tensor(0.01)
    optimizer = built(member, named, lr=lr)
    run(optimizer, named, range(2))
    lr.zero_()
    before = snapshot(optimizer).weights
    run(optimizer, named, range(2, 4))
    assert snapshot(optimizer).weights == before
    assert optimizer.param_groups[0]["lr"] is lr


@every_optimizer
def test_schedulers_write_into_a_tensor_learning_rate(member):
    named = weights(FEW)
    lr = torch.tensor(0.1)
    optimizer = built(member, named, lr=lr)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        run(optimizer, named, [step])
        scheduler.step()
    assert lr.item() == pytest.approx(0.0125, rel=1e-7)


@every_optimizer
def test_an_averaged_model_follows_the_run(member):
    torch.manual_seed(0)
    model = nn.Linear(12, 20)
    averaged = swa_utils.AveragedModel(model)
    optimizer = member.build(model, lr=0.01)
    visited = []
    for _ in range(3):
        model(torch.randn(4, 12)).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        visited.append(model.weight.detach().clone())
    # A running mean of three numbers of size 1/3 in float32: a few roundings.
    torch.testing.assert_close(averaged.module.weight.detach(), torch.stack(visited).mean(dim=0), rtol=1e-6, atol=1e-7)


@every_optimizer
def test_statistics_are_numbers_for_a_log(member):
    named = weights()
    optimizer = built(member, named)
    assert optimizer.statistics() == {"skipped": 0.0}
    run(optimizer, named, range(3))
    numbers = optimizer.statistics()
    assert all(isinstance(value, float) for value in numbers.values())
    rule = optimizer.param_groups[0]
    if rule["granularity"] in ("channel", "tensor") and rule["rank"] is not None:
        assert 0 < numbers["gain/min"] <= numbers["gain/mean"] <= numbers["gain/max"]
        assert 0 <= numbers["limiter/active"] <= 1
        assert 0 < numbers["limiter/shrink"] <= 1


@every_optimizer
def test_a_step_inside_autocast_is_the_step_outside(member):
    weights = []
    for inside in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(9, 40))
        optimizer = member.build([weight])
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_a_group_that_replaces_another_is_the_one_that_counts():
    weight = nn.Parameter(torch.randn(9, 40))
    optimizer = APOLLO([weight], lr=1.0)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)
