"""A step of an int8 weight: exact where nothing moves, right on average where something does, the same every time."""

import math

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import Int8Weight, quantize_weights_
from apollo_optim.quant import groups as groups_of_rows
from apollo_optim.quant.groups import LEAST_SCALE, Draws, dequantized, quantized
from family import BY_NAME, FAMILY, Member
from runs import bits, gradient
from training import model_of, optimizer_of, train

every_optimizer = pytest.mark.parametrize("member", FAMILY, ids=str)
SHAPES = pytest.mark.parametrize("shape", [(24, 40), (61, 21), (5, 300)], ids=str)

# Draws are fixed by their seed: a bound at six sigma that holds once holds always, and 2e-9 was the risk in choosing.
SIGMAS = 6


def parameter(shape: tuple[int, int], group_size: int = 16, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return nn.Parameter(Int8Weight.of(value, group_size))


def built(member: Member, weight: nn.Parameter, **options: object) -> ProjectedOptimizer:
    group = {"params": [("layer.weight", weight)], "refresh_every": 3}
    return member.build([group], **({"lr": 0.01, "weight_decay": 0.1} | options))


def steps(optimizer: ProjectedOptimizer, count: int, gradient=gradient) -> Int8Weight:
    weight = optimizer.param_groups[0]["params"][0]
    for step in range(count):
        weight.grad = gradient("layer", step, weight.dequantize())
        optimizer.step()
    return weight


def parts(weight: Tensor) -> tuple[bytes, bytes]:
    assert isinstance(weight, Int8Weight)
    return bits(weight.codes), bits(weight.scale)


# Nothing moves.


def awkward(columns: int) -> Tensor:
    """Rows of every size that float32 has, of zeros, of one size, and around the least scale."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(2000, columns, generator=generator)
    value *= torch.exp2(torch.randint(-140, 120, (2000, 1), generator=generator).float())
    value[0] = 0
    value[1] = 1e-42
    value[2] = 3.0
    value[3] = LEAST_SCALE * torch.linspace(0, 200, columns)
    value[4, 1:] = 0
    return value


@pytest.mark.parametrize("columns", [5, 61, 128])
def test_what_was_read_is_written_back_as_it_was(columns: int):
    """A scale times 127, over 127, is that scale; a code times its scale, over it, is that code, whatever is drawn."""
    for start in (None, Draws(3, 4, 0)):
        narrow = quantized(awkward(columns), 16, start)
        value = dequantized(*narrow, 16, torch.float32)
        assert torch.equal(value.double(), narrow.codes.double() * _spread(narrow.scale, columns).double())
        for draws in (None, *(Draws(seed, step, 0) for seed in range(3) for step in range(3))):
            again = quantized(value, 16, draws)
            assert torch.equal(again.codes, narrow.codes)
            assert torch.equal(again.scale, narrow.scale)


def _spread(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(16, dim=1)[:, :columns].contiguous()


def test_of_a_scale_with_all_its_bits_the_same_would_not_hold():
    """Why a scale has 16 bits: of random float32 scales, one in a hundred is another after one product and quotient."""
    scale = torch.rand(2**16, generator=torch.Generator().manual_seed(2)) + 1
    assert 0.005 < ((scale * 127) / 127 != scale).double().mean() < 0.02


@every_optimizer
def test_a_zero_update_leaves_a_weight_bit_for_bit(member: Member):
    weight = parameter((24, 40))
    before = parts(weight)
    steps(built(member, weight, lr=0.0), 4)
    assert parts(weight) == before
    steps(built(member, weight, weight_decay=0.0), 2, lambda _, __, like: torch.zeros_like(like))
    assert parts(weight) == before


@every_optimizer
def test_a_gradient_that_is_not_finite_leaves_a_weight_bit_for_bit(member: Member):
    weight = parameter((24, 40))
    optimizer = built(member, weight)
    steps(optimizer, 1)
    before = parts(weight), {name: bits(value) for name, value in optimizer.state[weight].items()}
    weight.grad = torch.randn(24, 40)
    weight.grad[3, 4] = math.nan
    optimizer.step()
    assert (parts(weight), {name: bits(value) for name, value in optimizer.state[weight].items()}) == before
    assert optimizer.skipped() == 1


# Something moves.


@every_optimizer
@SHAPES
def test_a_step_is_that_of_a_wide_weight_rounded_to_a_neighbouring_code(member: Member, shape: tuple[int, int]):
    weight = parameter(shape)
    wide = nn.Parameter(weight.dequantize())
    ours, theirs = built(member, weight), built(member, wide)
    wide.grad = gradient("layer", 0, wide)
    theirs.step()
    steps(ours, 1)
    target = wide.detach()
    assert not torch.equal(weight.dequantize(), target)
    scale = _spread(weight.scale, shape[1])
    # At random to one side or the other; the scale itself, and so the largest, is off by 2^-15 at most.
    error = (weight.dequantize() - target).abs()
    assert (error <= scale * (1 + 127 * 2**-14)).all()
    for name, value in theirs.state[wide].items():
        assert torch.equal(ours.state[weight][name], value), name


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_rounding_is_as_asked_for(rounding: str):
    weight = parameter((64, 64))
    wide = nn.Parameter(weight.dequantize())
    ours, theirs = (built(BY_NAME["apollo"], each, rounding=rounding, lr=1.0) for each in (weight, wide))
    wide.grad = gradient("layer", 0, wide)
    theirs.step()
    steps(ours, 1)
    error = (weight.dequantize() - wide.detach()).abs() / _spread(weight.scale, 64)
    beyond = float((error > 0.5 + 127 * 2**-16).double().mean())
    # Of uniform remainders, a quarter goes to the farther of two neighbours.
    assert beyond == 0 if rounding == "nearest" else abs(beyond - 0.25) < SIGMAS * math.sqrt(0.25 * 0.75 / 64**2)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e20, 1e-25, 1e-29])
def test_rounding_is_right_on_average_for_every_element(size: float):
    """Also the largest of a group, whose scale is drawn too."""
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(1, 300, generator=generator) * size
    value[0, 0], value[0, 1] = 4 * size, (4 - 2**-20) * size  # which a smaller scale would put beyond the last code
    count = 4096
    # Every row is the same row, at another place in the weight.
    narrow = quantized(value.expand(count, 300), 16, Draws(1, 1, 0))
    drawn = dequantized(*narrow, 16, torch.float32).double()
    scale = _spread(narrow.scale, 300).double().mean(dim=0)
    error = (drawn.mean(dim=0) - value.double()[0]) / scale
    # A code has a variance of at most 1/4; the largest has that of 127 scales, each within 2^-15. Sixteen random bits
    # know a probability to 2^-17, and beside the largest an element may be off by 2^-10.
    assert (error.abs() < SIGMAS * 0.5 / math.sqrt(count) + 2**-10 + 2**-17).all()


def test_rounding_has_no_bias_that_many_elements_would_show():
    """Neither up nor away from zero, over 2^21 elements."""
    value = torch.randn(2**11, 2**10, generator=torch.Generator().manual_seed(4))
    narrow = quantized(value, 128, Draws(1, 1, 0))
    scale = narrow.scale.repeat_interleave(128, dim=1).double()
    error = (narrow.codes * scale - value.double()) / scale
    bound = SIGMAS * 0.5 / math.sqrt(value.numel())
    assert abs(float(error.mean())) < bound
    assert abs(float((error * value.sign()).mean())) < bound
    # The largest of each group is as good as its scale: rounded to 2^-15 of itself, which is 2^-8 of a code.
    size = value.abs().unflatten(1, (-1, 128))
    largest = (size == size.amax(dim=2, keepdim=True)).flatten(1)
    assert (error[largest].abs() < 2**-8).all()
    bound = SIGMAS * 2**-9 / math.sqrt(int(largest.sum()))
    assert abs(float((error * value.sign())[largest].mean())) < bound


def test_steps_too_small_to_write_are_kept_on_average():
    """A twentieth of a code per step: nearest rounding loses them all, stochastic rounding none."""
    count = 40

    def moved(rounding: str) -> Tensor:
        # One element at the top of each group keeps its scale: it has no gradient.
        value = torch.full((256, 256), 0.5)
        value[:, ::16] = 1.0
        weight = nn.Parameter(Int8Weight.of(value, 16))
        start, code = weight.dequantize(), float(weight.scale[0, 0])
        optimizer = APOLLO([weight], lr=code / 20, rank=None, rounding=rounding)
        weight.grad = torch.ones(256, 256)
        weight.grad[:, ::16] = 0.0
        for _ in range(count):
            optimizer.step()
        change = (start - weight.dequantize()) / code
        assert (change[:, ::16] == 0).all()
        return change.view(256, 16, 16)[:, :, 1:].double()

    assert (moved("nearest") == 0).all()
    kept = moved("stochastic")
    # A walk of `count` roundings at p = 1 / 20 of a code or less from one.
    sigma = math.sqrt(count * 0.25 / kept.numel())
    assert abs(float(kept.mean()) - count / 20) < SIGMAS * sigma


# The same every time.


@pytest.mark.parametrize("member", [BY_NAME[name] for name in ("apollo", "mini", "galore", "adamw")], ids=str)
def test_how_rows_are_taken_in_pieces_makes_no_difference(member: Member, monkeypatch: pytest.MonkeyPatch):
    whole = parts(steps(built(member, parameter((61, 21))), 3))
    seen = []

    def watched(*arguments: object) -> Tensor:
        value = dequantized(*arguments)
        seen.append(value.numel())
        return value

    monkeypatch.setattr(groups_of_rows, "PIECE", 100)
    monkeypatch.setattr("apollo_optim.stepping.plain.dequantized", watched)
    weight = parameter((61, 21))
    assert parts(steps(built(member, weight), 3)) == whole
    assert max(seen) == 84


def test_a_run_resumes_bit_for_bit():
    net, other = (quantize_weights_(nn.Linear(40, 24, bias=False), 16) for _ in range(2))
    optimizer, resumed = (APOLLO(each, lr=0.01, rank=4, refresh_every=2) for each in (net, other))
    steps(optimizer, 3)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        steps(each, 2)
    assert parts(other.weight) == parts(net.weight)


def test_the_draw_belongs_to_seed_and_step():
    start = [parts(steps(built(BY_NAME["apollo"], parameter((24, 40)), seed=seed), 2)) for seed in (0, 0, 1)]
    assert start[0] == start[1]
    assert start[0] != start[2]


@pytest.mark.parametrize("options", [{"capturable": True}, {"lr": torch.tensor(0.01)}], ids=["capturable", "tensor lr"])
def test_counting_on_the_device_makes_no_difference(options: dict):
    for name in ("apollo", "adamw"):
        plain, other = (steps(built(BY_NAME[name], parameter((24, 40)), **each), 3) for each in ({}, options))
        # The same numbers by way of float64 tensors: a value may round the other way at the last bit.
        assert float((plain.codes != other.codes).double().mean()) < 1e-2


def test_maximize_moves_the_other_way():
    down, up = (
        built(BY_NAME["adamw"], parameter((24, 40)), maximize=choice, lr=0.1, weight_decay=0.0)
        for choice in (False, True)
    )
    start = parameter((24, 40)).dequantize()
    moved = [steps(each, 1).dequantize() - start for each in (down, up)]
    assert float(torch.corrcoef(torch.stack([each.flatten() for each in moved]))[0, 1]) < -0.8


@pytest.mark.parametrize("member", [BY_NAME[name] for name in ("mini", "apollo", "adamw")], ids=str)
def test_stepping_in_backward_gives_the_same_codes(member: Member):
    """A tied weight, one that is used twice, and a fallback that makes the whole weight for one operation."""

    def trained(in_backward: bool) -> dict[str, bytes]:
        net = quantize_weights_(model_of(torch.bfloat16), 8)
        optimizer = optimizer_of(member, net)
        if in_backward:
            step_in_backward(net, optimizer)
        train(net, optimizer, range(4))
        return {name: bits(value) for name, value in net.state_dict().items()}

    assert trained(True) == trained(False)


def test_a_backward_that_still_needs_an_older_weight_fails():
    net = quantize_weights_(nn.Linear(40, 24, bias=False), 16)
    optimizer = APOLLO(net, rank=4)
    loss = net(torch.randn(3, 40, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
