"""Kernels that write int8 weights: what `quant.groups` says, where a weight stands in registers."""

import triton
import triton.language as tl

from ..quant.groups import LARGEST_CODE, LEAST_SCALE, SCALE_BITS
from ..quant.groups import TO_INTEGER as INTEGERS
from ..quant.rounding import DRAWS
from . import columns as at
from .apply import HALF_TILE, PAIRED_TILE
from .device import element_bits, load_keys, pointer, tile_of
from .groups import (
    draws_of,
    elements_of,
    first_group,
    global_places,
    groups_of,
    in_group,
    load_groups,
    room,
    store_groups,
)

TOP = tl.constexpr(float(LARGEST_CODE))
LEAST = tl.constexpr(LEAST_SCALE)
CLEARED = tl.constexpr(-(1 << SCALE_BITS))
HALF_OF_CLEARED = tl.constexpr(1 << (SCALE_BITS - 1))
UNUSED_BITS = tl.constexpr(16 - SCALE_BITS)
TO_INTEGER = tl.constexpr(INTEGERS)
ONE_BITS = tl.constexpr(0x3F800000)
MIDDLE = tl.constexpr(1 + (DRAWS - 1) / 2 / DRAWS)


@triton.jit
def requantized(value, scale_bits, draw, ROUND: tl.constexpr):
    """(codes [K, N / 8, 8], scales [K]) as `quant.groups.quantized`."""
    size = tl.abs(value)
    largest = tl.max(tl.max(size, 2), 1)
    raw = tl.div_rn(largest, tl.full(largest.shape, TOP, tl.float32)).to(tl.int32, bitcast=True)
    if ROUND:
        raw += (scale_bits >> UNUSED_BITS).to(tl.int32)
    else:
        raw += HALF_OF_CLEARED
    scale = (raw & CLEARED).to(tl.float32, bitcast=True)
    scale = tl.where(scale < LEAST, LEAST, scale)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None, None]
    rounded = value * inverse + TO_INTEGER
    rest = (value - (rounded - TO_INTEGER) * scale[:, None, None]) * inverse
    if ROUND:
        # 1 + draw / 2^16 by its bits: a conversion would cost more than all of this line.
        rest += ((draw.to(tl.int32) << 7) | ONE_BITS).to(tl.float32, bitcast=True) - MIDDLE
    top = tl.where(scale > LEAST, largest, float("inf"))
    rounded += tl.where(size >= top[:, None, None], 0.0, rest)
    rounded = tl.minimum(tl.maximum(rounded, TO_INTEGER - TOP), TO_INTEGER + TOP)
    # An integer beside such a number is the last bits of the sum.
    return rounded.to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def apply_int8_kernel(
    tiles, moves, matrix_table, hypers, outcomes, gains,
    G: tl.constexpr, CHANNEL: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    COLUMNS_ALIGNED: tl.constexpr, SHARED: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr, N: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """weight <- (1 - lr * decay) * weight - lr * gain[channel] * grad, for PAIRS * 2048 elements of one int8 matrix."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    tile = tile.to(tl.int64)
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    if tl.load(outcome + at.FINITE) != 0:
        rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
        if COLUMNS_ALIGNED:
            columns = tl.multiple_of(columns, 16)
        codes = pointer(tl.load(moves + matrix * at.ADDRESS_WIDTH + at.WEIGHT), tl.int8, ALIGNED)
        grad = pointer(tl.load(moves + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
        scales = pointer(tl.load(meta + at.CODE_SCALE), tl.float32, False)
        keep = tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.KEEP)
        factor = tl.load(outcome + at.FACTOR)
        key0, key1, scale_key0, scale_key1 = load_keys(outcome)
        gain_ptr = gains + tl.load(meta + at.GAINS)
        FLAT: tl.constexpr = ALIGNED and COLUMNS_ALIGNED
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                group, there, row, block = groups_of(begin // HALF_TILE, rows, columns, N)
                column = block[:, None] * N + in_group(N, FLAT)
                inside = room(there, column, columns, SHARED, FLAT)
                element = elements_of(begin, row, column, columns, N, SHARED, FLAT)
                scale = tl.load(scales + group, mask=there, other=0.0)
                w = load_groups(codes + element, inside, FLAT).to(tl.float32) * scale[:, None, None]
                g = load_groups(grad + element, inside, FLAT).to(tl.float32)
                gain = 1.0
                if CHANNEL and CHANNELS_ARE_ROWS:
                    gain = tl.load(gain_ptr + row, mask=there, other=0.0)[:, None, None]
                elif CHANNEL:
                    gain = load_groups(gain_ptr + column, inside, FLAT)
                moved = keep * w - factor * gain * g
                place = global_places(meta, start, begin, row, column, element, N, SHARED, PART, FLAT)
                draw = draws_of(place, half, key0, key1, N, SHARED, FLAT)
                bits = element_bits(first_group(meta, columns, N, PART) + group, scale_key0, scale_key1)
                code, new_scale = requantized(moved, bits, draw, ROUND)
                store_groups(codes + element, code, inside, FLAT)
                tl.store(scales + group, new_scale, mask=there)
