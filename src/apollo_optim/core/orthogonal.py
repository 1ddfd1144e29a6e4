"""Matrices with all of their singular values brought near 1, by products alone.

    X <- X / |X|                                     so that no singular value is above 1
    X <- a X + b (X X^T) X + c (X X^T)^2 X           five times

Each round is an odd polynomial of every singular value, whose vectors stay what they are. Its coefficients are Muon's
(Jordan et al., 2024): values from 0.002 to 1 end between 0.68 and 1.21, and a value of zero stays zero.

A run of rounds is worked out on the smaller side alone, and multiplies X once. With G = X X^T, and W = a + b G + c G^2:

    X <- W X         G <- W G W        so that two rounds are X <- W' W X

All of these are polynomials of one G, so that they commute and are symmetric, and half of each is enough. What rounding
leaves of G where a singular value is zero may be negative, and grows with every round of a run, which is why there are
two runs: the second begins with the product itself.

A run of k rounds takes two products with X and 4 k - 3 symmetric ones of the smaller side. One run more saves three of
these, which are halves, so that it pays for a square X only: there each round is a run.

Shapes: N matrices of a smaller side S and a larger one C.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

COEFFICIENTS = 3.4445, -4.7750, 2.0315
RUNS = (COEFFICIENTS,) * 3, (COEFFICIENTS,) * 2
"""The polynomials of each run."""
SQUARE_RUNS = ((COEFFICIENTS,),) * 5
"""The same for a square matrix."""

VECTOR = 16
"""Sides that are multiples of this are read in whole vectors on a GPU; others are filled up with zeros."""

LIFT = 2.0**24
"""Factor of a direction before it is narrowed to bfloat16, which has no bits left for the smallest float32; a power of
two, so that nothing else is rounded, and small enough for any direction whose squares float32 can hold."""

Polynomial = tuple[float, float, float]

SymmetricProduct = Callable[..., Tensor]
"""(x [N, S, K], y [N, S, K], polynomial or None) -> [N, S, S], as `symmetric_product`."""


def symmetric_product(x_NSK: Tensor, y_NSK: Tensor, polynomial: Polynomial | None = None) -> Tensor:
    """x y^T, or a + b x + c x y^T, which is symmetric; both halves of it are computed."""
    if polynomial is None:
        return torch.bmm(x_NSK, y_NSK.mT)
    a, b, c = polynomial
    result_NSS = torch.baddbmm(x_NSK, x_NSK, y_NSK.mT, beta=b, alpha=c)
    result_NSS.diagonal(dim1=-2, dim2=-1).add_(a)
    return result_NSS


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of matrix products where the arithmetic is of `dtype`: bfloat16 for the tensor cores of a GPU.

    Meta tensors stand for a GPU's: it is those that are planned.
    """
    return torch.bfloat16 if dtype == torch.float32 and device.type in ("cuda", "meta") else dtype


def orthogonalized(matrices: Tensor, product: SymmetricProduct = symmetric_product) -> Tensor:
    """A stack of matrices [N, rows, columns] with their singular values near 1, in the dtype that it comes in.

    No size of a gradient is too small or too large, and one of zeros stays zero.
    """
    return orthogonalize_(to_unit_norm_(matrices.clone()), product)


def orthogonalize_(matrices: Tensor, product: SymmetricProduct) -> Tensor:
    """The same with their singular values near 1, of a stack [N, rows, columns] of norm 1 each, which is used up.

    Beside it there is one more of its size, and `products_at_once` of its smaller side squared. Either of the two is
    the result.
    """
    rows, columns = matrices.shape[-2:]
    tall = rows > columns
    x = matrices
    if x.is_cuda and (rows % VECTOR or columns % VECTOR):
        x = nn.functional.pad(x, (0, -columns % VECTOR, 0, -rows % VECTOR))
    other = torch.empty_like(x)
    for polynomials in SQUARE_RUNS if rows == columns else RUNS:
        x, other = _after(polynomials, x, tall, product, other), x
    return x if x.shape == matrices.shape else matrices.copy_(x[..., :rows, :columns])


def products_at_once(rows: int, columns: int) -> int:
    """Most symmetric products that are there at a time while a matrix is orthogonalised."""
    return 2 if rows == columns else 4


def _after(
    polynomials: tuple[Polynomial, ...], x: Tensor, tall: bool, product: SymmetricProduct, out: Tensor
) -> Tensor:
    """out <- these polynomials of X, one after the other"""
    factor_NSS = _factor(x.mT if tall else x, polynomials, product)
    return torch.bmm(*((x, factor_NSS) if tall else (factor_NSS, x)), out=out)


def _factor(x_NSC: Tensor, polynomials: tuple[Polynomial, ...], product: SymmetricProduct) -> Tensor:
    """Q, where these polynomials of X, one after the other, are Q X. [N, S, S]"""
    gram_NSS = product(x_NSC, x_NSC)
    w_NSS = factor_NSS = product(gram_NSS, gram_NSS, polynomials[0])
    for polynomial in polynomials[1:]:
        for _ in range(2):  # once from each side
            gram_NSS = product(w_NSS, gram_NSS)
        w_NSS = product(gram_NSS, gram_NSS, polynomial)
        factor_NSS = product(w_NSS, factor_NSS)
    return factor_NSS


def to_unit_norm_(matrices: Tensor) -> Tensor:
    """matrices <- each matrix / its norm, of a stack [N, rows, columns]; zeros stay zero"""
    # First by the largest entry: the squares of what is left stay within any dtype's range.
    largest_N11 = torch.linalg.vector_norm(matrices, math.inf, dim=(-2, -1), keepdim=True)
    matrices.div_(torch.where(largest_N11 > 0, largest_N11, 1.0))
    return matrices.div_(torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_min(1.0))
