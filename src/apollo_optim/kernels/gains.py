"""The gain of each channel, from sums over its elements. Numbers per channel only, which cost next to nothing."""

import triton
import triton.language as tl

from . import columns as at
from .device import float_bits, is_finite
from .moments import moments_of, narrow_moments_of


@triton.jit
def combine_kernel(
    tiles, matrix_table, hypers, parts, planes, gains, blocks,
    M: tl.constexpr, RANK1: tl.constexpr, CHANNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a block of channels; at rank 1 also step the moments. Leaves sums per block and gains.

    gain_c = |step_c| / |low_c|
    """
    meta = matrix_table + tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * at.MATRIX_WIDTH
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    channels = tl.load(meta + at.CHANNELS)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    low = tl.zeros([BLOCK], tl.float32)
    grad_sq = tl.zeros([BLOCK], tl.float32)
    step_sq = tl.zeros([BLOCK], tl.float32)
    moment_sq = tl.zeros([BLOCK], tl.float32)
    start = parts + tl.load(meta + at.PARTS) + c
    for part in range(0, tl.load(meta + at.PART_COUNT).to(tl.int32)):
        here = start + part * channels
        low += tl.load(here + at.LOW * planes, mask=inside, other=0.0)
        grad_sq += tl.load(here + at.GRAD_SQ * planes, mask=inside, other=0.0)
        if not RANK1:
            step_sq += tl.load(here + at.STEP_SQ * planes, mask=inside, other=0.0)
            moment_sq += tl.load(here + at.MOMENT_SQ * planes, mask=inside, other=0.0)
    if RANK1:
        low *= float_bits(tl.load(meta + at.BASIS_SCALE)) * tl.load(hyper + at.SIGN)
        if M == tl.int8:
            step, moment_sq = narrow_moments_of(meta, hyper, low, 0, tile * BLOCK, channels, 1, BLOCK)
            step, moment_sq = step.reshape(BLOCK), moment_sq.reshape(BLOCK)
        else:
            step, moment_sq = moments_of(meta, hyper, low, c * 0, c, channels, inside, M, False)
        low_sq, step_sq = low * low, step * step
    else:
        low_sq = low
    gain = tl.where(low_sq > 0, tl.sqrt(step_sq) / tl.sqrt(low_sq), 0.0)
    if CHANNEL:
        tl.store(gains + tl.load(meta + at.GAINS) + c, gain, mask=inside)
    scaled = gain * tl.sqrt(grad_sq)
    bad = tl.where(inside & ~(is_finite(low_sq) & is_finite(grad_sq)), 1.0, 0.0)
    out = blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
    tl.store(out + at.B_LOW_SQ, tl.sum(low_sq, 0))
    tl.store(out + at.B_STEP_SQ, tl.sum(step_sq, 0))
    tl.store(out + at.B_MOMENT_SQ, tl.sum(moment_sq, 0))
    tl.store(out + at.B_GRAD_SQ, tl.sum(grad_sq, 0))
    tl.store(out + at.B_SCALED_SQ, tl.sum(scaled * scaled, 0))
    tl.store(out + at.B_GAIN, tl.sum(gain, 0))
    tl.store(out + at.B_BAD, tl.sum(bad, 0))
    tl.store(out + at.B_LARGEST, 0.0)
