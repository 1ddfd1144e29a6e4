"""Stochastic rounding: right on average, exact where it can be, and the same draw whenever the same draw is due."""

import math

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO
from apollo_optim.core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, ROUND_WEIGHT, rounding_key
from apollo_optim.quant.rounding import write_rounded_

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

# Draws are fixed by their seed: a bound at six sigma that holds once holds always, and 2e-9 was the risk in choosing.
SIGMAS = 6
DRAWS = 2**18


def rounded(value: Tensor, dtype: torch.dtype, seed: int = 1, step: int = 1, stream: int = ROUND_WEIGHT) -> Tensor:
    target = torch.empty(value.shape, dtype=dtype)
    write_rounded_(target, value, rounding_key(seed, step, stream))
    return target


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The values of `dtype` on both sides of one that it does not hold, by walking from the nearest."""
    nearest = torch.tensor(value, dtype=torch.float64).to(dtype)
    other = torch.nextafter(nearest, torch.tensor(math.inf if float(nearest) < value else -math.inf, dtype=dtype))
    low, high = sorted([float(nearest), float(other)])
    assert low < value < high
    return low, high


def every_value(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a 16-bit dtype."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return values[values.isfinite()]


BETWEEN = {
    torch.bfloat16: [1.001, -1.001, 3.1415927, 1e-20, -7e30, 0.1, 65504.7],
    # The last three are subnormal, where the spacing is 2**-24 whatever the size.
    torch.float16: [1.0001, -1.0001, 3.1415927, 0.1, -1234.56, 6.2e-5, 3e-5, -5e-6, 2e-8],
}


@pytest.mark.parametrize(("dtype", "value"), [(dtype, value) for dtype, values in BETWEEN.items() for value in values])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype: torch.dtype, value: float):
    value = float(torch.tensor(value))  # as float32 holds it
    low, high = neighbours(value, dtype)
    drawn = rounded(torch.full((DRAWS,), value), dtype).double()
    assert set(drawn.unique().tolist()) <= {low, high}
    # A coin with P(up) = p has variance p (1 - p) <= 1/4; sixteen random bits know p to 2**-16.
    up = (value - low) / (high - low)
    error = (float(drawn.mean()) - value) / (high - low)
    assert abs(error) < SIGMAS * math.sqrt(max(up * (1 - up), 2**-16) / DRAWS) + 2**-16


@NARROW
def test_rounding_is_right_on_average_over_many_values(dtype: torch.dtype):
    """A bias too small to see in one value, such as half of the last random bit, adds up over 2^22 of them."""
    value = torch.randn(2**22, generator=torch.Generator().manual_seed(2))
    nearest = value.to(dtype)
    spacing = torch.nextafter(nearest.abs(), torch.tensor(math.inf, dtype=dtype)).double() - nearest.abs().double()
    error = (rounded(value, dtype).double() - value.double()) / spacing
    # Errors relative to the spacing have variance at most 1/4; signed by the value they point outward or inward,
    # so that a bias away from zero shows as well as one up.
    assert abs(float(error.mean())) < SIGMAS / 2 / math.sqrt(len(value))
    assert abs(float((error * value.sign()).mean())) < SIGMAS / 2 / math.sqrt(len(value))


@NARROW
@pytest.mark.parametrize("step", range(4))
def test_a_value_that_fits_is_written_as_it_is(dtype: torch.dtype, step: int):
    values = every_value(dtype)
    assert torch.equal(rounded(values.float(), dtype, step=step), values)


@NARROW
def test_infinities_and_nans_pass_through(dtype: torch.dtype):
    value = torch.tensor([math.inf, -math.inf, math.nan] * 1000)
    drawn = rounded(value, dtype)
    assert drawn[0::3].eq(math.inf).all()
    assert drawn[1::3].eq(-math.inf).all()
    assert drawn[2::3].isnan().all()
    # Of any bits: a GPU's own has all of them, the least only the last.
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001] * 1000, dtype=torch.int32).view(torch.float32)
    assert rounded(odd, dtype).isnan().all()


@NARROW
def test_a_value_beyond_the_largest_becomes_infinite_as_in_nearest_rounding(dtype: torch.dtype):
    beyond = torch.tensor([torch.finfo(dtype).max * 1.5, 3.4e38]).clamp(max=torch.finfo(torch.float32).max)
    assert torch.equal(rounded(beyond, dtype), beyond.to(dtype))


@NARROW
def test_zeros_stay_zero_and_signs_stay(dtype: torch.dtype):
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(3)) * 1e-6
    drawn = rounded(value, dtype)
    assert (drawn * value.sign() >= 0).all()
    assert torch.equal(rounded(torch.zeros(1000), dtype), torch.zeros(1000, dtype=dtype))
    assert rounded(-torch.zeros(1000), dtype).signbit().all()


@NARROW
def test_negative_numbers_round_as_positive_ones_do(dtype: torch.dtype):
    value = torch.full((DRAWS,), 1.0001)
    low, high = neighbours(float(value[0]), dtype)
    up, down = (rounded(value, dtype) == high).double().mean(), (rounded(-value, dtype) == -high).double().mean()
    # Outward as often on both sides: two coins of the same p, so twice the variance.
    p = (float(value[0]) - low) / (high - low)
    assert abs(float(up - down)) < SIGMAS * math.sqrt(2 * p * (1 - p) / DRAWS)


@NARROW
def test_the_draw_belongs_to_seed_step_and_stream(dtype: torch.dtype):
    value = torch.randn(37, 61, generator=torch.Generator().manual_seed(4))
    drawn = rounded(value, dtype)
    assert torch.equal(drawn, rounded(value, dtype))
    others = [{"seed": 2}, {"step": 2}, {"stream": ROUND_EXP_AVG}, {"stream": ROUND_EXP_AVG_SQ}]
    for other in others:
        # For a uniform remainder two independent draws part with probability 2 p (1 - p), on average a third.
        parted = float((rounded(value, dtype, **other) != drawn).double().mean())
        assert abs(parted - 1 / 3) < SIGMAS * math.sqrt(2 / 9 / value.numel())


@NARROW
@pytest.mark.parametrize("distance", [1, 2, 61, 1024, 2048])
def test_neighbouring_elements_draw_independently(dtype: torch.dtype, distance: int):
    """Also where two elements take the halves of one hash."""
    low, high = neighbours(1.0001, dtype)
    halfway = torch.full((DRAWS,), (low + high) / 2)
    coin = (rounded(halfway, dtype) == high).double() * 2 - 1
    assert abs(float(coin.mean())) < SIGMAS / math.sqrt(DRAWS)
    assert abs(float((coin[distance:] * coin[:-distance]).mean())) < SIGMAS / math.sqrt(DRAWS - distance)


@NARROW
@pytest.mark.parametrize("one", [{"step": 1}, {"seed": 1}, {"stream": ROUND_WEIGHT}], ids=str)
def test_steps_weights_and_streams_draw_independently(dtype: torch.dtype, one: dict[str, int]):
    other = {name: value + 1 for name, value in one.items()}
    low, high = neighbours(1.0001, dtype)
    halfway = torch.full((DRAWS,), (low + high) / 2)
    coins = [(rounded(halfway, dtype, **which) == high).double() * 2 - 1 for which in (one, other)]
    assert abs(float((coins[0] * coins[1]).mean())) < SIGMAS / math.sqrt(DRAWS)


@pytest.mark.parametrize("shape", [(), (1,), (61,), (5, 7), (3, 5, 7), (4, 3, 2, 2)])
def test_any_shape_is_rounded(shape: tuple[int, ...]):
    value = torch.full(shape, 1.001)
    low, high = neighbours(1.001, torch.bfloat16)
    drawn = rounded(value, torch.bfloat16)
    assert drawn.shape == shape
    assert drawn.double().flatten().apply_(lambda x: x in (low, high)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_wide_targets_are_refused(dtype: torch.dtype):
    with pytest.raises(ValueError, match="not torch"):
        write_rounded_(torch.empty(3, dtype=dtype), torch.ones(3), rounding_key(1, 1, ROUND_WEIGHT))


def stepped(weight: Tensor, gradients: list[Tensor], **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight after stepping by `gradients`, and its state."""
    parameter = nn.Parameter(weight.clone())
    optimizer = APOLLO([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@NARROW
@pytest.mark.parametrize("rank", [2, None], ids=["projected", "adamw"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32 state", "bf16 state"])
def test_a_step_at_learning_rate_zero_leaves_narrow_weights_as_they_are(
    dtype: torch.dtype, rank: int | None, state_dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(37, 61, generator=generator).to(dtype)
    gradients = [torch.randn(37, 61, generator=generator).to(dtype) for _ in range(5)]
    after, _ = stepped(weight, gradients, lr=0.0, rank=rank, state_dtype=state_dtype, weight_decay=0.1)
    assert torch.equal(after, weight)


@NARROW
@pytest.mark.parametrize("rank", [2, None], ids=["projected", "adamw"])
def test_steps_too_small_to_write_are_kept_on_average(dtype: torch.dtype, rank: int | None):
    """A fiftieth of a spacing per step: nearest rounding loses them all, stochastic rounding none."""
    steps, spacing = 50, torch.finfo(dtype).eps
    weight = torch.full((64, 512), 1.5, dtype=dtype)
    # Adam's step on a constant gradient is 1 per element; without a rank the update is that, else sqrt(2 / 64) of it.
    wanted = spacing / 50
    size = 1.0 if rank is None else math.sqrt(rank / 64)
    gradients = [torch.full((64, 512), 1e-2, dtype=dtype)] * steps
    moved = {
        rounding: 1.5 - stepped(weight, gradients, lr=wanted / size, rank=rank, rounding=rounding)[0].double()
        for rounding in ("stochastic", "nearest")
    }
    assert (moved["nearest"] == 0).all()
    exact = 1.5 - stepped(weight.double(), [g.double() for g in gradients], lr=wanted / size, rank=rank)[0]
    # A walk of `steps` roundings, each with variance at most spacing^2 p (1 - p) at p = 1 / 50 of a spacing (a gain per
    # channel makes p larger in some: at most 1/4); independent over 32768 elements.
    sigma = spacing * math.sqrt(steps / 4 / weight.numel())
    assert abs(float((moved["stochastic"] - exact).mean())) < SIGMAS * sigma


@pytest.mark.parametrize("rank", [2, None], ids=["projected", "adamw"])
def test_a_second_moment_in_bfloat16_decays(rank: int | None):
    """0.999 v is nearer to v than to the next bfloat16 below: nearest rounding would keep it for ever."""
    generator = torch.Generator().manual_seed(6)
    first, zero = torch.randn(64, 512, generator=generator), torch.zeros(64, 512)
    weight, steps = torch.zeros(64, 512), 300
    v_after_one = stepped(weight, [first], rank=rank, state_dtype=torch.bfloat16)[1]["exp_avg_sq"]
    state = stepped(weight, [first] + [zero] * steps, rank=rank, state_dtype=torch.bfloat16)[1]
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert torch.equal((0.999 * v_after_one.float()).to(torch.bfloat16), v_after_one)
    before, after = v_after_one.double().mean(), state["exp_avg_sq"].double().mean()
    # Each rounding moves v by at most a spacing, v 2^-7, with a variance of at most a quarter of its square, and is
    # right on average. Errors decay with v, so `steps` of them at full size bound their sum; elements are independent.
    spread = 2**-7 / 2 * math.sqrt(steps) * float(v_after_one.double().square().mean().sqrt())
    sigma = spread / math.sqrt(v_after_one.numel())
    assert abs(float(after - 0.999**steps * before)) < SIGMAS * sigma


@pytest.mark.parametrize("rank", [2, None], ids=["projected", "adamw"])
def test_a_first_moment_in_bfloat16_is_right_on_average(rank: int | None):
    generator = torch.Generator().manual_seed(7)
    gradients = [torch.randn(64, 512, generator=generator).abs() for _ in range(30)]
    narrow, wide = (
        stepped(torch.zeros(64, 512), gradients, rank=rank, state_dtype=dtype)[1]["exp_avg"].double()
        for dtype in (torch.bfloat16, torch.float32)
    )
    # One rounding per step, the older ones damped by 0.9 each: a geometric sum of variances.
    spread = 2**-7 / 2 * math.sqrt(1 / (1 - 0.9**2)) * float(wide.square().mean().sqrt())
    assert abs(float((narrow - wide).mean())) < SIGMAS * spread / math.sqrt(wide.numel())
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize(("lr", "pace"), [(2.0**-26, 0), (2.0**-19, 1)])
def test_an_update_below_the_spacing_of_float32_is_lost(lr: float, pace: float):
    """Just below 1 that spacing is 2^-24. Adam's steps along a gradient that never changes are 1."""
    weight = torch.nn.Parameter(torch.ones(2**15, dtype=torch.bfloat16))
    optimizer = APOLLO([weight], lr=lr)
    steps = 64
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    drift = 1 - weight.detach().double().mean()
    # Every step is a draw of 2^-8 with mean lr.
    error = math.sqrt(steps * lr * 2**-8 / weight.numel())
    assert abs(float(drift) - pace * steps * lr) <= (SIGMAS * error if pace else 0)
