"""The kernel that writes weights by scaled gradients, and what element-wise kernels share.

A tile is a run of elements of the flattened matrix; two rows of 1024 share their random words (`core.random`).
"""

import triton
import triton.language as tl

from . import columns as at
from .device import MASK, element_bits, hashed, load_keys, pointer, rounded, tile_of

HALF_TILE = tl.constexpr(1024)
PAIRED_TILE = tl.constexpr(2048)


@triton.jit
def lanes():
    """0 .. 1023 as [128, 8]: eight neighbours to a thread."""
    return tl.arange(0, 128)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def gain_of(gains, start, columns, left, ROWS_ARE_CHANNELS: tl.constexpr, ALIGNED: tl.constexpr):
    """The gain of each of the 1024 elements from `start` on, with one division for every eight (columns >= 8).

    ALIGNED says that eight neighbours never straddle a row.
    """
    start_row = start // columns
    first = (start - start_row * columns).to(tl.int32) + tl.arange(0, 128)[:, None] * 8
    width = columns.to(tl.int32)
    passed = first // width
    column = first - passed * width
    neighbours = tl.arange(0, 8)[None, :]
    if ALIGNED and ROWS_ARE_CHANNELS:
        inside = tl.arange(0, 128)[:, None] * 8 < left
        gain = tl.load(gains + start_row + passed, mask=inside, other=0.0)
    elif ALIGNED:
        gain = tl.load(gains + tl.multiple_of(column, [8, 8]) + neighbours)
    else:
        over = column + neighbours >= width
        if ROWS_ARE_CHANNELS:
            channel = start_row + passed + tl.where(over, 1, 0)
        else:
            channel = (column + neighbours - tl.where(over, width, 0)).to(tl.int64)
        gain = tl.load(gains + channel, mask=lanes() < left, other=0.0)
    return gain


@triton.jit
def scaled_half(
    weight, grad, left, bits, factor, keep, gain, W: tl.constexpr, ROUND: tl.constexpr, MASKED: tl.constexpr
):
    """1024 elements: weight <- keep * weight - factor * gain * grad"""
    offset = lanes()
    inside, outside = (offset < left, 0.0) if MASKED else (None, None)
    w = tl.load(weight + offset, mask=inside, other=outside).to(tl.float32)
    g = tl.load(grad + offset, mask=inside, other=outside).to(tl.float32)
    moved = keep * w - factor * gain * g
    if ROUND:
        result = rounded(moved, bits, W)
    else:
        result = moved.to(W)
    tl.store(weight + offset, result, mask=inside)


@triton.jit
def apply_kernel(
    tiles, moves, matrix_table, hypers, outcomes, gains,
    W: tl.constexpr, G: tl.constexpr, CHANNEL: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr,
    COLUMNS_ALIGNED: tl.constexpr, ALIGNED: tl.constexpr, SHARED: tl.constexpr, STRIDED: tl.constexpr,
    ROUND: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """weight <- (1 - lr * decay) * weight - lr * gain[channel] * grad, for PAIRS * 2048 elements of one matrix.

    `moves` are the addresses of the weight and of its gradient, or of what products have made of that.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    tile = tile.to(tl.int64)
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    if tl.load(outcome + at.FINITE) != 0:
        columns = tl.load(meta + at.COLUMNS)
        size = tl.load(meta + at.ROWS) * columns
        weight = pointer(tl.load(moves + matrix * at.ADDRESS_WIDTH + at.WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(moves + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
        keep = tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.KEEP)
        factor = tl.load(outcome + at.FACTOR)
        key0, key1, _, _ = load_keys(outcome)
        gain_ptr = gains + tl.multiple_of(tl.load(meta + at.GAINS), 16)
        first = tl.load(meta + at.FIRST)
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            word = shared_words(first + start, key0, key1)
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                if SHARED:
                    bits = (word >> (16 * half)) & 0xFFFF
                else:
                    bits = element_bits(element_positions(meta, begin, STRIDED), key0, key1)
                left = tl.minimum(size - begin, HALF_TILE).to(tl.int32)
                gain = 1.0
                if CHANNEL:
                    gain = gain_of(gain_ptr, begin, columns, left, CHANNELS_ARE_ROWS, COLUMNS_ALIGNED)
                if left == HALF_TILE:
                    scaled_half(weight + begin, grad + begin, left, bits, factor, keep, gain, W, ROUND, False)
                else:
                    scaled_half(weight + begin, grad + begin, left, bits, factor, keep, gain, W, ROUND, True)


@triton.jit
def element_positions(meta, begin, STRIDED: tl.constexpr):
    """Places in the whole weight, flattened, of the 1024 elements from `begin` on.

    STRIDED says that this is a part of it with rows that lie apart.
    """
    first = tl.load(meta + at.FIRST)
    if STRIDED:
        columns = tl.load(meta + at.COLUMNS)
        start_row = begin // columns
        along = (begin - start_row * columns).to(tl.int32) + lanes()
        passed = along // columns.to(tl.int32)
        position = first + (start_row + passed) * tl.load(meta + at.PITCH) + (along - passed * columns.to(tl.int32))
    else:
        position = first + begin + lanes()
    return position


@triton.jit
def shared_words(start, key0, key1):
    """A random word for each pair of elements `start + i`, `start + 1024 + i`; `start` is a multiple of 2048."""
    word = start >> 1
    return hashed((word & MASK).to(tl.uint32) + lanes().to(tl.uint32), word >> 32, key0, key1)
