"""Adam moments where the kernels meet them."""

import triton
import triton.language as tl

from ...quant.blocks import BLOCK
from . import layout as at
from .blocks import first_codes, first_moment, second_codes, second_moment
from .numbers import (
    M_STREAM,
    V_STREAM,
    adam_step,
    element_bits,
    int_bits,
    is_finite,
    pointer,
    rounding_key,
    store_moments,
)

N = tl.constexpr(BLOCK)


@triton.jit
def load_moments(meta, element, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """(m, v) at `element` of this matrix, zero outside."""
    m = tl.load(pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED) + element, mask=inside, other=0.0)
    v = tl.load(pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED) + element, mask=inside, other=0.0)
    return m.to(tl.float32), v.to(tl.float32)


@triton.jit
def moment_position(meta, row, column):
    """Where moments lie in those of the whole weight, flattened: it picks the bits by which they are rounded."""
    first_row = tl.load(meta + at.EXPERT) * tl.load(meta + at.RANK) + tl.load(meta + at.FIRST_MOMENT_ROW)
    return (first_row + row) * tl.load(meta + at.ALL_CHANNELS) + tl.load(meta + at.FIRST_KEPT) + column


@triton.jit
def step_moments(meta, hyper, low, old_m, old_v, element, position, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Write the moments after taking in `low`; (step, v), zero outside. A bad gradient leaves them as they were."""
    m, v, step = adam_step(old_m, old_v, low, hyper)
    # A square beyond float32 would stay in v for good, so such a gradient is as bad as an infinite one.
    good = is_finite(low * low)
    m, v = tl.where(good, m, old_m), tl.where(good, v, old_v)
    m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED) + element
    v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED) + element
    step_count = int_bits(tl.load(hyper + at.STEP_BITS))
    store_moments(m_ptr, v_ptr, m, v, position, tl.load(meta + at.SEED), step_count, inside, M)
    return tl.where(inside & good, step, 0.0), tl.where(inside, v, 0.0)


@triton.jit
def moments_of(meta, hyper, low, row, column, width, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Step the moments at these rows and columns of `width` by `low`; (step, v), zero outside."""
    element = row.to(tl.int64) * width + column
    m, v = load_moments(meta, element, inside, M, ALIGNED)
    return step_moments(meta, hyper, low, m, v, element, moment_position(meta, row, column), inside, M, ALIGNED)


@triton.jit
def narrow_moments_of(meta, hyper, low, first_row, first_column, channels, R: tl.constexpr, C: tl.constexpr):
    """The same in 8 bits, for a tile [R, C] of whole blocks that begins at this row and column of the moments."""
    K: tl.constexpr = R * C // N
    k = tl.arange(0, K)
    row = first_row + k // (C // N)
    block = first_column // N + k % (C // N)
    in_block = tl.arange(0, N // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    column = block[:, None, None] * N + in_block
    rank, blocks = tl.load(meta + at.RANK), tl.cdiv(channels, N)
    there = (row < rank) & (block < blocks)
    inside = there[:, None, None] & (column < channels)
    element = row[:, None, None].to(tl.int64) * channels + column
    m_ptr = pointer(tl.load(meta + at.EXP_AVG), tl.int8, False) + element
    v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), tl.uint8, False) + element
    scale = row.to(tl.int64) * blocks + block
    m_scales = pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + scale
    v_scales = pointer(tl.load(meta + at.EXP_AVG_SQ_SCALE), tl.float32, False) + scale
    old_m = first_moment(tl.load(m_ptr, mask=inside, other=0), tl.load(m_scales, mask=there, other=0.0))
    old_v = second_moment(tl.load(v_ptr, mask=inside, other=0), tl.load(v_scales, mask=there, other=0.0))
    low = low.reshape(K, N // 8, 8)
    m, v, step = adam_step(old_m, old_v, low, hyper)
    good = is_finite(low * low)
    m, v = tl.where(inside & good, m, old_m), tl.where(inside & good, v, old_v)
    position = tl.load(meta + at.EXPERT) * rank * channels + element
    seed, count = tl.load(meta + at.SEED), int_bits(tl.load(hyper + at.STEP_BITS))
    key0, key1 = rounding_key(seed, count, M_STREAM)
    m_code, m_scale = first_codes(m, element_bits(position, key0, key1))
    key0, key1 = rounding_key(seed, count, V_STREAM)
    v_code, v_scale = second_codes(v, element_bits(position, key0, key1))
    tl.store(m_ptr, m_code, mask=inside)
    tl.store(m_scales, m_scale, mask=there)
    tl.store(v_ptr, v_code, mask=inside)
    tl.store(v_scales, v_scale, mask=there)
    return tl.where(inside & good, step, 0.0).reshape(R, C), v.reshape(R, C)
