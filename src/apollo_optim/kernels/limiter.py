"""The gain of each channel, and then the norm-growth limiter with all that a step decides about a whole matrix.

Numbers per channel and per matrix only, which cost next to nothing.
"""

import triton
import triton.language as tl

from . import columns as at
from .device import count_outcome, float_bits, int_bits, is_finite, pointer, store_keys, tile_of
from .moments import moments_of, narrow_moments_of


@triton.jit
def combine_kernel(
    tiles, matrix_table, hypers, parts, planes, gains, blocks,
    M: tl.constexpr, RANK1: tl.constexpr, CHANNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a block of channels; at rank 1 also step the moments. Leaves sums per block and gains.

    gain_c = |step_c| / |low_c|
    """
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
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


@triton.jit
def _block_sums(blocks, first, count, BLOCK: tl.constexpr):
    """The sums of all columns of the block table over `count` rows."""
    column = tl.arange(0, at.BLOCK_WIDTH)[None, :]
    total = tl.zeros([BLOCK, at.BLOCK_WIDTH], tl.float32)
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        total += tl.load(blocks + (first + row) * at.BLOCK_WIDTH + column, mask=row < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _entry(sums, COLUMN: tl.constexpr):
    """One of them."""
    return tl.sum(tl.where(tl.arange(0, at.BLOCK_WIDTH) == COLUMN, sums, 0.0), 0)


@triton.jit
def decide_kernel(
    matrix_table, hypers, blocks, outcomes, skipped,
    CHANNEL: tl.constexpr, LIMITED: tl.constexpr, CAPTURABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per matrix: its gain, the limit on its growth, its rounding key, and whether it is stepped at all.

    norm = |gain * grad|;  shrink = min(1, limit * last_norm / norm) unless there was no last norm
    """
    matrix = tl.program_id(0).to(tl.int64)
    meta = matrix_table + matrix * at.MATRIX_WIDTH
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    first, weight_first = tl.load(meta + at.BLOCKS), tl.load(meta + at.WEIGHT_BLOCKS)
    sums = _block_sums(blocks, first, tl.load(meta + at.BLOCK_COUNT).to(tl.int32), BLOCK)
    # An expert alone in its weight reads its own rows again; the experts of one weight are refused together.
    weight_sums = _block_sums(blocks, weight_first, tl.load(meta + at.WEIGHT_BLOCK_COUNT).to(tl.int32), BLOCK)
    finite = (_entry(weight_sums, at.B_BAD) == 0) & is_finite(_entry(weight_sums, at.B_GRAD_SQ))
    channels = tl.load(meta + at.ALL_CHANNELS).to(tl.float32)
    scale = float_bits(tl.load(meta + at.SCALE))
    if CHANNEL:
        factor = scale
        norm = scale * tl.sqrt(_entry(sums, at.B_SCALED_SQ))
        mean_gain = scale * _entry(sums, at.B_GAIN) / channels
    else:
        low_sq = _entry(sums, at.B_LOW_SQ)
        factor = scale * tl.where(low_sq > 0, tl.sqrt(_entry(sums, at.B_STEP_SQ)) / tl.sqrt(low_sq), 0.0)
        norm = factor * tl.sqrt(_entry(sums, at.B_GRAD_SQ))
        mean_gain = factor
    shrink = tl.full([], 1.0, tl.float32)
    if LIMITED:
        # A stand-in for experts that are all elsewhere has none.
        there = tl.load(meta + at.LAST_NORM) != 0
        last_ptr = pointer(tl.load(meta + at.LAST_NORM), tl.float32, False)
        last = tl.load(last_ptr, mask=there, other=0.0)
        ceiling = tl.load(hyper + at.LIMIT) * last
        shrink = tl.where((last == 0) | (norm <= ceiling), 1.0, ceiling / norm)
        measured = tl.where(last == 0, norm / tl.load(hyper + at.FIRST_SIZE), norm * shrink)
        root = tl.load(hyper + at.CORRECTION2_ROOT)
        entries = tl.load(meta + at.RANK).to(tl.float32) * channels
        mean_square = _entry(sums, at.B_MOMENT_SQ) / entries / (root * root)
        eps = tl.load(hyper + at.EPS)
        measured = tl.where(mean_square < eps * eps, 0.0, measured)
        tl.store(last_ptr, tl.where(finite & (norm > 0), measured, last), mask=there)
    store_keys(outcome, tl.load(meta + at.SEED), int_bits(tl.load(hyper + at.STEP_BITS)))
    tl.store(outcome + at.FACTOR, factor * shrink * tl.load(hyper + at.LR) * tl.load(hyper + at.SIGN))
    tl.store(outcome + at.FINITE, tl.where(finite, 1.0, 0.0))
    tl.store(outcome + at.MEAN_GAIN, mean_gain * shrink)
    tl.store(outcome + at.SHRINK, shrink)
    if first == weight_first:
        count_outcome(meta, skipped, finite, CAPTURABLE)
