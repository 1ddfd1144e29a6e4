"""Kernels that write the weights: scaled gradients, and AdamW for what is not projected.

A tile is a run of elements of the flattened matrix; two rows of 1024 share their random words (`core.random`).
"""

import triton
import triton.language as tl

from .layout import (
    ADDRESS_WIDTH,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    EXPERT,
    FACTOR,
    FINITE,
    GAINS,
    GRAD,
    HYPER,
    HYPER_WIDTH,
    KEEP,
    KEY0,
    KEY1,
    LR,
    META_WIDTH,
    ROWS,
    SEED,
    SIGN,
    STEP_BITS,
    VERDICT_WIDTH,
    WEIGHT,
)
from .numbers import (
    M_STREAM,
    MASK,
    V_STREAM,
    adam_step,
    element_bits,
    hashed,
    int_bits,
    is_finite,
    narrowed,
    pointer,
    rounding_key,
    store_keys,
)
from .scale import count_outcome

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
    if MASKED:
        w = tl.load(weight + offset, mask=offset < left, other=0.0).to(tl.float32)
        g = tl.load(grad + offset, mask=offset < left, other=0.0).to(tl.float32)
    else:
        w = tl.load(weight + offset).to(tl.float32)
        g = tl.load(grad + offset).to(tl.float32)
    moved = keep * w - factor * gain * g
    if ROUND:
        result = narrowed(moved, bits, W)
    else:
        result = moved.to(W)
    if MASKED:
        tl.store(weight + offset, result, mask=offset < left)
    else:
        tl.store(weight + offset, result)


@triton.jit
def apply_kernel(
    tiles, addresses, metas, hypers, verdicts, gains,
    W: tl.constexpr, G: tl.constexpr, CHANNEL: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, SHARED: tl.constexpr, ROUND: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """weight <- (1 - lr * decay) * weight - lr * gain[channel] * grad, for PAIRS * 2048 elements of one matrix."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    verdict = verdicts + matrix * VERDICT_WIDTH
    if tl.load(verdict + FINITE) != 0:
        meta = metas + matrix * META_WIDTH
        columns = tl.load(meta + COLUMNS)
        size = tl.load(meta + ROWS) * columns
        weight = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
        keep = tl.load(hypers + tl.load(meta + HYPER) * HYPER_WIDTH + KEEP)
        factor = tl.load(verdict + FACTOR)
        key0 = tl.load(verdict + KEY0).to(tl.uint32, bitcast=True)
        key1 = tl.load(verdict + KEY1).to(tl.uint32, bitcast=True)
        gain_ptr = gains + tl.multiple_of(tl.load(meta + GAINS), 16)
        expert_start = tl.load(meta + EXPERT) * size
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            word = shared_words(expert_start + start, key0, key1)
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                if SHARED:
                    bits = (word >> (16 * half)) & 0xFFFF
                else:
                    bits = element_bits(expert_start + begin + lanes(), key0, key1)
                left = tl.minimum(size - begin, HALF_TILE).to(tl.int32)
                gain = 1.0
                if CHANNEL:
                    gain = gain_of(gain_ptr, begin, columns, left, CHANNELS_ARE_ROWS, COLUMNS_ALIGNED)
                if left == HALF_TILE:
                    scaled_half(weight + begin, grad + begin, left, bits, factor, keep, gain, W, ROUND, False)
                else:
                    scaled_half(weight + begin, grad + begin, left, bits, factor, keep, gain, W, ROUND, True)


@triton.jit
def shared_words(start, key0, key1):
    """A random word for each pair of elements `start + i`, `start + 1024 + i`; `start` is a multiple of 2048."""
    word = start >> 1
    return hashed((word & MASK).to(tl.uint32) + lanes().to(tl.uint32), word >> 32, key0, key1)


@triton.jit
def prepare_kernel(metas, hypers, verdicts):
    """AdamW, one program per weight: believed finite until shown otherwise, and its rounding keys."""
    matrix = tl.program_id(0).to(tl.int64)
    meta = metas + matrix * META_WIDTH
    step = int_bits(tl.load(hypers + tl.load(meta + HYPER) * HYPER_WIDTH + STEP_BITS))
    verdict = verdicts + matrix * VERDICT_WIDTH
    tl.store(verdict + FINITE, 1.0)
    store_keys(verdict, tl.load(meta + SEED), step)


@triton.jit
def finite_kernel(tiles, addresses, metas, verdicts, G: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr):
    """AdamW: note a gradient with a square that is not finite. All who write, write the same."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    meta = metas + matrix * META_WIDTH
    size = tl.load(meta + ROWS) * tl.load(meta + COLUMNS)
    grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
    start = tile * PAIRS * PAIRED_TILE
    bad = tl.zeros([128, 8], tl.int32)
    if start + PAIRS * PAIRED_TILE <= size:
        for half in tl.static_range(2 * PAIRS):
            g = tl.load(grad + (start + half * HALF_TILE) + lanes()).to(tl.float32)
            bad += tl.where(is_finite(g * g), 0, 1)
    else:
        for half in tl.static_range(2 * PAIRS):
            left = size - start - half * HALF_TILE
            g = tl.load(grad + (start + half * HALF_TILE) + lanes(), mask=lanes() < left, other=0.0).to(tl.float32)
            bad += tl.where(is_finite(g * g), 0, 1)
    if tl.sum(bad) > 0:
        tl.store(verdicts + matrix * VERDICT_WIDTH + FINITE, 0.0)


@triton.jit
def adamw_half(
    weight, grad, m_ptr, v_ptr, begin, left, word, m_key0, m_key1, v_key0, v_key1, hyper,
    W: tl.constexpr, M: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """1024 elements of AdamW: moments, and weight <- keep * weight - lr * step"""
    offset = lanes()
    inside = offset < left
    weight, grad, m_ptr, v_ptr = (
        weight + begin + offset,
        grad + begin + offset,
        m_ptr + begin + offset,
        v_ptr + begin + offset,
    )
    if MASKED:
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(m_ptr, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr, mask=inside, other=0.0).to(tl.float32)
    else:
        w = tl.load(weight).to(tl.float32)
        g = tl.load(grad).to(tl.float32)
        m = tl.load(m_ptr).to(tl.float32)
        v = tl.load(v_ptr).to(tl.float32)
    m, v, step = adam_step(m, v, g * tl.load(hyper + SIGN), hyper)
    moved = tl.load(hyper + KEEP) * w - tl.load(hyper + LR) * step
    if ROUND:
        result = narrowed(moved, (word >> (16 * HALF)) & 0xFFFF, W)
    else:
        result = moved.to(W)
    if M == tl.float32:
        m_out, v_out = m, v
    else:
        m_out = narrowed(m, element_bits(begin + offset, m_key0, m_key1), M)
        v_out = narrowed(v, element_bits(begin + offset, v_key0, v_key1), M)
    if MASKED:
        tl.store(weight, result, mask=inside)
        tl.store(m_ptr, m_out, mask=inside)
        tl.store(v_ptr, v_out, mask=inside)
    else:
        tl.store(weight, result)
        tl.store(m_ptr, m_out)
        tl.store(v_ptr, v_out)


@triton.jit
def adamw_kernel(
    tiles, addresses, metas, hypers, verdicts, skipped,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr,
    ROUND: tl.constexpr, CAPTURABLE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """AdamW on PAIRS * 2048 elements of one weight."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    meta = metas + matrix * META_WIDTH
    verdict = verdicts + matrix * VERDICT_WIDTH
    finite = tl.load(verdict + FINITE) != 0
    if tile == 0:
        count_outcome(meta, skipped, finite, CAPTURABLE)
    if finite:
        hyper = hypers + tl.load(meta + HYPER) * HYPER_WIDTH
        size = tl.load(meta + ROWS) * tl.load(meta + COLUMNS)
        weight = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
        m_ptr = pointer(tl.load(meta + EXP_AVG), M, ALIGNED)
        v_ptr = pointer(tl.load(meta + EXP_AVG_SQ), M, ALIGNED)
        key0 = tl.load(verdict + KEY0).to(tl.uint32, bitcast=True)
        key1 = tl.load(verdict + KEY1).to(tl.uint32, bitcast=True)
        m_key0, m_key1, v_key0, v_key1 = key0, key1, key0, key1
        if M != tl.float32:
            seed, step = tl.load(meta + SEED), int_bits(tl.load(hyper + STEP_BITS))
            m_key0, m_key1 = rounding_key(seed, step, M_STREAM)
            v_key0, v_key1 = rounding_key(seed, step, V_STREAM)
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            word = shared_words(start, key0, key1)
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                left = tl.minimum(size - begin, HALF_TILE).to(tl.int32)
                if left == HALF_TILE:
                    adamw_half(
                        weight, grad, m_ptr, v_ptr, begin, left, word, m_key0, m_key1, v_key0, v_key1, hyper,
                        W, M, ROUND, half, False,
                    )  # fmt: skip
                else:
                    adamw_half(
                        weight, grad, m_ptr, v_ptr, begin, left, word, m_key0, m_key1, v_key0, v_key1, hyper,
                        W, M, ROUND, half, True,
                    )  # fmt: skip
