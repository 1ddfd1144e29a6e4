"""The kernels that step int8 weights do what plain PyTorch does: in Triton's interpreter, and compiled on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from apollo_optim.quant import Int8Weight
from apollo_optim.quant.groups import dequantized
from family import Member
from runs import bits, gradient
from twins import RULES, on_both

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

Shapes = dict[str, tuple[tuple[int, int], int]]
"""Weights by name: their shape and the size of their groups."""

# Rows of whole groups and not, channels along either side, a group longer than a row, rows of an odd length.
SMALL: Shapes = {"even": ((24, 64), 16), "wide": ((37, 53), 16), "tall": ((61, 21), 128)}
LARGE: Shapes = {
    "even": ((256, 512), 128),
    "wide": ((512, 1376), 128),
    "tall": ((5461, 300), 128),
    "odd": ((300, 5461), 64),
    "square": ((128, 128), 8),
    "long": ((40, 2056), 1024),
}
NAMES = "mini", "apollo-4", "apollo-4-svd", "adamw"
RULE = pytest.mark.parametrize("member", [RULES[name] for name in NAMES], ids=str)


def shapes_for(device: str) -> Shapes:
    return SMALL if device == "cpu" else LARGE


class Run:
    """Int8 weights that are the same in every run, under an optimizer."""

    def __init__(self, member: Member, device: str, shapes: Shapes | None = None, **options: object):
        self.named: dict[str, nn.Parameter] = {}
        # The interpreter's bfloat16 is not the GPU's.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        for number, (name, (shape, group_size)) in enumerate((shapes or shapes_for(device)).items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
            self.named[name] = nn.Parameter(Int8Weight.of(value.to(device), group_size))
        group = {"params": list(self.named.items()), "refresh_every": 2}
        self.optimizer = member.build([group], **({"lr": 0.01, "weight_decay": 0.1, "fused": True} | options))

    def steps(self, count: int, gradient: Callable[..., Tensor] = gradient) -> "Run":
        for step in range(count):
            for name, weight in self.named.items():
                weight.grad = gradient(name, step, weight.dequantize())
            self.optimizer.step()
        return self

    def parts(self) -> dict[str, tuple[bytes, bytes]]:
        return {name: (bits(weight.codes), bits(weight.scale)) for name, weight in self.named.items()}


def twins(member: Member, device: str, **options: object) -> tuple[Run, Run]:
    return Run(member, device, fused=True, **options), Run(member, device, fused=False, **options)


def assert_same(fused: Run, plain: Run, flips: float) -> None:
    """Scales agree to a few roundings; of the codes at most a share `flips` differs, by one."""
    for name, weight in plain.named.items():
        ours = fused.named[name]
        torch.testing.assert_close(ours.scale, weight.scale, rtol=2**-14, atol=0)
        apart = (ours.codes.int() - weight.codes.int()).abs()
        assert apart.max() <= 1, name
        assert float((apart > 0).double().mean()) <= flips, name
        for key, value in plain.optimizer.state[weight].items():
            torch.testing.assert_close(fused.optimizer.state[ours][key].double(), value.double(), rtol=1e-3, atol=1e-5)


@on_both
@RULE
def test_the_kernels_step_int8_weights_as_plain_pytorch_does(
    member: Member, device: str, monkeypatch: pytest.MonkeyPatch
):
    """With NaN wherever a kernel might read what none has written."""
    fused, plain = twins(member, device)
    steps = 2 if device == "cpu" else 4
    plain.steps(steps)
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", -1)
    fused.steps(steps)
    # Sums in another order move a weight by 1e-5 of its step, which is a code or two: few draws fall in between.
    assert_same(fused, plain, flips=2e-3)
    assert fused.optimizer.skipped() == 0


@on_both
@pytest.mark.parametrize("group_size", [8, 32, 64, 256, 512, 1024])
@pytest.mark.parametrize("member", [RULES[name] for name in ("mini", "apollo-4", "adamw")], ids=str)
def test_groups_of_any_size_are_stepped_as_in_plain_pytorch(member: Member, group_size: int, device: str):
    """Half a tile holds one of the largest, and 128 of the smallest; in rows of groups, of whole vectors, and odd."""
    shapes = {f"{rest}": ((9, group_size + rest), group_size) for rest in (group_size, 16, 5)}
    fused, plain = (Run(member, device, shapes, fused=each).steps(1) for each in (True, False))
    # One draw of the fewest elements, 9 x 13.
    assert_same(fused, plain, flips=1 / 100)


@on_both
@pytest.mark.parametrize(("member", "rounding"), [(RULES["mini"], "stochastic"), (RULES["adamw"], "nearest")], ids=str)
def test_weights_that_only_decay_are_rounded_bit_for_bit_as_in_plain_pytorch(
    member: Member, device: str, rounding: str
):
    """A zero gradient leaves one product to compute, which both paths get exactly alike: only the rounding remains."""
    fused, plain = twins(member, device, weight_decay=0.3, rounding=rounding)
    for run in (fused, plain):
        run.steps(2, lambda _, __, like: torch.zeros_like(like))
    assert fused.parts() == plain.parts()
    assert fused.parts() != Run(member, device).parts()


@on_both
@RULE
def test_a_zero_update_leaves_a_weight_bit_for_bit(member: Member, device: str):
    """Also groups of zeros, of the smallest numbers and of the largest."""
    columns = 40 if device == "cpu" else 1376
    value = torch.randn(30, columns, generator=torch.Generator().manual_seed(1))
    value *= torch.exp2(torch.linspace(-140, 120, 30)).unsqueeze(1)
    value[3], value[4] = 0, 1e-42
    weight = nn.Parameter(Int8Weight.of(value.to(device), 16))
    before = bits(weight.codes), bits(weight.scale)
    optimizer = member.build([weight], lr=0.0, weight_decay=0.1, fused=True)
    for step in range(2):
        weight.grad = gradient("weight", step, value).to(device)
        optimizer.step()
        assert (bits(weight.codes), bits(weight.scale)) == before


@on_both
@RULE
def test_a_bad_gradient_leaves_its_weight_bit_for_bit_and_no_other(member: Member, device: str):
    run = Run(member, device, {"good": ((24, 40), 16), "bad": ((24, 40), 16)}).steps(1)
    before = run.parts()

    def spoiled(name: str, step: int, like: Tensor) -> Tensor:
        grad = gradient(name, step, like)
        if name == "bad":
            grad[3, 4] = math.inf
        return grad

    run.steps(1, spoiled)
    after = run.parts()
    assert after["bad"] == before["bad"]
    assert after["good"] != before["good"]
    assert run.optimizer.skipped() == 1
    assert all(bool(value.isfinite().all()) for value in run.optimizer.state[run.named["bad"]].values())


@on_both
@pytest.mark.parametrize("member", [RULES["mini"], RULES["adamw"]], ids=str)
def test_capturable_and_company_make_no_difference(member: Member, device: str):
    wide = {"wide": shapes_for(device)["wide"]}
    alone = Run(member, device, wide).steps(2).parts()
    assert Run(member, device, wide, capturable=True).steps(2).parts() == alone
    company = Run(member, device, {**wide, "even": shapes_for(device)["even"]}).steps(2).parts()
    assert company["wide"] == alone["wide"]


@on_both
def test_codes_and_scales_may_move_between_steps(device: str):
    still, moved = (Run(RULES["mini"], device, {"wide": ((24, 40), 16)}).steps(1) for _ in range(2))
    weight = moved.named["wide"]
    for part in ("codes", "scale"):
        old = getattr(weight, part)
        setattr(weight, part, old.clone())
        old.fill_(-1)
    assert moved.steps(1).parts() == still.steps(1).parts()


@on_both
def test_moments_in_bfloat16_are_rounded_as_in_plain_pytorch(device: str):
    fused, plain = twins(RULES["adamw"], device, state_dtype=torch.bfloat16)
    assert_states = [run.steps(1).optimizer.state for run in (fused, plain)]
    for name in fused.named:
        ours, theirs = (
            state[run.named[name]]["exp_avg"] for state, run in zip(assert_states, (fused, plain), strict=True)
        )
        assert ours.dtype == torch.bfloat16
        assert float((ours != theirs).double().mean()) < 1e-2


@pytest.mark.parametrize("device", ["cpu"])
def test_a_group_that_no_tile_holds_is_left_to_plain_pytorch(device: str):
    shapes = {"wide": ((8, 40), 2048)}
    with pytest.raises(
        RuntimeError, match=r"fused=True, but wide \(8, 40\) cannot be: .* groups of 2048, more than 1024"
    ):
        Run(RULES["mini"], device, shapes).steps(1)
    Run(RULES["mini"], device, shapes, fused=None).steps(1)


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_makes_a_weight_whole_as_plain_pytorch_does(dtype: torch.dtype, device: str):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bfloat16 is not the GPU's")
    from apollo_optim.quant.kernel import dequantized_by_kernel

    for columns, group_size in ((5, 8), (64, 16), (300, 128), (2100, 1024)):
        weight = Int8Weight.of(torch.randn(3, columns, generator=torch.Generator().manual_seed(0)), group_size)
        made = dequantized_by_kernel(weight.codes.to(device), weight.scale.to(device), group_size, dtype)
        assert torch.equal(made.cpu(), dequantized(weight.codes, weight.scale, group_size, dtype))
