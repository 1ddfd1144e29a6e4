"""AdamW for what is not projected. Tiles are as in `apply`."""

import triton
import triton.language as tl

from . import layout as at
from .apply import HALF_TILE, PAIRED_TILE, lanes, positions, shared_words
from .numbers import (
    M_STREAM,
    V_STREAM,
    adam_step,
    element_bits,
    int_bits,
    is_finite,
    narrowed,
    pointer,
    rounding_key,
    store_keys,
)
from .scale import count_outcome


@triton.jit
def prepare_kernel(metas, hypers, verdicts):
    """AdamW, one program per weight: believed finite until shown otherwise, and its rounding keys."""
    matrix = tl.program_id(0).to(tl.int64)
    meta = metas + matrix * at.META_WIDTH
    step = int_bits(tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.STEP_BITS))
    verdict = verdicts + matrix * at.VERDICT_WIDTH
    tl.store(verdict + at.FINITE, 1.0)
    store_keys(verdict, tl.load(meta + at.SEED), step)


@triton.jit
def finite_kernel(tiles, addresses, metas, verdicts, G: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr):
    """AdamW: note a gradient with a square that is not finite. All who write, write the same."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    meta = metas + matrix * at.META_WIDTH
    size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
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
        tl.store(verdicts + matrix * at.VERDICT_WIDTH + at.FINITE, 0.0)


@triton.jit
def adamw_half(
    weight, grad, m_ptr, v_ptr, begin, left, position, bits, m_key0, m_key1, v_key0, v_key1, hyper,
    W: tl.constexpr, M: tl.constexpr, ROUND: tl.constexpr, MASKED: tl.constexpr,
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
    m, v, step = adam_step(m, v, g * tl.load(hyper + at.SIGN), hyper)
    moved = tl.load(hyper + at.KEEP) * w - tl.load(hyper + at.LR) * step
    if ROUND:
        result = narrowed(moved, bits, W)
    else:
        result = moved.to(W)
    if M == tl.float32:
        m_out, v_out = m, v
    else:
        m_out = narrowed(m, element_bits(position, m_key0, m_key1), M)
        v_out = narrowed(v, element_bits(position, v_key0, v_key1), M)
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
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, SHARED: tl.constexpr,
    STRIDED: tl.constexpr, ROUND: tl.constexpr, CAPTURABLE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """AdamW on PAIRS * 2048 elements of one weight."""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    meta = metas + matrix * at.META_WIDTH
    verdict = verdicts + matrix * at.VERDICT_WIDTH
    finite = tl.load(verdict + at.FINITE) != 0
    if tile == 0:
        count_outcome(meta, skipped, finite, CAPTURABLE)
    if finite:
        hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
        size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
        weight = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
        m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED)
        v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED)
        key0 = tl.load(verdict + at.KEY0).to(tl.uint32, bitcast=True)
        key1 = tl.load(verdict + at.KEY1).to(tl.uint32, bitcast=True)
        m_key0, m_key1, v_key0, v_key1 = key0, key1, key0, key1
        if M != tl.float32:
            seed, step = tl.load(meta + at.SEED), int_bits(tl.load(hyper + at.STEP_BITS))
            m_key0, m_key1 = rounding_key(seed, step, M_STREAM)
            v_key0, v_key1 = rounding_key(seed, step, V_STREAM)
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            word = shared_words(tl.load(meta + at.FIRST) + start, key0, key1)
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                left = tl.minimum(size - begin, HALF_TILE).to(tl.int32)
                position = positions(meta, begin, STRIDED)
                if SHARED:
                    bits = (word >> (16 * half)) & 0xFFFF
                else:
                    bits = element_bits(position, key0, key1)
                if left == HALF_TILE:
                    adamw_half(
                        weight, grad, m_ptr, v_ptr, begin, left, position, bits, m_key0, m_key1, v_key0, v_key1, hyper,
                        W, M, ROUND, False,
                    )  # fmt: skip
                else:
                    adamw_half(
                        weight, grad, m_ptr, v_ptr, begin, left, position, bits, m_key0, m_key1, v_key0, v_key1, hyper,
                        W, M, ROUND, True,
                    )  # fmt: skip
