"""Bases and what they do to a gradient.

Shapes: E experts (where there are any), R rank, S the smaller side, C channels. A basis of None is the identity.
"""

import torch
from torch import Tensor

from .random import Word, normals
from .rule import Rule
from .shape import MatrixShape

# Of the randomized SVD (Halko et al., 2011): directions sampled beyond the rank, and passes that sharpen them.
OVERSAMPLING, POWER_ITERATIONS = 8, 4


def _experts(shape: MatrixShape, device: torch.device) -> Word:
    first = shape.begins.expert
    return 0 if shape.experts is None else torch.arange(first, first + shape.experts, device=device)[:, None, None]


def gaussian_basis(shape: MatrixShape, seed: Word, refresh: Word, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A basis [(E,) R, S] with entries N(0, 1/R), made from the seed alone; of a part, that part of the whole one."""
    columns = shape.begins.side, shape.begins.side + shape.side
    z_RS = normals(seed, refresh, _experts(shape, device), (0, shape.rank), columns, device)
    return z_RS.to(dtype) * shape.rank**-0.5


# Singular values below this times eps times sqrt(C) of the largest are what rounding makes of zeros.
NOISE = 4


def svd_basis(grad_SC: Tensor, rank: int) -> Tensor:
    """The R leading left singular vectors of the gradient, as rows [(E,) R, S]; zeros where it has fewer directions."""
    u_SS, size_S, _ = torch.linalg.svd(grad_SC, full_matrices=False)
    return _leading(u_SS, size_S, rank, grad_SC.shape[-1])


def svd_lowrank_basis(grad_SC: Tensor, shape: MatrixShape, seed: Word, refresh: Word) -> Tensor:
    """The same to a good approximation, from a random sketch of the gradient's range."""
    sampled = min(shape.rank + OVERSAMPLING, shape.side)
    experts = _experts(shape, grad_SC.device)
    sketch_KC = normals(seed, refresh, experts, (0, sampled), (0, shape.channels), grad_SC.device)
    range_SK = torch.linalg.qr(grad_SC @ sketch_KC.to(grad_SC.dtype).mT).Q
    for _ in range(POWER_ITERATIONS):
        range_SK = torch.linalg.qr(grad_SC @ torch.linalg.qr(grad_SC.mT @ range_SK).Q).Q
    u_KK, size_K, _ = torch.linalg.svd(range_SK.mT @ grad_SC, full_matrices=False)
    return _leading(range_SK @ u_KK[..., : shape.rank], size_K, shape.rank, shape.channels)


def random_rows(shape: MatrixShape, seed: Word, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Orthonormal rows [(E,) R, S] from the seed, for a matrix without a gradient to take them from."""
    z_RS = normals(seed, 0, _experts(shape, device), (0, shape.rank), (0, shape.side), device)
    return torch.linalg.qr(z_RS.to(dtype).mT).Q.mT


def _leading(u_SK: Tensor, size_K: Tensor, rank: int, channels: int) -> Tensor:
    """The first R of these vectors as rows, zeros in place of those whose singular value is only rounding.

    Adam would take full steps along them, and they differ between machines.
    """
    least = NOISE * torch.finfo(size_K.dtype).eps * channels**0.5 * size_K[..., :1]
    is_there_R1 = (size_K[..., :rank] > least).unsqueeze(-1)
    return torch.where(is_there_R1, _sign_fixed(u_SK[..., :rank].mT), 0.0)


def _sign_fixed(basis_RS: Tensor) -> Tensor:
    """Rows whose largest entry is positive: an SVD leaves the sign open, but moments kept across a refresh need one."""
    largest_R1 = basis_RS.abs().argmax(dim=-1, keepdim=True)
    return (basis_RS * basis_RS.gather(-1, largest_R1).sign()).contiguous()


def project(grad_SC: Tensor, basis_RS: Tensor | None) -> Tensor:
    """basis @ grad: [(E,) R, C]"""
    return grad_SC if basis_RS is None else basis_RS @ grad_SC


def lift(low_RC: Tensor, basis_RS: Tensor | None) -> Tensor:
    """basis.T @ low: [(E,) S, C]"""
    return low_RC if basis_RS is None else basis_RS.mT @ low_RC


def keeps_basis(rule: Rule, shape: MatrixShape) -> bool:
    """Whether the basis is data of the run, to be kept in state, rather than made from a seed."""
    return rule.uses_svd and not shape.full_rank
