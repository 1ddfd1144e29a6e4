"""Kernels that project onto many rows, on the tensor cores."""

import triton
import triton.language as tl

from . import columns as at
from .device import float_bits, int_bits, pointer, tile_of
from .moments import moments_of, narrow_moments_of

STEP_ROWS = tl.constexpr(16)
"""Rows of a tile whose moments are stepped at a time."""


@triton.jit
def _products(
    z_start, grad, r, c, rank, side, width, pitch,
    G: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr, NORMS: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(basis @ grad, sum_s grad^2) of one tile; the second only with NORMS. EVEN says that BLOCK_S divides the side.

    `width` is the number of channels that can be read: beyond the last one a padded row holds zeros. A basis in PIECES
    is the sum of as many planes.
    """
    low = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    one = tl.minimum(side, 1).to(tl.float32)
    # A thread holds eight neighbours along the rows of a gradient, or every sixteenth row: it adds up its own first.
    OUTER: tl.constexpr = BLOCK_S // 8 if CHANNELS_ARE_ROWS else BLOCK_S // 16
    INNER: tl.constexpr = BLOCK_S // OUTER
    grad_sq = tl.zeros([OUTER if CHANNELS_ARE_ROWS else INNER, BLOCK_C], tl.float32)
    plane = tl.multiple_of(tl.cdiv(rank.to(tl.int64) * side, 16) * 16, 16)
    for piece in range(PIECES):
        for start in range(0, side, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            z_inside = r[:, None] < rank
            g_inside = c[None, :] < width
            if not EVEN:
                z_inside &= s[None, :] < side
                g_inside &= s[:, None] < side
            z = tl.load(z_start + s[None, :], mask=z_inside, other=0.0)
            if CHANNELS_ARE_ROWS:
                g = tl.load(grad + c[None, :].to(tl.int64) * pitch + s[:, None], mask=g_inside, other=0.0)
            else:
                g = tl.load(grad + s[:, None].to(tl.int64) * pitch + c[None, :], mask=g_inside, other=0.0)
            low = tl.dot(z.to(G), g, low, input_precision="ieee")
            if NORMS:
                # Has the product waited for. Hopper's tensor cores read `g` from shared memory in their own time; where
                # it is read otherwise too, Triton (3.6, 3.7) keeps too few buffers for that, and the next tile
                # overwrites it.
                low *= one
                wide = g.to(tl.float32)
                if PIECES > 1:  # each reads the same gradient
                    wide = tl.where(piece == 0, wide, 0.0)
                grad_sq += tl.sum((wide * wide).reshape(OUTER, INNER, BLOCK_C), 1 if CHANNELS_ARE_ROWS else 0)
        z_start += plane
    return low, tl.sum(grad_sq, 0)


@triton.jit
def project_kernel(
    tiles, addresses, matrix_table, hypers, basis, padded, parts, lows, shares, planes, tile_count, shares_length,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, SIDE_ALIGNED: tl.constexpr,
    CHANNELS_ALIGNED: tl.constexpr, MOMENTS_ALIGNED: tl.constexpr, CHANNELS_ARE_ROWS: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, SHARE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Any rank: low = basis @ grad on the tensor cores, and its moments right behind it. A program takes many tiles.

    LOW = sum_r low^2;  STEP_SQ = sum_r step^2;  MOMENT_SQ = sum_r v;  GRAD_SQ = sum_s G^2, one part per block of rows.

    SHARE says that this is one rank's share in low: it goes to `shares`, and the moments wait for the sum.
    """
    for number in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        matrix = tl.load(tiles + 2 * number).to(tl.int64)
        tile = tl.load(tiles + 2 * number + 1)
        meta = matrix_table + matrix * at.MATRIX_WIDTH
        hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
        rank = tl.load(meta + at.RANK).to(tl.int32)
        if CHANNELS_ARE_ROWS:
            channels, side = tl.load(meta + at.ROWS).to(tl.int32), tl.load(meta + at.COLUMNS).to(tl.int32)
        else:
            side, channels = tl.load(meta + at.ROWS).to(tl.int32), tl.load(meta + at.COLUMNS).to(tl.int32)
        if SIDE_ALIGNED:
            side = tl.multiple_of(side, 16)
        if CHANNELS_ALIGNED:
            channels = tl.multiple_of(channels, 16)
        if PADDED:
            grad = padded + tl.multiple_of(tl.load(meta + at.PADDED_GRAD), 16)
            pitch = tl.multiple_of(tl.cdiv(tl.load(meta + at.COLUMNS).to(tl.int32), 16) * 16, 16)
            width = channels if CHANNELS_ARE_ROWS else pitch
        else:
            grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
            pitch = side if CHANNELS_ARE_ROWS else channels
            width = channels
        part_count = tl.cdiv(rank, BLOCK_R)
        part = tile % part_count
        r = part * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile // part_count) * BLOCK_C + tl.arange(0, BLOCK_C)
        z_start = basis + tl.multiple_of(tl.load(meta + at.BASIS), 16) + r[:, None].to(tl.int64) * side
        # Every block of rows sees the whole channel; the first alone adds up its norm.
        if part == 0:
            low, grad_sq = _products(
                z_start, grad, r, c, rank, side, width, pitch,
                G, CHANNELS_ARE_ROWS, True, EVEN, PIECES, BLOCK_R, BLOCK_C, BLOCK_S,
            )  # fmt: skip
        else:
            low, grad_sq = _products(
                z_start, grad, r, c, rank, side, width, pitch,
                G, CHANNELS_ARE_ROWS, False, EVEN, PIECES, BLOCK_R, BLOCK_C, BLOCK_S,
            )  # fmt: skip
        low *= float_bits(tl.load(meta + at.BASIS_SCALE)) * tl.load(hyper + at.SIGN)
        out = parts + tl.load(meta + at.PARTS) + part.to(tl.int64) * channels + c
        tl.store(out + at.GRAD_SQ * planes, grad_sq, mask=c < channels)
        slot = lows + tl.program_id(0).to(tl.int64) * (BLOCK_R * BLOCK_C)
        tl.store(slot + tl.arange(0, BLOCK_R)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :], low)
        tl.debug_barrier()
        if SHARE:
            _share_tile(
                meta, slot, part * BLOCK_R, (tile // part_count) * BLOCK_C, rank, channels, shares, shares_length,
                BLOCK_R, BLOCK_C,
            )  # fmt: skip
        else:
            _step_tile(
                meta, hyper, slot, part * BLOCK_R, (tile // part_count) * BLOCK_C, rank, channels, out, planes,
                M, MOMENTS_ALIGNED, BLOCK_R, BLOCK_C,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _share_tile(
    meta, slot, first, first_column, rank, channels, shares, shares_length, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Copy a tile to where other ranks find it; a few rows at a time, as in `_step_tile`."""
    ROWS_AT_ONCE: tl.constexpr = STEP_ROWS if STEP_ROWS < BLOCK_R else BLOCK_R
    c = first_column + tl.arange(0, BLOCK_C)[None, :]
    for start in range(0, BLOCK_R, ROWS_AT_ONCE):
        row = start + tl.arange(0, ROWS_AT_ONCE)[:, None]
        low = tl.load(slot + row * BLOCK_C + tl.arange(0, BLOCK_C)[None, :])
        inside = (first + row < rank) & (c < channels)
        tl.store(shared_out(meta, shares, shares_length, first + row, c), low, mask=inside)


@triton.jit
def shared_out(meta, shares, shares_length, r, c):
    """Pointers to row r of channel c in `shares`: a row for each rank that keeps moments, of CHUNK channels."""
    chunk = tl.load(meta + at.CHUNK).to(tl.int32)
    keeper = c // chunk
    return shares + keeper.to(tl.int64) * shares_length + tl.load(meta + at.SHARES) + r.to(tl.int64) * chunk + c % chunk


@triton.jit
def _step_tile(
    meta, hyper, slot, first, first_column, rank, channels, out, planes,
    M: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Step the moments of a tile, whose product waits in the cache, a few rows at a time.

    Beside the product itself the moments would take more registers than there are.
    """
    ROWS_AT_ONCE: tl.constexpr = STEP_ROWS if STEP_ROWS < BLOCK_R else BLOCK_R
    c = first_column + tl.arange(0, BLOCK_C)
    pitch = tl.load(meta + at.MOMENT_PITCH).to(tl.int32)
    if ALIGNED:
        pitch = tl.multiple_of(pitch, 16)
    low_sq = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    step_sq = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    moment = tl.zeros([ROWS_AT_ONCE, BLOCK_C], tl.float32)
    for start in range(0, BLOCK_R, ROWS_AT_ONCE):
        row = start + tl.arange(0, ROWS_AT_ONCE)[:, None]
        # Where rows are further apart than channels need, zeros between them stay zeros: vectors remain whole.
        inside = (first + row < rank) & (c[None, :] < pitch)
        low = tl.load(slot + row * BLOCK_C + tl.arange(0, BLOCK_C)[None, :])
        if M == tl.int8:
            step, v = narrow_moments_of(meta, hyper, low, first + start, first_column, channels, ROWS_AT_ONCE, BLOCK_C)
        else:
            step, v = moments_of(meta, hyper, low, first + row, c[None, :], pitch, inside, M, ALIGNED)
        low_sq += low * low
        step_sq += step * step
        moment += v
    tl.store(out + at.LOW * planes, tl.sum(low_sq, 0), mask=c < channels)
    tl.store(out + at.STEP_SQ * planes, tl.sum(step_sq, 0), mask=c < channels)
    tl.store(out + at.MOMENT_SQ * planes, tl.sum(moment, 0), mask=c < channels)


@triton.jit
def pad_kernel(tiles, addresses, matrix_table, padded, G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Copy a gradient whose rows are not whole vectors to scratch where they are, for the tensor cores to read."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    rows, columns = tl.load(meta + at.ROWS).to(tl.int32), tl.load(meta + at.COLUMNS).to(tl.int32)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, False)
    across = tl.cdiv(columns, BLOCK_C)
    row = (tile // across) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = (tile % across) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    pitch = tl.cdiv(columns, 16) * 16
    inside = (row < rows) & (column < columns)
    value = tl.load(grad + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    tl.store(
        padded + tl.load(meta + at.PADDED_GRAD) + row.to(tl.int64) * pitch + column,
        value,
        mask=(row < rows) & (column < pitch),
    )


@triton.jit
def normals_kernel(tiles, matrix_table, hypers, normals, basis, BLOCK: tl.constexpr):
    """basis[r, s] <- standard normal of (seed, refresh, expert, r, s), by the places of the whole matrix.

    Eight rows and BLOCK columns per program.
    """
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    rank = tl.load(meta + at.RANK).to(tl.int32)
    side = tl.load(meta + at.SIDE).to(tl.int32)
    columns_of_tiles = tl.cdiv(side, BLOCK)
    block = tile // columns_of_tiles
    column = (tile % columns_of_tiles) * BLOCK + tl.arange(0, BLOCK)
    refresh = int_bits(tl.load(hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH + at.REFRESH_BITS))
    expert = tl.load(meta + at.EXPERT).to(tl.int32)
    place = tl.load(meta + at.FIRST_SIDE).to(tl.int32) + column
    words = tl.philox(tl.load(meta + at.SEED), place, block, refresh, expert)
    start = basis + tl.load(meta + at.BASIS) + block.to(tl.int64) * 8 * side + column
    for row in tl.static_range(8):
        index = ((words[row // 2] >> (16 * (row % 2))) & 0xFFFF).to(tl.int32)
        inside = column < tl.where(block * 8 + row < rank, side, 0)
        tl.store(start + row * side, tl.load(normals + index, mask=inside), mask=inside)


@triton.jit
def stored_kernel(tiles, matrix_table, basis, B: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """basis[r, s] <- STORED_SCALE * the basis that state keeps, BLOCK of its elements per program.

    Where that is too wide it becomes a sum of PIECES, one plane each: rounded, and what the rounding left out.
    """
    _, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    element = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(meta + at.RANK) * tl.load(meta + at.SIDE)
    inside = element < size
    stored = pointer(tl.load(meta + at.STORED_BASIS), B, False)
    left = tl.load(stored + element, mask=inside, other=0.0).to(tl.float32) * at.STORED_SCALE
    out = basis + tl.load(meta + at.BASIS) + element
    for piece in tl.static_range(PIECES):
        narrow = left.to(basis.dtype.element_ty)
        tl.store(out + piece * (tl.cdiv(size, 16) * 16), narrow, mask=inside)
        left -= narrow.to(tl.float32)


@triton.jit
def reduce_rows_kernel(
    tiles, addresses, matrix_table, hypers, basis, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, IDENTITY: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Rank 1 or full rank, channels are rows: sums along each row of a block of rows.

    rank 1:  LOW = sum_s z[s] G[c, s];  GRAD_SQ = sum_s G[c, s]^2
    full:    Adam moments of G itself;  STEP_SQ, MOMENT_SQ, GRAD_SQ summed over s

    A row is seen as [BLOCK_S / 8, 8]: a thread adds up its own eight neighbours, so sums take few registers and more
    loads can be under way.
    """
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    channels = tl.load(meta + at.ROWS).to(tl.int32)
    side = tl.load(meta + at.COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        side = tl.multiple_of(side, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    z = basis + tl.multiple_of(tl.load(meta + at.BASIS), 16)
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    c_C11 = c[:, None, None]
    row_C11 = grad + c_C11.to(tl.int64) * side
    in_row = tl.arange(0, BLOCK_S // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    first = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    second = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    third = tl.zeros([BLOCK_C, BLOCK_S // 8], tl.float32)
    for start in range(0, side, BLOCK_S):
        s = start + in_row
        inside = (c_C11 < channels) & (s < side)
        g = tl.load(row_C11 + s, mask=inside, other=0.0).to(tl.float32)
        second += tl.sum(g * g, 2)
        if IDENTITY:
            # Moments are kept [S, C]: the transpose of the gradient as it is stored.
            step, v = moments_of(meta, hyper, g * tl.load(hyper + at.SIGN), s, c_C11, channels, inside, M, False)
            first += tl.sum(step * step, 2)
            third += tl.sum(v, 2)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < side, other=0.0).to(tl.float32), 2)
    out = parts + tl.load(meta + at.PARTS) + c
    tl.store(out + at.GRAD_SQ * planes, tl.sum(second, 1), mask=c < channels)
    if IDENTITY:
        tl.store(out + at.LOW * planes, tl.sum(second, 1), mask=c < channels)
        tl.store(out + at.STEP_SQ * planes, tl.sum(first, 1), mask=c < channels)
        tl.store(out + at.MOMENT_SQ * planes, tl.sum(third, 1), mask=c < channels)
    else:
        tl.store(out + at.LOW * planes, tl.sum(first, 1), mask=c < channels)


@triton.jit
def reduce_columns_kernel(
    tiles, addresses, matrix_table, hypers, basis, parts, planes,
    G: tl.constexpr, M: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS_ALIGNED: tl.constexpr, IDENTITY: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`reduce_rows_kernel` where channels are columns: a block of columns, over one part of the rows."""
    matrix, meta, tile = tile_of(tiles, tl.program_id(0), matrix_table)
    hyper = hypers + tl.load(meta + at.HYPER) * at.HYPER_WIDTH
    side = tl.load(meta + at.ROWS).to(tl.int32)
    channels = tl.load(meta + at.COLUMNS).to(tl.int32)
    if COLUMNS_ALIGNED:
        channels = tl.multiple_of(channels, 16)
    grad = pointer(tl.load(addresses + matrix * at.ADDRESS_WIDTH + at.GRAD), G, ALIGNED)
    z = basis + tl.load(meta + at.BASIS)
    part_count = tl.load(meta + at.PART_COUNT).to(tl.int32)
    part = tile % part_count
    c = (tile // part_count) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows_per_part = tl.cdiv(tl.cdiv(side, part_count), BLOCK_S) * BLOCK_S
    end = tl.minimum(side, (part + 1) * rows_per_part)
    first = tl.zeros([BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_C], tl.float32)
    third = tl.zeros([BLOCK_C], tl.float32)
    for start in range(part * rows_per_part, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        inside = (s[:, None] < end) & (c[None, :] < channels)
        element = s[:, None].to(tl.int64) * channels + c[None, :]
        g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
        second += tl.sum(g * g, 0)
        if IDENTITY:
            row, column = s[:, None], c[None, :]
            step, v = moments_of(
                meta, hyper, g * tl.load(hyper + at.SIGN), row, column, channels, inside, M, COLUMNS_ALIGNED
            )
            first += tl.sum(step * step, 0)
            third += tl.sum(v, 0)
        else:
            first += tl.sum(g * tl.load(z + s, mask=s < end, other=0.0).to(tl.float32)[:, None], 0)
    out = parts + tl.load(meta + at.PARTS) + part.to(tl.int64) * channels + c
    tl.store(out + at.GRAD_SQ * planes, second, mask=c < channels)
    if IDENTITY:
        tl.store(out + at.LOW * planes, second, mask=c < channels)
        tl.store(out + at.STEP_SQ * planes, first, mask=c < channels)
        tl.store(out + at.MOMENT_SQ * planes, third, mask=c < channels)
    else:
        tl.store(out + at.LOW * planes, first, mask=c < channels)
