"""Kernels that project onto many rows, on the tensor cores."""

import triton
import triton.language as tl

from .layout import (
    ADDRESS_WIDTH,
    BASIS,
    BASIS_SCALE,
    COLUMNS,
    GRAD,
    GRAD_SQ,
    HYPER,
    HYPER_WIDTH,
    LOW,
    META_WIDTH,
    MOMENT_SQ,
    PADDED_GRAD,
    PARTS,
    RANK,
    ROWS,
    SIGN,
    STEP_SQ,
)
from .moments import load_moments, step_moments
from .numbers import float_bits, pointer


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
    start = (tile // part_count) * BLOCK_C
    if BLOCK_C == 256:
        left, right = _halves(low, BLOCK_R, BLOCK_C)
        _step_tile(meta, hyper, left, r, start, rank, channels, out, planes, M, CHANNELS_ALIGNED, BLOCK_R, 128)
        _step_tile(meta, hyper, right, r, start + 128, rank, channels, out, planes, M, CHANNELS_ALIGNED, BLOCK_R, 128)
    else:
        _step_tile(meta, hyper, low, r, start, rank, channels, out, planes, M, CHANNELS_ALIGNED, BLOCK_R, BLOCK_C)


@triton.jit
def _halves(tile, ROWS_OF_TILE: tl.constexpr, COLUMNS_OF_TILE: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tile.reshape(ROWS_OF_TILE, 2, COLUMNS_OF_TILE // 2).permute(0, 2, 1))


@triton.jit
def _step_tile(
    meta, hyper, low, r, start, rank, channels, out, planes,
    M: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Step the moments of a tile, a quarter at a time: they take twice the registers of the tile itself.

    The next quarter's moments are asked for before this one's are written, so that they are on their way meanwhile.
    """
    quarter: tl.constexpr = BLOCK_C // 4
    left, right = _halves(low, BLOCK_R, BLOCK_C)
    low0, low1 = _halves(left, BLOCK_R, BLOCK_C // 2)
    low2, low3 = _halves(right, BLOCK_R, BLOCK_C // 2)
    c = start + tl.arange(0, quarter)
    element = r[:, None].to(tl.int64) * channels + c[None, :]
    in_rank = r[:, None] < rank
    in0, in1 = in_rank & (c[None, :] < channels), in_rank & (c[None, :] + quarter < channels)
    in2, in3 = in_rank & (c[None, :] + 2 * quarter < channels), in_rank & (c[None, :] + 3 * quarter < channels)
    m0, v0 = load_moments(meta, element, in0, M, ALIGNED)
    m1, v1 = load_moments(meta, element + quarter, in1, M, ALIGNED)
    step, v = step_moments(meta, hyper, low0, m0, v0, element, in0, M, ALIGNED)
    _store_sums(low0, step, v, c, channels, out, planes)
    m2, v2 = load_moments(meta, element + 2 * quarter, in2, M, ALIGNED)
    step, v = step_moments(meta, hyper, low1, m1, v1, element + quarter, in1, M, ALIGNED)
    _store_sums(low1, step, v, c + quarter, channels, out, planes)
    m3, v3 = load_moments(meta, element + 3 * quarter, in3, M, ALIGNED)
    step, v = step_moments(meta, hyper, low2, m2, v2, element + 2 * quarter, in2, M, ALIGNED)
    _store_sums(low2, step, v, c + 2 * quarter, channels, out, planes)
    step, v = step_moments(meta, hyper, low3, m3, v3, element + 3 * quarter, in3, M, ALIGNED)
    _store_sums(low3, step, v, c + 3 * quarter, channels, out, planes)


@triton.jit
def _store_sums(low, step, v, c, channels, out, planes):
    """Leave the sums over the rows of a tile."""
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
