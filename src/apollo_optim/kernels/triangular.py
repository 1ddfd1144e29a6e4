"""The inverse triangular factors of small Gram matrices, a row at a time: one program for each."""

import triton
import triton.language as tl


@triton.jit
def inverse_factor_kernel(gram, inverse, least, rank, BLOCK: tl.constexpr):
    """As `core.projection.inverse_factor`, by elimination.

    Registers hold the matrix less what the rows so far take of it, and in place of their columns the same of 1.
    """
    row = tl.arange(0, BLOCK)
    matrix = tl.program_id(0).to(tl.int64) * rank * rank
    inside = (row < rank)[:, None] & (row < rank)[None, :]
    rest = tl.load(gram + matrix + row[:, None] * rank + row[None, :], mask=inside, other=0.0)
    least_own = least * tl.load(gram + matrix + row * (rank + 1), mask=row < rank, other=0.0)
    for number in range(rank):
        this = tl.sum(tl.where((row == number)[:, None], rest, 0.0), 0)
        there = (row == number) & (this > least_own)
        share = tl.sum(tl.where(there, tl.rsqrt(tl.where(there, this, 1.0)), 0.0), 0)
        here = matrix + number * rank
        # The inverse's row up to the diagonal, and the factor's column beyond it.
        both = tl.where(row == number, 1.0, this) * share
        tl.store(inverse + here + row, tl.where(row <= number, both, 0.0), mask=row < rank)
        beyond = tl.where(row > number, both, 0.0)
        rest = tl.where((row == number)[None, :], 0.0, rest) - beyond[:, None] * both[None, :]
