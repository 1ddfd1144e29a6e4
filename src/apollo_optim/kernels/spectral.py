"""What comes before the products of a spectral step: its momentum in 4 bits, and a direction of norm 1.

A tile is a run of blocks, the rows cut into blocks of 128 one after the other, and seen as [K, 64, 2]: K blocks of 64
pairs, of which each is a byte of codes (`quant.blocks`). A row that 128 does not divide is filled up in thought.
"""

import triton
import triton.language as tl

from ..core.orthogonal import LIFT as LIFTED_BY
from ..quant.blocks import BLOCK as STATE_BLOCK
from . import columns as at
from .device import count_outcome, float_bits, int_bits, is_finite, pointer, store_keys

N = tl.constexpr(STATE_BLOCK)
PAIRS_OF_BLOCK = tl.constexpr(STATE_BLOCK // 2)
BLOCKS_OF_TILE = tl.constexpr(32)
CODES = tl.constexpr(16)
LIFT = tl.constexpr(LIFTED_BY)


@triton.jit
def largest_of(size):
    """The largest of each block [K, 64, 2] -> [K]"""
    return tl.max(tl.max(size, 2), 1)


@triton.jit
def total_of(value):
    return tl.sum(tl.sum(tl.sum(value, 2), 1), 0)


@triton.jit
def kept_momentum(meta, grad, group, row, column, there, columns, levels, rest, MOMENTUM: tl.constexpr):
    """The momentum after taking in a gradient, once it is kept; blocks with anything but finite numbers stay as are."""
    exp_avg = grad
    if MOMENTUM:
        half = tl.arange(0, 2)[None, None, :]
        of_row = row.to(tl.int64) * tl.cdiv(columns, 2)
        codes = pointer(tl.load(meta + at.EXP_AVG), tl.uint8, False)
        scales = pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + group
        byte = tl.load(codes + of_row + column // 2, mask=there[:, None, None] & (column < columns), other=0)
        code = (byte.to(tl.int32) >> (4 * half)) & (CODES - 1)
        old = tl.load(levels + code) * tl.load(scales, mask=there, other=0.0)[:, None, None]
        exp_avg = tl.where(column < columns, old + rest * (grad - old), 0.0)
        scale = largest_of(tl.abs(exp_avg))
        share = tl.div_rn(exp_avg, tl.where(scale > 0, scale, 1.0)[:, None, None])
        code = tl.zeros(share.shape, tl.int32)
        for number in tl.static_range(CODES - 1):
            code += tl.where(share > tl.load(levels + CODES + number), 1, 0)
        bad = tl.max(tl.max(tl.where(is_finite(exp_avg), 0, 1), 2), 1)
        whole = there & (bad == 0)
        tl.store(scales, scale, mask=whole)
        # [K, 64], where the bytes of a row end with its last pair.
        first = tl.min(column, 2)
        bytes_ptr = codes + tl.min(of_row + column // 2, 2)
        tl.store(bytes_ptr, tl.sum(code << (4 * half), 2).to(tl.uint8), mask=whole[:, None] & (first < columns))
    return exp_avg


@triton.jit
def momentum_kernel(
    tiles, addresses, matrix_table, hypers, levels, directions, blocks,
    G: tl.constexpr, MOMENTUM: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """m <- beta m + (1 - beta) g, kept in 4 bits;  direction <- LIFT (beta m + (1 - beta) g), and its size: one tile.

    `levels` are what the 16 codes stand for and the 15 middles between them. Without MOMENTUM there is no m, and the
    direction is g. It is left in the gradient's own sign, whichever way the weight is to go.
    """
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    meta = matrix_table + matrix * at.MATRIX_WIDTH
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    if COLUMNS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    to_a_row = tl.cdiv(columns, N).to(tl.int32)
    group = tile * BLOCKS_OF_TILE + tl.arange(0, BLOCKS_OF_TILE)
    there = group < rows * to_a_row
    row = group // to_a_row
    in_block = tl.arange(0, PAIRS_OF_BLOCK)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    column = ((group - row * to_a_row) * N)[:, None, None] + in_block
    row = row[:, None, None]
    inside = there[:, None, None] & (column < columns)
    element = row.to(tl.int64) * columns + column
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    sign, rest = tl.load(hyper + at.SIGN), tl.load(hyper + at.ONE_MINUS_BETA1)
    g = sign * tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
    exp_avg = kept_momentum(meta, g, group, row, column, there, columns, levels, rest, MOMENTUM)
    ahead = exp_avg + rest * (g - exp_avg)
    if not MOMENTUM:
        ahead = g
    out = directions + matrix * rows * columns
    tl.store(out + element, (sign * ahead * LIFT).to(directions.dtype.element_ty), mask=inside)
    size = tl.abs(ahead)
    largest = tl.max(largest_of(size), 0)
    share = tl.div_rn(size, tl.where(largest > 0, largest, 1.0))
    line = blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
    tl.store(line + at.B_LARGEST, largest)
    tl.store(line + at.B_SCALED_SQ, total_of(share * share))
    tl.store(line + at.B_GRAD_SQ, total_of(g * g))


@triton.jit
def settle_kernel(
    matrix_table, hypers, blocks, outcomes, gains, skipped, CAPTURABLE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per matrix: the largest entry of its direction, its norm in such entries, and whether it is stepped.

    Norms by the largest entry: no size of a gradient is too small or too large to be squared.
    """
    matrix = tl.program_id(0).to(tl.int64)
    meta = matrix_table + matrix * at.MATRIX_WIDTH
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    first, weight_first = tl.load(meta + at.BLOCKS), tl.load(meta + at.WEIGHT_BLOCKS)
    count = tl.load(meta + at.BLOCK_COUNT).to(tl.int32)
    number = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        line = blocks + (first + start + number) * at.BLOCK_WIDTH
        largest = tl.maximum(largest, tl.load(line + at.B_LARGEST, mask=start + number < count, other=0.0))
    top = tl.max(largest, 0)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        line, inside = blocks + (first + start + number) * at.BLOCK_WIDTH, start + number < count
        share = tl.div_rn(tl.load(line + at.B_LARGEST, mask=inside, other=0.0), tl.where(top > 0, top, 1.0))
        squares += share * share * tl.load(line + at.B_SCALED_SQ, mask=inside, other=0.0)
    size = gains + tl.load(meta + at.GAINS)
    tl.store(size, top)
    tl.store(size + 1, tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1.0))
    # The experts of one weight are refused together.
    all_squares = tl.zeros([BLOCK], tl.float32)
    weight_count = tl.load(meta + at.WEIGHT_BLOCK_COUNT).to(tl.int32)
    for start in range(0, weight_count, BLOCK):
        line = blocks + (weight_first + start + number) * at.BLOCK_WIDTH
        all_squares += tl.load(line + at.B_GRAD_SQ, mask=start + number < weight_count, other=0.0)
    finite = is_finite(tl.sum(all_squares, 0))
    store_keys(outcome, tl.load(meta + at.SEED), int_bits(tl.load(hyper + at.STEP_BITS)))
    factor = float_bits(tl.load(meta + at.SCALE)) * tl.load(hyper + at.LR) * tl.load(hyper + at.SIGN)
    tl.store(outcome + at.FACTOR, factor)
    tl.store(outcome + at.FINITE, tl.where(finite, 1.0, 0.0))
    if first == weight_first:
        count_outcome(meta, skipped, finite, CAPTURABLE)


@triton.jit
def unit_kernel(tiles, matrix_table, gains, directions, BLOCK: tl.constexpr):
    """direction <- direction / |direction|, of one tile; zeros stay zero"""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    element = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    meta = matrix_table + matrix * at.MATRIX_WIDTH
    size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
    here = directions + matrix * size + element
    value = tl.load(here, mask=element < size, other=0.0).to(tl.float32)
    sizes = gains + tl.load(meta + at.GAINS)
    largest, norm = tl.load(sizes), tl.load(sizes + 1)
    value = tl.div_rn(tl.div_rn(value, tl.where(largest > 0, largest, 1.0) * LIFT), norm)
    tl.store(here, value.to(directions.dtype.element_ty), mask=element < size)
