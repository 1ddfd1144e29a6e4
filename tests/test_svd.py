"""Bases from the gradient: the singular vectors themselves are compared with tests/papers.py; here is the rest."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from apollo_optim import GaLore
from apollo_optim.core.projection import svd_basis, svd_lowrank_basis
from apollo_optim.core.shape import matrix_shape
from family import BY_NAME, FAMILY, Member
from runs import built, run, snapshot, weights


def test_a_singular_vector_points_where_its_largest_entry_is_positive():
    """An SVD leaves the sign open, and devices choose differently; of a gradient and its opposite we choose alike."""
    gradient = torch.randn(5, 11, 31, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    basis = svd_basis(gradient, 4)
    assert basis.shape == (5, 4, 11)
    assert (basis.amax(dim=-1) == basis.abs().amax(dim=-1)).all()
    torch.testing.assert_close(svd_basis(-gradient, 4), basis, rtol=0, atol=1e-12)


def test_randomized_svd_is_exact_where_its_sketch_spans_the_side():
    gradient = torch.randn(11, 31, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    shape = matrix_shape((11, 31), rank=3)
    # Gaussian singular values are percents apart, which costs the vectors two digits of sixteen.
    torch.testing.assert_close(
        svd_lowrank_basis(gradient, shape, seed=1, refresh=0), svd_basis(gradient, 3), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("seed", range(8))
def test_randomized_svd_of_noise_leaves_little_more_than_the_best(seed: int):
    """Halko et al. (2011), corollary 10.10, for the sampled range; truncation to the rank adds one more sigma (9.4)."""
    side, rank, oversampling, powers = 96, 8, 8, 4
    gradient = torch.randn(side, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = svd_lowrank_basis(gradient, matrix_shape((side, 128), rank=rank), seed=seed, refresh=0)
    torch.testing.assert_close(basis @ basis.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-13)
    left_out = torch.linalg.matrix_norm(gradient - basis.T @ (basis @ gradient), ord=2)
    next_value = torch.linalg.svdvals(gradient)[rank]
    sampled = (
        1
        + math.sqrt(rank / (oversampling - 1))
        + math.e * math.sqrt(rank + oversampling) / oversampling * (math.sqrt(side - rank))
    )
    assert left_out <= (1 + sampled ** (1 / (2 * powers + 1))) * next_value


def test_randomized_svd_finds_directions_twice_as_long_as_all_others():
    """Each of its four passes divides what it has of the others by four."""
    generator = torch.Generator().manual_seed(8)
    left, right = (
        torch.linalg.qr(torch.randn(side, 96, generator=generator, dtype=torch.float64)).Q for side in (96, 128)
    )
    gradient = left * torch.where(torch.arange(96) < 8, 1.0, 0.5) @ right.mT
    basis = svd_lowrank_basis(gradient, matrix_shape((96, 128), rank=8), seed=1, refresh=0)
    missed = left[:, :8] - basis.T @ (basis @ left[:, :8])
    # Of 16 samples the others are expected to be 15 times too large before the passes, as above.
    assert torch.linalg.matrix_norm(missed, ord=2) <= 15 * 0.5**9


@pytest.mark.parametrize("name", ["galore", "fira", "apollo-svd", "flora-svd"])
def test_a_step_whose_svd_fails_leaves_everything_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch):
    def failed(*_: object, **__: object) -> None:
        raise torch.linalg.LinAlgError("failed to converge")

    ours, theirs = weights({"wide": (9, 40)}), weights({"wide": (9, 40)})
    optimizer, twin = built(BY_NAME[name], ours), built(BY_NAME[name], theirs)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "svd", failed)
        with pytest.raises(torch.linalg.LinAlgError):
            run(optimizer, ours, range(1))
    run(optimizer, ours, range(1, 4))
    run(twin, theirs, range(1, 4))
    assert snapshot(optimizer) == snapshot(twin)


OF_GRADIENTS = pytest.mark.parametrize("member", [member for member in FAMILY if member.uses_svd], ids=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9, 40), (300, 17), (3, 10, 24)], ids=str)
@pytest.mark.parametrize("projection", ["svd", "svd_lowrank"])
def test_directions_that_a_gradient_has_not_are_left_out(projection: str, shape: tuple[int, ...], dtype: torch.dtype):
    """Of rank 1 at rank 4: Adam's step along a direction of rounding would be as long as along the gradient."""
    generator = torch.Generator().manual_seed(6)
    column, row = (
        torch.randn(*shape[:-2], *sides, generator=generator, dtype=dtype) for sides in ((shape[-2], 1), (1, shape[-1]))
    )
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = GaLore([weight], rank=4, projection=projection)
    weight.grad = column * row
    optimizer.step()
    basis = optimizer.state[weight]["basis"]
    assert (basis[..., 1:, :] == 0).all()
    direction = row if shape[-2] >= shape[-1] else column.mT
    direction = direction / direction.norm(dim=-1, keepdim=True)
    # The update is along the gradient's one direction; what is across it is rounding.
    steps = weight.detach() if shape[-2] >= shape[-1] else weight.detach().mT
    across = steps - steps @ direction.mT @ direction
    assert across.norm() < 1e2 * torch.finfo(dtype).eps * steps.norm()


@pytest.mark.parametrize("projection", ["svd", "svd_lowrank"])
def test_an_expert_without_a_gradient_at_a_refresh_keeps_its_basis(projection: str):
    weight = torch.nn.Parameter(torch.zeros(3, 10, 24))
    optimizer = GaLore([weight], rank=4, projection=projection, refresh_every=1)
    bases = []
    for step in range(2):
        weight.grad = torch.randn(3, 10, 24, generator=torch.Generator().manual_seed(step))
        weight.grad[1] *= step == 0
        optimizer.step()
        bases.append(optimizer.state[weight]["basis"].clone())
    assert [torch.equal(*pair) for pair in zip(*bases, strict=True)] == [False, True, False]


@OF_GRADIENTS
def test_no_direction_of_an_ordinary_gradient_is_left_out(member: Member):
    """Singular values that fall off to 1e-4 of the first are a gradient's own."""
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.linalg.qr(torch.randn(side, 64, generator=generator)).Q for side in (64, 4096))
    gradient = left * torch.logspace(0, -4, 64) @ right.mT
    weight = torch.nn.Parameter(torch.zeros(64, 4096))
    optimizer = member.build([weight], rank=63)
    weight.grad = gradient
    optimizer.step()
    assert (optimizer.state[weight]["basis"].norm(dim=-1) > 0.99).all()


@OF_GRADIENTS
def test_a_zero_gradient_begins_no_basis(member: Member):
    """Nor is it counted: a layer behind zeros, or a distributed checkpoint that makes state, changes nothing."""
    shapes = {"experts": (3, 10, 24), "tall": (40, 9), "wide": (9, 40)}
    ours, theirs = torch.nn.ParameterDict(weights(shapes)), weights(shapes)
    optimizer, twin = built(member, dict(ours.items())), built(member, theirs)
    for _ in range(2):
        get_optimizer_state_dict(ours, optimizer)
    for weight in ours.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    optimizer.param_groups[0]["lr"] = 0.01
    run(optimizer, dict(ours.items()), range(5))
    run(twin, theirs, range(5))
    assert snapshot(optimizer) == snapshot(twin)


@OF_GRADIENTS
def test_a_zero_gradient_decays_the_weight_all_the_same(member: Member):
    named = weights({"wide": (9, 40)})
    optimizer = built(member, named, lr=0.5, weight_decay=0.5)
    before = named["wide"].detach().clone()
    named["wide"].grad = torch.zeros_like(named["wide"])
    optimizer.step()
    assert torch.equal(named["wide"], before * 0.75)


@OF_GRADIENTS
def test_an_expert_without_a_gradient_at_first_is_trained_from_the_next_step_on(member: Member):
    weight = torch.nn.Parameter(torch.zeros(3, 10, 24))
    optimizer = member.build([("experts", weight)])
    for step in range(3):
        weight.grad = torch.randn(3, 10, 24, generator=torch.Generator().manual_seed(step))
        if step == 0:
            weight.grad[1] = 0
        optimizer.step()
        assert bool(weight[1].any()) == (step > 0)
    basis = optimizer.state[weight]["basis"][1]
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), rtol=0, atol=1e-6)


@OF_GRADIENTS
def test_a_zero_gradient_leaves_the_basis_of_before(member: Member):
    named = weights({"wide": (9, 40)})
    optimizer = built(member, named)
    run(optimizer, named, range(3))
    before = optimizer.state[named["wide"]]["basis"].clone()
    named["wide"].grad = torch.zeros_like(named["wide"])
    optimizer.step()
    assert torch.equal(optimizer.state[named["wide"]]["basis"], before)
    assert float(optimizer.state[named["wide"]]["step"]) == 4


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_is_not_carried_over_to_a_basis_that_stays(state_dtype: torch.dtype):
    """A basis in bfloat16 times itself is off by 0.4% from 1. Half of any momentum is exact, and so is its decay."""
    weight = nn.Parameter(torch.zeros(9, 14))
    optimizer = BY_NAME["flora-svd"].build([weight], betas=(0.5, 0.999), refresh_every=1, state_dtype=state_dtype)
    weight.grad = torch.randn(9, 14, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before = optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.zeros(9, 14)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], before / 2)
