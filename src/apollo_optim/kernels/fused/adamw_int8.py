"""AdamW on int8 weights, a run of groups at a time (`int8`)."""

import triton
import triton.language as tl

from .apply import HALF_TILE, PAIRED_TILE
from .int8 import code_bits, groups_of, places, requantized, within
from .layout import (
    ADDRESS_WIDTH,
    CODE_SCALE,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    FINITE,
    GRAD,
    HYPER,
    HYPER_WIDTH,
    KEEP,
    KEY0,
    KEY1,
    LR,
    META_WIDTH,
    ROWS,
    SCALE_KEY0,
    SCALE_KEY1,
    SEED,
    SIGN,
    STEP_BITS,
    VERDICT_WIDTH,
    WEIGHT,
)
from .numbers import adam_step, element_bits, int_bits, pointer, store_moments
from .scale import count_outcome


@triton.jit
def adamw_int8_kernel(
    tiles, addresses, metas, hypers, verdicts, skipped,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    ROUND: tl.constexpr, CAPTURABLE: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """AdamW on PAIRS * 2048 elements of one int8 weight: moments, and weight <- keep * weight - lr * step"""
    matrix = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    meta = metas + matrix * META_WIDTH
    verdict = verdicts + matrix * VERDICT_WIDTH
    finite = tl.load(verdict + FINITE) != 0
    if tile == 0:
        count_outcome(meta, skipped, finite, CAPTURABLE)
    if finite:
        hyper = hypers + tl.load(meta + HYPER) * HYPER_WIDTH
        rows, columns = tl.load(meta + ROWS), tl.load(meta + COLUMNS)
        if COLUMNS_ALIGNED:
            columns = tl.multiple_of(columns, 16)
        codes = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + WEIGHT), tl.int8, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * ADDRESS_WIDTH + GRAD), G, ALIGNED)
        m_ptr = pointer(tl.load(meta + EXP_AVG), M, ALIGNED)
        v_ptr = pointer(tl.load(meta + EXP_AVG_SQ), M, ALIGNED)
        scales = pointer(tl.load(meta + CODE_SCALE), tl.float32, False)
        key0 = tl.load(verdict + KEY0).to(tl.uint32, bitcast=True)
        key1 = tl.load(verdict + KEY1).to(tl.uint32, bitcast=True)
        scale_key0 = tl.load(verdict + SCALE_KEY0).to(tl.uint32, bitcast=True)
        scale_key1 = tl.load(verdict + SCALE_KEY1).to(tl.uint32, bitcast=True)
        keep, lr, sign = tl.load(hyper + KEEP), tl.load(hyper + LR), tl.load(hyper + SIGN)
        seed, step_count = tl.load(meta + SEED), int_bits(tl.load(hyper + STEP_BITS))
        for pair in tl.static_range(PAIRS):
            start = (tile * PAIRS + pair) * PAIRED_TILE
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                group = groups_of(begin // HALF_TILE, N)
                there = group < rows * tl.cdiv(columns, N)
                row, column = places(group, columns, N)
                if EVEN:
                    element, inside = begin + within(N), there[:, None, None]
                else:
                    element = row.to(tl.int64) * columns + column
                    inside = there[:, None, None] & (column < columns)
                scale = tl.load(scales + group, mask=there, other=0.0)
                w = tl.load(codes + element, mask=inside, other=0).to(tl.float32) * scale[:, None, None]
                g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
                m = tl.load(m_ptr + element, mask=inside, other=0.0).to(tl.float32)
                v = tl.load(v_ptr + element, mask=inside, other=0.0).to(tl.float32)
                m, v, step = adam_step(m, v, g * sign, hyper)
                # A whole group may end outside: beyond the last column eps could be zero, and a step with it 0 / 0.
                moved = tl.where(inside, keep * w - lr * step, 0.0)
                draw = code_bits(start, half, element, key0, key1, N, EVEN)
                code, new_scale = requantized(moved, element_bits(group, scale_key0, scale_key1), draw, ROUND)
                tl.store(codes + element, code, mask=inside)
                tl.store(scales + group, new_scale, mask=there)
                store_moments(m_ptr + element, v_ptr + element, m, v, element, seed, step_count, inside, M)
