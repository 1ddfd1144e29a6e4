"""Kernels that read the gradient once: bases, projection, moments, and sums per channel.

Each takes a table of tiles, two int32 per program: which matrix, and which tile of it.
"""

import triton
import triton.language as tl

from ...core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ
from .layout import (
    ADDRESS_WIDTH,
    BASIS,
    BASIS_SCALE,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    EXPERT,
    GRAD,
    GRAD_SQ,
    HYPER,
    HYPER_WIDTH,
    LOW,
    META_WIDTH,
    MOMENT_SQ,
    PADDED_GRAD,
    PART_COUNT,
    PARTS,
    RANK,
    REFRESH_BITS,
    ROWS,
    SEED,
    SIGN,
    STEP_BITS,
    STEP_SQ,
)
from .numbers import adam_step, float_bits, is_finite, pointer, store_moments

M_STREAM = tl.constexpr(ROUND_EXP_AVG)
V_STREAM = tl.constexpr(ROUND_EXP_AVG_SQ)


@triton.jit
def int_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def normals_kernel(tiles, metas, hypers, table, basis, BLOCK: tl.constexpr):
    """basis[r, s] <- standard normal of (seed, refresh, expert, r, s); eight rows and BLOCK columns per program."""
    meta = metas + tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * META_WIDTH
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    rank = tl.load(meta + RANK).to(tl.int32)
    side = tl.minimum(tl.load(meta + ROWS), tl.load(meta + COLUMNS)).to(tl.int32)
    columns_of_tiles = tl.cdiv(side, BLOCK)
    block = tile // columns_of_tiles
    column = (tile % columns_of_tiles) * BLOCK + tl.arange(0, BLOCK)
    refresh = int_bits(tl.load(hypers + tl.load(meta + HYPER) * HYPER_WIDTH + REFRESH_BITS))
    expert = tl.load(meta + EXPERT).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(meta + SEED), column, block, refresh, expert)
    start = basis + tl.load(meta + BASIS) + block.to(tl.int64) * 8 * side + column
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
    meta = metas + matrix * META_WIDTH
    hyper = hypers + tl.load(meta + HYPER) * HYPER_WIDTH
    channels = tl.load(meta + ROWS).to(tl.int32)
    side = tl.load(meta + COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        side = tl.multiple_of(side, 16)
    grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
    z = basis + tl.multiple_of(tl.load(meta + BASIS), 16)
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
            element = s.to(tl.int64) * channels + c_C11
            step, v = _moments_of(meta, hyper, g * tl.load(hyper + SIGN), element, inside, M, False)
            first += tl.sum(step * step, 2)
            third += tl.sum(v, 2)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < side, other=0.0).to(tl.float32), 2)
    out = parts + tl.load(meta + PARTS) + c
    tl.store(out + GRAD_SQ * planes, tl.sum(second, 1), mask=c < channels)
    if IDENTITY:
        tl.store(out + LOW * planes, tl.sum(second, 1), mask=c < channels)
        tl.store(out + STEP_SQ * planes, tl.sum(first, 1), mask=c < channels)
        tl.store(out + MOMENT_SQ * planes, tl.sum(third, 1), mask=c < channels)
    else:
        tl.store(out + LOW * planes, tl.sum(first, 1), mask=c < channels)


@triton.jit
def reduce_columns_kernel(
    tiles, addresses, metas, hypers, basis, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, IDENTITY: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The same where channels are columns: a block of columns, over one part of the rows."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = metas + matrix * META_WIDTH
    hyper = hypers + tl.load(meta + HYPER) * HYPER_WIDTH
    side = tl.load(meta + ROWS).to(tl.int32)
    channels = tl.load(meta + COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        channels = tl.multiple_of(channels, 16)
    grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
    z = basis + tl.load(meta + BASIS)
    part_count = tl.load(meta + PART_COUNT).to(tl.int32)
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
            step, v = _moments_of(meta, hyper, g * tl.load(hyper + SIGN), element, inside, M, COLUMNS_ALIGNED)
            first += tl.sum(step * step, 0)
            third += tl.sum(v, 0)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < end, other=0.0).to(tl.float32)[:, None], 0)
    out = parts + tl.load(meta + PARTS) + part.to(tl.int64) * channels + c
    tl.store(out + GRAD_SQ * planes, second, mask=c < channels)
    if IDENTITY:
        tl.store(out + LOW * planes, second, mask=c < channels)
        tl.store(out + STEP_SQ * planes, first, mask=c < channels)
        tl.store(out + MOMENT_SQ * planes, third, mask=c < channels)
    else:
        tl.store(out + LOW * planes, first, mask=c < channels)


@triton.jit
def _moments_of(meta, hyper, low, element, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Update the moments at `element` of this matrix by `low`; (step, v), zero outside. A bad gradient leaves them."""
    m_ptr = pointer(tl.load(meta + EXP_AVG), M, ALIGNED) + element
    v_ptr = pointer(tl.load(meta + EXP_AVG_SQ), M, ALIGNED) + element
    old_m = tl.load(m_ptr, mask=inside, other=0.0).to(tl.float32)
    old_v = tl.load(v_ptr, mask=inside, other=0.0).to(tl.float32)
    m, v, step = adam_step(old_m, old_v, low, hyper)
    good = is_finite(low)
    m, v = tl.where(good, m, old_m), tl.where(good, v, old_v)
    # Experts share one rounding sequence, so that an element's place in the whole tensor picks its bits.
    size = tl.load(meta + RANK) * tl.maximum(tl.load(meta + ROWS), tl.load(meta + COLUMNS))
    position = tl.load(meta + EXPERT) * size + element
    step_count = int_bits(tl.load(hyper + STEP_BITS))
    store_moments(m_ptr, v_ptr, m, v, position, tl.load(meta + SEED), step_count, inside, M, M_STREAM, V_STREAM)
    return tl.where(inside & good, step, 0.0), tl.where(inside, v, 0.0)


@triton.jit
def _products(
    z_start, grad, r, c, rank, side, width, pitch,
    G: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr, NORMS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(basis @ grad, sum_s grad^2) of one tile; the second only with NORMS. EVEN says that BLOCK_S divides the side.

    `width` is the number of channels that can be read: beyond the last one a padded row holds zeros.
    """
    low = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    grad_sq = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for start in range(0, side, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        z_inside = r[:, None] < rank
        g_inside = c[None, :] < width
        if not EVEN:
            z_inside &= s[None, :] < side
            g_inside &= s[:, None] < side
        z = tl.load(z_start + s[None, :], mask=z_inside, other=0.0)
        if CHANNELS_ARE_ROWS:
            g = tl.load(grad + c[None, :].to(tl.int64) * pitch + s[:, None], mask=g_inside, other=0.0)
        else:
            g = tl.load(grad + s[:, None].to(tl.int64) * pitch + c[None, :], mask=g_inside, other=0.0)
        low = tl.dot(z.to(G), g, low, input_precision="ieee")
        if NORMS:
            wide = g.to(tl.float32)
            grad_sq += wide * wide
    return low, tl.sum(grad_sq, 0)


@triton.jit
def project_kernel(
    tiles, addresses, metas, hypers, basis, padded, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, SIDE_ALIGNED: tl.constexpr,
    CHANNELS_ALIGNED: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Any rank: low = basis @ grad on the tensor cores, and its moments where it stands in registers.

    LOW = sum_r low^2;  STEP_SQ = sum_r step^2;  MOMENT_SQ = sum_r v;  GRAD_SQ = sum_s G^2, one part per block of rows.
    """
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = metas + matrix * META_WIDTH
    hyper = hypers + tl.load(meta + HYPER) * HYPER_WIDTH
    rank = tl.load(meta + RANK).to(tl.int32)
    if CHANNELS_ARE_ROWS:
        channels, side = tl.load(meta + ROWS).to(tl.int32), tl.load(meta + COLUMNS).to(tl.int32)
    else:
        side, channels = tl.load(meta + ROWS).to(tl.int32), tl.load(meta + COLUMNS).to(tl.int32)
    if SIDE_ALIGNED:
        side = tl.multiple_of(side, 16)
    if CHANNELS_ALIGNED:
        channels = tl.multiple_of(channels, 16)
    if PADDED:
        grad = padded + tl.multiple_of(tl.load(meta + PADDED_GRAD), 16)
        pitch = tl.multiple_of(tl.cdiv(tl.load(meta + COLUMNS).to(tl.int32), 16) * 16, 16)
        width = channels if CHANNELS_ARE_ROWS else pitch
    else:
        grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
        pitch = side if CHANNELS_ARE_ROWS else channels
        width = channels
    part_count = tl.cdiv(rank, BLOCK_R)
    part = tile % part_count
    r = part * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile // part_count) * BLOCK_C + tl.arange(0, BLOCK_C)
    z_start = basis + tl.multiple_of(tl.load(meta + BASIS), 16) + r[:, None].to(tl.int64) * side
    # Every block of rows sees the whole channel; the first alone adds up its norm.
    if part == 0:
        low, grad_sq = _products(
            z_start, grad, r, c, rank, side, width, pitch, G, CHANNELS_ARE_ROWS, True, EVEN, BLOCK_R, BLOCK_C, BLOCK_S
        )
    else:
        low, grad_sq = _products(
            z_start, grad, r, c, rank, side, width, pitch, G, CHANNELS_ARE_ROWS, False, EVEN, BLOCK_R, BLOCK_C, BLOCK_S
        )
    low *= float_bits(tl.load(meta + BASIS_SCALE)) * tl.load(hyper + SIGN)
    out = parts + tl.load(meta + PARTS) + part.to(tl.int64) * channels
    tl.store(out + GRAD_SQ * planes + c, grad_sq, mask=c < channels)
    # Moments take twice the registers of the tile itself, so they are stepped a quarter at a time.
    left, right = _halves(low, BLOCK_R, BLOCK_C)
    start = (tile // part_count) * BLOCK_C
    quarter: tl.constexpr = BLOCK_C // 4
    for half in tl.static_range(2):
        first, second = _halves(left if half == 0 else right, BLOCK_R, BLOCK_C // 2)
        c = start + 2 * half * quarter + tl.arange(0, quarter)
        _step_columns(meta, hyper, first, r, c, rank, channels, out, planes, M, CHANNELS_ALIGNED)
        _step_columns(meta, hyper, second, r, c + quarter, rank, channels, out, planes, M, CHANNELS_ALIGNED)


@triton.jit
def _halves(tile, ROWS_OF_TILE: tl.constexpr, COLUMNS_OF_TILE: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tile.reshape(ROWS_OF_TILE, 2, COLUMNS_OF_TILE // 2).permute(0, 2, 1))


@triton.jit
def _step_columns(meta, hyper, low, r, c, rank, channels, out, planes, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Step the moments of some columns of a tile, and leave their sums over its rows."""
    element = r[:, None].to(tl.int64) * channels + c[None, :]
    inside = (r[:, None] < rank) & (c[None, :] < channels)
    step, v = _moments_of(meta, hyper, low, element, inside, M, ALIGNED)
    tl.store(out + LOW * planes + c, tl.sum(low * low, 0), mask=c < channels)
    tl.store(out + STEP_SQ * planes + c, tl.sum(step * step, 0), mask=c < channels)
    tl.store(out + MOMENT_SQ * planes + c, tl.sum(v, 0), mask=c < channels)


@triton.jit
def pad_kernel(tiles, addresses, metas, padded, G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Copy a gradient whose rows are not whole vectors to scratch where they are, for the tensor cores to read."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = metas + matrix * META_WIDTH
    rows, columns = tl.load(meta + ROWS).to(tl.int32), tl.load(meta + COLUMNS).to(tl.int32)
    grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, False)
    across = tl.cdiv(columns, BLOCK_C)
    row = (tile // across) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = (tile % across) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    pitch = tl.cdiv(columns, 16) * 16
    inside = (row < rows) & (column < columns)
    value = tl.load(grad + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    tl.store(
        padded + tl.load(meta + PADDED_GRAD) + row.to(tl.int64) * pitch + column,
        value,
        mask=(row < rows) & (column < pitch),
    )
