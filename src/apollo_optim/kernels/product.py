"""A product that is known to be symmetric: one half of its tiles, each written twice.

Shapes: matrices of side S, products of K elements along the contracted side. Tiles are square.
"""

import triton
import triton.language as tl


@triton.jit
def _described_tile(
    x, y, matrix, top, edge, contracted,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x y^T, of descriptors: beyond a matrix they read zeros."""
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, contracted, BLOCK_K):
        if TRANSPOSED:
            left = x.load([matrix, k, top]).reshape(BLOCK_K, BLOCK).T
            right = y.load([matrix, k, edge]).reshape(BLOCK_K, BLOCK)
        else:
            left = x.load([matrix, top, k]).reshape(BLOCK, BLOCK_K)
            right = y.load([matrix, edge, k]).reshape(BLOCK, BLOCK_K).T
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def _pointed_tile(
    x, y, matrix, top, edge, side, contracted,
    TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x y^T. EVEN says that tiles divide K; ALIGNED, that 16 divides S."""
    row, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    # Rows beyond the last are read from the first ones, and not written.
    x_row, y_row = (top + row) % side, (edge + row) % side
    if ALIGNED:
        x_row = tl.max_contiguous(tl.multiple_of(x_row, 16), 16)
        y_row = tl.max_contiguous(tl.multiple_of(y_row, 16), 16)
    first = matrix.to(tl.int64) * side * contracted
    if TRANSPOSED:
        x_ptr = x + first + x_row[:, None] + k[None, :].to(tl.int64) * side
        y_ptr = y + first + y_row[None, :] + k[:, None].to(tl.int64) * side
        onward = side.to(tl.int64) * BLOCK_K
    else:
        x_ptr = x + first + x_row[:, None].to(tl.int64) * contracted + k[None, :]
        y_ptr = y + first + y_row[None, :].to(tl.int64) * contracted + k[:, None]
        onward = tl.full((), BLOCK_K, tl.int64)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, contracted, BLOCK_K):
        if EVEN:
            left, right = tl.load(x_ptr), tl.load(y_ptr)
        else:
            left = tl.load(x_ptr, mask=k[None, :] < contracted - start, other=0.0)
            right = tl.load(y_ptr, mask=k[:, None] < contracted - start, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        x_ptr += onward
        y_ptr += onward
    return total


@triton.jit
def symmetric_kernel(
    tiles, x, y, term, out, a, b, c, side, contracted, tiles_of_matrix,
    POLYNOMIAL: tl.constexpr, TRANSPOSED: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out <- x y^T, or if POLYNOMIAL a + b term + c x y^T: one tile on or below the diagonal of a matrix.

    TRANSPOSED says that the S elements of a factor are neighbours, not the K of them; DESCRIBED, that factors are
    descriptors. A tile below the diagonal is written above it too. Both are written in whole vectors: no mask is finer
    than a tile, but for the last rows and columns of a matrix.
    """
    tile = tiles + 2 * (tl.program_id(0) % tiles_of_matrix)
    matrix = tl.program_id(0) // tiles_of_matrix
    top, edge = tl.load(tile) * BLOCK, tl.load(tile + 1) * BLOCK
    if DESCRIBED:
        total = _described_tile(x, y, matrix, top, edge, contracted, TRANSPOSED, PRECISION, BLOCK, BLOCK_K)
    else:
        total = _pointed_tile(
            x, y, matrix, top, edge, side, contracted, TRANSPOSED, EVEN, ALIGNED, PRECISION, BLOCK, BLOCK_K
        )
    m, n = top + tl.arange(0, BLOCK), edge + tl.arange(0, BLOCK)
    square = matrix.to(tl.int64) * side * side
    # Fewer than 2^31 elements to a matrix, so that registers do for the addresses.
    here = m[:, None] * side + n[None, :]
    inside = (m < side)[:, None] & (n < side)[None, :]
    if POLYNOMIAL:
        total = c * total + b * tl.load(term + square + here, mask=inside, other=0.0).to(tl.float32)
        if top == edge:
            total += tl.where(m[:, None] == n[None, :], a, 0.0)
    value = total.to(out.dtype.element_ty)
    tl.store(out + square + here, value, mask=inside)
    if top != edge:
        across = n[:, None] * side + m[None, :]
        tl.store(out + square + across, tl.trans(value), mask=(m < side)[None, :] & (n < side)[:, None])
