"""Moments in 8 bits where the kernels meet them, as `quant.blocks` says: tiles [K, N / 8, 8] of K blocks."""

import triton
import triton.language as tl

from ...quant.blocks import DRAWS, LEAST_ROOT, LEAST_UNIT, SIGNED_CODES, UNSIGNED_CODES

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
    """The same of a second moment, which stays positive where it is."""
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
