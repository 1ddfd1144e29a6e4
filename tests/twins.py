"""Runs of the Triton kernels beside their plain twins: the rules that have kernels, and what "the same" means."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, APOLLOMini, StructuredAdamW
from apollo_optim.optimizer import ProjectedOptimizer
from family import BY_NAME, ROWWISE, WITHOUT_MOMENTUM, Member
from runs import gradient, weights

RULES = {
    member.name: member
    for member in [
        Member("apollo-1", APOLLO, {"rank": 1}),
        Member("mini", APOLLOMini),
        Member("apollo-4", APOLLO, {"rank": 4}),
        Member("apollo-4-tensor", APOLLO, {"rank": 4, "granularity": "tensor"}),
        Member("apollo-20", APOLLO, {"rank": 20}),
        Member("apollo-20-tensor", APOLLO, {"rank": 20, "granularity": "tensor"}),
        Member("apollo-1-svd", APOLLO, {"rank": 1, "projection": "svd"}),
        Member("mini-svd", APOLLOMini, {"projection": "svd_lowrank"}),
        Member("apollo-4-svd", APOLLO, {"rank": 4, "projection": "svd"}),
        Member("apollo-20-svd", APOLLO, {"rank": 20, "projection": "svd_lowrank", "granularity": "tensor"}),
        Member("structured", StructuredAdamW),
        Member("structured-tensor", StructuredAdamW, {"granularity": "tensor"}),
        Member("adamw", APOLLO, {"rank": None}),
    ]
}
MEMBERS = BY_NAME | RULES | {member.name: member for member in (WITHOUT_MOMENTUM, ROWWISE)}

Shapes = Mapping[str, tuple[int, ...]]
Gradient = Callable[[str, int, Tensor], Tensor]

# The interpreter takes a tenth of a second per matrix and step, so these are few, and one tile each: 37 rows that are
# contracted in two parts, experts that lie apart by no whole vector. Other orientations have a test of their own.
SMALL = {"wide": (37, 53), "experts": (2, 9, 24), "vector": (5,)}
# On a GPU also several tiles to a weight.
LARGE = {
    "wide": (37, 61),
    "tall": (208, 96),
    "square": (128, 128),
    "experts": (3, 9, 24),
    "vector": (3000,),
    "scalar": (),
}

cuda = pytest.mark.cuda
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
KERNELS = [("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float16)]


def each_kernel(
    names: Iterable[str] = RULES, half: Iterable[str] = ("mini", "apollo-4", "adamw")
) -> pytest.MarkDecorator:
    """Every rule in the interpreter, and on a GPU in float32 and bfloat16; those of `half` in float16 too.

    The interpreter's bfloat16 arithmetic is not the GPU's, so on the CPU weights are float32.
    """
    cases = [
        pytest.param(
            MEMBERS[name],
            device,
            dtype,
            marks=[cuda] if device == "cuda" else [],
            id=f"{name}-{device}-{_short(dtype)}",
        )
        for name in names
        for device, dtype in KERNELS
        if dtype != torch.float16 or name in half
    ]
    return pytest.mark.parametrize(("member", "device", "dtype"), cases)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shapes_for(device: str) -> Shapes:
    return SMALL if device == "cpu" else LARGE


@dataclass
class Run:
    """Weights under an optimizer."""

    start: dict[str, Tensor]
    named: dict[str, nn.Parameter]
    optimizer: ProjectedOptimizer

    def step(self, number: int, gradient: Gradient = gradient) -> None:
        """Take the step of this number."""
        for name, weight in self.named.items():
            weight.grad = gradient(name, number, weight)
        self.optimizer.step()

    def steps(self, count: int, gradient: Gradient = gradient) -> "Run":
        """Take the first `count` steps."""
        for number in range(count):
            self.step(number, gradient)
        return self

    def load_(self, other: "Run") -> None:
        """Go on from where another run is."""
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        with torch.no_grad():
            for name, weight in self.named.items():
                weight.copy_(other.named[name])

    def state(self, name: str) -> dict[str, Tensor]:
        return self.optimizer.state[self.named[name]]


def started(
    member: Member, device: str, dtype: torch.dtype = torch.float32, shapes: Shapes | None = None, **options: Any
) -> Run:
    """The member over weights that are the same in every run, with a basis that is renewed every second step."""
    made = weights(shapes or shapes_for(device), dtype)
    named = {name: nn.Parameter(weight.detach().to(device)) for name, weight in made.items()}
    group = {"params": list(named.items()), "refresh_every": 2}
    optimizer = member.build([group], **({"lr": 0.01, "weight_decay": 0.1, "fused": True} | options))
    return Run({name: weight.detach().clone() for name, weight in named.items()}, named, optimizer)


def twins(member: Member, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Run, Run]:
    """The same run by the kernels and in plain PyTorch."""
    return (
        started(member, device, dtype, **(options | {"fused": True})),
        started(member, device, dtype, **(options | {"fused": False})),
    )


def assert_same_run(fused: Run, plain: Run, gain_error: float | None = None, flips: float = 1e-2) -> None:
    """Weights and state agree as closely as float32 sums in another order do.

    A sum of S products errs by about sqrt(S) 2^-24 of its terms, at most 1e-6 here; a tenfold margin makes it 1e-5 of
    the largest entry. `gain_error` is the same for the gain. A narrow tensor rounds up where its float32 value exceeds
    a draw: values that lie a share `d` of the spacing apart part with probability `d`, which is about 1e-4 for a small
    weight that takes a step of many spacings. At most a share `flips` of all elements do.
    """
    gain_error = gain_error or gain_error_of(plain.optimizer)
    for name, weight in plain.named.items():
        moved = (weight.detach().double() - plain.start[name].double()).abs().max()
        assert_close_or_neighbour(fused.named[name], weight, gain_error * float(moved), flips, name)
        state, expected = fused.state(name), plain.state(name)
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            error = gain_error if key == "last_norm" else 1e-5
            tolerance = error * float(value.double().abs().max())
            assert_close_or_neighbour(state[key], value, tolerance, flips, f"{name}.{key}")


def gain_error_of(optimizer: ProjectedOptimizer) -> float:
    """How far gains may be apart, relative to the largest.

    At rank 1 a channel's gain divides by one number, |low|. Of a thousand such normals the smallest is a thousandth of
    the usual, or with bad luck a ten-thousandth, and its error of 1e-6 weighs that much more; and it is this channel
    that takes the largest step.
    """
    group = optimizer.param_groups[0]
    return 1e-2 if group["rank"] == 1 and group["granularity"] == "channel" else 1e-5


def assert_close_or_neighbour(actual: Tensor, expected: Tensor, tolerance: float, flips: float, what: str) -> None:
    """Within `tolerance` and four float32 roundings of the largest; or, of a narrow dtype, one spacing now and then."""
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device), what
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    assert bool(actual.isfinite().all()), f"{what} is not finite"
    largest = float(expected.double().abs().max())
    if actual.dtype in (torch.bfloat16, torch.float16):
        share = float((actual != expected).double().mean())
        assert share <= flips, f"{what}: {share:.2%} of the elements differ"
        tolerance += torch.finfo(actual.dtype).eps * largest
    error = float((actual.double() - expected.double()).abs().max())
    allowed = tolerance + 4 * 2**-24 * largest
    assert error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}"
