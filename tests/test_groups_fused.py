"""AdamW's kernels for rows in groups: int8 weights, 8-bit moments and row-wise state, beside plain PyTorch."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import triton
import triton.language as tl

from apollo_optim import APOLLO, Artemis, FactoredAdamW
from apollo_optim.kernels.groups import groups_of, in_group, room
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import Int8Weight
from apollo_optim.quant.blocks import widened
from family import Member
from runs import bits, gradient
from twins import RULES, on_both, started

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

STATES: dict[str, dict[str, Any]] = {
    "int8": {"state_dtype": "int8"},
    "rowwise": {"second_moment": "rowwise"},
    "rowwise-bf16": {"second_moment": "rowwise", "state_dtype": torch.bfloat16},
    "rowwise-int8": {"second_moment": "rowwise", "state_dtype": "int8"},
    "no-momentum": {"second_moment": "rowwise", "betas": (0.0, 0.99)},
}
STATE = pytest.mark.parametrize("state", STATES)
STATES["wide"] = {}
WEIGHT = pytest.mark.parametrize("weight", ["wide", "int8"])
SMALL = {"even": (4, 256), "odd": (5, 150), "vector": (70,)}
LARGE = {"even": (300, 4096), "odd": (301, 1376), "vector": (5000,), "scalar": (), "experts": (3, 40, 200)}


class Run:
    """Weights that are the same in every run, stepped by AdamW with one kind of state."""

    def __init__(
        self, state: str, weight: str, device: str, shapes: dict[str, tuple[int, ...]] | None = None, **options: Any
    ):
        self.named: dict[str, nn.Parameter] = {}
        # The interpreter's bfloat16 is not the GPU's.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        for number, (name, shape) in enumerate((shapes or (SMALL if device == "cpu" else LARGE)).items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype).to(device)
            if state == "rowwise-int8" and len(shape) > 2:
                continue  # no kernel
            narrow = weight == "int8" and len(shape) == 2
            self.named[name] = nn.Parameter(Int8Weight.of(value, 128) if narrow else value)
        group = {"params": list(self.named.items()), "rank": None, **STATES[state]}
        defaults = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
        self.optimizer: ProjectedOptimizer = APOLLO([group], **(defaults | options))

    def steps(self, count: int, bad: str | None = None) -> "Run":
        for step in range(count):
            for name, weight in self.named.items():
                weight.grad = gradient(name, step, whole(weight))
                if name == bad:
                    weight.grad.view(-1)[3] = math.inf
            self.optimizer.step()
        return self

    def bits(self, name: str) -> list[bytes]:
        weight = self.named[name]
        parts = [weight.codes, weight.scale] if isinstance(weight, Int8Weight) else [weight]
        return [bits(each) for each in (*parts, *self.optimizer.state[weight].values())]


def whole(weight: Tensor) -> Tensor:
    return (weight.dequantize() if isinstance(weight, Int8Weight) else weight).detach()


def assert_codes_agree(ours: Tensor, theirs: Tensor, what: str) -> None:
    """The same but for a few draws that fall between two results of float32 sums in another order."""
    apart = (ours.int() - theirs.int()).abs()
    assert apart.max() <= 1, what
    assert float((apart > 0).double().mean()) <= 5e-3, what


@on_both
@STATE
@WEIGHT
def test_the_kernels_step_as_plain_pytorch_does(state: str, weight: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """With NaN wherever a kernel might read what none has written."""
    plain = Run(state, weight, device, fused=False).steps(2)
    fused = Run(state, weight, device)
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", -1)
    fused.steps(2)
    monkeypatch.undo()
    for name, expected in plain.named.items():
        actual = fused.named[name]
        if isinstance(expected, Int8Weight):
            assert_codes_agree(actual.codes, expected.codes, name)
            torch.testing.assert_close(actual.scale, expected.scale, rtol=2**-14, atol=0)
        else:
            # A moment that is rounded the other way moves the next step by its distance to the next code.
            spacing = 2**-7 if expected.dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(actual.float(), expected.float(), rtol=spacing, atol=1e-3)
        ours, theirs = fused.optimizer.state[actual], plain.optimizer.state[expected]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if value.dtype in (torch.int8, torch.uint8):
                assert_codes_agree(ours[key], value, f"{name}.{key}")
            else:
                torch.testing.assert_close(
                    ours[key], value, rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-5, atol=1e-7
                )
    assert fused.optimizer.skipped() == 0


@on_both
@pytest.mark.parametrize("state", ["int8", "rowwise-int8", "no-momentum"])
@WEIGHT
def test_a_bad_gradient_holds_back_its_weight_and_no_other(state: str, weight: str, device: str):
    run = Run(state, weight, device, {"good": (5, 150), "bad": (5, 150)}).steps(1)
    before = {name: bits(whole(run.named[name])) for name in run.named}
    run.steps(1, bad="bad")
    assert bits(whole(run.named["bad"])) == before["bad"]
    assert bits(whole(run.named["good"])) != before["good"]
    assert run.optimizer.skipped() == 1
    state_of_bad = run.optimizer.state[run.named["bad"]]
    assert all(bool(value.isfinite().all()) for value in state_of_bad.values())
    run.steps(1)
    assert bits(whole(run.named["bad"])) != before["bad"]


@on_both
@pytest.mark.parametrize("state", ["int8", "rowwise"])
def test_capturable_and_company_make_no_difference(state: str, device: str):
    shape = {"odd": (5, 150)}
    alone = Run(state, "int8", device, shape).steps(2).bits("odd")
    capturable = Run(state, "int8", device, shape, capturable=True).steps(2)
    assert capturable.bits("odd")[:2] == alone[:2]
    assert Run(state, "int8", device, {**shape, "even": (4, 256)}).steps(2).bits("odd") == alone


@on_both
def test_state_may_move_between_steps(device: str):
    still, moved = (Run("int8", "wide", device, {"odd": (5, 150)}).steps(1) for _ in range(2))
    for entries in moved.optimizer.state.values():
        for key, value in entries.items():
            entries[key] = value.clone()
            value.fill_(1)
    assert moved.steps(1).bits("odd") == still.steps(1).bits("odd")


@on_both
def test_moments_in_8_bits_stay_right_on_average(device: str):
    """Against wide moments, over many elements: the mean of ten roundings of each."""
    shape = {"matrix": (16, 256) if device == "cpu" else (512, 4096)}
    narrow = Run("int8", "wide", device, shape, lr=0.0).steps(3)
    wide = Run("wide", "wide", device, shape, lr=0.0, fused=False).steps(3)
    ours, theirs = (run.optimizer.state[run.named["matrix"]] for run in (narrow, wide))
    for key in ("exp_avg", "exp_avg_sq"):
        kept = widened(ours[key], ours[f"{key}_scale"], torch.float64)
        error = kept - theirs[key].double()
        # Codes are at most 2 / 127 of the largest apart (of a second moment 4 / 255), and so is a rounding; three of
        # them, older ones damped; a coin between two codes varies by half their distance.
        distance = float(theirs[key].abs().max()) * (2 / 127 if key == "exp_avg" else 4 / 255)
        assert abs(float(error.mean())) < 6 * math.sqrt(3) * distance / 2 / math.sqrt(error.numel())


@pytest.mark.parametrize("device", ["cpu"])
def test_what_has_no_kernel_says_so(device: str, monkeypatch: pytest.MonkeyPatch):
    weight = nn.Parameter(Int8Weight.of(torch.randn(5, 150), 64))
    weight.grad = torch.randn(5, 150)
    with pytest.raises(
        RuntimeError, match=r"with state_dtype=torch.int8 there are kernels for groups of 128 only, not of 64"
    ):
        APOLLO([{"params": [weight], "rank": None}], state_dtype="int8", fused=True).step()
    cube = nn.Parameter(torch.randn(3, 4, 50))
    cube.grad = torch.randn(3, 4, 50)
    group = {"params": [cube], "rank": None, "second_moment": "rowwise", "state_dtype": "int8"}
    with pytest.raises(RuntimeError, match=r"rows of more than one dimension have no kernel"):
        APOLLO([dict(group)], fused=True).step()
    APOLLO([dict(group)], fused=None).step()
    monkeypatch.setattr("apollo_optim.fused.support.MOST_COLUMNS", 200)
    for size, message in ((300, r"8-bit moments of 300 elements in one row have no kernel"), (256, None), (150, None)):
        vector = nn.Parameter(torch.randn(size))
        vector.grad = torch.randn(size)
        with pytest.raises(RuntimeError, match=message) if message else nullcontext():
            APOLLO([vector], state_dtype="int8", fused=True).step()


@triton.jit
def room_kernel(sides, rooms, N: tl.constexpr):
    """The room in the first and the last groups of a matrix of whole groups whose rows are not read as vectors."""
    rows, columns = tl.load(sides), tl.load(sides + 1)
    run = tl.program_id(0) * ((columns - 1) // 1024)
    _, there, _, block = groups_of(run, rows, columns, N)
    column = block[:, None] * N + in_group(N, False)
    place = tl.arange(0, 1024 // N)[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :]
    tl.store(rooms + tl.program_id(0) * 128 + place, room(there, column, columns, True, False))


@on_both
@pytest.mark.parametrize("columns", [1024 + 128, 2**31 + 128])
def test_a_row_of_whole_groups_may_be_longer_than_int32_can_count(columns: int, device: str):
    rooms = torch.empty(2, 128, dtype=torch.int32, device=device)
    room_kernel[(2,)](torch.tensor([1, columns], device=device), rooms, N=128)
    assert rooms.clamp(max=8).tolist() == [[8] * 128, [8] * 16 + [0] * 112]


PROJECTED = {"wide": (37, 300), "tall": (150, 21), "experts": (2, 21, 140)}


@on_both
@pytest.mark.parametrize("member", [RULES[name] for name in ("mini", "apollo-20", "apollo-20-svd")], ids=str)
def test_moments_of_a_projected_gradient_in_8_bits_are_those_of_plain_pytorch(member: Member, device: str):
    """After one step, whose moments depend on nothing but the gradient."""
    shapes = PROJECTED if device == "cpu" else {**PROJECTED, "large": (512, 1376)}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    fused, plain = (
        started(member, device, dtype, shapes, state_dtype="int8", fused=each).steps(1) for each in (True, False)
    )
    for name in shapes:
        ours, theirs = fused.state(name), plain.state(name)
        assert ours.keys() == theirs.keys()
        for key in ("exp_avg", "exp_avg_sq"):
            assert_codes_agree(ours[key], theirs[key], f"{name}.{key}")
            # A low-rank gradient is a sum of S products, in another order: 1e-5 of the largest.
            torch.testing.assert_close(ours[f"{key}_scale"], theirs[f"{key}_scale"], rtol=1e-4, atol=0)
        spacing = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(fused.named[name], plain.named[name], rtol=spacing, atol=1e-5)
    assert fused.optimizer.skipped() == 0


@on_both
@pytest.mark.parametrize("member", [RULES["mini"], RULES["apollo-4"]], ids=str)
def test_a_bad_gradient_leaves_8_bit_moments_finite(member: Member, device: str):
    run = started(member, device, shapes={"wide": (37, 300)}, state_dtype="int8").steps(1)
    before = bits(run.named["wide"])

    def spoiled(name: str, step: int, like: Tensor) -> Tensor:
        grad = gradient(name, step, like)
        grad[3, 4] = math.nan
        return grad

    run.step(1, spoiled)
    assert bits(run.named["wide"]) == before
    assert run.optimizer.skipped() == 1
    assert all(bool(value.isfinite().all()) for value in run.state("wide").values())
    run.step(2)
    assert bits(run.named["wide"]) != before
    assert bool(run.named["wide"].isfinite().all())


@on_both
@pytest.mark.parametrize("moves", ["gradient", "state"])
@pytest.mark.parametrize("columns", [256, 208, 150])
@pytest.mark.parametrize("rule", ["nf4", *STATES])
@pytest.mark.parametrize("weight", ["wide", "int8"])
def test_gradients_and_state_may_begin_anywhere(weight: str, rule: str, columns: int, moves: str, device: str):
    def moved(tensor: Tensor) -> Tensor:
        """The same numbers, one element after the beginning of a vector."""
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    ends = []
    for begins in (False, True):
        if rule == "nf4":
            drawn = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).to(device)
            stepped = nn.Parameter(Int8Weight.of(drawn, 128) if weight == "int8" else drawn)
            optimizer: ProjectedOptimizer = FactoredAdamW([("odd", stepped)], lr=0.01, fused=True)
        else:
            run = Run(rule, weight, device, {"odd": (5, columns)})
            stepped, optimizer = run.named["odd"], run.optimizer
        for step in range(3):
            grad = gradient("odd", step, whole(stepped))
            stepped.grad = moved(grad) if begins and moves == "gradient" else grad
            optimizer.step()
            state = optimizer.state[stepped]
            if begins and moves == "state":
                state.update({name: moved(value) if value.dim() else value for name, value in state.items()})
        ends.append([whole(stepped).cpu(), *(value.cpu() for value in state.values())])
    for aligned, unaligned in zip(*ends, strict=True):
        # A GPU adds the squares of a row in another order where it reads them one by one.
        rounding = {"rtol": 2**-20, "atol": 2**-30} if aligned.dtype == torch.float32 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(unaligned, aligned, **rounding)


def fenced(tensor: Tensor, fences: list[Tensor]) -> Tensor:
    """The same numbers at the beginning of a vector, between two fences."""
    around = tensor.new_zeros(tensor.numel() + 128)
    fences += [around[:64], around[-64:]]
    return around[64:-64].view_as(tensor).copy_(tensor)


def held_to(fences: list[Tensor], access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """An operation of the interpreter that fails where it reads or writes a fence."""

    def held(builder: Any, *arguments: Any) -> Any:
        touched = arguments[0].data[arguments[mask_at].data]
        for fence in fences:
            begin = fence.data_ptr()
            assert not ((begin <= touched) & (touched < begin + fence.nbytes)).any()
        return access(builder, *arguments)

    return held


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("columns", [256, 208, 151])
@pytest.mark.parametrize("rule", ["nf4", "artemis", "int8", "rowwise-bf16"])
@WEIGHT
def test_kernels_touch_nothing_beside_what_they_step(
    weight: str, rule: str, columns: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    """Where the last tile has room for more groups, and the last group of a row for more elements."""
    from triton.runtime.interpreter import InterpreterBuilder

    fences: list[Tensor] = []
    for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2)):
        monkeypatch.setattr(InterpreterBuilder, name, held_to(fences, getattr(InterpreterBuilder, name), mask_at))
    drawn = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    narrow = Int8Weight.of(drawn, 128)
    codes, scale = fenced(narrow.codes, fences), fenced(narrow.scale, fences)
    value = Int8Weight(codes, scale, 128, drawn.dtype) if weight == "int8" else fenced(drawn, fences)
    stepped = nn.Parameter(value)
    build = {"nf4": FactoredAdamW, "artemis": Artemis}.get(rule, APOLLO)
    options = {"rank": None, **STATES[rule]} if build is APOLLO else {}
    optimizer = build([{"params": [("odd", stepped)], **options}], lr=0.01, fused=True)
    for step in range(2):
        stepped.grad = fenced(gradient("odd", step, whole(stepped)), fences)
        optimizer.step()
        state = optimizer.state[stepped]
        state.update({name: fenced(kept, fences) if kept.dim() else kept for name, kept in state.items()})
