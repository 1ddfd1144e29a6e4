"""Bases and what they do to a gradient.

Shapes: E experts (where there are any), R rank, S the smaller side, C channels. A basis of None is the identity.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .orthogonal import product_dtype
from .random import Word, normals
from .rule import Rule
from .shape import MatrixShape

# Of the randomized SVD (Halko et al., 2011): directions sampled beyond the rank, and passes that sharpen them.
OVERSAMPLING, POWER_ITERATIONS = 8, 4


def _experts(shape: MatrixShape, device: torch.device) -> Word:
    first = shape.first_expert
    return 0 if shape.experts is None else torch.arange(first, first + shape.experts, device=device)[:, None, None]


def gaussian_basis(shape: MatrixShape, seed: Word, refresh: Word, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A basis [(E,) R, S] with entries N(0, 1/R), made from the seed alone; of a part, that part of the whole one."""
    columns = shape.first_side, shape.first_side + shape.side
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


class LowRank(NamedTuple):
    """Matrices [N, C, S], each as the product of two: basis.T @ low. The rows of the basis are orthonormal, or zero."""

    basis_RC: Tensor
    low_RS: Tensor


InverseFactor = Callable[[Tensor, float], Tensor]
"""(Gram matrices [(E,) R, R], least) -> the inverses of their factors, as `inverse_factor`."""


def inverse_factor(gram_RR: Tensor, least: float) -> Tensor:
    """X, triangular, with X gram X^T = 1: the inverse of the Cholesky factor, but zero in some rows.

    It makes those rows orthonormal whose Gram matrix this is, one after the other. One that has no more than `least` of
    its square beside those before it is left out.
    """
    if gram_RR.is_meta:  # only the shape is asked for, and torch would work it out row by row
        return torch.empty_like(gram_RR)
    least_R1 = least * gram_RR.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # The matrix less what the rows so far take of it, and in place of their columns the same of 1.
    rest_RR = gram_RR.clone()
    for number in range(gram_RR.shape[-1]):
        this, beyond = slice(number, number + 1), slice(number + 1, None)
        row_1R, below_BR = rest_RR[..., this, :], rest_RR[..., beyond, :]
        own_11 = row_1R[..., this]
        share_11 = torch.where(own_11 > least_R1[..., this, :], own_11.rsqrt(), 0.0)
        own_11.fill_(1)
        row_1R.mul_(share_11)
        below_BR[..., this].zero_()
        below_BR.addcmul_(row_1R[..., beyond].mT, row_1R, value=-1)
    return rest_RR.tril()


def power_iteration(
    momentum: LowRank, beta: float, grad_CS: Tensor, share: float, dtype: torch.dtype, factor: InverseFactor
) -> LowRank:
    """The leading directions of m <- beta m + share grad in `dtype`, from those of m before; it is never there whole.

    The basis lies along the larger side, of a square matrix along the weight's rows. Of the gradients of a transformer
    much less would be kept the other way round (docs/numerics.md).

    A direction that the momentum has no more of begins anew, at a row of m; one that is only rounding is zero.
    """
    old_RC, old_RS = (each.to(dtype) for each in momentum)
    rows = _few_of(old_RC.shape[-1], old_RC.shape[-2], grad_CS.device)
    m_RS = grad_CS[:, rows].to(dtype).baddbmm_(old_RC[..., rows].mT, old_RS, beta=share, alpha=beta)
    start_RS = torch.where(old_RS.any(dim=-1, keepdim=True), old_RS, m_RS)
    # By its largest entry, so that no momentum is too small or too large to be multiplied by a row of it.
    largest_R1 = torch.linalg.vector_norm(start_RS, math.inf, dim=-1, keepdim=True)
    start_RS /= largest_R1.clamp_min(torch.finfo(dtype).tiny)
    image_RC = _product(start_RS, grad_CS.mT).baddbmm_(start_RS @ old_RS.mT, old_RC, beta=share, alpha=beta)
    basis_RC = _orthonormal_rows(image_RC, factor)
    overlap_RR = _product(basis_RC, momentum.basis_RC.mT)
    low_RS = _product(basis_RC, grad_CS).baddbmm_(overlap_RR, old_RS, beta=share, alpha=beta)
    return LowRank(basis_RC, low_RS)


@cache
def _few_of(length: int, count: int, device: torch.device) -> Tensor:
    """This many numbers below `length`, evenly spread."""
    # From the host, which waits for the copy: another stream may be the next to read it.
    return (torch.arange(count, device="cpu") * length // count).to(device)


def _product(few_RK: Tensor, many_KN: Tensor) -> Tensor:
    """few @ many in the dtype of `few`; a GPU multiplies what is narrower by two pieces of it, on tensor cores."""
    if many_KN.dtype == few_RK.dtype or many_KN.dtype != product_dtype(few_RK.dtype, few_RK.device):
        return few_RK @ many_KN.to(few_RK.dtype)
    few, length = few_RK.shape[-2:]
    pieces_PK = many_KN.new_empty(*few_RK.shape[:-2], 2 * few, length)
    high_RK, low_RK = pieces_PK.chunk(2, dim=-2)
    torch.sub(few_RK, high_RK.copy_(few_RK), out=low_RK)
    high_RN, low_RN = torch.bmm(pieces_PK, many_KN, out_dtype=few_RK.dtype).chunk(2, dim=-2)
    return high_RN + low_RN


def _orthonormal_rows(image_RC: Tensor, factor: InverseFactor = inverse_factor) -> Tensor:
    """Orthonormal rows that span these; zeros in place of a row that the ones before it make up.

    By products and factors of the small side, all in float64: a QR of many wide matrices is slow on a GPU.
    """
    rows_RC = image_RC.double()
    # What float32 alone leaves of a row differs between machines.
    least = NOISE * torch.finfo(torch.float32).eps * image_RC.shape[-1] ** 0.5
    # The second time for what rounding left. A row that is not nearly orthogonal by then is nothing else.
    for share in (least**2, 0.5):
        rows_RC = factor(rows_RC @ rows_RC.mT, share) @ rows_RC
    return rows_RC.to(image_RC.dtype)


def project(grad_SC: Tensor, basis_RS: Tensor | None) -> Tensor:
    """basis @ grad: [(E,) R, C]"""
    return grad_SC if basis_RS is None else basis_RS @ grad_SC


def lift(low_RC: Tensor, basis_RS: Tensor | None) -> Tensor:
    """basis.T @ low: [(E,) S, C]"""
    return low_RC if basis_RS is None else basis_RS.mT @ low_RC


def keeps_basis(rule: Rule, shape: MatrixShape) -> bool:
    """True if the basis is data of the run, to be kept in state, rather than made from a seed."""
    return rule.projection in ("svd", "svd_lowrank") and not shape.full_rank
