"""Adam moments where the kernels meet them."""

import triton
import triton.language as tl

from ..quant.blocks import BLOCK, LEAST_ROOT, LEAST_UNIT, SIGNED_CODES, UNSIGNED_CODES
from ..quant.rounding import DRAWS
from . import columns as at
from .device import (
    M_STREAM,
    V_STREAM,
    adam_step,
    element_bits,
    int_bits,
    is_finite,
    pointer,
    rounded,
    rounding_key,
)

N = tl.constexpr(BLOCK)


@triton.jit
def moments_of(meta, hyper, low, row, column, width, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Step the moments at these rows and columns of `width` by `low`; (step, v), zero outside.

    A bad gradient leaves them as they were.
    """
    element = row.to(tl.int64) * width + column
    m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED) + element
    old_m = tl.load(m_ptr, mask=inside, other=0.0)
    v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED) + element
    old_v = tl.load(v_ptr, mask=inside, other=0.0)
    old_m, old_v = old_m.to(tl.float32), old_v.to(tl.float32)
    # Positions in the moments of the whole weight, flattened, pick the bits that these are rounded by.
    first_row = tl.load(meta + at.EXPERT) * tl.load(meta + at.RANK) + tl.load(meta + at.FIRST_MOMENT_ROW)
    position = (first_row + row) * tl.load(meta + at.ALL_CHANNELS) + tl.load(meta + at.FIRST_KEPT) + column
    m, v, step = adam_step(old_m, old_v, low, hyper)
    # A square beyond float32 would stay in v for good, so such a gradient is as bad as an infinite one.
    good = is_finite(low * low)
    m, v = tl.where(good, m, old_m), tl.where(good, v, old_v)
    if M == tl.float32:
        tl.store(m_ptr, m, mask=inside)
        tl.store(v_ptr, v, mask=inside)
    else:
        count, seed = int_bits(tl.load(hyper + at.STEP_BITS)), tl.load(meta + at.SEED)
        key0, key1 = rounding_key(seed, count, M_STREAM)
        tl.store(m_ptr, rounded(m, element_bits(position, key0, key1), M), mask=inside)
        key0, key1 = rounding_key(seed, count, V_STREAM)
        tl.store(v_ptr, rounded(v, element_bits(position, key0, key1), M), mask=inside)
    return tl.where(inside & good, step, 0.0), tl.where(inside, v, 0.0)


@triton.jit
def narrow_moments_of(meta, hyper, low, first_row, first_column, channels, R: tl.constexpr, C: tl.constexpr):
    """`moments_of` in 8 bits, for a tile [R, C] of whole blocks that begins at this row and column of the moments."""
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


DRAW = tl.constexpr(1 / DRAWS)
SIGNED_MOST = tl.constexpr(float(SIGNED_CODES))
UNSIGNED_MOST = tl.constexpr(float(UNSIGNED_CODES))
SIGNED_LEAST = tl.constexpr(LEAST_UNIT)
UNSIGNED_LEAST = tl.constexpr(LEAST_ROOT)


@triton.jit
def first_moment(code, scale):
    """sign(code) * code^2 * scale"""
    wide = code.to(tl.float32)
    return wide * tl.abs(wide) * scale[:, None, None]


@triton.jit
def second_moment(code, scale):
    """(code^2 * scale)^2"""
    wide = code.to(tl.float32)
    root = wide * wide * scale[:, None, None]
    return root * root


@triton.jit
def _lower_code(size, scale, MOST: tl.constexpr):
    """The code below each size. One too many or too few makes no difference to what is then drawn."""
    code = tl.floor(tl.sqrt(size * (1.0 / scale)[:, None, None]))
    return tl.minimum(code, MOST - 1.0)


@triton.jit
def first_codes(value, draw):
    """(codes [K, N / 8, 8], scales [K]) of a first moment, rounded by 16 random bits."""
    size = tl.abs(value)
    scale = tl.max(tl.max(size, 2), 1) * (1.0 / (SIGNED_MOST * SIGNED_MOST))
    scale = tl.where(scale < SIGNED_LEAST, SIGNED_LEAST, scale)
    code = _lower_code(size, scale, SIGNED_MOST)
    low = code * code * scale[:, None, None]
    high = (code + 1.0) * (code + 1.0) * scale[:, None, None]
    up = size - low >= (draw.to(tl.float32) + 0.5) * DRAW * (high - low)
    code += tl.where(up, 1.0, 0.0)
    return tl.where(value < 0, -code, code).to(tl.int8), scale


@triton.jit
def second_codes(value, draw):
    """(codes [K, N / 8, 8], scales [K]) of a second moment, which stays positive where it is."""
    largest = tl.max(tl.max(value, 2), 1)
    scale = tl.sqrt_rn(largest) * (1.0 / (UNSIGNED_MOST * UNSIGNED_MOST))
    scale = tl.where(scale < UNSIGNED_LEAST, UNSIGNED_LEAST, scale)
    code = _lower_code(tl.sqrt(value), scale, UNSIGNED_MOST)
    low_root = code * code * scale[:, None, None]
    high_root = (code + 1.0) * (code + 1.0) * scale[:, None, None]
    low, high = low_root * low_root, high_root * high_root
    up = value - low >= (draw.to(tl.float32) + 0.5) * DRAW * (high - low)
    code += tl.where(up, 1.0, 0.0)
    return tl.maximum(code, tl.where(value > 0, 1.0, 0.0)).to(tl.uint8), scale
