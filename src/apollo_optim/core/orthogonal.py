"""Matrices with all of their singular values brought near 1, by products alone.

    X <- X / |X|                                     so that no singular value is above 1
    X <- a X + b (X X^T) X + c (X X^T)^2 X           five times

Each round is an odd polynomial of every singular value, whose vectors stay what they are. Its coefficients are Muon's
(Jordan et al., 2024): values from 0.002 to 1 end between 0.68 and 1.21, and a value of zero stays zero.

Shapes: N matrices of a smaller side S and a larger one C.
"""

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
ROUNDS = 5


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in where the arithmetic is of `dtype`: bfloat16 for the tensor cores of a GPU."""
    return torch.bfloat16 if dtype == torch.float32 and device.type == "cuda" else dtype


def orthogonalized(matrices: Tensor) -> Tensor:
    """A stack of matrices [N, rows, columns] with their singular values near 1, in the dtype that it comes in.

    No size of a gradient is too small or too large, and one of zeros stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x_NSC = _at_unit_norm(matrices.mT if tall else matrices)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram_NSS = torch.bmm(x_NSC, x_NSC.mT)
        polynomial_NSS = torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=b, alpha=c)
        x_NSC = torch.baddbmm(x_NSC, polynomial_NSS, x_NSC, beta=a)
    return x_NSC.mT if tall else x_NSC


def _at_unit_norm(x_NSC: Tensor) -> Tensor:
    # First by the largest entry: the squares of what is left stay within any dtype's range.
    largest_N11 = x_NSC.abs().amax(dim=(-2, -1), keepdim=True)
    x_NSC = torch.where(largest_N11 > 0, x_NSC / largest_N11, 0.0)
    return x_NSC / torch.linalg.vector_norm(x_NSC, dim=(-2, -1), keepdim=True).clamp_min(1.0)
