"""One matrix of a weight as a kernel sees it, and the facts by which it shares a launch with others."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..core.orthogonal import product_dtype
from ..core.shape import MatrixShape
from ..distributed import Part
from ..quant.rounding import rounds
from ..stepping.weight import WeightStep


class Offsets(NamedTuple):
    """Offsets of a matrix in the whole weight, from which kernels compute global rows, columns and positions."""

    first: int
    """Position of the first element in the whole weight, flattened."""
    pitch: int
    """Elements from one row to the next in the whole weight."""
    expert: int = 0
    first_side: int = 0
    """First row of the contracted side."""
    all_channels: int = 0
    kept: int = 0
    """Channels whose moments this rank keeps."""
    first_kept: int = 0
    first_moment_row: int = 0


def _first_and_pitch(part: Part, dim: int) -> tuple[int, int]:
    """First element of a part in the whole matrix whose rows are dimension `dim`, and the length of its rows."""
    pitch = math.prod(part.shape[dim + 1 :])
    column = part.ranges[dim + 1][0] * math.prod(part.shape[dim + 2 :])
    return part.ranges[dim][0] * pitch + column, pitch


def ranks_that_share(part: Part) -> int:
    """Number of ranks that share out the moments of this rank's channels."""
    return math.prod(axis.size for axis in part.axes("S")) if part.moments_are_shared_out else 1


PIECES = {torch.float32: 1, torch.bfloat16: 3, torch.float16: 2}
"""Numbers of each dtype that add up to a float32: bfloat16 exactly, float16 but for the last two bits."""


REGISTERS = 65536
"""Registers of one multiprocessor."""

MOST_REGISTERS, UPDATE_REGISTERS = 216, 40
"""Registers of a thread that projects or updates: eight warps of one leave room for two programs of the other."""

SMALL_SIDE = 1024
"""Contracted elements up to which small tiles are faster, on one H200."""


class GemmTile(NamedTuple):
    """Rank, channels and contracted side of one projection tile, and how it is compiled."""

    rank: int
    channels: int
    side: int
    warps: int
    stages: int
    resident: int = 1
    """Programs that share a multiprocessor, so that one computes while another waits for memory."""

    @property
    def options(self) -> dict[str, int]:
        """Options by which Triton compiles it: programs on one multiprocessor share its registers."""
        registers = min(MOST_REGISTERS, REGISTERS // (32 * self.warps * self.resident))
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": registers}


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have on this card, or none where there is no card."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute] (not in torch's stubs)


def gemm_tile(rank: int, side: int, grad: torch.dtype, moments: torch.dtype, device: torch.device) -> GemmTile:
    """The projection's tile: as tall as the rank allows, within the registers and shared memory of the card.

    It follows from the whole weight's own shape, so that no result depends on the company or the part that it is in.
    """
    tall = min(128, max(16, 2 ** math.ceil(math.log2(rank))))
    if grad == torch.float32:
        # Moments in 8 bits need whole blocks of channels.
        return (
            GemmTile(min(tall, 32), 128, 32, 4, 2) if moments == torch.int8 else GemmTile(min(tall, 64), 64, 32, 4, 2)
        )
    shared = shared_memory(device)
    if side <= SMALL_SIDE and shared > 200 * 1024 and moments != torch.int8:
        # The product of a tile is soon done and its moments are not, so that many programs must have something to do.
        return GemmTile(min(tall, 64), 64, 64, 4, 3, resident=4)
    if rank >= 256 and shared > 200 * 1024:
        # A larger tile reads the gradient from the L2 cache less often, which is what bounds the smaller ones.
        return GemmTile(256, 128, 64, 8, 4)
    warps = 8 if tall == 128 else 4
    if shared > 200 * 1024:
        return GemmTile(tall, 128, 64, warps, 3, resident=2)
    return GemmTile(tall, 128, 64, warps, 4 if shared > 128 * 1024 else 2)


class BatchKind(NamedTuple):
    """Compile-time facts that a batch shares."""

    mode: str
    """The kernels that step it: "adamw", "rowwise", "factored", "identity", "rank1", "gemm" or "spectral"."""
    channel: bool
    limited: bool
    weight: torch.dtype
    """The dtype in which it is stored: int8 too."""
    group_size: int
    """Elements of a row that are stepped together, because they share a scale; 0 where none do."""
    grad: torch.dtype
    moments: torch.dtype
    momentum: bool
    """True if kernels keep a first moment."""
    stochastic: bool
    capturable: bool
    basis: torch.dtype | None
    """Dtype of bases kept in state; None where they are made from seeds, or there are none."""
    device: torch.device
    shares_lows: bool
    """True if a low-rank gradient is a sum of what several ranks have of it."""
    sides: tuple[int, int] | None
    """Rows and columns that all of its matrices have, where they are multiplied together; None unless spectral."""
    tile: GemmTile
    """The projection's, where basis and gradient are multiplied as matrices."""
    low_rank: int | None
    """Rank of the momenta of low rank that plain PyTorch follows between launches, one for all; None without such."""

    @property
    def is_projected(self) -> bool:
        """True if this is neither AdamW nor AdamW with another second moment."""
        return self.mode not in ("adamw", "rowwise", "factored")

    @property
    def has_bases(self) -> bool:
        """True if gradients are multiplied by bases, which lie in the scratch."""
        return self.mode in ("rank1", "gemm")

    @property
    def moved_by(self) -> torch.dtype:
        """Dtype of what a weight is moved by: its gradient, or what products have made of it."""
        return product_dtype(torch.float32, self.device) if self.mode == "spectral" else self.grad

    @property
    def pieces(self) -> int:
        """Numbers of the gradient's dtype that an entry of a basis is cut into: tensor cores take no wider ones."""
        return PIECES[self.grad] if self.mode == "gemm" and self.basis == torch.float32 else 1

    @property
    def scratch_basis(self) -> torch.dtype:
        """Dtype of bases in the scratch: the gradient's own where both go to the tensor cores."""
        return self.basis if self.mode == "rank1" and self.basis is not None else self.grad


def batch_kind_of(job: WeightStep) -> BatchKind:
    if job.shape is None:
        mode = "rowwise" if job.by_row else "factored" if job.by_factors else "adamw"
    elif job.rule.is_spectral:
        mode = "spectral"
    elif job.rule.projection == "identity" or job.shape.full_rank:
        mode = "identity"
    else:
        mode = "rank1" if job.shape.rank == 1 else "gemm"
    low_rank = job.shape.rank if job.shape is not None and job.rule.is_spectral and "basis" in job.state else None
    moments = job.state["exp_avg"].dtype if "exp_avg" in job.state else torch.float32
    tile = GemmTile(0, 0, 0, 4, 1)
    if mode == "gemm" and job.shape is not None:
        tile = gemm_tile(job.shape.rank, job.shape.global_shape.side, job.grad.dtype, moments, job.weight.device)
    return BatchKind(
        mode=mode,
        channel=job.rule.granularity == "channel",
        limited=job.rule.limits_growth,
        weight=job.stored.dtype,
        group_size=job.group_size,
        grad=job.grad.dtype,
        moments=moments,
        momentum="exp_avg" in job.state and low_rank is None,
        stochastic=(rounds(job.stored.dtype) or job.stored.dtype == torch.int8)
        and job.group["rounding"] == "stochastic",
        capturable=job.group["capturable"],
        basis=job.state["basis"].dtype if "basis" in job.state else None,
        device=job.weight.device,
        shares_lows=mode in ("rank1", "gemm") and job.part is not None and bool(job.part.axes("S")),
        sides=(job.shape.rows, job.shape.columns) if job.rule.is_spectral and job.shape is not None else None,
        tile=tile,
        low_rank=low_rank,
    )


class MatrixFacts(NamedTuple):
    """Facts of a matrix that kernels are compiled for, called as their constants are, but in small letters."""

    channels_are_rows: bool
    even: bool
    """True if the projection's tiles divide the contracted side."""
    aligned: bool
    columns_aligned: bool
    side_aligned: bool
    channels_aligned: bool
    moments_aligned: bool
    """True if every row of the moments begins at a whole vector."""
    shared: bool
    """True if two rows of 1024 elements of a tile share their random words; they then are whole groups, too."""
    strided: bool
    """True if rows lie apart in the whole weight."""
    part: bool
    """True if other ranks hold other parts of the weight."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a weight, or this rank's part of it: the weight itself, or one of its experts.

    A rank that holds none of a weight's experts has one matrix without elements in their stead.
    """

    job: WeightStep
    kind: BatchKind
    expert: int
    """Its number among this rank's experts."""

    @property
    def sides(self) -> tuple[int, int]:
        if self.job.shape is None:
            if self.job.by_factors:
                rows, *columns = self.job.weight.shape
                return rows, math.prod(columns)  # a rank without rows keeps second moments of columns all the same
            columns = max(1, self.row_length)
            return self.job.weight.numel() // columns, columns
        return (0, 0) if self.stands_in else (self.job.shape.rows, self.job.shape.columns)

    @property
    def whole(self) -> MatrixShape | None:
        """All of a matrix that ranks have parts of; None of others, and where nothing but elements is stepped."""
        return None if self.job.part is None else self.job.part.matrix

    @property
    def is_tall(self) -> bool:
        """True if the whole weight has at least as many rows as columns."""
        return self.sides[0] >= self.sides[1] if self.whole is None else self.whole.channels_are_rows

    @property
    def stands_in(self) -> bool:
        """True if it is there only for the weight to be counted."""
        return self.job.shape is not None and self.job.shape.experts == 0

    @property
    def row_length(self) -> int:
        """Row length of a weight that is not projected; all of it, unless rows share something or lie apart."""
        shape = self.job.weight.shape
        if len(shape) < 2 or (self.job.group_size == 0 and not self.job.is_split):
            return self.job.weight.numel()
        whole_rows = self.job.by_row or self.job.is_split
        return math.prod(shape[1:]) if whole_rows else shape[-1]

    @cached_property
    def offsets(self) -> Offsets:
        shape, part, columns = self.job.shape, self.job.part, self.sides[1]
        if part is None or not part.is_split:
            channels = 0 if shape is None else shape.channels
            return Offsets(self.expert * self.size, columns, expert=self.expert, all_channels=channels, kept=channels)
        if part.matrix is None or shape is None:
            return Offsets(part.ranges[0][0], columns) if len(part.shape) == 1 else Offsets(*_first_and_pitch(part, 0))
        expert = shape.first_expert + self.expert
        first, pitch = _first_and_pitch(part, len(part.matrix.batch))
        first += expert * part.matrix.rows * part.matrix.columns
        (first_row, _), (first_kept, end) = part.state_ranges("exp_avg")[-2:]
        return Offsets(
            first, pitch, expert=expert, first_side=shape.first_side, all_channels=part.matrix.channels,
            kept=end - first_kept, first_kept=first_kept, first_moment_row=first_row,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return math.prod(self.sides)

    @property
    def rank(self) -> int:
        return 0 if self.job.shape is None else self.job.shape.rank

    @property
    def channels(self) -> int:
        return self.sides[0 if self.channels_are_rows else 1]

    @property
    def side(self) -> int:
        return self.sides[1 if self.channels_are_rows else 0]

    @property
    def kept(self) -> int:
        """Channels whose moments this rank keeps."""
        return 0 if self.stands_in else self.offsets.kept

    @property
    def chunk(self) -> int:
        """Channels that a rank keeps of those that ranks share out, the last one fewer; 0 where they share none."""
        if not self.kind.shares_lows:
            return 0
        assert self.job.part is not None
        return -(-self.channels // ranks_that_share(self.job.part))

    @property
    def moment_pitch(self) -> int:
        """Elements from one row of its moments to the next."""
        if self.rank <= 1 or self.job.rule.is_spectral:
            return self.kept
        return self.job.state["exp_avg_sq"].stride(-2)

    @property
    def channels_are_rows(self) -> bool:
        return self.job.shape is not None and self.job.shape.channels_are_rows

    @cached_property
    def facts(self) -> MatrixFacts:
        job, columns = self.job, self.sides[1]
        starts = [job.stored.data_ptr(), job.grad.data_ptr()]
        starts += [job.state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq") if name in job.state]
        expert_stride = self.size if job.shape is not None and job.shape.experts is not None else 0
        # What is multiplied together lies side by side, too, and two codes of it to a byte.
        apart, vector = (self.size, 32) if job.rule.is_spectral else (expert_stride, 16)
        strided = self.offsets.pitch != columns
        whole_pairs = not strided and (expert_stride | self.offsets.first) % 2048 == 0
        return MatrixFacts(
            channels_are_rows=self.channels_are_rows,
            even=self.kind.mode == "gemm" and self.side % self.kind.tile.side == 0,
            aligned=all(start % 16 == 0 for start in starts) and apart % vector == 0,
            columns_aligned=columns % 16 == 0,
            side_aligned=self.side % 16 == 0,
            channels_aligned=self.channels % 16 == 0,
            moments_aligned=self.moment_pitch % 16 == 0,
            shared=whole_pairs and (self.kind.group_size == 0 or columns % self.kind.group_size == 0),
            strided=strided,
            part=job.is_split,
        )
