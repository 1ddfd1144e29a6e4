"""Which weights share a launch, and the tables that tell a kernel about them. Built once, while nothing changes.

A batch is a set of weights whose launches have the same compile-time facts. Its scratch is bounded: a model that would
need more is stepped in several batches.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant.blocks import BLOCK
from ...quant.int8 import Int8Weight
from ...quant.rounding import rounds
from ..job import Job
from .layout import (
    BASIS,
    BASIS_SCALE,
    BLOCK_COUNT,
    BLOCKS,
    CODE_SCALE,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    EXPERT,
    GAINS,
    HYPER,
    LAST_NORM,
    META_WIDTH,
    PADDED_GRAD,
    PART_COUNT,
    PARTS,
    RANK,
    ROWS,
    SCALE,
    SEED,
    STEP,
    WEIGHT_BLOCK_COUNT,
    WEIGHT_BLOCKS,
)

SCRATCH_BYTES = 56 * 2**20
"""Of one batch, bases and partial sums together."""

COMBINE_BLOCK = 1024
"""Channels per program when sums are combined."""

MOST_PARTS, LEAST_ROWS = 8, 32
"""Where channels are columns: into how many parts the contracted rows are cut, and how few a part may hold."""


class Kind(NamedTuple):
    """Compile-time facts that a batch shares."""

    mode: str
    """"adamw", "identity", "rank1" or "gemm"."""
    channel: bool
    limited: bool
    weight: torch.dtype
    """As it is stored: int8 too."""
    group: int
    """Elements of a row that are stepped together, because they share a scale; 0 where none do."""
    grad: torch.dtype
    moments: torch.dtype
    momentum: bool
    by_row: bool
    """Whether the second moment is one number per row."""
    stochastic: bool
    capturable: bool
    device: torch.device


def kind_of(job: Job) -> Kind:
    if job.shape is None:
        mode = "adamw"
    elif job.rule.projection == "identity" or job.shape.full_rank:
        mode = "identity"
    else:
        mode = "rank1" if job.shape.rank == 1 else "gemm"
    return Kind(
        mode=mode,
        channel=mode != "adamw" and job.rule.granularity == "channel",
        limited=mode != "adamw" and job.rule.limits_growth,
        weight=job.stored.dtype,
        group=job.group_size,
        grad=job.grad.dtype,
        moments=job.state["exp_avg"].dtype if "exp_avg" in job.state else torch.float32,
        momentum="exp_avg" in job.state,
        by_row=job.by_row,
        stochastic=(rounds(job.stored.dtype) or job.stored.dtype == torch.int8)
        and job.group["rounding"] == "stochastic",
        capturable=job.group["capturable"],
        device=job.weight.device,
    )


class Block(NamedTuple):
    """Rank, channels and contracted side of one projection tile, and how it is compiled."""

    rank: int
    channels: int
    side: int
    warps: int
    stages: int


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have on this card."""
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute] (not in torch's stubs)


def gemm_block(rank: int, grad: torch.dtype, device: torch.device) -> Block:
    """The projection's tile: as tall as the rank allows, within the registers and shared memory of the card."""
    tall = min(128, max(16, 2 ** math.ceil(math.log2(rank))))
    if grad == torch.float32:
        return Block(min(tall, 64), 64, 32, 4, 2)
    roomy = device.type == "cuda" and _shared_memory(device) > 128 * 1024
    return Block(tall, 128, 64, 8 if tall == 128 else 4, 4 if roomy else 2)


@dataclass(frozen=True)
class Matrix:
    """One matrix of a weight: the weight itself, or one of its experts."""

    job: Job
    expert: int
    hyper: int

    @property
    def sides(self) -> tuple[int, int]:
        if self.job.shape is None:
            columns = self.row_length
            return self.job.weight.numel() // columns, columns
        return self.job.shape.rows, self.job.shape.columns

    @property
    def row_length(self) -> int:
        """Of a weight that is not projected: rows matter only where something is shared along them."""
        shape = self.job.weight.shape
        if self.job.group_size == 0 or len(shape) < 2:
            return self.job.weight.numel()
        return math.prod(shape[1:]) if self.job.by_row else shape[-1]

    @property
    def size(self) -> int:
        return math.prod(self.sides)

    @property
    def rank(self) -> int:
        return 0 if self.job.shape is None else self.job.shape.rank

    @property
    def channels(self) -> int:
        return max(self.sides)

    @property
    def side(self) -> int:
        return min(self.sides)

    @property
    def channels_are_rows(self) -> bool:
        return self.job.shape is not None and self.job.shape.channels_are_rows


class Subset(NamedTuple):
    """Matrices of a batch that one launch can take: alike in orientation and alignment."""

    channels_are_rows: bool
    even: bool
    """Whether the projection's tiles divide the contracted side."""
    aligned: bool
    columns_aligned: bool
    side_aligned: bool
    channels_aligned: bool
    shared: bool
    """Whether two rows of 1024 elements of a tile share their random words."""


def subset_of(matrix: Matrix, block: Block, group: int) -> Subset:
    job = matrix.job
    _, columns = matrix.sides
    starts = [job.stored.data_ptr(), job.grad.data_ptr()]
    starts += [job.state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq") if name in job.state]
    expert_stride = matrix.size if job.shape is not None and job.shape.experts is not None else 0
    return Subset(
        channels_are_rows=matrix.channels_are_rows,
        even=block.side > 0 and matrix.side % block.side == 0,
        aligned=all(start % 16 == 0 for start in starts) and expert_stride % 16 == 0,
        columns_aligned=columns % 16 == 0,
        side_aligned=matrix.side % 16 == 0,
        channels_aligned=matrix.channels % 16 == 0,
        shared=expert_stride % 2048 == 0 and (group == 0 or columns % group == 0),
    )


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

    @property
    def scratch_bytes(self) -> int:
        return sum(_scratch_bytes(self.kind, self.block, matrix) for matrix in self.matrices)

    def part_count(self, matrix: Matrix) -> int:
        """Partial sums per channel."""
        return part_count(self.kind, matrix, self.block)


def part_count(kind: Kind, matrix: Matrix, block: Block) -> int:
    if kind.mode == "gemm":
        return -(-matrix.rank // block.rank)
    if kind.mode == "adamw" or matrix.channels_are_rows:
        return 1
    return min(MOST_PARTS, -(-matrix.side // LEAST_ROWS))


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def batches(jobs: Sequence[Job], hyper_of: Sequence[int]) -> list[Batch]:
    """All jobs in as few batches as their kinds and the scratch allow; `hyper_of` is each job's row of numbers."""
    by_kind: dict[tuple[Kind, Block, bool], list[list[Matrix]]] = {}
    for job, hyper in zip(jobs, hyper_of, strict=True):
        kind = kind_of(job)
        rank = 0 if job.shape is None else job.shape.rank
        block = gemm_block(rank, kind.grad, kind.device) if kind.mode == "gemm" else Block(0, 0, 0, 4, 1)
        experts = 1 if job.shape is None else job.shape.experts or 1
        weight = [Matrix(job, expert, hyper) for expert in range(experts)]
        # Copies of gradients take most of the scratch, so weights that need one keep to themselves.
        by_kind.setdefault((kind, block, padded_elements(kind, weight[0]) > 0), []).append(weight)
    result = []
    for (kind, block, _), weights in by_kind.items():
        chunk: list[list[Matrix]] = []
        used = 0
        for weight in weights:
            need = sum(_scratch_bytes(kind, block, matrix) for matrix in weight)
            if chunk and used + need > SCRATCH_BYTES:
                result.append(_batch(kind, block, chunk))
                chunk, used = [], 0
            chunk.append(weight)
            used += need
        result.append(_batch(kind, block, chunk))
    return result


def padded_elements(kind: Kind, matrix: Matrix) -> int:
    """Elements of the copy that the tensor cores need of a gradient whose rows are not whole vectors."""
    rows, columns = matrix.sides
    wanted = kind.mode == "gemm" and kind.grad != torch.float32 and columns % 16 != 0
    return rows * -(-columns // 16) * 16 if wanted else 0


def _scratch_bytes(kind: Kind, block: Block, matrix: Matrix) -> int:
    if kind.mode == "adamw":
        return 4 * _gain_count(kind, matrix)
    basis = 0 if kind.mode == "identity" else matrix.rank * matrix.side * kind.grad.itemsize
    padded = padded_elements(kind, matrix) * kind.grad.itemsize
    return basis + padded + 4 * matrix.channels * (4 * part_count(kind, matrix, block) + kind.channel)


def _gain_count(kind: Kind, matrix: Matrix) -> int:
    """Factors of a gradient or a momentum, one per channel or row."""
    return matrix.channels if kind.channel else matrix.sides[0] if kind.by_row else 0


def _batch(kind: Kind, block: Block, weights: list[list[Matrix]]) -> Batch:
    matrices = [matrix for weight in weights for matrix in weight]
    rows = []
    basis = padded = parts = gains = blocks = 0
    for weight in weights:
        weight_blocks = blocks
        per_matrix = -(-weight[0].channels // COMBINE_BLOCK)
        for matrix in weight:
            row = _meta_row(kind, matrix)
            row[BASIS.value], row[PARTS.value], row[GAINS.value], row[BLOCKS.value] = basis, parts, gains, blocks
            row[PADDED_GRAD.value] = padded
            row[PART_COUNT.value] = part_count(kind, matrix, block)
            row[BLOCK_COUNT.value] = per_matrix
            row[WEIGHT_BLOCKS.value], row[WEIGHT_BLOCK_COUNT.value] = weight_blocks, per_matrix * len(weight)
            rows.append(row)
            if kind.mode != "adamw":
                # Whole vectors, so that an aligned load of one matrix's basis stays aligned after another's.
                basis += 0 if kind.mode == "identity" else -(-matrix.rank * matrix.side // 16) * 16
                padded += padded_elements(kind, matrix)
                parts += -(-matrix.channels * row[PART_COUNT.value] // 16) * 16
                blocks += per_matrix
            gains += -(-_gain_count(kind, matrix) // 16) * 16
    subsets: dict[Subset, list[int]] = {}
    for number, matrix in enumerate(matrices):
        subsets.setdefault(subset_of(matrix, block, kind.group), []).append(number)
    metas = torch.tensor(rows, dtype=torch.int64, device="cpu").to(kind.device)
    return Batch(kind, matrices, block, metas, subsets, basis, padded, parts, gains, blocks)


def _meta_row(kind: Kind, matrix: Matrix) -> list[int]:
    job, state = matrix.job, matrix.job.state
    moments = 0 if job.shape is None else matrix.expert * matrix.rank * matrix.channels * kind.moments.itemsize
    row = [0] * META_WIDTH.value
    row[EXP_AVG.value] = state["exp_avg"].data_ptr() + moments if kind.momentum else 0
    row[EXP_AVG_SQ.value] = state["exp_avg_sq"].data_ptr() + moments
    scales = 0 if job.shape is None else matrix.expert * matrix.rank * -(-matrix.channels // BLOCK) * 4
    for column, name in ((EXP_AVG_SCALE, "exp_avg_scale"), (EXP_AVG_SQ_SCALE, "exp_avg_sq_scale")):
        row[column.value] = state[name].data_ptr() + scales if name in state else 0
    if kind.limited:
        row[LAST_NORM.value] = state["last_norm"].data_ptr() + matrix.expert * state["last_norm"].element_size()
    if isinstance(job.weight, Int8Weight):
        row[CODE_SCALE.value] = job.weight.scale.data_ptr()
    row[STEP.value] = state["step"].data_ptr() if kind.capturable else 0
    row[SEED.value] = int(state["seed"])
    row[EXPERT.value] = matrix.expert
    row[ROWS.value], row[COLUMNS.value] = matrix.sides
    row[RANK.value] = matrix.rank
    row[HYPER.value] = matrix.hyper
    if job.shape is not None:
        row[SCALE.value] = _float_bits(job.scale)
        row[BASIS_SCALE.value] = _float_bits(job.shape.rank**-0.5)
    return row
