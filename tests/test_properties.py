"""What holds for every optimizer, shape, dtype, option and gradient that hypothesis can think of."""

import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apollo_optim import ArtemisMini, optimizer_memory
from apollo_optim.optimizer import ProjectedOptimizer
from family import FAMILY, Member

# `make test-all` asks for more.
SETTINGS = settings(deadline=None, derandomize=True, max_examples=int(os.environ.get("EXAMPLES", "40")))

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
NON_FINITE = math.nan, math.inf, -math.inf

members = st.sampled_from(FAMILY)
random_bases = st.sampled_from([member for member in FAMILY if not member.uses_svd])
shapes = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 17), st.integers(1, 17)),
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)
seeds = st.integers(0, 2**31)


@dataclass(frozen=True)
class Gradient:
    """A pattern of gradients: normals of one size with what is peculiar about them."""

    seed: int = 0
    exponent: float = 0.0
    """Of ten, for the size of a value."""
    kept: float = 1.0
    """Share of the values that are not zero."""
    planted: float | None = None
    """A value that is not finite, somewhere."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Values past the largest finite one are cut there, so that only what is planted is not finite."""
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**self.exponent
        values *= torch.rand(shape, generator=generator) < self.kept
        if self.planted is not None:
            values.view(-1)[self.seed % values.numel()] = self.planted
        largest = torch.finfo(dtype).max
        return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(dtype)


ordinary_gradients = st.builds(Gradient, seed=seeds, exponent=st.floats(-4, 1))
# From float32's subnormals to its largest. Left out is where a gradient's squares do not overflow but those of its
# projection may, which is longer by up to the root of the side.
sizes = st.one_of(st.floats(-46, 17), st.floats(20, 39))
finite_gradients = st.builds(Gradient, seed=seeds, exponent=sizes, kept=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
spoilt_gradients = st.builds(Gradient, seed=seeds, planted=st.sampled_from(NON_FINITE))


@dataclass
class Run:
    """A weight under an optimizer."""

    member: Member
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    weight: nn.Parameter = field(init=False)
    optimizer: ProjectedOptimizer = field(init=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(11)
        self.weight = nn.Parameter(torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.dtype))
        self.optimizer = self.member.build([("weight", self.weight)], **self.options)

    def step(self, *gradients: Gradient | Tensor) -> "Run":
        for gradient in gradients:
            is_tensor = isinstance(gradient, Tensor)
            self.weight.grad = gradient.clone() if is_tensor else gradient.tensor(self.shape, self.dtype)
            self.optimizer.step()
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.weight]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the weight and of all its state."""
        return {"weight": self.weight.detach().clone()} | {name: value.clone() for name, value in self.state.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are the same to the bit: not a number is itself, and zeros have signs."""
    raw = [{name: value.reshape(-1).view(torch.uint8) for name, value in tensors.items()} for tensors in (a, b)]
    return a.keys() == b.keys() and all(torch.equal(raw[0][name], raw[1][name]) for name in a)


@st.composite
def options_of(draw: st.DrawFn, member: Member) -> dict[str, Any]:
    """Options that the optimizer takes, far from its defaults too."""
    options = {
        "lr": draw(st.sampled_from([0.0, 1e-3, 1.0])),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.999), (0.5, 0.5), (0.0, 0.0)])),
        "eps": draw(st.sampled_from([1e-8, 1e-6, 1e-12])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "seed": draw(st.sampled_from([0, 1, 2**62])),
        "state_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        "rounding": draw(st.sampled_from(["stochastic", "nearest"])),
        "maximize": draw(st.booleans()),
    }
    if member.takes_scale:
        options["scale"] = draw(st.sampled_from([0.25, 1.0, 10.0, "auto"]))
    if member.capturable:
        options["capturable"] = draw(st.booleans())
    if member.limits_growth:
        options["growth_limit"] = draw(st.sampled_from([None, 1.01, 2.0]))
    if member.refreshes:
        options["refresh_every"] = draw(st.integers(1, 4))
        if member.options.get("rank", 1) is not None:
            options["rank"] = draw(st.sampled_from([1, 2, 5, 100, 0.01, 0.25, 0.99]))
    return options


@st.composite
def runs(draw: st.DrawFn, which: st.SearchStrategy[Member] = members) -> Run:
    member = draw(which)
    return Run(member, draw(shapes), draw(st.sampled_from(DTYPES)), draw(options_of(member)))


@SETTINGS
@given(runs(), st.lists(st.one_of(finite_gradients, spoilt_gradients), min_size=1, max_size=6))
def test_weights_and_state_stay_finite_whatever_comes(run: Run, gradients: list[Gradient]):
    # A second moment of float64 gradients has no room in the exponents of bfloat16.
    assume((run.dtype, run.options["state_dtype"]) != (torch.float64, torch.bfloat16))
    run.step(*gradients)
    for name, value in run.snapshot().items():
        assert value.isfinite().all(), name


@SETTINGS
@given(runs(), st.lists(ordinary_gradients, max_size=3), spoilt_gradients)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    run: Run, before: list[Gradient], spoilt: Gradient
):
    run.step(*before)
    if not before:  # state is made at the first gradient; take it as it is made
        run.step(Gradient(planted=math.nan))
    earlier, counted = run.snapshot(), run.optimizer.skipped()
    run.step(spoilt)
    assert same_bits(run.snapshot(), earlier)
    assert run.optimizer.skipped() == counted + 1
    run.step(Gradient(seed=1))
    assert run.optimizer.skipped() == counted + 1
    assert float(run.state["step"]) == len(before) + 1


@SETTINGS
@given(runs(), st.lists(ordinary_gradients, min_size=1, max_size=2))
def test_state_takes_the_bytes_that_were_promised(run: Run, gradients: list[Gradient]):
    member, options = run.member, run.member.options | run.options
    promised = optimizer_memory(member.grouped([run.weight], **run.options), member.optimizer, **options)
    run.step(*gradients)
    assert promised == sum(tensor.numel() * tensor.element_size() for tensor in run.state.values())
    if not member.group:  # whose options a shape cannot have
        assert promised == optimizer_memory([run.shape], member.optimizer, dtype=run.dtype, **options)


@SETTINGS
@given(runs(), st.lists(finite_gradients, min_size=1, max_size=5))
def test_a_run_repeats_bit_for_bit(run: Run, gradients: list[Gradient]):
    again = Run(run.member, run.shape, run.dtype, run.options)
    assert same_bits(run.step(*gradients).snapshot(), again.step(*gradients).snapshot())


@SETTINGS
@given(runs(), shapes, st.lists(ordinary_gradients, min_size=1, max_size=3))
def test_a_weight_does_not_notice_its_company(run: Run, other: tuple[int, ...], gradients: list[Gradient]):
    """Named weights keep their seeds, so one stepped between others ends where it would alone."""
    named = [("before", nn.Parameter(torch.ones(other))), ("own", nn.Parameter(run.weight.detach().clone()))]
    together = run.member.build(named, **run.options)
    alone = run.member.build([("own", run.weight)], **run.options)
    for gradient in gradients:
        for name, weight in [*named, ("own", run.weight)]:
            weight.grad = gradient.tensor(weight.shape, weight.dtype) if name == "own" else torch.ones(other)
        together.step()
        alone.step()
    own = named[1][1]
    assert torch.equal(own, run.weight)
    assert same_bits(together.state[own], alone.state[run.weight])


@SETTINGS
@given(runs(), st.lists(ordinary_gradients, min_size=1, max_size=4))
def test_maximizing_is_minimizing_the_opposite(run: Run, gradients: list[Gradient]):
    opposite = Run(run.member, run.shape, run.dtype, run.options | {"maximize": not run.options["maximize"]})
    for gradient in gradients:
        run.step(gradient)
        opposite.step(-gradient.tensor(run.shape, run.dtype))
    assert torch.equal(run.weight, opposite.weight)


@SETTINGS
@given(runs(), st.integers(1, 5))
def test_zero_gradients_only_decay_a_weight(run: Run, steps: int):
    """And leave nothing in the moments: a sharding framework makes state by such steps."""
    assume(run.dtype in (torch.float32, torch.float64))
    expected = run.weight.detach().clone()
    wide = torch.float64 in (run.dtype, run.options["state_dtype"])
    for _ in range(steps):
        run.step(Gradient(kept=0.0))
        decayed = expected.double() if wide else expected
        expected = (decayed * (1 - run.options["lr"] * run.options["weight_decay"])).to(run.dtype)
    assert torch.equal(run.weight, expected)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_side", "exp_avg_sq_channel", "last_norm"):
        assert not run.state.get(name, torch.zeros(1)).any(), name


@SETTINGS
@given(runs(random_bases), st.lists(ordinary_gradients, min_size=1, max_size=5), st.integers(-20, 20))
def test_the_step_does_not_know_the_scale_of_the_loss(run: Run, gradients: list[Gradient], power: int):
    """Bit for bit by powers of two, where eps is too small to matter: everything else in the step is a ratio."""
    assume(run.dtype in (torch.float32, torch.float64) and run.options["state_dtype"] != torch.bfloat16)
    options = run.options | {"eps": 1e-35 if run.dtype == torch.float32 else 1e-200}
    run, scaled = Run(run.member, run.shape, run.dtype, options), Run(run.member, run.shape, run.dtype, options)
    for gradient in gradients:
        run.step(gradient)
        scaled.step(gradient.tensor(run.shape, run.dtype) * 2.0**power)
    assert torch.equal(run.weight, scaled.weight)


@SETTINGS
@given(
    # The blocks of a 4-bit momentum go along the rows of the weight.
    members.filter(lambda member: not member.in_4_bits),
    st.tuples(st.integers(2, 30), st.integers(2, 30)).filter(lambda shape: shape[0] != shape[1]),
    st.lists(ordinary_gradients, min_size=1, max_size=4),
)
def test_a_transposed_weight_takes_the_transposed_step(
    member: Member, shape: tuple[int, int], gradients: list[Gradient]
):
    """The smaller side is projected, whichever it is. float64; the products may add up in another order."""
    tall, wide = Run(member, shape, torch.float64), Run(member, shape[::-1], torch.float64)
    wide.weight.data.copy_(tall.weight.T)
    for gradient in gradients:
        tall.step(gradient)
        wide.step(gradient.tensor(shape, torch.float64).T.contiguous())
    torch.testing.assert_close(tall.weight.T, wide.weight, rtol=0, atol=1e-10)


@SETTINGS
@given(
    random_bases.filter(lambda member: member.optimizer is not ArtemisMini),
    st.tuples(st.integers(2, 20), st.integers(21, 40)),
    st.lists(ordinary_gradients, min_size=1, max_size=4),
    seeds,
)
def test_channels_have_no_order(member: Member, shape: tuple[int, int], gradients: list[Gradient], seed: int):
    """A permutation of them permutes the step, to the rounding of float64.

    Not so in ArtemisMini, whose basis lies along them and begins with random numbers for each.
    """
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
    run, permuted = Run(member, shape, torch.float64), Run(member, shape, torch.float64)
    permuted.weight.data.copy_(run.weight[:, order])
    for gradient in gradients:
        run.step(gradient)
        permuted.step(gradient.tensor(shape, torch.float64)[:, order])
    torch.testing.assert_close(run.weight[:, order], permuted.weight, rtol=0, atol=1e-10)


@SETTINGS
@given(
    st.sampled_from([m for m in FAMILY if m.capturable]), shapes, st.lists(ordinary_gradients, min_size=1, max_size=4)
)
def test_a_capturable_step_is_the_same_step(member: Member, shape: tuple[int, ...], gradients: list[Gradient]):
    """Its step count is a tensor; so may its learning rate be. float64 rounding apart."""
    refreshes = member.refreshes
    plain = Run(member, shape, torch.float64, {"lr": 1e-3} | ({"refresh_every": 2} if refreshes else {}))
    captured = Run(member, shape, torch.float64, plain.options | {"capturable": True, "lr": torch.tensor(1e-3)})
    plain.step(*gradients)
    captured.step(*gradients)
    # A learning rate of 1e-3 as float32 is off by 5e-8 of itself, and updates here are at most some tens.
    torch.testing.assert_close(plain.weight, captured.weight, rtol=0, atol=1e-3 * 6e-8 * 100)


@SETTINGS
@given(random_bases, st.tuples(st.integers(2, 4), st.integers(2, 17), st.integers(2, 17)), seeds)
def test_experts_do_not_notice_each_other(member: Member, shape: tuple[int, int, int], seed: int):
    one, other = Run(member, shape), Run(member, shape)
    for step in range(4):
        gradient = Gradient(seed=seed + step).tensor(shape, torch.float32)
        one.step(gradient)
        gradient[1:] = Gradient(seed=seed + 100 + step, exponent=2).tensor(shape, torch.float32)[1:]
        other.step(gradient)
    assert torch.equal(one.weight[0], other.weight[0])
    assert not torch.equal(one.weight[1], other.weight[1])
