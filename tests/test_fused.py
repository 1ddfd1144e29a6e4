"""The Triton kernels do what plain PyTorch does: in Triton's interpreter on the CPU, and compiled on a GPU."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO
from family import Member
from runs import bits, gradient, snapshot
from twins import RULES, assert_same_run, each_kernel, on_both, started, twins

# Beyond the last channel the kernels divide zero by zero, to no effect, but numpy reports it.
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

NO_MOMENTUM = 0.0, 0.999
"""Betas with which a spike in the gradient is one in the update at once."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let memory that nobody has written yet hold NaN, at every step anew; counts the tensors."""
    empty, made = torch.empty, []

    def poisoned_empty(*size: object, **options: object) -> Tensor:
        made.append(1)
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", -1)
    return made


@each_kernel()
def test_the_kernels_step_as_plain_pytorch_does(member: Member, device: str, dtype: torch.dtype, poisoned: list[int]):
    """Across a refresh, and with NaN wherever a kernel might read what none has written."""
    fused, plain = twins(member, device, dtype)
    steps = 3 if device == "cpu" else 5
    fused.steps(steps)
    assert poisoned
    assert_same_run(fused, plain.steps(steps))
    assert fused.optimizer.skipped() == 0


@each_kernel(["apollo-1", "apollo-4", "apollo-4-svd", "structured"], half=[])
def test_orientation_and_alignment_make_no_difference(member: Member, device: str, dtype: torch.dtype):
    """Channels along rows that are not whole vectors, along columns that are; a square, whose channels are its rows."""
    shapes = {"tall": (61, 21), "wide": (24, 48), "square": (16, 16), "convolution": (8, 4, 3, 3)}
    if device == "cuda":
        shapes |= {"long": (24, 2056), "experts": (2, 64, 48)}
    fused, plain = twins(member, device, dtype, shapes=shapes)
    assert_same_run(fused.steps(2), plain.steps(2))


@on_both
@pytest.mark.parametrize("rank", [1, 70], ids=str)
def test_weights_of_several_blocks_are_put_together(rank: int, device: str):
    """More than 1024 channels, or more rows of the basis than fit a tile."""
    shapes = {"wide": (8, 1100)} if rank == 1 else {"wide": (72, 80)}
    fused, plain = twins(Member("", APOLLO, {"rank": rank}), device, shapes=shapes)
    assert_same_run(fused.steps(2), plain.steps(2))


@each_kernel(["mini", "apollo-4"], half=[])
@pytest.mark.parametrize("growth_limit", [1.01, None], ids=["limited", "unlimited"])
def test_a_spike_is_limited_as_in_plain_pytorch(
    member: Member, device: str, dtype: torch.dtype, growth_limit: float | None
):
    def spike(name: str, step: int, like: Tensor) -> Tensor:
        return gradient(name, step, like) * (30 if step == 2 else 1)

    shapes = {"wide": (24, 40)} if device == "cpu" else {"wide": (24, 40), "tall": (40, 24)}
    fused, plain = twins(member, device, dtype, shapes=shapes, growth_limit=growth_limit, betas=NO_MOMENTUM)
    assert_same_run(fused.steps(3, spike), plain.steps(3, spike))
    ours, theirs = fused.optimizer.statistics(), plain.optimizer.statistics()
    for key, value in ours.items():
        assert value == pytest.approx(theirs[key], rel=1e-4), key
    if growth_limit is None:
        assert "last_norm" not in fused.state("wide")
    else:
        assert ours["limiter/active"] == 1
        assert ours["limiter/shrink"] < 0.9


@each_kernel(["apollo-4", "apollo-4-svd", "adamw"], half=[])
def test_maximize_and_a_learning_rate_in_a_tensor(member: Member, device: str, dtype: torch.dtype):
    shapes = {"wide": (24, 40), "scalar": ()}
    fused, plain = twins(member, device, dtype, shapes=shapes, maximize=True, lr=torch.tensor(0.01))
    assert_same_run(fused.steps(2), plain.steps(2))


@each_kernel(["apollo-1", "apollo-4", "mini-svd", "apollo-4-svd", "structured", "adamw"], half=[])
def test_moments_in_bfloat16_are_rounded_as_in_plain_pytorch(member: Member, device: str, dtype: torch.dtype):
    shapes = {"experts": (2, 9, 24), "vector": (5,)} if device == "cpu" else None
    fused, plain = twins(member, device, dtype, shapes=shapes, state_dtype=torch.bfloat16)
    # A moment that was rounded the other way differs by up to 2^-7, and with it the gain of its channel.
    assert_same_run(fused.steps(2), plain.steps(2), gain_error=2**-6, flips=3e-2)
    assert fused.state("experts")["exp_avg"].dtype == torch.bfloat16


# Gradients and weights that ask for care.

BAD = {"experts": (1, 2, 3), "vector": (2,)}
"""Where one number of a gradient is not finite: of the experts, in one of them."""
REFUSALS = [
    ("apollo-1", math.nan, False),
    ("mini", math.inf, True),
    ("apollo-4", -math.inf, False),
    ("apollo-4-svd", math.nan, False),
    ("structured", math.nan, True),
]


@on_both
@pytest.mark.parametrize(("rule", "value", "capturable"), REFUSALS)
def test_a_bad_gradient_holds_back_its_weight_and_no_other(rule: str, value: float, capturable: bool, device: str):
    def spoiled(name: str, step: int, like: Tensor) -> Tensor:
        grad = gradient(name, step, like)
        if name in BAD:
            grad[BAD[name]] = value
        return grad

    shapes = {"wide": (24, 40), "experts": (2, 9, 24), "vector": (5,)}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    run = started(RULES[rule], device, dtype, shapes=shapes, capturable=capturable).steps(1)
    before = {name: weight.detach().clone() for name, weight in run.named.items()}
    run.step(1, spoiled)
    for name, weight in run.named.items():
        assert torch.equal(weight, before[name]) == (name in BAD), name
        assert all(bool(entry.isfinite().all()) for entry in run.state(name).values()), name
        # The host does not ask the device what became of a step that it counts.
        assert run.state(name)["step"] == (1 if capturable and name in BAD else 2)
    assert run.optimizer.skipped() == len(BAD)
    run.step(2)
    for name, weight in run.named.items():
        assert not torch.equal(weight, before[name])
        assert bool(weight.isfinite().all())
    assert run.optimizer.skipped() == len(BAD)


@each_kernel(["apollo-1", "apollo-4", "apollo-4-svd", "structured", "adamw"], half=[])
def test_a_gradient_whose_squares_overflow_is_refused_too(member: Member, device: str, dtype: torch.dtype):
    """It would leave an infinite second moment, and with it a weight that never moves again."""
    run = started(member, device, dtype, shapes={"wide": (24, 40)})
    run.step(0, lambda name, step, like: gradient(name, step, like) * 1e25)
    assert torch.equal(run.named["wide"], run.start["wide"])
    assert all(bool(entry.isfinite().all()) for entry in run.state("wide").values())
    assert run.optimizer.skipped() == 1


@on_both
@pytest.mark.parametrize("capturable", [False, True], ids=["host", "device"])
def test_a_refused_gradient_that_the_host_counts_is_a_step_of_the_bias_correction(capturable: bool, device: str):
    weight = nn.Parameter(torch.zeros(5, device=device))
    optimizer = APOLLO([weight], lr=1.0, fused=True, capturable=capturable)
    for value in (math.nan, 1.0):
        weight.grad = torch.full_like(weight, value)
        optimizer.step()
    # The moments have seen one gradient: AdamW's first step is the learning rate if their count is 1.
    of_two = (1 - 0.9) / (1 - 0.9**2) * math.sqrt((1 - 0.999**2) / (1 - 0.999))
    assert weight.tolist() == pytest.approx([-1.0 if capturable else -of_two] * 5, rel=1e-5)
    resumed = nn.Parameter(weight.detach().clone())
    twin = APOLLO([resumed], lr=1.0, fused=True, capturable=capturable)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((weight, optimizer), (resumed, twin)):
        each.grad = torch.full_like(each, 0.5)
        stepped.step()
    assert torch.equal(weight, resumed)


def every_value(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a 16-bit dtype, or as many of float32, as a matrix."""
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32).view(dtype)
        return values[values.isfinite()][:2400].view(40, 60)
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return values[values.isfinite()].view(-1, 256)


@each_kernel(["mini", "apollo-4", "structured", "adamw"])
def test_without_a_gradient_and_a_learning_rate_every_weight_stays_bit_for_bit(
    member: Member, device: str, dtype: torch.dtype
):
    weight = nn.Parameter(every_value(dtype).to(device))
    before = bits(weight)
    optimizer = member.build([weight], lr=0.0, weight_decay=0.1, fused=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert bits(weight) == before


@each_kernel(["mini", "apollo-4", "adamw"])
def test_weights_that_only_decay_round_bit_for_bit_as_in_plain_pytorch(member: Member, device: str, dtype: torch.dtype):
    """A zero gradient leaves one product to compute, which both paths get exactly alike: only the draws remain."""
    shapes = {"wide": (24, 40), "vector": (5,)} if device == "cpu" else None
    fused, plain = twins(member, device, dtype, shapes=shapes, weight_decay=0.3)
    for run in (fused, plain):
        run.steps(2, lambda _, __, like: torch.zeros_like(like))
    assert snapshot(fused.optimizer).weights == snapshot(plain.optimizer).weights
    assert not torch.equal(fused.named["wide"], fused.start["wide"])


@on_both
def test_a_gradient_that_is_not_contiguous_is_made_so(device: str):
    """Also one that lies where the last gradient lay."""
    memory = torch.empty(24 * 40, device=device)

    def transposed(name: str, step: int, like: Tensor) -> Tensor:
        grad = memory.view(24, 40) if step == 0 else memory.view(40, 24).t()
        return grad.copy_(gradient(name, step, like))

    whole = started(RULES["mini"], device, shapes={"wide": (24, 40)}).steps(3)
    strided = started(RULES["mini"], device, shapes={"wide": (24, 40)}).steps(3, transposed)
    assert torch.equal(strided.named["wide"].grad, whole.named["wide"].grad)
    assert snapshot(strided.optimizer).weights == snapshot(whole.optimizer).weights


@on_both
def test_an_empty_weight_is_left_alone(device: str):
    run = started(RULES["adamw"], device, shapes={"empty": (0, 24), "vector": (5,)})
    run.step(0)
    assert not run.optimizer.state.get(run.named["empty"])
    assert not torch.equal(run.named["vector"], run.start["vector"])


BUFFERS = "basis", "padded", "lows", "shares", "parts", "gains", "blocks", "kept_gains"


@each_kernel(["apollo-1", "apollo-4", "apollo-4-svd", "structured", "adamw"], half=[])
def test_scratch_takes_the_bytes_that_batches_are_formed_by(member: Member, device: str, dtype: torch.dtype):
    fused, _ = twins(member, device, dtype, shapes={"wide": (37, 53), "tall": (24, 9), "experts": (2, 9, 24)})
    embed = fused.named["embed"] = nn.Parameter(torch.zeros(24, 40, dtype=dtype, device=device))
    fused.optimizer.add_param_group({"params": [("embed", embed)], "rank": None, "second_moment": "factored"})
    fused.step(0)
    (plan,) = fused.optimizer._plans.last
    (step,) = plan.fused
    all_launches = [*step._elementwise, *step._projected]
    assert {launches.batch.kind.mode for launches in all_launches} > {"factored"}
    for launches in all_launches:
        assert launches.scratch is not None
        assert sum(getattr(launches.scratch, name).nbytes for name in BUFFERS) == launches.batch.scratch_bytes
        if launches.batch.kind.mode == "factored":  # sums of rows, of columns and of one tile, one more than 64
            assert launches.scratch.parts.numel() >= 24 + 40 + 1
