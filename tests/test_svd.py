"""Bases from the gradient: the singular vectors themselves are compared with tests/papers.py; here is the rest."""

import math

import pytest
import torch

from apollo_optim.core.projection import svd_basis, svd_lowrank_basis
from apollo_optim.core.shape import matrix_shape
from family import BY_NAME
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
