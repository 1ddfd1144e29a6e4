"""A product that is known to be symmetric: one half of its tiles, each written twice.

Shapes: matrices of side S, products of K elements along the contracted side; tiles of M rows and N columns.
"""

import triton
import triton.language as tl


@triton.jit
def symmetric_kernel(
    tiles, a, b, first, second, out, alpha, beta, gamma, side, contracted, tiles_of_matrix,
    TERMS: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out <- alpha a b^T + beta first + gamma second, of TERMS terms: one tile on or below the diagonal of a matrix.

    TRANSPOSED says that the S elements of a factor are neighbours, not the K of them; EVEN, that tiles divide K;
    ALIGNED, that 16 divides S. A tile that is wholly below the diagonal is written above it too. Both are written in
    whole vectors: no mask is finer than a tile, but for the last rows and columns of a matrix.
    """
    tile = tiles + 2 * (tl.program_id(0) % tiles_of_matrix)
    matrix = (tl.program_id(0) // tiles_of_matrix).to(tl.int64)
    top, left_edge = tl.load(tile) * BLOCK_M, tl.load(tile + 1) * BLOCK_N
    below = left_edge + BLOCK_N <= top
    m, n = top + tl.arange(0, BLOCK_M), left_edge + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the last are read from the first ones, and not written.
    a_row, b_row = m % side, n % side
    if ALIGNED:
        a_row = tl.max_contiguous(tl.multiple_of(a_row, 16), 16)
        b_row = tl.max_contiguous(tl.multiple_of(b_row, 16), 16)
    a_ptr, b_ptr = a + matrix * side * contracted, b + matrix * side * contracted
    if TRANSPOSED:
        a_ptr += a_row[:, None] + k[None, :].to(tl.int64) * side
        b_ptr += b_row[None, :] + k[:, None].to(tl.int64) * side
        onward = side.to(tl.int64) * BLOCK_K
    else:
        a_ptr += a_row[:, None].to(tl.int64) * contracted + k[None, :]
        b_ptr += b_row[None, :].to(tl.int64) * contracted + k[:, None]
        onward = tl.full((), BLOCK_K, tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, contracted, BLOCK_K):
        if EVEN:
            left, right = tl.load(a_ptr), tl.load(b_ptr)
        else:
            left = tl.load(a_ptr, mask=k[None, :] < contracted - start, other=0.0)
            right = tl.load(b_ptr, mask=k[:, None] < contracted - start, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a_ptr += onward
        b_ptr += onward
    square = matrix * side * side
    # Fewer than 2^31 elements to a matrix, so that registers do for the addresses.
    here = m[:, None] * side + n[None, :]
    inside = (m < side)[:, None] & (n < side)[None, :]
    total *= alpha
    if TERMS > 0:
        total += beta * tl.load(first + square + here, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 1:
        total += gamma * tl.load(second + square + here, mask=inside, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    tl.store(out + square + here, value, mask=inside)
    if below:
        across = n[:, None] * side + m[None, :]
        tl.store(out + square + across, tl.trans(value), mask=(m < side)[None, :] & (n < side)[:, None])


@triton.jit
def _described_tile(
    tile, matrix, a, b, first, second, out, alpha, beta, gamma, side, contracted,
    TERMS: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    top, edge = tl.load(tile) * BLOCK_M, tl.load(tile + 1) * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, contracted, BLOCK_K):
        if TRANSPOSED:
            left = a.load([matrix, k, top]).reshape(BLOCK_K, BLOCK_M).T
            right = b.load([matrix, k, edge]).reshape(BLOCK_K, BLOCK_N)
        else:
            left = a.load([matrix, top, k]).reshape(BLOCK_M, BLOCK_K)
            right = b.load([matrix, edge, k]).reshape(BLOCK_N, BLOCK_K).T
        total = tl.dot(left, right, total, input_precision=PRECISION)
    m, n = top + tl.arange(0, BLOCK_M), edge + tl.arange(0, BLOCK_N)
    square = matrix.to(tl.int64) * side * side
    here = m[:, None] * side + n[None, :]
    inside = (m < side)[:, None] & (n < side)[None, :]
    total *= alpha
    if TERMS > 0:
        total += beta * tl.load(first + square + here, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 1:
        total += gamma * tl.load(second + square + here, mask=inside, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    tl.store(out + square + here, value, mask=inside)
    # A mask and no branch, in which a loop over tiles cannot be unrolled into that over K.
    below = (edge + BLOCK_N <= top) & (m < side)[None, :] & (n < side)[:, None]
    tl.store(out + square + n[:, None] * side + m[None, :], tl.trans(value), mask=below)


@triton.jit
def described_kernel(
    tiles, a, b, first, second, out, alpha, beta, gamma, side, contracted, tiles_of_matrix, count,
    TERMS: tl.constexpr, TRANSPOSED: tl.constexpr, PROGRAMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `symmetric_kernel`, with factors that are read by descriptors; PROGRAMS, if any, take turns with the tiles."""
    if PROGRAMS > 0:
        for number in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
            _described_tile(
                tiles + 2 * (number % tiles_of_matrix), number // tiles_of_matrix,
                a, b, first, second, out, alpha, beta, gamma, side, contracted,
                TERMS, TRANSPOSED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _described_tile(
            tiles + 2 * (tl.program_id(0) % tiles_of_matrix), tl.program_id(0) // tiles_of_matrix,
            a, b, first, second, out, alpha, beta, gamma, side, contracted,
            TERMS, TRANSPOSED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
