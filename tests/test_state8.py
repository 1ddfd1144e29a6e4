"""Optimizer state in 8 bits: right on average, never a second moment of nothing, plain in a checkpoint."""

import io
import math

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, optimizer_memory
from apollo_optim.core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, rounding_key
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant.blocks import narrowed, scale_shape, scales_of, widened
from family import BY_NAME, DISTINCT, FAMILY, Member, partly_slow
from runs import bits, built, run, snapshot, state_bytes_of, weights

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)
KINDS = pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
STREAMS = {True: ROUND_EXP_AVG, False: ROUND_EXP_AVG_SQ}

# Draws are fixed by their seed: a bound at six sigma that holds once holds always, and 2e-9 was the risk in choosing.
SIGMAS = 6


def moments(shape: tuple[int, ...], signed: bool) -> Tensor:
    """First moments, or second ones: squares of numbers that differ in size as gradients do."""
    generator = torch.Generator().manual_seed(len(shape))
    value = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    return value if signed else value.square()


def rounded(value: Tensor, signed: bool, seed: int = 1, step: int = 1) -> Tensor:
    return widened(*narrowed(value, signed, rounding_key(seed, step, STREAMS[signed])), torch.float32)


@KINDS
@pytest.mark.parametrize("shape", [(), (1,), (5,), (128,), (300,), (7, 129), (2, 3, 40)], ids=str)
def test_any_shape_is_kept_in_codes_and_scales(shape: tuple[int, ...], signed: bool):
    codes, scale = narrowed(moments(shape, signed), signed, rounding_key(1, 1, STREAMS[signed]))
    assert codes.shape == shape
    assert codes.dtype == (torch.int8 if signed else torch.uint8)
    assert scale.shape == scale_shape(shape) == (*shape[:-1], -(-(shape[-1] if shape else 1) // 128))
    assert widened(codes, scale, torch.float64).shape == shape


@KINDS
def test_a_moment_goes_to_a_neighbouring_code(signed: bool):
    value = moments((64, 200), signed)
    codes, scale = narrowed(value, signed, rounding_key(1, 1, STREAMS[signed]))
    wide = scale.repeat_interleave(128, dim=1)[:, :200]
    size = value.abs() if signed else value.sqrt()
    # The code of a size is the root of its share; rounding moves it by less than one, float32 by 1e-5 of 255.
    assert ((codes.float().abs() - (size / wide).sqrt()).abs() < 1 + 1e-2).all()
    most = 127 if signed else 255
    assert (codes.float().abs().amax(dim=1) == most).all()
    if signed:
        assert (codes.float() * value >= 0).all()


@KINDS
def test_the_first_and_the_last_code_are_kept_whatever_is_drawn(signed: bool):
    """Beyond the last, 8 bits would begin again."""
    for value, code in ((moments((2**20, 1), signed), 127 if signed else 255), (torch.zeros(2**20, 1), 0)):
        alone = narrowed(value, signed, rounding_key(1, 1, STREAMS[signed])).codes
        assert (alone.float().abs() == code).all()


@KINDS
def test_rounding_is_right_on_average_for_every_element(signed: bool):
    value, count = moments((1, 200), signed), 4096
    drawn = rounded(value.expand(count, 200), signed).double()
    # Between two codes a coin: its variance is at most a quarter of their distance squared.
    spread = drawn.amax(dim=0) - drawn.amin(dim=0)
    error = (drawn.mean(dim=0) - value[0].double()).abs()
    # Float32 levels are off by a few 2^-24 of themselves, which the top of a block, that never moves, shows.
    bound = SIGMAS * spread / 2 / math.sqrt(count) + 2**-21 * value[0].double().abs()
    # A second moment below the first code is rounded up to it.
    bottom = 0.0 if signed else float(value.max()) * 255.0**-4
    assert (error <= bound + bottom).all()


def test_a_positive_second_moment_is_never_rounded_to_zero():
    value = torch.logspace(-30, 0, 128).expand(100, 128)
    assert (rounded(value, signed=False) > 0).all()


@KINDS
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e30])
def test_blocks_of_any_size_are_finite_and_zero_stays_zero(signed: bool, size: float):
    value = moments((3, 200), signed).abs().clamp(max=1.0) * size
    value[1] = 0
    assert (scales_of(value, signed) > 0).all()  # they are divided by
    drawn = rounded(value, signed)
    assert drawn.isfinite().all()
    assert (drawn[1] == 0).all()
    if size >= 1e-20:
        torch.testing.assert_close(drawn[0].sum(), value[0].sum(), rtol=0.1, atol=0)


@every_optimizer
def test_the_first_step_is_that_of_wide_state(member: Member):
    """Moments are rounded when they are kept, after the step that they decide."""
    results = []
    for state_dtype in (torch.float32, torch.int8):
        named = weights({"wide": (9, 40), "tall": (40, 9), "norm": (40,), "scalar": ()})
        run(built(member, named, state_dtype=state_dtype), named, range(1))
        results.append([weight.detach().clone() for weight in named.values()])
    for wide, narrow in zip(*results, strict=True):
        # A basis from an SVD is kept in bfloat16.
        torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-4 if member.uses_svd else 0)


@every_optimizer
def test_state_takes_a_quarter_of_the_bytes_and_those_that_are_promised(member: Member):
    shapes = [(48, 512), (512,)]

    def stepped(state_dtype: object) -> ProjectedOptimizer:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = member.build(params, state_dtype=state_dtype)
        for weight in params:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer

    narrow = state_bytes_of(stepped("int8"))
    promised = member.grouped([nn.Parameter(torch.ones(shape)) for shape in shapes])
    assert narrow == optimizer_memory(promised, member.optimizer, **(member.options | {"state_dtype": "int8"}))
    factored = member.optimizer.__name__ in ("Flora", "FactoredAdamW") or bool(member.group)
    if not factored and not member.uses_svd and member.name != "artemis-mini":  # whose bases are in 16 bits
        # 1 + 4 / 128 bytes for 4, and scalars.
        assert narrow < 0.27 * state_bytes_of(stepped(torch.float32)) + 64


@pytest.mark.parametrize("name", ["apollo", "mini", "galore", "fira", "flora", "structured-channel", "adamw"])
def test_a_regression_is_learned_as_well_as_with_wide_state(name: str):
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(256, 40, generator=generator), torch.randn(24, 40, generator=generator)

    def loss_after(state_dtype: object) -> float:
        weight = nn.Parameter(torch.zeros(24, 40))
        optimizer = BY_NAME[name].build([weight], lr=0.03, state_dtype=state_dtype)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (inputs @ (weight - target).T).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    start = float((inputs @ target.T).square().mean())
    wide, narrow = loss_after(torch.float32), loss_after("int8")
    assert wide < 0.9 * start
    # A code of a first moment is 1 / 64 of it at the top, and rounding is averaged over ten steps.
    assert narrow < wide + 0.05 * start


@pytest.mark.parametrize("name", ["apollo", "mini", "adamw", "galore"])
def test_a_run_resumes_bit_for_bit_from_plain_tensors(name: str):
    whole, named = _halfway(BY_NAME[name])
    resumed, others = _halfway(BY_NAME[name], steps=0)
    stream = io.BytesIO()
    torch.save(whole.state_dict(), stream)
    stream.seek(0)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    for weight, other in zip(named.values(), others.values(), strict=True):
        other.data.copy_(weight.data)
    assert resumed.param_groups[0]["state_dtype"] == torch.int8
    for optimizer, each in ((whole, named), (resumed, others)):
        run(optimizer, each, range(4, 6))
    assert snapshot(whole)[:2] == snapshot(resumed)[:2]
    state = resumed.state[others["wide"]]
    assert (state["exp_avg"].dtype, state["exp_avg_scale"].dtype) == (torch.int8, torch.float32)
    assert state["exp_avg_sq"].dtype == torch.uint8


def _halfway(member: Member, steps: int = 4) -> tuple[ProjectedOptimizer, dict[str, nn.Parameter]]:
    named = weights({"wide": (9, 40), "norm": (300,)})
    optimizer = built(member, named, state_dtype="int8")
    run(optimizer, named, range(steps))
    return optimizer, named


@pytest.mark.parametrize(("before", "after"), [("int8", torch.float32), (torch.float32, torch.int8)], ids=str)
def test_state_is_not_taken_for_codes_nor_codes_for_state(before: object, after: object):
    weight = nn.Parameter(torch.ones(24, 40))
    optimizer = APOLLO([weight], rank=4, state_dtype=before)
    weight.grad = torch.ones(24, 40)
    optimizer.step()
    kept = {name: bits(value) for name, value in optimizer.state[weight].items()}
    optimizer.param_groups[0]["state_dtype"] = after
    with pytest.raises(ValueError, match=r"whether state_dtype is int8 or nf4. cannot change once there is one"):
        optimizer.step()
    assert {name: bits(value) for name, value in optimizer.state[weight].items()} == kept


def test_a_bad_gradient_leaves_codes_and_scales_as_they_were():
    optimizer, named = _halfway(BY_NAME["adamw"])
    before = snapshot(optimizer)
    for weight in named.values():
        weight.grad = torch.full_like(weight, math.inf)
    optimizer.step()
    assert snapshot(optimizer) == before
