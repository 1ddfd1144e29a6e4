"""Batches of weights that share a launch, and the tables that tell a kernel about them. Built once, until a change.

A batch is a set of weights whose launches have the same compile-time facts. Its scratch is bounded: a model that would
need more is stepped in several batches.
"""

import operator
import struct
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.orthogonal import VECTOR, products_at_once
from ..distributed import Part
from ..kernels import columns as at
from ..kernels.spectral import BLOCKS_OF_TILE
from ..quant.blocks import BLOCK
from ..quant.int8 import Int8Weight
from ..stepping.weight import WeightStep
from .matrix import BatchKind, Matrix, batch_kind_of, ranks_that_share

SCRATCH_BYTES = 40 * 2**20
"""Most scratch of one batch, bases and partial sums together."""

PADDED_BYTES = 80 * 2**20
"""Most scratch of a batch that copies gradients to whole vectors: with less, too few tiles would share a launch."""

SPECTRAL_BYTES = 2**30
"""Most scratch of matrices that are orthogonalised together, with all that their products are made of."""

FOLLOWED_BYTES = 24
"""Most bytes that PyTorch takes for each number of a momentum of low rank while it follows it."""

COMBINE_BLOCK = 1024
"""Channels per program when sums are combined."""

FACTOR_TILE = 64, 512
"""Rows and columns of a factored weight that one program takes, as `kernels.factors` has them."""

MOST_PARTS, LEAST_ROWS = 8, 32
"""Most parts that contracted rows are cut into where channels are columns, and fewest rows of a part."""


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tile_table(counts: Iterable[tuple[int, int]], device: torch.device) -> Tensor:
    """Two int32 per program, (matrix, tile), for `count` tiles of each matrix."""
    pairs = list(counts)
    matrices = torch.tensor([matrix for matrix, _ in pairs], dtype=torch.int32, device="cpu")
    counted = torch.tensor([count for _, count in pairs], dtype=torch.int64, device="cpu")
    matrix = matrices.repeat_interleave(counted)
    start = (counted.cumsum(0) - counted).repeat_interleave(counted)
    tile = torch.arange(len(matrix), device="cpu") - start
    return torch.stack([matrix, tile.to(torch.int32)], dim=1).to(device)


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


STATE_COLUMNS = {
    "exp_avg": at.EXP_AVG, "exp_avg_scale": at.EXP_AVG_SCALE, "exp_avg_sq": at.EXP_AVG_SQ,
    "exp_avg_sq_scale": at.EXP_AVG_SQ_SCALE, "exp_avg_sq_side": at.EXP_AVG_SQ, "exp_avg_sq_channel": at.COLUMN_MEANS,
    "last_norm": at.LAST_NORM, "basis": at.STORED_BASIS,
}  # fmt: skip
OF_TALL = {"exp_avg_sq_channel": at.EXP_AVG_SQ, "exp_avg_sq_side": at.COLUMN_MEANS}
"""Columns of the table that say where the state of a matrix lies. Factors are those of rows and of columns there."""


def matrix_row(matrix: Matrix) -> list[int]:
    """The matrix's row of the table, but for what depends on the rest of its batch, and its row of hyper-parameters."""
    job, kind, state = matrix.job, matrix.kind, matrix.job.state
    row = [0] * at.MATRIX_WIDTH.value
    for name, column in (STATE_COLUMNS | OF_TALL if matrix.is_tall else STATE_COLUMNS).items():
        if name in state and not matrix.stands_in:
            # Where there are experts, they are the first dimension of all state.
            row[column.value] = (state[name][matrix.expert] if matrix.expert > 0 else state[name]).data_ptr()
    if isinstance(job.weight, Int8Weight):
        row[at.CODE_SCALE.value] = job.weight.scale.data_ptr()
    row[at.STEP.value] = state["step"].data_ptr() if kind.capturable else 0
    row[at.SEED.value] = int(state["seed"])
    offsets = matrix.offsets
    row[at.EXPERT.value], row[at.FIRST.value], row[at.PITCH.value] = offsets.expert, offsets.first, offsets.pitch
    row[at.SIDE.value], row[at.CHANNELS.value] = matrix.side, matrix.channels
    row[at.FIRST_SIDE.value], row[at.ALL_CHANNELS.value] = offsets.first_side, offsets.all_channels
    row[at.KEPT.value], row[at.FIRST_KEPT.value] = matrix.kept, offsets.first_kept
    row[at.FIRST_MOMENT_ROW.value], row[at.MOMENT_PITCH.value] = offsets.first_moment_row, matrix.moment_pitch
    row[at.ROWS.value], row[at.COLUMNS.value] = matrix.sides
    row[at.ALL_ROWS.value] = matrix.sides[0] if matrix.whole is None else matrix.whole.rows
    row[at.RANK.value], row[at.CHUNK.value] = matrix.rank, matrix.chunk
    row[at.PART_COUNT.value] = part_count(matrix)
    if job.shape is not None:
        row[at.SCALE.value] = _float_bits(job.scale)
        row[at.BASIS_SCALE.value] = _float_bits(
            job.shape.rank**-0.5 if kind.basis is None else 1 / at.STORED_SCALE.value
        )
    return row


class ScratchSizes(NamedTuple):
    """Elements of each buffer of the scratch, and rows of the table of block sums, that a matrix or a batch takes."""

    basis: int
    padded: int
    parts: int
    """In each of four planes."""
    gains: int
    blocks: int
    shares: int
    """Elements of low-rank gradients that this rank keeps where ranks share them out, a short last chunk filled up."""
    kept_gains: int


SCRATCH_COLUMNS = at.BASIS, at.PADDED_GRAD, at.PARTS, at.GAINS, at.BLOCKS, at.SHARES, at.KEPT_GAINS
"""Columns of the table that say where a matrix begins in each of them."""


@dataclass
class KernelBatch:
    """Matrices that go through the same launches, with the tables for them."""

    kind: BatchKind
    jobs: list[WeightStep]
    """The weights that the matrices are of, in the same order."""
    matrices: list[Matrix]
    matrix_table: Tensor
    part: Part | None
    """The part that this rank holds of one of its weights, where ranks share them: all are split alike."""
    sizes: ScratchSizes

    @property
    def programs(self) -> int:
        """Programs of a projection: as many as the device runs at once."""
        return _multiprocessors(self.kind.device) * self.kind.tile.resident

    @property
    def lows_size(self) -> int:
        """Elements of one product for every program of a projection."""
        return self.programs * self.kind.tile.rank * self.kind.tile.channels if self.kind.mode == "gemm" else 0

    @property
    def shares_size(self) -> int:
        """Elements of all products, where other ranks have a share in them."""
        return self.sizes.shares * ranks_that_share(self.part) if self.part is not None else 0

    @property
    def scratch_key(self) -> tuple[Any, ...]:
        """Sizes and dtypes of its scratch: batches that agree in them can share it, one after the other."""
        dtypes = self.kind.grad, self.kind.scratch_basis
        return self.kind.device, dtypes, self.sizes, self.lows_size, self.shares_size, self.directions_shape

    @property
    def directions_shape(self) -> tuple[int, ...]:
        """Shape of what is orthogonalised, of all matrices together."""
        return (0,) if self.kind.sides is None else (len(self.matrices), *self.kind.sides)

    @property
    def multiplied_at_once(self) -> int:
        """Matrices whose products are made in one call: all of them, unless a weight has very many experts."""
        return max(1, SPECTRAL_BYTES // _scratch_bytes(self.matrices[0]))

    @property
    def scratch_bytes(self) -> int:
        return 4 * self.lows_size + sum(map(_scratch_bytes, self.matrices))


def part_count(matrix: Matrix) -> int:
    """Partial sums per channel."""
    if matrix.kind.mode == "gemm":
        return -(-matrix.rank // matrix.kind.tile.rank)
    if matrix.kind.mode not in ("identity", "rank1"):
        return 0
    return 1 if matrix.channels_are_rows else min(MOST_PARTS, max(1, -(-matrix.side // LEAST_ROWS)))


def batches_of(jobs: Sequence[WeightStep]) -> list[KernelBatch]:
    """All weights in as few batches as their kinds and the scratch allow."""
    by_kind: dict[tuple[BatchKind, bool, Hashable], list[list[Matrix]]] = {}
    for job in jobs:
        kind = batch_kind_of(job)
        weight = [Matrix(job, kind, expert) for expert in range(job.matrix_count)]
        # Copies of gradients take most of the scratch, so weights that need one keep to themselves.
        padded = padded_elements(largest(weight[0])) > 0
        by_kind.setdefault((kind, padded, rank_groups_of(job)), []).append(weight)
    result: list[KernelBatch] = []
    for (kind, padded, _), weights in by_kind.items():
        limit = SPECTRAL_BYTES if kind.mode == "spectral" else PADDED_BYTES if padded else SCRATCH_BYTES
        chunk: list[list[Matrix]] = []
        used = 0
        for weight in weights:
            matrix = largest(weight[0])
            need = matrix.job.matrix_count * _scratch_bytes(matrix)
            if chunk and used + need > limit:
                result.append(_batch(kind, chunk))
                chunk = []
                used = 0
            chunk.append(weight)
            used += need
        result.append(_batch(kind, chunk))
    return result


def rank_groups_of(job: WeightStep) -> tuple[tuple[str, ...], ...]:
    """The groups of ranks that split what each letter of `distributed` stands for; none where ranks hold all of it."""
    if job.part is None or not job.part.is_split:
        return ()
    return tuple(tuple(axis.group.group_name for axis in job.part.axes(letter)) for letter in "WESCP")


def largest(matrix: Matrix) -> Matrix:
    """The matrix as the rank that holds most of the weight has it, by which all ranks form the same batches."""
    job = matrix.job
    if not job.is_split or job.part is None or job.part.matrix is None:
        return matrix
    return replace(matrix, job=replace(job, shape=job.part.largest_matrix))


def padded_elements(matrix: Matrix) -> int:
    """Elements of the copy that the tensor cores need of a gradient whose rows are not whole vectors."""
    rows, columns = matrix.sides
    wanted = matrix.kind.mode == "gemm" and matrix.kind.grad != torch.float32 and columns % 16 != 0
    return rows * -(-columns // 16) * 16 if wanted else 0


def _sizes_of(matrix: Matrix) -> ScratchSizes:
    """The scratch that a matrix takes; bases and sums in whole vectors, so that the next matrix is aligned too."""
    kind = matrix.kind
    return ScratchSizes(
        basis=kind.pieces * -(-matrix.rank * matrix.side // 16) * 16 if kind.has_bases else 0,
        padded=padded_elements(matrix),
        parts=-(-_partial_sums(matrix) // 64) * 16,
        gains=-(-_gain_count(matrix) // 16) * 16,
        blocks=block_count(matrix),
        shares=matrix.rank * matrix.chunk,
        kept_gains=matrix.chunk,
    )


def _scratch_bytes(matrix: Matrix) -> int:
    """Bytes that a matrix takes in all buffers, and in its products where it is orthogonalised."""
    kind = matrix.kind
    block_row = 4 * at.BLOCK_WIDTH.value * (2 if kind.shares_lows else 1)
    share = 4 * ranks_that_share(matrix.job.part) if kind.shares_lows and matrix.job.part is not None else 0
    itemsizes = kind.scratch_basis.itemsize, kind.grad.itemsize, 4 * 4, 4, block_row, share, 4
    held = sum(map(operator.mul, _sizes_of(matrix), itemsizes))
    if kind.sides is None:
        return held
    # The matrix and the next round's, twice where neither is whole vectors; products of its smaller side.
    copies = 2 if all(side % VECTOR == 0 for side in kind.sides) else 4
    squares = products_at_once(*kind.sides) * min(kind.sides) ** 2
    multiplied = (copies * matrix.size + squares) * kind.moved_by.itemsize
    if kind.low_rank:
        # While its momentum is followed: the direction, and what PyTorch makes of the momentum's numbers.
        followed = matrix.size * kind.moved_by.itemsize + FOLLOWED_BYTES * matrix.rank * sum(matrix.sides)
        multiplied = max(multiplied, followed)
    return held + multiplied


def block_count(matrix: Matrix) -> int:
    """Rows of a matrix in the table of block sums: one at least where there are any, for what ranks add up."""
    mode = matrix.kind.mode
    if mode in ("adamw", "rowwise"):
        return 0
    if mode == "spectral":
        return max(1, momentum_tiles(matrix))
    summed = matrix.sides[0] if mode == "factored" else matrix.channels
    return max(1, -(-summed // COMBINE_BLOCK))


def momentum_tiles(matrix: Matrix) -> int:
    """Programs that step a momentum in 4 bits."""
    return block_tiles(*matrix.sides)


def block_tiles(rows: int, columns: int) -> int:
    """Tiles of rows that are cut into blocks."""
    return -(-rows * -(-columns // BLOCK) // BLOCKS_OF_TILE.value)


def _gain_count(matrix: Matrix) -> int:
    """Numbers that scale or divide its update: one per channel or row, and of a factored weight one per column."""
    kind = matrix.kind
    if kind.mode == "spectral":
        return 2  # which bring a direction to norm 1, one after the other
    if kind.mode == "factored":
        return sum(matrix.sides)
    return matrix.channels if kind.channel else matrix.sides[0] if kind.mode == "rowwise" else 0


def factor_tiles(matrix: Matrix) -> tuple[int, int]:
    """Tiles of a factored weight, down its rows and across its columns."""
    rows, columns = matrix.sides
    return -(-rows // FACTOR_TILE[0]), -(-columns // FACTOR_TILE[1])


def _partial_sums(matrix: Matrix) -> int:
    """Partial sums of a matrix: four for each part of a channel, or those of the tiles of a factored weight."""
    if matrix.kind.mode != "factored":
        return 4 * matrix.channels * part_count(matrix)
    (rows, columns), (down, across) = matrix.sides, factor_tiles(matrix)
    return across * rows + down * columns + across * down


def _batch(kind: BatchKind, weights: list[list[Matrix]]) -> KernelBatch:
    matrices = [matrix for weight in weights for matrix in weight]
    sizes = zip(*map(_sizes_of, matrices), strict=True)
    *offsets, totals = zip(*(accumulate(each, initial=0) for each in sizes), strict=True)
    rows: list[list[int]] = []
    for weight in weights:
        first_row, blocks = len(rows), block_count(weight[0])
        for matrix in weight:
            row = matrix_row(matrix)
            for column, offset in zip(SCRATCH_COLUMNS, offsets[len(rows)], strict=True):
                row[column.value] = offset
            rows.append(row)
            row[at.BLOCK_COUNT.value] = blocks
            row[at.WEIGHT_BLOCKS.value] = rows[first_row][at.BLOCKS.value]
            row[at.WEIGHT_BLOCK_COUNT.value] = blocks * len(weight)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(kind.device)
    jobs = [weight[0].job for weight in weights]
    part = jobs[0].part if jobs[0].is_split else None
    return KernelBatch(kind, jobs, matrices, table, part, ScratchSizes(*totals))
