"""AdamW for what is not projected. Tiles are as in `apply`."""

import triton
import triton.language as tl

from . import columns as at
from .apply import HALF_TILE, PAIRED_TILE, element_positions, lanes, shared_words
from .device import (
    M_STREAM,
    V_STREAM,
    adam_step,
    count_outcome,
    element_bits,
    int_bits,
    is_finite,
    load_keys,
    pointer,
    quotient,
    rounded,
    rounding_key,
    store_keys,
    tile_of,
    wide,
)
from .groups import (
    draws_of,
    elements_of,
    every_room,
    everywhere,
    first_group,
    global_places,
    groups_of,
    in_group,
    load_groups,
    room,
    store_groups,
)
from .int8 import requantized
from .moments import first_codes, first_moment, second_codes, second_moment
from .spectral import code_places, levels_and_middles, load_codes, looked_up, nearest_codes, store_codes


@triton.jit
def prepare_kernel(matrix_table, hypers, outcomes):
    """AdamW, one program per weight: believed finite until shown otherwise, and its rounding keys."""
    matrix = tl.program_id(0).to(tl.int64)
    meta = matrix_table + matrix * at.MATRIX_WIDTH
    step = int_bits(tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.STEP_BITS))
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    tl.store(outcome + at.FINITE, 1.0)
    store_keys(outcome, tl.load(meta + at.SEED), step)


@triton.jit
def finite_kernel(
    tiles, addresses, matrix_table, outcomes, G: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr
):
    """AdamW: note a gradient with a square that is not finite. All who write, write the same."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    tile = tile.to(tl.int64)
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
        tl.store(outcomes + matrix * at.OUTCOME_WIDTH + at.FINITE, 0.0)


@triton.jit
def adamw_half(
    weight, grad, m_ptr, v_ptr, begin, left, position, bits, m_key0, m_key1, v_key0, v_key1, hyper,
    W: tl.constexpr, M: tl.constexpr, ROUND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """1024 elements of AdamW: moments, and weight <- keep * weight - lr * step"""
    offset = lanes()
    inside, outside = (offset < left, 0.0) if MASKED else (None, None)
    weight, grad = weight + begin + offset, grad + begin + offset
    m_ptr, v_ptr = m_ptr + begin + offset, v_ptr + begin + offset
    w = tl.load(weight, mask=inside, other=outside).to(tl.float32)
    g = tl.load(grad, mask=inside, other=outside).to(tl.float32)
    m = tl.load(m_ptr, mask=inside, other=outside).to(tl.float32)
    v = tl.load(v_ptr, mask=inside, other=outside).to(tl.float32)
    m, v, step = adam_step(m, v, g * tl.load(hyper + at.SIGN), hyper)
    moved = tl.load(hyper + at.KEEP) * w - tl.load(hyper + at.LR) * step
    if ROUND:
        result = rounded(moved, bits, W)
    else:
        result = moved.to(W)
    if M == tl.float32:
        m_out, v_out = m, v
    else:
        m_out = rounded(m, element_bits(position, m_key0, m_key1), M)
        v_out = rounded(v, element_bits(position, v_key0, v_key1), M)
    tl.store(weight, result, mask=inside)
    tl.store(m_ptr, m_out, mask=inside)
    tl.store(v_ptr, v_out, mask=inside)


@triton.jit
def adamw_kernel(
    tiles, addresses, matrix_table, hypers, outcomes, skipped,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, SHARED: tl.constexpr,
    STRIDED: tl.constexpr, ROUND: tl.constexpr, CAPTURABLE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """AdamW on PAIRS * 2048 elements of one weight."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    tile = tile.to(tl.int64)
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    finite = tl.load(outcome + at.FINITE) != 0
    if tile == 0:
        count_outcome(meta, skipped, finite, CAPTURABLE)
    if finite:
        hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
        size = tl.load(meta + at.ROWS) * tl.load(meta + at.COLUMNS)
        weight = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
        m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED)
        v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED)
        key0, key1, _, _ = load_keys(outcome)
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
                position = element_positions(meta, begin, STRIDED)
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


@triton.jit
def row_squares_kernel(
    tiles, addresses, matrix_table, hypers, outcomes, gains,
    G: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """v[row] <- beta2 * v + (1 - beta2) * mean of the row's squares;  gain[row] <- 1 / (sqrt(v_hat) + eps), by which a
    momentum that is still to be corrected is multiplied. A row that is not finite keeps its v, and its weight as it is.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    r_R11 = r[:, None, None]
    in_row = tl.arange(0, BLOCK_C // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    total = tl.zeros([BLOCK_R, BLOCK_C // 8], tl.float32)
    for start in range(0, columns, BLOCK_C):
        c = start + in_row
        g = tl.load(grad + r_R11.to(tl.int64) * columns + c, mask=(r_R11 < rows) & (c < columns), other=0.0)
        total += tl.sum(g.to(tl.float32) * g.to(tl.float32), 2)
    mean = tl.sum(total, 1) / columns.to(tl.float32)
    v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), tl.float32, False) + r
    old = tl.load(v_ptr, mask=r < rows, other=0.0)
    good = is_finite(mean)
    v = tl.where(good, tl.load(hyper + at.BETA2) * old + tl.load(hyper + at.ONE_MINUS_BETA2) * mean, old)
    tl.store(v_ptr, v, mask=r < rows)
    denominator = tl.sqrt(v) / tl.load(hyper + at.CORRECTION2_ROOT) + tl.load(hyper + at.EPS)
    tl.store(gains + tl.load(meta + at.GAINS) + r, 1.0 / (denominator * tl.load(hyper + at.CORRECTION1)), mask=r < rows)
    if tl.sum(tl.where(good, 0, 1)) > 0:
        tl.store(outcomes + matrix * at.OUTCOME_WIDTH + at.FINITE, 0.0)


@triton.jit
def adamw_groups_kernel(
    tiles, addresses, matrix_table, hypers, outcomes, gains, skipped, levels,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, MOMENTUM: tl.constexpr, BY_ROW: tl.constexpr,
    BY_FACTORS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, SHARED: tl.constexpr,
    PART: tl.constexpr, ROUND: tl.constexpr, CAPTURABLE: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """AdamW on PAIRS * 2048 elements of one weight: moments, and weight <- keep * weight - lr * step

    `levels` are those of 4-bit codes, as in `spectral`, where moments are kept in them (M is uint8). Where groups fill
    their rows (SHARED), a group is there as a whole or not at all, and what one that is not there comes to is not read.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    tile = tile.to(tl.int64)
    outcome = outcomes + matrix * at.OUTCOME_WIDTH
    finite = tl.load(outcome + at.FINITE) != 0
    if tile == 0:
        count_outcome(meta, skipped, finite, CAPTURABLE)
    if finite:
        hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
        rows, columns = tl.load(meta + at.ROWS), tl.load(meta + at.COLUMNS)
        if COLUMNS_ALIGNED:
            columns = tl.multiple_of(columns, 16)
        weight = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.WEIGHT), W, ALIGNED)
        grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
        scales = pointer(tl.load(meta + at.CODE_SCALE), tl.float32, False)
        gain_ptr = gains + tl.load(meta + at.GAINS)
        if COLUMNS_ALIGNED:
            gain_ptr = tl.multiple_of(gain_ptr, 16)
        key0, key1, scale_key0, scale_key1 = load_keys(outcome)
        keep, lr, sign = tl.load(hyper + at.KEEP), tl.load(hyper + at.LR), tl.load(hyper + at.SIGN)
        eps = tl.load(hyper + at.EPS)
        if BY_FACTORS:
            # What all elements are multiplied by is multiplied once.
            sign *= tl.load(outcome + at.FACTOR)
            if MOMENTUM:
                lr /= tl.load(hyper + at.CORRECTION1)
            else:
                lr *= sign
        # Of a momentum in 4 bits, looked up before the loop, whose stores the compiler takes for changes to all tables.
        codes, rest = tl.load(meta + at.EXP_AVG), tl.load(hyper + at.ONE_MINUS_BETA1)
        code_scales = pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False)
        level, middle = levels_and_middles(levels)
        FLAT: tl.constexpr = ALIGNED and COLUMNS_ALIGNED
        for pair in range(PAIRS):  # unrolled, it would take four times as long to compile
            start = (tile * PAIRS + pair) * PAIRED_TILE
            for half in tl.static_range(2):
                begin = start + half * HALF_TILE
                group, there, row, block = groups_of(begin // HALF_TILE, rows, columns, N)
                column = block[:, None] * N + in_group(N, FLAT)
                inside = room(there, column, columns, SHARED, FLAT)
                element = elements_of(begin, row, column, columns, N, SHARED, FLAT)
                place = global_places(meta, start, begin, row, column, element, N, SHARED, PART, FLAT)
                w = wide(load_groups(weight + element, inside, FLAT))
                if W == tl.int8:
                    w *= tl.load(scales + group, mask=there, other=0.0)[:, None, None]
                g = wide(load_groups(grad + element, inside, FLAT))
                if not BY_FACTORS:
                    g *= sign
                if BY_ROW:
                    momentum = g
                    if MOMENTUM:
                        momentum = _stepped_momentum(meta, hyper, g, group, there, place, half, element, inside, M,
                                                     ALIGNED, N, SHARED, FLAT)  # fmt: skip
                    step = momentum * tl.load(gain_ptr + row, mask=there, other=0.0)[:, None, None]
                elif BY_FACTORS:
                    if SHARED:
                        of_column = load_groups(gain_ptr + column, everywhere(FLAT), FLAT)
                    else:
                        of_column = load_groups(gain_ptr + column, inside, FLAT)
                    of_row = tl.load(gain_ptr + columns + row, mask=there, other=1.0)[:, None, None]
                    step = quotient(g, tl.fma(of_row, of_column, eps))
                    if M == tl.uint8:
                        step = _momentum_in_4_bits(codes, code_scales, step, 1 - rest, rest * sign, group, there, row,
                                                   block, columns, inside, level, middle, ALIGNED, SHARED,
                                                   FLAT)  # fmt: skip
                    elif MOMENTUM:
                        step = _stepped_momentum(meta, hyper, step * sign, group, there, place, half, element, inside,
                                                 M, ALIGNED, N, SHARED, FLAT)  # fmt: skip
                else:
                    step = _stepped_moments(meta, hyper, g, group, there, place, half, element, inside, M, ALIGNED, N,
                                            SHARED, FLAT)  # fmt: skip
                if BY_FACTORS:
                    moved = tl.fma(step, -lr, keep * w)
                else:
                    moved = keep * w - lr * step
                draw = draws_of(place, half, key0, key1, N, SHARED, FLAT)
                if W == tl.int8:
                    bits = element_bits(first_group(meta, columns, N, PART) + group, scale_key0, scale_key1)
                    result, scale = requantized(moved, bits, draw, ROUND)
                    tl.store(scales + group, scale, mask=there)
                elif ROUND:
                    result = rounded(moved, draw, W, True)
                else:
                    result = moved.to(W)
                store_groups(weight + element, result, inside, FLAT)


@triton.jit
def _stepped_momentum(
    meta, hyper, g, group, there, place, half: tl.constexpr, element, inside,
    M: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The first moment after taking in one gradient; left in the state, too."""
    m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED)
    m_scales = pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + group
    if M == tl.int8:
        scale = tl.load(m_scales, mask=there, other=0.0)
        m = first_moment(load_groups(m_ptr + element, inside, FLAT), scale)
    else:
        m = load_groups(m_ptr + element, inside, FLAT).to(tl.float32)
    m = m + tl.load(hyper + at.ONE_MINUS_BETA1) * (g - m)
    _store(meta, hyper, m, m_ptr, m_scales, there, place, half, element, inside, M, N, SHARED, FLAT, M_STREAM)
    return m


@triton.jit
def _momentum_in_4_bits(
    address, scales, step, kept, taken, group, there, row, block, columns, inside, level, middle,
    ALIGNED: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """kept * momentum + taken * step, left in the state in the codes of `quant.blocks.packed`.

    `block` is each group's number in its row.
    """
    codes, in_row, to_a_row = code_places(address, group, row, block, columns, ALIGNED, SHARED, FLAT)
    in_row = room(there, in_row, to_a_row, SHARED, FLAT)
    scale = tl.load(scales + group, mask=there, other=0.0)[:, None, None]
    m = tl.fma(step, taken, looked_up(level * scale * kept, load_codes(codes, in_row, FLAT)))
    if not SHARED:
        m = tl.where(every_room(inside, FLAT), m, 0.0)
    scale = tl.max(tl.max(tl.abs(m), 2), 1)
    store_codes(codes, nearest_codes(m, scale[:, None, None], middle), in_row, FLAT)
    tl.store(scales + group, scale, mask=there)
    return m


@triton.jit
def _store(
    meta, hyper, value, moments, scales, there, place, half: tl.constexpr, element, inside,
    M: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Leave a moment in the state, the first or the second as the stream of its random bits says."""
    if M == tl.float32:
        store_groups(moments + element, value, inside, FLAT)
    else:
        key0, key1 = rounding_key(tl.load(meta + at.SEED), int_bits(tl.load(hyper + at.STEP_BITS)), STREAM)
        draw = draws_of(place, half, key0, key1, N, SHARED, FLAT)
        if M == tl.int8:
            if STREAM == M_STREAM:
                code, scale = first_codes(value, draw)
            else:
                code, scale = second_codes(value, draw)
            store_groups(moments + element, code, inside, FLAT)
            tl.store(scales, scale, mask=there)
        else:
            store_groups(moments + element, rounded(value, draw, M), inside, FLAT)


@triton.jit
def _stepped_moments(
    meta, hyper, g, group, there, place, half: tl.constexpr, element, inside,
    M: tl.constexpr, ALIGNED: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Adam's step after taking in one gradient; both moments are left in the state."""
    m_ptr = pointer(tl.load(meta + at.EXP_AVG), M, ALIGNED)
    m_scales = pointer(tl.load(meta + at.EXP_AVG_SCALE), tl.float32, False) + group
    v_scales = pointer(tl.load(meta + at.EXP_AVG_SQ_SCALE), tl.float32, False) + group
    if M == tl.int8:
        v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), tl.uint8, ALIGNED)
        m = first_moment(load_groups(m_ptr + element, inside, FLAT), tl.load(m_scales, mask=there, other=0.0))
        v = second_moment(load_groups(v_ptr + element, inside, FLAT), tl.load(v_scales, mask=there, other=0.0))
    else:
        v_ptr = pointer(tl.load(meta + at.EXP_AVG_SQ), M, ALIGNED)
        m = load_groups(m_ptr + element, inside, FLAT).to(tl.float32)
        v = load_groups(v_ptr + element, inside, FLAT).to(tl.float32)
    m, v, step = adam_step(m, v, g, hyper)
    _store(meta, hyper, m, m_ptr, m_scales, there, place, half, element, inside, M, N, SHARED, FLAT, M_STREAM)
    _store(meta, hyper, v, v_ptr, v_scales, there, place, half, element, inside, M, N, SHARED, FLAT, V_STREAM)
    return step
