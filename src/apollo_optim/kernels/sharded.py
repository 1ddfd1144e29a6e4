"""Kernels of matrices whose contracted side is spread over ranks, around what those exchange.

Each rank has a share in the low-rank gradients of all of its channels, and keeps the moments and gains of some of them.
"""

import triton
import triton.language as tl

from . import columns as at
from .device import float_bits, is_finite, tile_of
from .moments import moments_of
from .project import STEP_ROWS, shared_out


@triton.jit
def share_kernel(tiles, matrix_table, hypers, parts, planes, shares, shares_length, BLOCK: tl.constexpr):
    """Rank 1: this rank's share in low, put where `project_kernel` puts it at others."""
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    channels = tl.load(meta + at.CHANNELS)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.float32)
    start = parts + tl.load(meta + at.PARTS) + c
    for part in range(0, tl.load(meta + at.PART_COUNT).to(tl.int32)):
        low += tl.load(start + part * channels + at.LOW * planes, mask=c < channels, other=0.0)
    low *= float_bits(tl.load(meta + at.BASIS_SCALE)) * tl.load(hyper + at.SIGN)
    tl.store(shared_out(meta, shares, shares_length, c * 0, c), low, mask=c < channels)


# What another rank sent may lie anywhere.
@triton.jit(do_not_specialize_on_alignment=["low_sums"])
def moments_kernel(
    tiles, matrix_table, hypers, low_sums, parts, planes, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Step the moments of channels that this rank keeps, from the sum of all ranks' shares in low.

    LOW = sum_r low^2;  STEP_SQ = sum_r step^2;  MOMENT_SQ = sum_r v, one part per block of rows.
    """
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    rank, kept = tl.load(meta + at.RANK).to(tl.int32), tl.load(meta + at.KEPT).to(tl.int32)
    chunk = tl.load(meta + at.CHUNK).to(tl.int32)
    part_count = tl.cdiv(rank, BLOCK_R)
    part = tile % part_count
    c = (tile // part_count) * BLOCK_C + tl.arange(0, BLOCK_C)
    ROWS_AT_ONCE: tl.constexpr = STEP_ROWS if STEP_ROWS < BLOCK_R else BLOCK_R
    low_sq = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    step_sq = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    moment = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    for start in range(0, BLOCK_R, ROWS_AT_ONCE):
        row = part * BLOCK_R + start + tl.arange(0, ROWS_AT_ONCE)[:, None]
        inside = (row < rank) & (c[None, :] < kept)
        low = tl.load(
            low_sums + tl.load(meta + at.SHARES) + row.to(tl.int64) * chunk + c[None, :], mask=inside, other=0.0
        )
        step, v = moments_of(meta, hyper, low, row, c[None, :], tl.load(meta + at.MOMENT_PITCH), inside, M, False)
        low_sq += low * low
        step_sq += step * step
        moment += v
    out = parts + tl.load(meta + at.PARTS) + part.to(tl.int64) * kept + c
    tl.store(out + at.LOW * planes, tl.sum(low_sq, 0), mask=c < kept)
    tl.store(out + at.STEP_SQ * planes, tl.sum(step_sq, 0), mask=c < kept)
    tl.store(out + at.MOMENT_SQ * planes, tl.sum(moment, 0), mask=c < kept)


@triton.jit
def kept_kernel(
    tiles, matrix_table, parts, planes, kept_gains, kept_blocks, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr
):
    """Gains of channels whose moments this rank keeps, and sums over blocks of them. gain_c = |step_c| / |low_c|"""
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    kept = tl.load(meta + at.KEPT)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    inside = c < kept
    low_sq = tl.zeros([BLOCK], tl.float32)
    step_sq = tl.zeros([BLOCK], tl.float32)
    moment_sq = tl.zeros([BLOCK], tl.float32)
    start = parts + tl.load(meta + at.PARTS) + c
    for part in range(0, tl.cdiv(tl.load(meta + at.RANK), BLOCK_R).to(tl.int32)):
        here = start + part * kept
        low_sq += tl.load(here + at.LOW * planes, mask=inside, other=0.0)
        step_sq += tl.load(here + at.STEP_SQ * planes, mask=inside, other=0.0)
        moment_sq += tl.load(here + at.MOMENT_SQ * planes, mask=inside, other=0.0)
    gain = tl.where(low_sq > 0, tl.sqrt(step_sq) / tl.sqrt(low_sq), 0.0)
    tl.store(kept_gains + tl.load(meta + at.KEPT_GAINS) + c, gain, mask=inside)
    out = kept_blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
    tl.store(out + at.B_LOW_SQ, tl.sum(low_sq, 0))
    tl.store(out + at.B_STEP_SQ, tl.sum(step_sq, 0))
    tl.store(out + at.B_MOMENT_SQ, tl.sum(moment_sq, 0))
    tl.store(out + at.B_BAD, tl.sum(tl.where(is_finite(low_sq), 0.0, 1.0), 0))


@triton.jit(do_not_specialize_on_alignment=["all_gains"])
def scaled_kernel(
    tiles, matrix_table, parts, planes, all_gains, kept_gains_length, gains, blocks,
    CHANNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gains, from those who keep some of them; and sums over blocks of channels, of this rank's gradient."""
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    channels = tl.load(meta + at.CHANNELS)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    grad_sq = tl.zeros([BLOCK], tl.float32)
    start = parts + tl.load(meta + at.PARTS) + c
    for part in range(0, tl.load(meta + at.PART_COUNT).to(tl.int32)):
        grad_sq += tl.load(start + part * channels + at.GRAD_SQ * planes, mask=inside, other=0.0)
    out = blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
    tl.store(out + at.B_GRAD_SQ, tl.sum(grad_sq, 0))
    tl.store(out + at.B_BAD, tl.sum(tl.where(is_finite(grad_sq), 0.0, 1.0), 0))
    if CHANNEL:
        chunk = tl.load(meta + at.CHUNK).to(tl.int32)
        keeper = c // chunk
        place = keeper.to(tl.int64) * kept_gains_length + tl.load(meta + at.KEPT_GAINS) + (c - keeper * chunk)
        gain = tl.load(all_gains + place, mask=inside, other=0.0)
        tl.store(gains + tl.load(meta + at.GAINS) + c, gain, mask=inside)
        scaled = gain * tl.sqrt(grad_sq)
        tl.store(out + at.B_SCALED_SQ, tl.sum(scaled * scaled, 0))
        tl.store(out + at.B_GAIN, tl.sum(gain, 0))
