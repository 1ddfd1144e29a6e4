"""The first half of a spectral step, before its products: the momentum, and a direction of norm 1.

A tile is K blocks of N = 128, one after the other, of the rows cut into such blocks; a row that 128 does not divide is
filled up in thought. Two neighbours of a block share a byte of codes (`quant.blocks`).
"""

import triton
import triton.language as tl

from ..core.orthogonal import LIFT as LIFTED_BY
from ..quant.blocks import BLOCK as STATE_BLOCK
from ..quant.groups import TO_INTEGER as INTEGERS
from . import columns as at
from .device import (
    M_STREAM,
    count_outcome,
    element_bits,
    float_bits,
    int_bits,
    is_finite,
    pointer,
    quotient,
    rounded,
    rounding_key,
    store_keys,
    tile_of,
    wide,
)
from .groups import every_room, groups_of, in_group, in_line, load_groups, room, store_groups
from .moments import first_codes

N = tl.constexpr(STATE_BLOCK)
BLOCKS_OF_TILE = tl.constexpr(8)
CODES = tl.constexpr(16)
LIFT = tl.constexpr(LIFTED_BY)
TO_INTEGER = tl.constexpr(INTEGERS)
HALF_PLACE = tl.constexpr(2.0**-24)


@triton.jit
def inverse_power(largest):
    """A power of two near the inverse of a size: to multiply by it rounds nothing, and what is left is near 1."""
    return (0x7F000000 - tl.minimum(int_bits(largest) & 0x7F800000, 0x7E000000)).to(tl.float32, bitcast=True)


@triton.jit
def code_places(address, group, row, block, columns, ALIGNED: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr):
    """(pointers, places in their row, length of a row) of every eight codes of blocks [K, 16], for `room`.

    They are counted in words, or if not FLAT in bytes, of which a pointer is to the first of four. SHARED says that
    rows are whole blocks, of which `group` is the number.
    """
    TO_A_UNIT: tl.constexpr = 8 if FLAT else 2
    part = tl.arange(0, N // 8)[None, :] * (8 // TO_A_UNIT)
    in_row = block[:, None] * (N // TO_A_UNIT) + part
    to_a_row = tl.cdiv(columns, TO_A_UNIT).to(tl.int32)
    if SHARED:
        place = group[:, None].to(tl.int64) * (N // TO_A_UNIT) + part
    else:
        place = row[:, None].to(tl.int64) * to_a_row + in_row
    codes = pointer(address, tl.int32 if FLAT else tl.uint8, ALIGNED) + place
    return codes, in_row, to_a_row


@triton.jit
def load_codes(pointers, inside, FLAT: tl.constexpr):
    """The codes at the places of blocks. [K, 16, 8]"""
    if FLAT:
        eight = tl.load(pointers, mask=inside, other=0)
    else:
        first, left = in_line(pointers), in_line(inside)
        eight = tl.zeros(left.shape, tl.int32)
        for number in tl.static_range(4):
            two = tl.load(first + number, mask=left > number, other=0)
            eight |= two.to(tl.int32) << 8 * number
        eight = eight.reshape(inside.shape)
    return (eight[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & (CODES - 1)


@triton.jit
def store_codes(pointers, codes, inside, FLAT: tl.constexpr):
    """Leave codes [K, 16, 8] of four bits at the places of their blocks."""
    eight = tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], 2)
    if FLAT:
        tl.store(pointers, eight, mask=inside)
    else:
        first, left, eight = in_line(pointers), in_line(inside), in_line(eight)
        for number in tl.static_range(4):
            tl.store(first + number, (eight >> 8 * number).to(tl.uint8), mask=left > number)


@triton.jit
def levels_and_middles(levels):
    """The values of the codes, and the middles between them with a number beyond, as tables. [1, 16, 1]"""
    code = tl.arange(0, CODES)[None, :, None]
    return tl.load(levels + code), tl.load(levels + CODES + code)


@triton.jit
def looked_up(table, codes):
    """The entries of each block's table [K, 16, 1] at its codes [K, 16, 8]: a thread has one, and hands it out."""
    return tl.gather(tl.broadcast_to(table, codes.shape), codes, 1)


@triton.jit
def below_middles(scale, middle):
    """The largest number below each border between codes, in blocks of these scales. [K, 16, 1]

    As in `packed`, value / scale is compared with a middle once it is rounded: to be above it means value - middle *
    scale > half a place of the middle * scale. For a float next to this border the difference is exact, and the two are
    never equal, since no quotient lies half-way between two floats.
    """
    half_place = (int_bits(middle) & 0x7F800000).to(tl.float32, bitcast=True) * (scale * HALF_PLACE)
    number = tl.fma(middle, scale, half_place)
    above = tl.fma(middle, -scale, number) > half_place
    before = int_bits(number) - tl.where(number > 0, 1, -1)
    return tl.where(above, before.to(tl.float32, bitcast=True), number)


@triton.jit
def nearest_codes(value, scale, middle):
    """The code of each value [K, 16, 8] in a block of this scale [K, 1, 1]: of how many borders it is above.

    7 + 11.9 x - 4.44 x |x| with x = value / scale is the number of the i-th middle to within 0.48, so that rounded it
    is the code or the one below, and one border is left to compare with.
    """
    unit = inverse_power(scale)
    value, scale = value * unit, scale * unit
    scale = tl.where(scale > 0, scale, 1.0)
    below = below_middles(scale, middle)
    inverse = quotient(1.0, scale)
    steep, bend = 11.9 * inverse, 4.44 * inverse * inverse
    # Beside TO_INTEGER a sum is an integer, which its last bits are.
    code = int_bits(tl.fma(tl.fma(tl.abs(value), -bend, steep), value, TO_INTEGER + 7)) & (CODES - 1)
    # Of a number that is above, the sign of the difference.
    return code + (int_bits(looked_up(below, code) - value).to(tl.uint32) >> 31).to(tl.int32)


@triton.jit
def kept_momentum(
    meta, grad, inside, group, row, block, there, columns, levels, rest, ALIGNED: tl.constexpr, FLAT: tl.constexpr
):
    """The momentum after taking in a gradient, once it is kept; blocks with anything but finite numbers stay as are."""
    address, scales = tl.load(meta + at.EXP_AVG), pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + group
    codes, in_row, to_a_row = code_places(address, group, row, block, columns, ALIGNED, False, FLAT)
    level, middle = levels_and_middles(levels)
    scale = tl.load(scales, mask=there, other=0.0)[:, None, None]
    old = looked_up(level * scale, load_codes(codes, room(there, in_row, to_a_row, False, FLAT), FLAT))
    exp_avg = tl.where(every_room(inside, FLAT), old + rest * (grad - old), 0.0)
    scale = tl.max(tl.max(tl.where(is_finite(exp_avg), tl.abs(exp_avg), float("inf")), 2), 1)
    nearest = nearest_codes(exp_avg, scale[:, None, None], middle)
    whole = there & is_finite(scale)
    tl.store(scales, scale, mask=whole)
    store_codes(codes, nearest, room(whole, in_row, to_a_row, False, FLAT), FLAT)
    return exp_avg


@triton.jit
def store_size(line, size):
    """The largest of a tile's sizes, and their squares added up in units of its square."""
    largest = tl.max(size)
    inverse = inverse_power(largest)
    share, most = size * inverse, largest * inverse
    tl.store(line + at.B_LARGEST, largest)
    tl.store(line + at.B_SCALED_SQ, tl.sum(share * share) / tl.where(most > 0, most * most, 1.0))


@triton.jit
def momentum_kernel(
    tiles, addresses, matrix_table, hypers, levels, directions, blocks,
    G: tl.constexpr, MOMENTUM: tl.constexpr, MEASURED: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """m <- beta m + (1 - beta) g, kept in 4 bits;  direction <- LIFT (beta m + (1 - beta) g), and its size: one tile.

    `levels` are what the 16 codes stand for, the 15 middles between them and a number beyond. Without MOMENTUM there is
    no m, and the direction is g. It is left in the gradient's own sign, whichever way the weight is to go. Only if
    MEASURED, its size is noted.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    if COLUMNS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    FLAT: tl.constexpr = ALIGNED and COLUMNS_ALIGNED
    group, there, row, block = groups_of(tile, rows, columns, N)
    column = block[:, None] * N + in_group(N, FLAT)
    inside = room(there, column, columns, False, FLAT)
    element = row[:, None].to(tl.int64) * columns + column
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    sign, rest = tl.load(hyper + at.SIGN), tl.load(hyper + at.ONE_MINUS_BETA1)
    g = sign * wide(load_groups(grad + element, inside, FLAT))
    ahead = g
    if MOMENTUM:
        exp_avg = kept_momentum(meta, g, inside, group, row, block, there, columns, levels, rest, ALIGNED, FLAT)
        ahead = exp_avg + rest * (g - exp_avg)
    lifted = sign * ahead * LIFT
    directions += matrix * rows * columns
    store_groups(directions + element, lifted.to(directions.dtype.element_ty), inside, FLAT)
    line = blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
    if MEASURED:
        store_size(line, tl.abs(lifted))
    tl.store(line + at.B_GRAD_SQ, tl.sum(g * g))


@triton.jit
def measure_kernel(tiles, matrix_table, directions, blocks, ALIGNED: tl.constexpr):
    """The size of a direction that was changed since: one tile, of as many elements as the momentum's has."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    element = tl.arange(0, BLOCKS_OF_TILE)[:, None] * N + tl.arange(0, N)[None, :]
    element += tile.to(tl.int64) * BLOCKS_OF_TILE * N
    value = tl.load(directions + matrix * size + element, mask=element < size, other=0.0).to(tl.float32)
    store_size(blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH, tl.abs(value))


@triton.jit
def settle_kernel(
    matrix_table, hypers, blocks, outcomes, gains, skipped, CAPTURABLE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per matrix: two factors that bring its direction to norm 1, and whether it is stepped.

    Norms by the largest entry: no size of a gradient is too small or too large to be squared, or its inverse taken.
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
    inverse, norm = inverse_power(top), tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1.0)
    factors = gains + tl.load(meta + at.GAINS)
    tl.store(factors, inverse)
    tl.store(factors + 1, 1.0 / (tl.where(top > 0, top * inverse, 1.0) * norm))
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
def keep_kernel(tiles, matrix_table, hypers, outcomes, value, M: tl.constexpr, BASIS: tl.constexpr):
    """state <- value, of a momentum of low rank whose gradient is not refused: one tile of its basis, or of the rest.

    A basis comes as it is kept; the rest is rounded at random where it is kept narrow.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    rank = tl.load(meta + at.RANK)
    if BASIS:
        columns, state = tl.load(meta + at.CHANNELS), tl.load(meta + at.STORED_BASIS)
    else:
        columns, state = tl.load(meta + at.SIDE), tl.load(meta + at.EXP_AVG)
    to_a_row = tl.cdiv(columns, N).to(tl.int32)
    group = tile * BLOCKS_OF_TILE + tl.arange(0, BLOCKS_OF_TILE)
    row = group // to_a_row
    finite = tl.load(outcomes + matrix * at.OUTCOME_WIDTH + at.FINITE) != 0
    there = row < tl.where(finite, rank, 0)
    in_block = tl.arange(0, N // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    column = ((group - row * to_a_row) * N)[:, None, None] + in_block
    inside = there[:, None, None] & (column < columns)
    element = (row.to(tl.int64) * columns)[:, None, None] + column
    new = tl.load(value + matrix * rank * columns + element, mask=inside, other=0.0)
    here = pointer(state, M, False) + element
    if BASIS or M == tl.float32:
        tl.store(here, new, mask=inside)
    else:
        step = int_bits(tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.STEP_BITS))
        key0, key1 = rounding_key(tl.load(meta + at.SEED), step, M_STREAM)
        bits = element_bits(tl.load(meta + at.EXPERT) * rank * columns + element, key0, key1)
        if M == tl.int8:
            codes, scale = first_codes(new, bits)
            tl.store(here, codes, mask=inside)
            tl.store(pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + group, scale, mask=there)
        else:
            tl.store(here, rounded(new, bits, M), mask=inside)


@triton.jit
def unit_kernel(tiles, matrix_table, gains, directions, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """direction <- direction / |direction|, of one tile; zeros stay zero"""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    element = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    here = directions + matrix * size + element
    value = tl.load(here, mask=element < size, other=0.0).to(tl.float32)
    factors = gains + tl.load(meta + at.GAINS)
    value = value * tl.load(factors) * tl.load(factors + 1)
    tl.store(here, value.to(directions.dtype.element_ty), mask=element < size)
