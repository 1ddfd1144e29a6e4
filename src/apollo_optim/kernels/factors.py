"""Adafactor for what is not projected: row and column means of squares, without float atomics, and the update's size.

A program takes a tile of 64 x 512 elements. Sums over its columns and rows are left side by side in the scratch, and
added up in one order by others, so that two runs agree bit for bit.

Shapes: R rows of a step of a tile, C its columns.
"""

import triton
import triton.language as tl

from . import columns as at
from .device import is_finite, pointer, quotient, tile_of, wide

TILE_ROWS = tl.constexpr(64)
TILE_COLUMNS = tl.constexpr(512)
ROWS_AT_ONCE = tl.constexpr(8)
# Steps of a tile whose loads are under way at once, and sums of tiles that are.
AHEAD = tl.constexpr(3)
PARTS_AT_ONCE = tl.constexpr(8)
LEAST = tl.constexpr(2.0**-126)


@triton.jit
def squares_kernel(
    tiles, addresses, matrix_table, parts, G: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr
):
    """Sums of squares of one tile, along its rows and along its columns."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    if COLUMNS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    across = tl.cdiv(columns, TILE_COLUMNS)
    block_row, block_column = tile // across, tile % across
    c = block_column * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows = parts + 4 * tl.load(meta + at.PARTS) + block_column * rows
    of_columns = parts + 4 * tl.load(meta + at.PARTS) + across * rows + block_row * columns
    total = tl.zeros([ROWS_AT_ONCE, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, TILE_ROWS, ROWS_AT_ONCE, num_stages=AHEAD):
        r = block_row * TILE_ROWS + start + tl.arange(0, ROWS_AT_ONCE)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        g = wide(tl.load(grad + r[:, None].to(tl.int64) * columns + c[None, :], mask=inside, other=0.0))
        total += g * g
        tl.store(of_rows + r, tl.sum(g * g, 1), mask=r < rows)
    tl.store(of_columns + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def added_up(parts, count, length, place):
    """The sums of `count` lines of this length, at these places."""
    total = tl.zeros(place.shape, tl.float32)
    for first in range(0, count.to(tl.int32), PARTS_AT_ONCE):
        part = first + tl.arange(0, PARTS_AT_ONCE)[:, None]
        inside = (part < count) & (place < length)[None, :]
        total += tl.sum(tl.load(parts + part * length + place[None, :], mask=inside, other=0.0), 0)
    return total


@triton.jit
def means_kernel(tiles, matrix_table, parts, gains, blocks, BLOCK: tl.constexpr):
    """Mean square of each row, left after those of the columns; over a block of rows, sums of it and of v as it was.

    Of a part of a weight, what it has of the means of all ranks.
    """
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    across, down = tl.cdiv(columns, TILE_COLUMNS), tl.cdiv(rows, TILE_ROWS)
    row_blocks = tl.maximum(tl.cdiv(rows, BLOCK), 1)  # one of a part without rows, too
    start = parts + 4 * tl.load(meta + at.PARTS)
    out = gains + tl.load(meta + at.GAINS)
    if tile < row_blocks:
        r = tile * BLOCK + tl.arange(0, BLOCK)
        mean = added_up(start, across, rows, r) / tl.load(meta + at.PITCH).to(tl.float32)
        tl.store(out + columns + r, mean, mask=r < rows)
        old = tl.load(pointer(tl.load(meta + at.EXP_AVG_SQ), tl.float32, False) + r, mask=r < rows, other=0.0)
        block = blocks + (tl.load(meta + at.BLOCKS) + tile) * at.BLOCK_WIDTH
        tl.store(block + at.B_GRAD_SQ, tl.sum(mean, 0))
        tl.store(block + at.B_MOMENT_SQ, tl.sum(old, 0))
    else:
        c = (tile - row_blocks) * BLOCK + tl.arange(0, BLOCK)
        mean = added_up(start + across * rows, down, columns, c) / tl.load(meta + at.ALL_ROWS).to(tl.float32)
        tl.store(out + c, mean, mask=c < columns)


@triton.jit
def factors_kernel(tiles, matrix_table, hypers, blocks, outcomes, gains, BLOCK: tl.constexpr):
    """f <- beta2 f + (1 - beta2) mean;  scratch <- roots of column / mean and of row / (1 - beta2^t)

    v_hat is the product of what the roots are taken of. To take them here, once for each row and column, spares one for
    each element twice, and a product of two small numbers that float32 could not hold.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    row_blocks = tl.maximum(tl.cdiv(rows, BLOCK), 1)
    beta2, rest = tl.load(hyper + at.BETA2), tl.load(hyper + at.ONE_MINUS_BETA2)
    square, before = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for number in range(0, row_blocks.to(tl.int32)):
        block = blocks + (tl.load(meta + at.BLOCKS) + number) * at.BLOCK_WIDTH
        square += tl.load(block + at.B_GRAD_SQ)
        before += tl.load(block + at.B_MOMENT_SQ)
    # As in plain PyTorch, squares whose sum float32 cannot hold are not finite.
    if is_finite(square * tl.load(meta + at.PITCH).to(tl.float32)):
        out = gains + tl.load(meta + at.GAINS)
        if tile < row_blocks:
            r = tile * BLOCK + tl.arange(0, BLOCK)
            v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), tl.float32, False) + r
            here = out + columns + r
            v = beta2 * tl.load(v_ptr, mask=r < rows, other=0.0) + rest * tl.load(here, mask=r < rows, other=0.0)
            tl.store(v_ptr, v, mask=r < rows)
            tl.store(here, tl.sqrt_rn(v) / tl.load(hyper + at.CORRECTION2_ROOT), mask=r < rows)
        else:
            c = (tile - row_blocks) * BLOCK + tl.arange(0, BLOCK)
            v_ptr = pointer(tl.load(meta + at.COLUMN_MEANS), tl.float32, False) + c
            here = out + c
            v = beta2 * tl.load(v_ptr, mask=c < columns, other=0.0)
            v += rest * tl.load(here, mask=c < columns, other=0.0)
            tl.store(v_ptr, v, mask=c < columns)
            mean = (beta2 * before + rest * square) / tl.load(meta + at.ALL_ROWS).to(tl.float32)
            tl.store(here, tl.sqrt_rn(tl.div_rn(v, tl.maximum(mean, LEAST))), mask=c < columns)
    elif tile == 0:
        tl.store(outcomes + matrix * at.OUTCOME_WIDTH + at.FINITE, 0.0)


@triton.jit
def sizes_kernel(
    tiles, addresses, matrix_table, hypers, parts, gains,
    G: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sum of squares of one tile of grad / (sqrt(v_hat) + eps)."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    eps = tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.EPS)
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    if COLUMNS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    roots = gains + tl.load(meta + at.GAINS)
    across, down = tl.cdiv(columns, TILE_COLUMNS), tl.cdiv(rows, TILE_ROWS)
    c = (tile % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_column = tl.load(roots + c, mask=c < columns, other=1.0)
    total = tl.zeros([ROWS_AT_ONCE, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, TILE_ROWS, ROWS_AT_ONCE, num_stages=AHEAD):
        r = (tile // across) * TILE_ROWS + start + tl.arange(0, ROWS_AT_ONCE)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        g = wide(tl.load(grad + r[:, None].to(tl.int64) * columns + c[None, :], mask=inside, other=0.0))
        of_row = tl.load(roots + columns + r, mask=r < rows, other=1.0)
        step = quotient(g, of_row[:, None] * of_column[None, :] + eps)
        total += step * step
    sums = parts + 4 * tl.load(meta + at.PARTS) + across * rows + down * columns
    tl.store(sums + tile, tl.sum(tl.sum(total, 1), 0))


@triton.jit
def clip_kernel(matrix_table, outcomes, parts, SPREAD: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the factor that brings an update to a root mean square of at most 1. One program per weight.

    Where weights are spread over ranks (SPREAD), a part leaves what it has of the mean square.
    """
    matrix = tl.program_id(0).to(tl.int64)
    meta, outcome = matrix_table + matrix * at.MATRIX_WIDTH, outcomes + matrix * at.OUTCOME_WIDTH
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
    across, down = tl.cdiv(columns, TILE_COLUMNS), tl.cdiv(rows, TILE_ROWS)
    sums = parts + 4 * tl.load(meta + at.PARTS) + across * rows + down * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, (across * down).to(tl.int32), BLOCK):
        number = start + tl.arange(0, BLOCK)
        total += tl.load(sums + number, mask=number < across * down, other=0.0)
    size = tl.load(meta + at.ALL_ROWS).to(tl.float32) * tl.load(meta + at.PITCH).to(tl.float32)
    result = tl.sum(total, 0) / size
    if not SPREAD:
        result = 1.0 / tl.sqrt(tl.maximum(result, 1.0))
    tl.store(outcome + at.FACTOR, result)
