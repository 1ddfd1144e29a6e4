"""A product that is known to be symmetric: one half of its tiles, each written twice.

Shapes: matrices of side S, products of K elements along the contracted side; tiles of M rows and N columns.
"""

import triton
import triton.language as tl


@triton.jit
def symmetric_kernel(
    tiles, x, y, out, a, b, c, side, contracted, tiles_of_matrix,
    POLYNOMIAL: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out <- x y^T, or if POLYNOMIAL a + b x + c x y^T: one tile on or below the diagonal of a matrix.

    TRANSPOSED says that the S elements of a factor are neighbours, not the K of them; EVEN, that tiles divide K;
    ALIGNED, that 16 divides S. A tile that is wholly below the diagonal is written above it too. Both are written in
    whole vectors: no mask is finer than a tile, but for the last rows and columns of a matrix.
    """
    tile = tiles + 2 * (tl.program_id(0) % tiles_of_matrix)
    matrix = (tl.program_id(0) // tiles_of_matrix).to(tl.int64)
    top, edge = tl.load(tile) * BLOCK_M, tl.load(tile + 1) * BLOCK_N
    m, n = top + tl.arange(0, BLOCK_M), edge + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the last are read from the first ones, and not written.
    x_row, y_row = m % side, n % side
    if ALIGNED:
        x_row = tl.max_contiguous(tl.multiple_of(x_row, 16), 16)
        y_row = tl.max_contiguous(tl.multiple_of(y_row, 16), 16)
    x_ptr, y_ptr = x + matrix * side * contracted, y + matrix * side * contracted
    if TRANSPOSED:
        x_ptr += x_row[:, None] + k[None, :].to(tl.int64) * side
        y_ptr += y_row[None, :] + k[:, None].to(tl.int64) * side
        onward = side.to(tl.int64) * BLOCK_K
    else:
        x_ptr += x_row[:, None].to(tl.int64) * contracted + k[None, :]
        y_ptr += y_row[None, :].to(tl.int64) * contracted + k[:, None]
        onward = tl.full((), BLOCK_K, tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, contracted, BLOCK_K):
        if EVEN:
            left, right = tl.load(x_ptr), tl.load(y_ptr)
        else:
            left = tl.load(x_ptr, mask=k[None, :] < contracted - start, other=0.0)
            right = tl.load(y_ptr, mask=k[:, None] < contracted - start, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        x_ptr += onward
        y_ptr += onward
    square = matrix * side * side
    # Fewer than 2^31 elements to a matrix, so that registers do for the addresses.
    here = m[:, None] * side + n[None, :]
    inside = (m < side)[:, None] & (n < side)[None, :]
    if POLYNOMIAL:
        total = c * total + b * tl.load(x + square + here, mask=inside, other=0.0).to(tl.float32)
        if edge + BLOCK_N > top:
            total += tl.where(m[:, None] == n[None, :], a, 0.0)
    value = total.to(out.dtype.element_ty)
    tl.store(out + square + here, value, mask=inside)
    if edge + BLOCK_N <= top:
        across = n[:, None] * side + m[None, :]
        tl.store(out + square + across, tl.trans(value), mask=(m < side)[None, :] & (n < side)[:, None])
