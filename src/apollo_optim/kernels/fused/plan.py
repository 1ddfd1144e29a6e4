"""Which weights share a launch, and the tables that tell a kernel about them. Built once, while nothing changes.

A batch is a set of weights whose launches have the same compile-time facts. Its scratch is bounded: a model that would
need more is stepped in several batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...distributed import Part
from ...stepping.weight import Job
from . import layout as at
from .matrix import Kind, Matrix, Subset, basis_elements, kind_of, subset_of
from .metas import meta_row
from .place import ranks_that_share
from .tile import Block, gemm_block

SCRATCH_BYTES = 40 * 2**20
"""Of one batch, bases and partial sums together."""

PADDED_BYTES = 80 * 2**20
"""Of one batch whose gradients must be copied to whole vectors: below this, too few tiles would share a launch."""

COMBINE_BLOCK = 1024
"""Channels per program when sums are combined."""

MOST_PARTS, LEAST_ROWS = 8, 32
"""Where channels are columns: into how many parts the contracted rows are cut, and how few a part may hold."""


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


@dataclass
class Batch:
    """Matrices that go through the same launches, with the tables for them."""

    kind: Kind
    matrices: list[Matrix]
    block: Block
    metas: Tensor
    subsets: dict[Subset, list[int]]
    basis_size: int
    padded_size: int
    parts_size: int
    gains_size: int
    blocks_size: int
    counts: list[int]
    """Matrices of each weight."""
    part: Part | None
    """How its weights are spread over ranks, where they are: all of them alike, so one of them stands for all."""
    shares_length: int
    """Elements of low-rank gradients that this rank keeps where ranks share them out, a short last chunk filled up."""
    kept_gains_size: int

    @property
    def programs(self) -> int:
        """Of a projection: as many as the device runs at once."""
        return _multiprocessors(self.kind.device) * self.block.resident

    @property
    def lows_size(self) -> int:
        """Elements of one product for every program of a projection."""
        return self.programs * self.block.rank * self.block.channels if self.kind.mode == "gemm" else 0

    @property
    def shares_size(self) -> int:
        """Elements of all products, where other ranks have a share in them."""
        return self.shares_length * ranks_that_share(self.part) if self.part is not None else 0

    @property
    def scratch_sizes(self) -> tuple[Any, ...]:
        """What decides its scratch: batches that are alike in it can use the same, one after the other."""
        sizes = self.basis_size, self.padded_size, self.lows_size, self.shares_size, self.parts_size, self.gains_size
        return self.kind.device, self.kind.grad, self.kind.scratch_basis, *sizes, self.blocks_size

    @property
    def scratch_bytes(self) -> int:
        return 4 * self.lows_size + sum(_scratch_bytes(self.kind, self.block, matrix) for matrix in self.matrices)

    @property
    def exchanges_lows(self) -> bool:
        """Whether a rank has only a share in each low-rank gradient."""
        return self.part is not None and sums_over_side(self.kind, self.part)

    def part_count(self, matrix: Matrix) -> int:
        """Partial sums per channel."""
        return part_count(self.kind, matrix, self.block)


def part_count(kind: Kind, matrix: Matrix, block: Block) -> int:
    if kind.mode == "gemm":
        return -(-matrix.rank // block.rank)
    if kind.mode == "adamw" or matrix.channels_are_rows:
        return 1
    return min(MOST_PARTS, max(1, -(-matrix.side // LEAST_ROWS)))


def sums_over_side(kind: Kind, part: Part) -> bool:
    """Whether a low-rank gradient is a sum of what several ranks have of it."""
    return kind.mode in ("rank1", "gemm") and bool(part.axes("S"))


def batches(jobs: Sequence[Job], hyper_of: Sequence[int]) -> list[Batch]:
    """All jobs in as few batches as their kinds and the scratch allow; `hyper_of` is each job's row of numbers."""
    by_kind: dict[tuple[Kind, Block, bool, Layout], list[list[Matrix]]] = {}
    for job, hyper in zip(jobs, hyper_of, strict=True):
        kind = kind_of(job)
        if kind.mode == "gemm" and job.shape is not None:
            block = gemm_block(job.shape.rank, job.shape.global_shape.side, kind)
        else:
            block = Block(0, 0, 0, 4, 1)
        # Of no experts at all, there is one matrix to stand in.
        experts = 1 if job.shape is None else job.shape.experts or 1
        weight = [Matrix(job, expert, hyper) for expert in range(experts)]
        # Copies of gradients take most of the scratch, so weights that need one keep to themselves.
        padded = padded_elements(kind, largest(weight[0])) > 0
        by_kind.setdefault((kind, block, padded, layout_of(job)), []).append(weight)
    result = []
    for (kind, block, padded, _), weights in by_kind.items():
        limit = PADDED_BYTES if padded else SCRATCH_BYTES
        chunk: list[list[Matrix]] = []
        used = 0
        for weight in weights:
            matrix = largest(weight[0])
            experts = 1 if matrix.job.shape is None else matrix.job.shape.experts or 1
            need = experts * _scratch_bytes(kind, block, matrix)
            if chunk and used + need > limit:
                result.append(_batch(kind, block, chunk))
                chunk, used = [], 0
            chunk.append(weight)
            used += need
        result.append(_batch(kind, block, chunk))
    return result


Layout = tuple[tuple[str, ...], ...]
"""The groups of ranks that split what each letter of `distributed` stands for."""


def layout_of(job: Job) -> Layout:
    """Those of a weight; nothing where a rank holds all of it."""
    if job.part is None or not job.part.is_split:
        return ()
    return tuple(tuple(axis.group.group_name for axis in job.part.axes(letter)) for letter in "WESCP")


def largest(matrix: Matrix) -> Matrix:
    """The part of the rank with most of the weight: ranks form their batches by it, so that all form the same."""
    job = matrix.job
    if not job.is_split or job.part is None or job.part.matrix is None:
        return matrix
    return replace(matrix, job=replace(job, shape=job.part.largest_matrix))


def padded_elements(kind: Kind, matrix: Matrix) -> int:
    """Elements of the copy that the tensor cores need of a gradient whose rows are not whole vectors."""
    rows, columns = matrix.sides
    wanted = kind.mode == "gemm" and kind.grad != torch.float32 and columns % 16 != 0
    return rows * -(-columns // 16) * 16 if wanted else 0


def _scratch_bytes(kind: Kind, block: Block, matrix: Matrix) -> int:
    if kind.mode == "adamw":
        return 4 * _gain_count(kind, matrix)
    basis = basis_elements(kind, matrix) * kind.scratch_basis.itemsize
    padded = padded_elements(kind, matrix) * kind.grad.itemsize
    part = matrix.job.part
    lows = matrix.rank if part is not None and sums_over_side(kind, part) else 0
    return basis + padded + 4 * matrix.channels * (4 * part_count(kind, matrix, block) + kind.channel + lows)


def block_count(matrix: Matrix) -> int:
    """Rows of a matrix in the table of block sums: one at least, for what ranks add up."""
    return max(1, -(-matrix.channels // COMBINE_BLOCK))


def _gain_count(kind: Kind, matrix: Matrix) -> int:
    """Factors of a gradient or a momentum, one per channel or row."""
    return matrix.channels if kind.channel else matrix.sides[0] if kind.by_row else 0


def _batch(kind: Kind, block: Block, weights: list[list[Matrix]]) -> Batch:
    matrices = [matrix for weight in weights for matrix in weight]
    rows = []
    basis = padded = parts = gains = blocks = shares = kept_gains = 0
    part = weights[0][0].job.part if weights[0][0].job.is_split else None
    exchanges = part is not None and sums_over_side(kind, part)
    for weight in weights:
        weight_blocks = blocks
        per_matrix = block_count(weight[0])
        for matrix in weight:
            row = meta_row(kind, matrix)
            row[at.BASIS.value], row[at.PARTS.value], row[at.GAINS.value], row[at.BLOCKS.value] = (
                basis,
                parts,
                gains,
                blocks,
            )
            row[at.PADDED_GRAD.value] = padded
            row[at.PART_COUNT.value] = part_count(kind, matrix, block)
            row[at.BLOCK_COUNT.value] = per_matrix
            row[at.WEIGHT_BLOCKS.value], row[at.WEIGHT_BLOCK_COUNT.value] = weight_blocks, per_matrix * len(weight)
            if exchanges:
                row[at.CHUNK.value], row[at.SHARES.value], row[at.KEPT_GAINS.value] = matrix.chunk, shares, kept_gains
                shares += matrix.rank * matrix.chunk
                kept_gains += matrix.chunk
            rows.append(row)
            if kind.mode != "adamw":
                basis += basis_elements(kind, matrix)
                padded += padded_elements(kind, matrix)
                parts += -(-matrix.channels * row[at.PART_COUNT.value] // 16) * 16
                blocks += per_matrix
            gains += -(-_gain_count(kind, matrix) // 16) * 16
    subsets: dict[Subset, list[int]] = {}
    for number, matrix in enumerate(matrices):
        subsets.setdefault(subset_of(matrix, block.side, kind.group), []).append(number)
    metas = torch.tensor(rows, dtype=torch.int64, device="cpu").to(kind.device)
    counts = [len(weight) for weight in weights]
    return Batch(
        kind=kind,
        matrices=matrices,
        block=block,
        metas=metas,
        subsets=subsets,
        basis_size=basis,
        padded_size=padded,
        parts_size=parts,
        gains_size=gains,
        blocks_size=blocks,
        counts=counts,
        part=part,
        shares_length=shares,
        kept_gains_size=kept_gains,
    )
