"""The norm-growth limiter: it holds a spike to 1%, and traps no weight.

A weight is trapped where its first update is zero or tiny: from there, 1% a step would be 700 steps to a thousandfold.
The paper's own limiter does that, which each of these cases shows on tests/papers.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import papers
from apollo_optim import Fira, GaLore, StructuredAdamW
from apollo_optim.core.limiter import limited_growth
from family import BY_NAME, FAMILY, Member, partly_slow

LIMITED = [member for member in FAMILY if member.limits_growth]
SCALING = [member for member in LIMITED if member.optimizer is not Fira]
"""Those whose whole update is limited."""
SHAPE = 24, 40
RECOVERY = 50
NO_MOMENTUM = 0.0, 0.999
"""Betas with which a spike in the gradient is one in the update at once."""


def steady(steps: int, *shape: int, noise: float = 0.1) -> Tensor:
    """Gradients of one direction and size 1e-2 under a little noise: nothing that a limiter should act on for long."""
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(shape, generator=generator)
    return 1e-2 * (direction + noise * torch.randn(steps, *shape, generator=generator))


def updates(member: Member, stream: Tensor, **options: object) -> Tensor:
    """The update that each gradient of the stream leads to."""
    weight = nn.Parameter(torch.zeros(stream.shape[1:]))
    optimizer = member.build([weight], lr=1.0, **options)
    result = []
    for gradient in stream:
        weight.data.zero_()
        weight.grad = gradient.clone()
        optimizer.step()
        result.append(-weight.detach().clone())
    return torch.stack(result)


def recovered(shares: Tensor) -> float:
    """Where a weight has got to by the end of its first RECOVERY ordinary steps: the mean of the last ten."""
    return float(shares[-10:].mean())


def share(member: Member, stream: Tensor) -> Tensor:
    """The norm of each update as a share of what it is without a limiter, per step and expert."""
    limited, unlimited = updates(member, stream), updates(member, stream, growth_limit=None)
    return limited.norm(dim=(-2, -1)) / unlimited.norm(dim=(-2, -1))


def share_by_the_paper(stream: Tensor) -> Tensor:
    """The same for the paper's structured AdamW, on one matrix."""
    strict = papers.Deviations(forgiving_limiter=False)
    rules = [
        papers.StructuredAdamW(papers.Settings(growth_limit=limit, deviations=strict), "channel")
        for limit in (1.01, None)
    ]
    norms = [[rule.update(gradient.double()).norm() for gradient in stream] for rule in rules]
    return torch.tensor(norms[0]) / torch.tensor(norms[1])


@pytest.mark.parametrize("noise", partly_slow([0.0, 0.1], quick=[0.0]), ids=["constant", "steady"])
@pytest.mark.parametrize(
    ("member", "first"),
    partly_slow(
        [(member, first) for member in LIMITED for first in (2, 50)] + [(BY_NAME["structured-channel"], 400)],
        quick=[(member, 50) for member in LIMITED],
    ),
    ids=str,
)
def test_an_expert_first_reached_late_is_not_trapped(member: Member, first: int, noise: float):
    """A constant direction is the hard case: Adam's step on it grows sixfold while its averages fill."""
    stream = steady(first + RECOVERY - 1, 3, *SHAPE, noise=noise)
    stream[: first - 1, 1] = 0
    assert recovered(share(member, stream)[:, 1]) >= 0.9
    assert recovered(share_by_the_paper(stream[:, 1])) < 0.9


@pytest.mark.parametrize(
    ("member", "tiny_steps"),
    partly_slow(
        [(member, steps) for member in LIMITED for steps in (1, 20)] + [(BY_NAME["structured-channel"], 300)],
        quick=[(member, 20) for member in LIMITED],
    ),
    ids=str,
)
def test_a_weight_whose_first_gradients_are_below_eps_is_not_trapped(member: Member, tiny_steps: int):
    stream = steady(tiny_steps + RECOVERY, *SHAPE)
    stream[:tiny_steps] *= 1e-10
    assert recovered(share(member, stream)) >= 0.9
    assert recovered(share_by_the_paper(stream)) < 0.9


@pytest.mark.parametrize("member", SCALING, ids=str)
def test_a_first_gradient_of_three_eps_is_above_eps(member: Member):
    """Though its second moment, which begins at zero, is far below until it is corrected."""
    stream = steady(2, *SHAPE, noise=0.0)
    stream[0] *= 3e-6
    norms = updates(member, stream, betas=NO_MOMENTUM).norm(dim=(-2, -1))
    torch.testing.assert_close(norms[1], 1.01 * norms[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", partly_slow(range(3), quick=[0]))
@pytest.mark.parametrize("member", LIMITED, ids=str)
def test_a_weight_below_a_zero_initialised_projection_is_not_trapped(member: Member, seed: int):
    """Its gradient is zero at the first step, and then grows with the projection above."""
    generator = torch.Generator().manual_seed(seed)
    below, above = nn.Parameter(torch.randn(SHAPE, generator=generator) / 40**0.5), nn.Parameter(torch.zeros(32, 24))
    inputs, targets = torch.randn(40, 64, generator=generator), torch.randn(32, 64, generator=generator)
    # By name: without one, the basis would be drawn by the weight's values, anew for each seed.
    optimizer = member.build([("below", below), ("above", above)], lr=1e-3)
    gradients = []
    for _ in range(1 + RECOVERY):
        optimizer.zero_grad()
        (above @ torch.tanh(below @ inputs) - targets).square().mean().backward()
        gradients.append(below.grad.clone())
        optimizer.step()
    stream = torch.stack(gradients)
    assert torch.equal(stream[0], torch.zeros(SHAPE))
    if member.uses_svd:
        # Zeros begin no basis and are not counted: the limiter sees the run from the second gradient on.
        assert torch.equal(share(member, stream)[1:], share(member, stream[1:]))
        return
    assert recovered(share(member, stream)) >= 0.9
    assert recovered(share_by_the_paper(stream)) < 0.9


@pytest.mark.parametrize("size", [1.8, torch.tensor(1.8)], ids=["host", "device"])
def test_growth_is_never_measured_from_less_than_the_first_update(size: float | Tensor):
    """Adam's step on a first gradient that comes after some hundred steps is larger than any other."""
    limited = limited_growth(torch.tensor(2.0), torch.tensor(0.0), 1.01, torch.tensor(False), size)
    assert limited == (1, 2)


@pytest.mark.parametrize("growth_limit", [1.01, 1.5])
@pytest.mark.parametrize("member", SCALING, ids=str)
def test_a_spike_is_held_to_the_limit(member: Member, growth_limit: float):
    stream = steady(12, *SHAPE, noise=0.0)
    stream[10] *= 100
    norms, unlimited = (
        updates(member, stream, growth_limit=limit, betas=NO_MOMENTUM).norm(dim=(-2, -1))
        for limit in (growth_limit, None)
    )
    assert unlimited[10] > 2 * unlimited[9]
    # float32: a norm of 960 squares, and the products that make it, lie within 1e-6 of exact.
    torch.testing.assert_close(norms[10], growth_limit * norms[9], rtol=1e-6, atol=0)


@pytest.mark.parametrize("member", SCALING, ids=str)
def test_no_update_grows_faster_than_the_limit(member: Member):
    norms = updates(member, steady(80, *SHAPE, noise=2.0)).norm(dim=(-2, -1))
    growth = norms[1:] / norms[:-1]
    assert growth.max() <= 1.01 * (1 + 1e-6)
    assert growth.min() < 1 / 1.01, "norms may fall as they like"


@pytest.mark.parametrize("projection", ["svd", "gaussian"])
def test_of_fira_the_residual_is_limited(projection: str):
    """What Fira adds to GaLore, whose own part is free to spike."""
    stream = steady(12, *SHAPE, noise=0.3)
    stream[10] *= 100
    fira, galore = Member("fira", Fira, {"rank": 4}), Member("galore", GaLore, {"rank": 4, "scale": 1.0})
    options = {"projection": projection, "betas": NO_MOMENTUM}
    inside = updates(galore, stream, **options)
    norms, unlimited = (
        (updates(fira, stream, growth_limit=limit, **options) - inside).norm(dim=(-2, -1)) for limit in (1.01, None)
    )
    assert unlimited[10] > 2 * unlimited[9]
    # The difference of two updates of about the same size loses one digit of float32's seven.
    torch.testing.assert_close(norms[10], 1.01 * norms[9], rtol=1e-5, atol=0)


@pytest.mark.parametrize("member", LIMITED, ids=str)
def test_without_a_limit_nothing_is_held_or_kept(member: Member):
    stream = steady(12, *SHAPE)
    stream[10] *= 100
    assert torch.equal(updates(member, stream, growth_limit=None), updates(member, stream, growth_limit=1e30))
    weight = nn.Parameter(torch.zeros(SHAPE))
    weight.grad = stream[0]
    optimizer = member.build([weight], growth_limit=None)
    optimizer.step()
    assert "last_norm" not in optimizer.state[weight]


class Means(TorchDispatchMode):
    """Counts the means that are taken inside of it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.mean
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("member", LIMITED, ids=str)
def test_the_second_moment_is_read_for_a_limit_only_where_there_is_one(member: Member):
    counts = []
    for growth_limit in (1.01, None):
        with Means() as means:
            updates(member, steady(1, *SHAPE), growth_limit=growth_limit)
        counts.append(means.count)
    assert counts == [1, 0]


@pytest.mark.parametrize("member", LIMITED, ids=str)
def test_experts_are_limited_each_by_its_own_norm(member: Member):
    calm = steady(12, 3, *SHAPE)
    spiked = calm.clone()
    spiked[10, 0] *= 100
    quiet, loud = updates(member, calm), updates(member, spiked)
    assert not torch.equal(quiet[10, 0], loud[10, 0])
    assert torch.equal(quiet[:, 1:], loud[:, 1:])


@pytest.mark.parametrize("member", SCALING, ids=str)
def test_a_zero_gradient_is_not_remembered(member: Member):
    """A batch that skips an expert neither frees the next update nor forbids it."""
    stream = steady(12, *SHAPE, noise=0.0)
    stream[8:10] = 0
    stream[10] *= 100
    norms = updates(member, stream, betas=NO_MOMENTUM).norm(dim=(-2, -1))
    assert norms[8] == norms[9] == 0
    torch.testing.assert_close(norms[10], 1.01 * norms[7], rtol=1e-6, atol=0)


def test_noise_limits_a_late_expert_no_more_than_an_early_one():
    """On noise the limiter is always at work, so the yardstick is an expert that was there from the start."""
    stream = steady(50 + RECOVERY, 8, *SHAPE, noise=3.0)
    late = stream.clone()
    late[:50, ::2] = 0
    shares = share(BY_NAME["apollo-tensor"], late)[-20:].mean(dim=0)
    assert shares[::2].mean() >= 0.9 * shares[1::2].mean()


def test_the_limiter_changes_the_size_of_an_update_and_not_its_direction():
    stream = steady(30, *SHAPE, noise=1.0)
    stream[20] *= 100
    limited, unlimited = (
        updates(Member("", StructuredAdamW), stream, growth_limit=limit, betas=NO_MOMENTUM) for limit in (1.01, None)
    )
    similarity = torch.cosine_similarity(limited.flatten(1), unlimited.flatten(1), dim=1)
    torch.testing.assert_close(similarity, torch.ones(30), rtol=0, atol=1e-6)
    assert (limited.norm(dim=(-2, -1)) < 0.9 * unlimited.norm(dim=(-2, -1))).any()


@pytest.mark.parametrize("member", SCALING, ids=str)
def test_a_limiter_that_was_off_begins_anew(member: Member):
    """Whatever its norm was before: that of long ago would hold back all that has grown since."""
    stream = steady(12, *SHAPE)
    weight = nn.Parameter(torch.zeros(SHAPE))
    optimizer = member.build([weight], lr=1.0)
    unlimited = member.build([nn.Parameter(torch.zeros(SHAPE))], lr=1.0, growth_limit=None)
    moved = []
    for number, gradient in enumerate(stream):
        optimizer.param_groups[0]["growth_limit"] = None if 2 <= number < 8 else 1.01
        # The first two are of opposite sign, so that the second update is small: it is the norm of long ago.
        gradient = 1e-3 * (-1) ** number * gradient if number < 2 else gradient
        for each in (optimizer, unlimited):
            (own,) = each.param_groups[0]["params"]
            own.data.zero_()
            own.grad = gradient.clone()
            each.step()
        moved.append(float(weight.detach().norm() / unlimited.param_groups[0]["params"][0].detach().norm()))
    assert moved[8] == 1
    assert min(moved[8:]) > 0.9
