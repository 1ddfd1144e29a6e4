"""The kernels that a batch goes through, in order, with everything but the step's own numbers already bound.

A kernel's signature says all that a launch of it needs, by name. An argument is one of the batch's tables, or a buffer
of its scratch; a constant, in capitals, is a fact of the batch or of its matrices, unless a launch gives it.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.orthogonal import orthogonalize_
from ..core.projection import LowRank
from ..core.random import NORMALS_PER_COUNTER, normal_table
from ..kernels import columns as at
from ..kernels.adamw import adamw_groups_kernel, adamw_kernel, finite_kernel, prepare_kernel, row_squares_kernel
from ..kernels.apply import PAIRED_TILE, apply_kernel
from ..kernels.factors import clip_kernel, factors_kernel, means_kernel, sizes_kernel, squares_kernel
from ..kernels.int8 import apply_int8_kernel
from ..kernels.limiter import combine_kernel, decide_kernel
from ..kernels.project import (
    normals_kernel,
    pad_kernel,
    project_kernel,
    reduce_columns_kernel,
    reduce_rows_kernel,
    stored_kernel,
)
from ..kernels.sharded import kept_kernel, moments_kernel, scaled_kernel, share_kernel
from ..kernels.spectral import keep_kernel, measure_kernel, momentum_kernel, settle_kernel, unit_kernel
from ..quant.blocks import code_levels
from ..quant.kernel import TRITON_TYPES
from ..stepping.spectral import Stack
from .batches import (
    COMBINE_BLOCK,
    KernelBatch,
    block_count,
    block_tiles,
    factor_tiles,
    momentum_tiles,
    padded_elements,
    part_count,
    tile_table,
)
from .matrix import UPDATE_REGISTERS, Matrix, MatrixFacts
from .products import inverse_factor, symmetric_product
from .streams import CompiledLaunch

K = TypeVar("K")

PAIRS = 4
"""Pairs of 1024 elements that one program of an element-wise kernel takes."""

PAD_BLOCK = 8, 512
NORMALS_BLOCK = 256
STORED_BLOCK = 1024
UNIT_BLOCK = 2048
SETTLE_BLOCK = 4096
DECIDE_BLOCK = 128
# Channels, contracted elements and warps per tile where every element has moments of its own, which take registers.
IDENTITY_ROWS_BLOCK = 32, 64, 4
IDENTITY_COLUMNS_BLOCK = 512, 4, 4
MOMENTS_BLOCK = 64
"""Channels per program that steps moments by themselves."""

AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}
"""No product and sum rounded as one: what is written back unchanged must be what was read, and equal the plain twin."""


class Scratch:
    """Buffers that a batch needs only between its own launches, named as the kernels' arguments."""

    def __init__(self, batch: KernelBatch):
        device, spread = batch.kind.device, batch.part is not None
        self.bytes = batch.scratch_bytes
        self.hypers: Tensor | None = None
        """The hyper-parameters of this step."""
        self.basis: Tensor | None = torch.empty(batch.sizes.basis, dtype=batch.kind.scratch_basis, device=device)
        self.padded: Tensor | None = torch.empty(batch.sizes.padded, dtype=batch.kind.grad, device=device)
        self.lows: Tensor | None = torch.empty(batch.lows_size, dtype=torch.float32, device=device)
        # Zero, because nothing is written where chunks of channels are filled up.
        self.shares: Tensor | None = torch.zeros(batch.shares_size, dtype=torch.float32, device=device)
        self.parts: Tensor | None = new_parts(batch)
        self.gains = torch.empty(batch.sizes.gains, dtype=torch.float32, device=device)
        # Of a batch that is spread over ranks: where ranks keep some channels each, rows for blocks of those follow;
        # and last a row that stays zero.
        rows = batch.sizes.blocks * (2 if batch.kind.shares_lows else 1) + spread
        self.blocks = torch.empty(rows, at.BLOCK_WIDTH.value, dtype=torch.float32, device=device)
        self.kept_blocks = self.blocks[batch.sizes.blocks :] if batch.kind.shares_lows else None
        self.kept_gains = torch.zeros(batch.sizes.kept_gains, dtype=torch.float32, device=device)
        self.directions = torch.empty(batch.directions_shape, dtype=batch.kind.moved_by, device=device)
        self.updates = self.directions
        """The directions once products have changed them, there or elsewhere."""
        self.low_rank: LowRank | None = None
        """Momentum of low rank after this step, of all matrices, until it is kept."""
        self.value: Tensor | None = None
        """The factor of it that is being kept."""
        self.moves: Tensor | None = None
        """Addresses of the weights and of their directions, where these are what weights are moved by."""
        self.low_sums: Tensor | None = None
        """Low-rank gradients of the channels that this rank keeps, once ranks have added them up."""
        self.all_gains: Tensor | None = None
        """The gains that each rank keeps, once ranks have exchanged them."""

    def end_projection_(self) -> None:
        """Free what only the projection reads."""
        self.basis = self.padded = self.lows = self.shares = None

    def end_sums_(self) -> None:
        """Free what only the sums over channels are made of."""
        self.end_projection_()
        self.parts = self.low_sums = self.all_gains = None


def new_parts(batch: KernelBatch) -> Tensor:
    """Memory for the partial sums of a batch."""
    return torch.empty(4 * batch.sizes.parts, dtype=torch.float32, device=batch.kind.device)


Launch = Callable[[Scratch], None]


class BatchLaunches:
    """All launches of one batch, by phase. Where its weights are spread over ranks, phases end where ranks exchange.

    Its matrices have these rows of the addresses and outcomes.
    """

    def __init__(
        self, batch: KernelBatch, addresses: Tensor, outcomes: Tensor, skipped: Tensor, scratch: Scratch | None
    ):
        """`scratch` is reused across steps; None when it is allocated per step."""
        self.batch, self.addresses, self.outcomes, self.scratch = batch, addresses, outcomes, scratch
        kind = batch.kind
        self._known: dict[str, Any] = {
            "matrix_table": batch.matrix_table, "addresses": addresses, "outcomes": outcomes, "skipped": skipped,
            "planes": batch.sizes.parts, "shares_length": batch.sizes.shares,
            "kept_gains_length": batch.sizes.kept_gains,
            "levels": nn.functional.pad(torch.cat(code_levels(torch.float32, kind.device)), (0, 1), value=2.0),
            "W": TRITON_TYPES[kind.weight], "G": TRITON_TYPES[kind.grad], "M": TRITON_TYPES[kind.moments],
            "CHANNEL": kind.channel, "LIMITED": kind.limited, "MOMENTUM": kind.momentum,
            "MEASURED": not kind.low_rank,
            "BY_ROW": kind.mode == "rowwise", "BY_FACTORS": kind.mode == "factored", "RANK1": kind.mode == "rank1",
            "IDENTITY": kind.mode == "identity", "SHARE": kind.shares_lows, "ROUND": kind.stochastic,
            "CAPTURABLE": kind.capturable, "SPREAD": batch.part is not None, "PIECES": kind.pieces,
            "N": kind.group_size, "PAIRS": PAIRS,
        }  # fmt: skip
        """Arguments that every kernel of the batch is given, at every step."""
        if kind.mode != "spectral":
            self._known["moves"] = addresses
        self.bases = self._normals() if kind.has_bases and kind.basis is None else []
        """Make the bases; none where state keeps them."""
        self.projections = self._reads_of_gradients()
        """Read the gradients, and step the moments of projected ones unless ranks must add up low-rank gradients."""
        self.moments = self._moments() if kind.shares_lows else []
        """Step the moments, once ranks have added up the low-rank gradients."""
        self.sums = self._sums()
        """Sum up over channels, once gains are known where other ranks keep some of them; of factored weights, find
        second moments and the size of the update, once ranks have added up their squares."""
        self.updates = self._updates()
        """Step the weights."""

    def project(self, hypers: Tensor, renews_bases: bool, own_scratch: bool = False) -> Scratch:
        """Begin a step, and launch the projections; bases are made first unless the scratch has them.

        Returns the scratch of this step: new where it is not kept, or where this step is to have its own.
        """
        scratch = Scratch(self.batch) if self.scratch is None or own_scratch else self.scratch
        scratch.hypers = hypers
        for launch in (*self.bases, *self.projections) if renews_bases else self.projections:
            launch(scratch)
        return scratch

    def update(self, scratch: Scratch) -> None:
        """Launch what steps the weights by what the projections have found."""
        for launch in (*self.sums, *self.updates):
            launch(scratch)

    def _launch(self, kernel: Any, programs: int, given: dict[str, Any], **arguments: Any) -> Launch:
        """A launch of a kernel; what is `given` and none of its arguments is an option of its compilation."""
        known = self._known | arguments | given
        names = [name for name in kernel.arg_names if not name.isupper()]
        fixed = [known.get(name) for name in names]
        of_scratch = [(place, name) for place, name in enumerate(names) if name not in known]
        constants = {name: known[name] for name in kernel.arg_names if name.isupper()}
        options = {name: value for name, value in given.items() if name not in kernel.arg_names}
        compiled = CompiledLaunch(kernel, programs, constants, **options)

        def launch(scratch: Scratch) -> None:
            values = fixed.copy()
            for place, name in of_scratch:
                values[place] = getattr(scratch, name)
            compiled(*values)

        return launch

    def _by_matrix(self, kernel: Any, **given: Any) -> Launch:
        """A launch of one program for each matrix."""
        return self._launch(kernel, len(self.batch.matrices), given)

    def _by_tile(
        self, kernel: Any, tile_count: Callable[[Matrix], int], numbers: Sequence[int] | None = None,
        backwards: bool = False, programs: int | None = None, **given: Any,
    ) -> list[Launch]:  # fmt: skip
        """Launches of a program for each tile of these matrices, or all; at most `programs`, which share the tiles.

        There is one launch for matrices that agree in what the kernel is compiled for.
        """
        facts = [name for name in kernel.arg_names if name.lower() in MatrixFacts._fields and name not in given]
        alike = self._numbers_by(lambda m: tuple(getattr(m.facts, name.lower()) for name in facts), numbers)
        launches = []
        for key, those in alike.items():
            counts = [(number, tile_count(self.batch.matrices[number])) for number in those]
            tiles = tile_table(counts, self.batch.kind.device)
            tiles = tiles.flip(0).contiguous() if backwards else tiles
            constants = given | dict(zip(facts, key, strict=True))
            count = len(tiles)
            launches.append(
                self._launch(kernel, min(count, programs or count), constants, tiles=tiles, tile_count=count)
            )
        return launches

    def _numbers_by(self, key: Callable[[Matrix], K], numbers: Sequence[int] | None = None) -> dict[K, list[int]]:
        """The numbers of the matrices, or of these, by what `key` says of each matrix."""
        found: dict[K, list[int]] = {}
        for number in range(len(self.batch.matrices)) if numbers is None else numbers:
            found.setdefault(key(self.batch.matrices[number]), []).append(number)
        return found

    def _normals(self) -> list[Launch]:
        def count(matrix: Matrix) -> int:
            return -(-matrix.rank // NORMALS_PER_COUNTER) * -(-matrix.side // NORMALS_BLOCK)

        normals = normal_table(self.batch.kind.device).to(self.batch.kind.grad)
        return self._by_tile(normals_kernel, count, normals=normals, BLOCK=NORMALS_BLOCK)

    def _reads_of_gradients(self) -> list[Launch]:
        kind = self.batch.kind
        if kind.mode == "spectral":
            return self._directions()
        if kind.mode == "factored":
            return self._squares()
        if kind.mode == "rowwise":
            return [self._by_matrix(prepare_kernel), *self._row_squares()]
        if kind.mode == "adamw":
            return [self._by_matrix(prepare_kernel), *self._by_tile(finite_kernel, counted_element_tiles)]
        return [*self._stored(), *(self._products() if kind.mode == "gemm" else self._reductions())]

    def _stored(self) -> list[Launch]:
        basis = self.batch.kind.basis
        if basis is None:
            return []
        # At every step, so that whoever writes to state is heeded.
        return self._by_tile(
            stored_kernel, lambda matrix: -(-matrix.rank * matrix.side // STORED_BLOCK),
            B=TRITON_TYPES[basis], BLOCK=STORED_BLOCK,
        )  # fmt: skip

    def _products(self) -> list[Launch]:
        rows, columns = PAD_BLOCK
        tile = self.batch.kind.tile
        given: dict[str, Any] = {"BLOCK_R": tile.rank, "BLOCK_C": tile.channels, "BLOCK_S": tile.side}
        given |= tile.options

        def copied_tiles(matrix: Matrix) -> int:
            return -(-matrix.sides[0] // rows) * -(-matrix.sides[1] // columns)

        def tiles(matrix: Matrix) -> int:
            return -(-matrix.channels // tile.channels) * part_count(matrix)

        padded = self._numbers_by(lambda matrix: padded_elements(matrix) > 0)
        copied, others = padded.get(True, []), padded.get(False, [])
        return [
            *self._by_tile(pad_kernel, copied_tiles, copied, BLOCK_R=rows, BLOCK_C=columns),
            *self._by_tile(project_kernel, tiles, copied, programs=self.batch.programs, PADDED=True, **given),
            *self._by_tile(project_kernel, tiles, others, programs=self.batch.programs, PADDED=False, **given),
        ]

    def _reductions(self) -> list[Launch]:
        # A matrix's block follows from its own shape, so that its sums do not depend on the rest of its batch.
        def block_of(matrix: Matrix) -> tuple[Any, tuple[int, int, int]]:
            rows = matrix.channels_are_rows
            kernel = reduce_rows_kernel if rows else reduce_columns_kernel
            if self.batch.kind.mode == "identity":
                return kernel, IDENTITY_ROWS_BLOCK if rows else IDENTITY_COLUMNS_BLOCK
            return kernel, reduction_block(matrix.side, rows, matrix.facts.columns_aligned)

        launches: list[Launch] = []
        for (kernel, (block_c, block_s, warps)), numbers in self._numbers_by(block_of).items():
            launches += self._by_tile(
                kernel, lambda m, width=block_c: -(-m.channels // width) * part_count(m), numbers,
                BLOCK_C=block_c, BLOCK_S=block_s, num_warps=warps,
            )  # fmt: skip
        if self.batch.kind.shares_lows:
            launches += self._by_channels(share_kernel)
        return launches

    def _by_channels(self, kernel: Any) -> list[Launch]:
        return self._by_tile(kernel, lambda matrix: -(-matrix.channels // COMBINE_BLOCK), BLOCK=COMBINE_BLOCK)

    def _sums(self) -> list[Launch]:
        kind = self.batch.kind
        if kind.mode == "factored":
            return self._factors()
        if not kind.is_projected or kind.mode == "spectral":
            return []
        return self._by_channels(scaled_kernel if kind.shares_lows else combine_kernel)

    def _updates(self) -> list[Launch]:
        kind = self.batch.kind
        if kind.mode == "spectral":
            return [self._orthogonalize, *self._applies()]
        if kind.is_projected:
            return [self._by_matrix(decide_kernel, BLOCK=DECIDE_BLOCK), *self._applies()]
        # Backwards, as in `_applies`.
        if kind.group_size == 0:
            return self._by_tile(adamw_kernel, counted_element_tiles, backwards=True)
        return self._by_tile(adamw_groups_kernel, self._group_tiles, backwards=True, **AS_WRITTEN)

    def _applies(self) -> list[Launch]:
        """Backwards, because the end of the gradients is what the projection has left in the L2 cache."""
        kind = self.batch.kind
        given: dict[str, Any] = {"G": TRITON_TYPES[kind.moved_by]}
        if kind.group_size > 0:
            # One gain for the tensor needs neither rows nor columns, so all shapes share a launch.
            given |= {} if kind.channel else {"CHANNELS_ARE_ROWS": False}
            return self._by_tile(apply_int8_kernel, self._group_tiles, backwards=True, **given, **AS_WRITTEN)
        given |= {} if kind.channel else {"CHANNELS_ARE_ROWS": False, "COLUMNS_ALIGNED": False}
        # One batch is updated while the next is projected, beside it where there are registers for both. Other weights
        # than these would have to keep some of theirs in memory.
        few_suffice = kind.mode == "gemm" and kind.weight == torch.bfloat16
        beside = self._numbers_by(lambda m: few_suffice and m.facts.aligned and not m.facts.strided)
        few, others = beside.get(True, []), beside.get(False, [])
        return [
            *self._by_tile(apply_kernel, element_tiles, few, backwards=True, maxnreg=UPDATE_REGISTERS, **given),
            *self._by_tile(apply_kernel, element_tiles, others, backwards=True, **given),
        ]

    def _group_tiles(self, matrix: Matrix) -> int:
        """Programs that a kernel of whole groups needs for a matrix, at least one as in `counted_element_tiles`."""
        rows, columns = matrix.sides
        group = self.batch.kind.group_size
        return max(1, -(-rows * -(-columns // group) * group // (PAIRS * PAIRED_TILE.value)))

    def _directions(self) -> list[Launch]:
        """Compute the directions to be orthogonalised, of norm 1, and keep the momentum."""
        launches = self._by_tile(momentum_kernel, momentum_tiles, **AS_WRITTEN)
        # Whether the directions of all matrices begin at whole vectors.
        aligned = all(matrix.size % 16 == 0 for matrix in self.batch.matrices)
        if self.batch.kind.low_rank:
            launches += [self._low_rank(), *self._by_tile(measure_kernel, momentum_tiles, ALIGNED=aligned)]
        launches.append(self._by_matrix(settle_kernel, BLOCK=SETTLE_BLOCK, num_warps=16))
        if self.batch.kind.basis is not None:
            launches.append(self._keep(self.batch.kind.basis))
        return [
            *launches,
            *self._by_tile(unit_kernel, lambda m: -(-m.size // UNIT_BLOCK), ALIGNED=aligned, BLOCK=UNIT_BLOCK),
        ]

    def _low_rank(self) -> Launch:
        """Directions along a momentum of low rank: few numbers, which plain PyTorch follows."""
        by_shape = groupby(self.batch.jobs, lambda job: (id(job.group), job.weight.shape))
        stacks = [Stack(list(alike), factor=inverse_factor) for _, alike in by_shape]

        def launch(scratch: Scratch) -> None:
            first = 0
            followed: list[LowRank] = []
            for stack in stacks:
                these = slice(first, first := first + len(stack.jobs) * stack.first.matrix_count)
                directions = scratch.directions[these]  # so far the gradients
                sign = -1 if stack.first.group["maximize"] else 1
                followed.append(stack.look_ahead_at_low_rank_(directions, sign))
            alone = len(followed) == 1
            scratch.low_rank = followed[0] if alone else LowRank(*map(torch.cat, zip(*followed, strict=True)))

        return launch

    def _keep(self, basis: torch.dtype) -> Launch:
        """Write a momentum of low rank to state, once it is known which gradients are refused."""
        keep_basis = self._by_tile(
            keep_kernel, lambda m: block_tiles(m.rank, m.channels), M=TRITON_TYPES[basis], BASIS=True, **AS_WRITTEN
        )
        keep_rest = self._by_tile(keep_kernel, lambda m: block_tiles(m.rank, m.side), BASIS=False, **AS_WRITTEN)

        def launch(scratch: Scratch) -> None:
            assert scratch.low_rank is not None
            basis_RC, low_RS = scratch.low_rank
            for value, keeps in ((basis_RC.to(basis), keep_basis), (low_RS, keep_rest)):
                scratch.value = value
                for keep in keeps:
                    keep(scratch)
            scratch.low_rank = scratch.value = None

        return launch

    def _orthogonalize(self, scratch: Scratch) -> None:
        at_once = self.batch.multiplied_at_once
        if len(scratch.directions) <= at_once:
            scratch.updates = orthogonalize_(scratch.directions, symmetric_product)
        else:
            for directions in scratch.directions.split(at_once):
                directions.copy_(orthogonalize_(directions, symmetric_product))
        size = scratch.updates[0].numel() * scratch.updates.itemsize
        offsets = torch.arange(len(self.batch.matrices), device=self.addresses.device) * size
        starts = offsets + scratch.updates.data_ptr()
        scratch.moves = torch.stack([self.addresses[:, at.WEIGHT.value], starts], dim=1)

    def _row_squares(self) -> list[Launch]:
        # A row's block follows from its length alone: no result may depend on the rest of the batch.
        by_block = self._numbers_by(lambda m: reduction_block(m.sides[1], True, m.facts.columns_aligned))
        launches: list[Launch] = []
        for (block_r, block_c, warps), numbers in by_block.items():
            launches += self._by_tile(
                row_squares_kernel, lambda matrix, height=block_r: -(-matrix.sides[0] // height), numbers,
                BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps,
            )  # fmt: skip
        return launches

    def _squares(self) -> list[Launch]:
        """Means of squares of rows and columns, of factored weights."""
        return [
            self._by_matrix(prepare_kernel),
            *self._by_tile(squares_kernel, _all_tiles),
            *self._by_tile(means_kernel, _ends, BLOCK=COMBINE_BLOCK),
        ]

    def _factors(self) -> list[Launch]:
        """Their second moments, and the size of the update."""
        return [
            *self._by_tile(factors_kernel, _ends, BLOCK=COMBINE_BLOCK),
            *self._by_tile(sizes_kernel, _all_tiles),
            self._by_matrix(clip_kernel, BLOCK=COMBINE_BLOCK),
        ]

    def _moments(self) -> list[Launch]:
        # Rows of moments that one program steps: not more blocks than a projection has.
        rows = self.batch.kind.tile.rank if self.batch.kind.mode == "gemm" else 1
        return [
            *self._by_tile(
                moments_kernel, lambda matrix: -(-matrix.kept // MOMENTS_BLOCK) * -(-matrix.rank // rows),
                BLOCK_R=rows, BLOCK_C=MOMENTS_BLOCK,
            ),
            *self._by_tile(
                kept_kernel, lambda matrix: -(-matrix.kept // COMBINE_BLOCK), BLOCK_R=rows, BLOCK=COMBINE_BLOCK
            ),
        ]  # fmt: skip


def _all_tiles(matrix: Matrix) -> int:
    """Tiles of a factored weight."""
    return math.prod(factor_tiles(matrix))


def _ends(matrix: Matrix) -> int:
    """Programs for a factored weight's rows, a block of them each, and for its columns."""
    return block_count(matrix) + -(-matrix.sides[1] // COMBINE_BLOCK)


def element_tiles(matrix: Matrix) -> int:
    """Programs that an element-wise kernel needs for a matrix."""
    return -(-matrix.size // (PAIRS * PAIRED_TILE.value))


def counted_element_tiles(matrix: Matrix) -> int:
    """As `element_tiles`, but at least one program, because the first also counts the step, of an empty part too."""
    return max(1, element_tiles(matrix))


def reduction_block(side: int, channels_are_rows: bool, columns_aligned: bool) -> tuple[int, int, int]:
    """Channels, contracted elements and warps per tile of a reduction, as measured to read fastest."""
    if channels_are_rows:
        along = min(2048 if side >= 4096 else 1024, max(32, 1 << (side - 1).bit_length()))
        return (8192 if side < 1024 else 4096) // along, along, 4
    if not columns_aligned:
        return 512, 8, 2
    return (2048, 4, 8) if side >= 2048 else (512, 8, 4)
