"""Kernels that make bases, and that project onto one row or none: sums along or across the rows of a gradient.

Each takes a table of tiles, two int32 per program: which matrix, and which tile of it.
"""

import triton
import triton.language as tl

from . import layout as at
from .moments import moments_of
from .numbers import int_bits, pointer


@triton.jit
def normals_kernel(tiles, metas, hypers, table, basis, BLOCK: tl.constexpr):
    """basis[r, s] <- standard normal of (seed, refresh, expert, r, s), by the places of the whole matrix.

    Eight rows and BLOCK columns per program.
    """
    meta = metas + tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * at.META_WIDTH
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    rank = tl.load(meta + at.RANK).to(tl.int32)
    side = tl.load(meta + at.SIDE).to(tl.int32)
    columns_of_tiles = tl.cdiv(side, BLOCK)
    block = tile // columns_of_tiles
    column = (tile % columns_of_tiles) * BLOCK + tl.arange(0, BLOCK)
    refresh = int_bits(tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.REFRESH_BITS))
    expert = tl.load(meta + at.EXPERT).to(tl.int32)
    place = tl.load(meta + at.FIRST_SIDE).to(tl.int32) + column
    w0, w1, w2, w3 = tl.philox(tl.load(meta + at.SEED), place, block, refresh, expert)
    start = basis + tl.load(meta + at.BASIS) + block.to(tl.int64) * 8 * side + column
    for row in tl.static_range(8):
        if row // 2 == 0:
            word = w0
        elif row // 2 == 1:
            word = w1
        elif row // 2 == 2:
            word = w2
        else:
            word = w3
        index = ((word >> (16 * (row % 2))) & 0xFFFF).to(tl.int32)
        inside = column < tl.where(block * 8 + row < rank, side, 0)
        tl.store(start + row * side, tl.load(table + index, mask=inside), mask=inside)


@triton.jit
def stored_kernel(tiles, metas, basis, B: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """basis[r, s] <- STORED_SCALE * the basis that state keeps, BLOCK of its elements per program.

    Where that is too wide it becomes a sum of PIECES, one plane each: rounded, and what the rounding left out.
    """
    meta = metas + tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * at.META_WIDTH
    element = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(meta + at.RANK) * tl.load(meta + at.SIDE)
    inside = element < size
    stored = pointer(tl.load(meta + at.STORED_BASIS), B, False)
    left = tl.load(stored + element, mask=inside, other=0.0).to(tl.float32) * at.STORED_SCALE
    out = basis + tl.load(meta + at.BASIS) + element
    for piece in tl.static_range(PIECES):
        narrow = left.to(basis.dtype.element_ty)
        tl.store(out + piece * (tl.cdiv(size, 16) * 16), narrow, mask=inside)
        left -= narrow.to(tl.float32)


@triton.jit
def reduce_rows_kernel(
    tiles, addresses, metas, hypers, basis, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, IDENTITY: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Rank 1 or full rank, channels are rows: sums along each row of a block of rows.

    rank 1:  LOW = sum_s z[s] G[c, s];  GRAD_SQ = sum_s G[c, s]^2
    full:    Adam moments of G itself;  STEP_SQ, MOMENT_SQ, GRAD_SQ summed over s

    A row is seen as [BLOCK_S / 8, 8]: a thread adds up its own eight neighbours, so sums take few registers and more
    loads can be under way.
    """
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = metas + matrix * at.META_WIDTH
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    channels = tl.load(meta + at.ROWS).to(tl.int32)
    side = tl.load(meta + at.COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        side = tl.multiple_of(side, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    z = basis + tl.multiple_of(tl.load(meta + at.BASIS), 16)
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    c_C11 = c[:, None, None]
    row_C11 = grad + c_C11.to(tl.int64) * side
    in_row = tl.arange(0, BLOCK_S // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    first = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    second = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    third = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    for start in range(0, side, BLOCK_S):
        s = start + in_row
        inside = (c_C11 < channels) & (s < side)
        g = tl.load(row_C11 + s, mask=inside, other=0.0).to(tl.float32)
        second += tl.sum(g * g, 2)
        if IDENTITY:
            # Moments are kept [S, C]: the transpose of the gradient as it is stored.
            step, v = moments_of(meta, hyper, g * tl.load(hyper + at.SIGN), s, c_C11, channels, inside, M, False)
            first += tl.sum(step * step, 2)
            third += tl.sum(v, 2)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < side, other=0.0).to(tl.float32), 2)
    out = parts + tl.load(meta + at.PARTS) + c
    tl.store(out + at.GRAD_SQ * planes, tl.sum(second, 1), mask=c < channels)
    if IDENTITY:
        tl.store(out + at.LOW * planes, tl.sum(second, 1), mask=c < channels)
        tl.store(out + at.STEP_SQ * planes, tl.sum(first, 1), mask=c < channels)
        tl.store(out + at.MOMENT_SQ * planes, tl.sum(third, 1), mask=c < channels)
    else:
        tl.store(out + at.LOW * planes, tl.sum(first, 1), mask=c < channels)


@triton.jit
def reduce_columns_kernel(
    tiles, addresses, metas, hypers, basis, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, IDENTITY: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The same where channels are columns: a block of columns, over one part of the rows."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = metas + matrix * at.META_WIDTH
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    side = tl.load(meta + at.ROWS).to(tl.int32)
    channels = tl.load(meta + at.COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        channels = tl.multiple_of(channels, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    z = basis + tl.load(meta + at.BASIS)
    part_count = tl.load(meta + at.PART_COUNT).to(tl.int32)
    part = tile % part_count
    c = (tile // part_count) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows_per_part = tl.cdiv(tl.cdiv(side, part_count), BLOCK_S) * BLOCK_S
    end = tl.minimum(side, (part + 1) * rows_per_part)
    first = tl.zeros([BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_C], tl.float32)
    third = tl.zeros([BLOCK_C], tl.float32)
    for start in range(part * rows_per_part, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        inside = (s[:, None] < end) & (c[None, :] < channels)
        element = s[:, None].to(tl.int64) * channels + c[None, :]
        g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
        second += tl.sum(g * g, 0)
        if IDENTITY:
            row, column = s[:, None], c[None, :]
            step, v = moments_of(
                meta, hyper, g * tl.load(hyper + at.SIGN), row, column, channels, inside, M, COLUMNS_ALIGNED
            )
            first += tl.sum(step * step, 0)
            third += tl.sum(v, 0)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < end, other=0.0).to(tl.float32)[:, None], 0)
    out = parts + tl.load(meta + at.PARTS) + part.to(tl.int64) * channels + c
    tl.store(out + at.GRAD_SQ * planes, second, mask=c < channels)
    if IDENTITY:
        tl.store(out + at.LOW * planes, second, mask=c < channels)
        tl.store(out + at.STEP_SQ * planes, first, mask=c < channels)
        tl.store(out + at.MOMENT_SQ * planes, third, mask=c < channels)
    else:
        tl.store(out + at.LOW * planes, first, mask=c < channels)
