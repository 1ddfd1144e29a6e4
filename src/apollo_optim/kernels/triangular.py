"""The triangular factor of small Gram matrices, a column at a time: one program for each."""

import triton
import triton.language as tl


@triton.jit
def triangular_kernel(gram, factor, least, rank, BLOCK: tl.constexpr):
    """As `core.projection.triangular_factor`, with zeros for a row that is not there.

    What is left of the matrix stays in registers; columns are written one after the other.
    """
    row = tl.arange(0, BLOCK)
    here = row[:, None] * rank + row[None, :]
    inside = (row < rank)[:, None] & (row < rank)[None, :]
    matrix = tl.program_id(0).to(tl.int64) * rank * rank
    rest = tl.load(gram + matrix + here, mask=inside, other=0.0)
    for number in range(rank):
        column = tl.sum(tl.where(row[None, :] == number, rest, 0.0), 1)
        own = tl.sum(tl.where(row == number, column, 0.0), 0)
        inverse = tl.where(own > least, 1.0 / tl.sqrt(tl.maximum(own, least)), 0.0)
        # From the diagonal on: above it is what rounding leaves of zeros.
        column = tl.where(row >= number, column * inverse, 0.0)
        tl.store(factor + matrix + row * rank + number, column, mask=row < rank)
        rest -= column[:, None] * column[None, :]
