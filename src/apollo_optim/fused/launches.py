"""The kernels that a batch goes through, in order, with everything but the step's own numbers already bound."""

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor

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
from ..stepping.spectral import Stack
from .batches import (
    COMBINE_BLOCK,
    UPDATE_REGISTERS,
    KernelBatch,
    block_tiles,
    factor_tiles,
    momentum_tiles,
    padded_elements,
    tile_table,
)
from .matrix import ElementKind, Matrix, MatrixKind
from .products import inverse_factor, symmetric_product
from .streams import CompiledLaunch

Facts = TypeVar("Facts")

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}

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
    """Buffers that a batch needs only between its own launches."""

    def __init__(self, batch: KernelBatch):
        device, spread = batch.kind.device, batch.part is not None
        self.bytes = batch.scratch_bytes
        self.basis: Tensor | None = torch.empty(batch.basis_size, dtype=batch.kind.scratch_basis, device=device)
        self.padded: Tensor | None = torch.empty(batch.padded_size, dtype=batch.kind.grad, device=device)
        self.lows: Tensor | None = torch.empty(batch.lows_size, dtype=torch.float32, device=device)
        # Zero, because nothing is written where chunks of channels are filled up.
        self.shares: Tensor | None = torch.zeros(batch.shares_size, dtype=torch.float32, device=device)
        self.parts: Tensor | None = torch.empty(4 * batch.parts_size, dtype=torch.float32, device=device)
        self.gains = torch.empty(batch.gains_size, dtype=torch.float32, device=device)
        # Of a batch that is spread over ranks: where ranks keep some channels each, rows for blocks of those follow;
        # and last a row that stays zero.
        rows = batch.blocks_size * (2 if batch.exchanges_lows else 1) + spread
        self.blocks = torch.empty(rows, at.BLOCK_WIDTH.value, dtype=torch.float32, device=device)
        self.kept_gains = torch.zeros(batch.kept_gains_size, dtype=torch.float32, device=device)
        self.directions = torch.empty(batch.directions_shape, dtype=batch.kind.moved_by, device=device)
        self.updates = self.directions
        """The directions once products have changed them, there or elsewhere."""
        self.low_rank: LowRank | None = None
        """Momentum of low rank after this step, of all matrices, until it is kept."""
        self.low_sums: Tensor | None = None
        """Low-rank gradients of the channels that this rank keeps, once ranks have added them up."""
        self.all_gains: Tensor | None = None
        """The gains that each rank keeps, once ranks have exchanged them."""
        self.refreshes: list[int] | None = None
        """The refresh numbers of the bases in it; None where there are no valid bases."""

    def end_projection_(self) -> None:
        """Free what only the projection reads."""
        self.basis = self.padded = self.lows = self.shares = None

    def end_sums_(self) -> None:
        """Free what only the sums over channels are made of."""
        self.end_projection_()
        self.parts = self.low_sums = self.all_gains = None


Launch = Callable[[Tensor, Scratch], None]
"""A launch, given the hyper-parameters of this step and the batch's scratch."""


class BatchLaunches:
    """All launches of one batch, by phase. Where its weights are spread over ranks, phases end where ranks exchange.

    Its matrices have these rows of the addresses and outcomes.
    """

    def __init__(self, batch: KernelBatch, addresses: Tensor, outcomes: Tensor, skipped: Tensor):
        self.batch, self.table = batch, batch.matrix_table
        self.addresses, self.outcomes, self.skipped = addresses, outcomes, skipped
        kind = batch.kind
        self.scratch: Scratch | None = None
        """Scratch reused across steps; None when it is allocated per step."""
        self.types = {"W": TRITON_TYPES[kind.weight], "G": TRITON_TYPES[kind.grad], "M": TRITON_TYPES[kind.moments]}
        makes_bases = kind.mode in ("rank1", "gemm") and kind.basis is None
        self.bases = self._normals() if makes_bases else None
        """Makes the bases; None where there are none, or state keeps them."""
        self.projections = self._reads_of_gradients()
        """Read the gradients, and step the moments of projected ones unless ranks must add up low-rank gradients."""
        self.moments = [self._moments(), self._kept()] if batch.exchanges_lows else []
        """Step the moments, once ranks have added up the low-rank gradients."""
        sums = self._scaled if batch.exchanges_lows else self._combine
        self.sums = [] if kind.mode in ("adamw", "spectral") else [sums()]
        """Sum up over channels, once gains are known where other ranks keep some of them."""
        self.updates = self._updates()
        """Step the weights."""

    def project(self, scratch: Scratch, hypers: Tensor, refreshes: list[int] | None) -> None:
        """Launch the projections; bases are made first where the scratch does not have those of `refreshes`."""
        if self.bases is not None and (refreshes is None or refreshes != scratch.refreshes):
            self.bases(hypers, scratch)
            scratch.refreshes = refreshes
        for launch in self.projections:
            launch(hypers, scratch)

    def update(self, scratch: Scratch, hypers: Tensor) -> None:
        """Launch what steps the weights by what the projections have found."""
        for launch in (*self.sums, *self.updates):
            launch(hypers, scratch)

    def _reads_of_gradients(self) -> list[Launch]:
        kind = self.batch.kind
        if kind.mode == "spectral":
            if kind.basis is None:
                return [*self._momenta(), self._settle(), self._unit()]
            follows = [self._low_rank(), self._measure(), self._settle()]
            return [*self._momenta(), *follows, self._keep(kind.basis), self._unit()]
        if kind.by_factors:
            return self._factors()
        if kind.by_row:
            return [self._prepare(), *(launch for facts in self.batch.kinds for launch in self._row_squares(facts))]
        if kind.mode == "adamw":
            return [self._prepare(), *(self._finite(*tiles) for tiles in self._elementwise_tiles().items())]
        # At every step, so that whoever writes to state is heeded.
        copies = [] if kind.basis is None else [self._stored(kind.basis)]
        shares = [self._share()] if self.batch.exchanges_lows and kind.mode == "rank1" else []
        return [*copies, *self._projections(), *shares]

    def _tiles(self, numbers: list[int], count: Callable[[Matrix], int]) -> Tensor:
        matrices = self.batch.matrices
        return tile_table([(number, count(matrices[number])) for number in numbers], self.batch.kind.device)

    def _everything(self) -> list[int]:
        return list(range(len(self.batch.matrices)))

    def _numbers_by(self, facts_of: Callable[[MatrixKind], Facts]) -> dict[Facts, list[int]]:
        """The numbers of the batch's matrices by those of their facts that a launch depends on."""
        numbers_by: dict[Facts, list[int]] = {}
        for kind, numbers in self.batch.kinds.items():
            numbers_by.setdefault(facts_of(kind), []).extend(numbers)
        return numbers_by

    def _normals(self) -> Launch:
        def count(matrix: Matrix) -> int:
            return -(-matrix.rank // NORMALS_PER_COUNTER) * -(-matrix.side // NORMALS_BLOCK)

        tiles = self._tiles(self._everything(), count)
        normals = normal_table(self.batch.kind.device).to(self.batch.kind.grad)
        kernel = CompiledLaunch(normals_kernel, len(tiles), {"BLOCK": NORMALS_BLOCK})
        return lambda hypers, scratch: kernel(tiles, self.table, hypers, normals, scratch.basis)

    def _stored(self, dtype: torch.dtype) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.rank * matrix.side // STORED_BLOCK))
        constants = {"B": TRITON_TYPES[dtype], "PIECES": self.batch.kind.pieces, "BLOCK": STORED_BLOCK}
        kernel = CompiledLaunch(stored_kernel, len(tiles), constants)
        return lambda hypers, scratch: kernel(tiles, self.table, scratch.basis)

    def _projections(self) -> list[Launch]:
        launches: list[Launch] = []
        for facts, numbers in self.batch.kinds.items():
            if self.batch.kind.mode != "gemm":
                launches += self._reductions(facts, numbers)
                continue
            if padded := padded_elements(self.batch.kind, self.batch.matrices[numbers[0]]) > 0:
                launches.append(self._pad(numbers))
            launches.append(self._gemm(facts, numbers, padded))
        return launches

    def _reductions(self, facts: MatrixKind, numbers: list[int]) -> list[Launch]:
        # A matrix's block follows from its own shape, so that its sums do not depend on the rest of its batch.
        by_block: dict[tuple[int, int, int], list[int]] = {}
        for number in numbers:
            side = self.batch.matrices[number].side
            if self.batch.kind.mode == "identity":
                block = IDENTITY_ROWS_BLOCK if facts.channels_are_rows else IDENTITY_COLUMNS_BLOCK
            else:
                block = reduction_block(side, facts.channels_are_rows, facts.columns_aligned)
            by_block.setdefault(block, []).append(number)
        return [self._reduction(facts, block, alike) for block, alike in by_block.items()]

    def _pad(self, numbers: list[int]) -> Launch:
        rows, columns = PAD_BLOCK
        tiles = self._tiles(numbers, lambda m: -(-m.sides[0] // rows) * -(-m.sides[1] // columns))
        constants = {"G": self.types["G"], "BLOCK_R": rows, "BLOCK_C": columns}
        kernel = CompiledLaunch(pad_kernel, len(tiles), constants)
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.table, scratch.padded)

    def _reduction(self, facts: MatrixKind, block: tuple[int, int, int], numbers: list[int]) -> Launch:
        rows = facts.channels_are_rows
        block_c, block_s, warps = block
        tiles = self._tiles(numbers, lambda m: -(-m.channels // block_c) * self.batch.part_count(m))
        constants = {
            "G": self.types["G"], "M": self.types["M"],
            "ALIGNED": facts.aligned, "COLUMNS_ALIGNED": facts.columns_aligned,
            "IDENTITY": self.batch.kind.mode == "identity",
        }  # fmt: skip
        blocks = {"BLOCK_C": block_c, "BLOCK_S": block_s} if rows else {"BLOCK_S": block_s, "BLOCK_C": block_c}
        function = reduce_rows_kernel if rows else reduce_columns_kernel
        kernel = CompiledLaunch(function, len(tiles), constants | blocks, num_warps=warps)
        planes = self.batch.parts_size
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.table, hypers, scratch.basis, scratch.parts, planes
        )

    def _gemm(self, facts: MatrixKind, numbers: list[int], padded: bool) -> Launch:
        block = self.batch.block
        tiles = self._tiles(numbers, lambda m: -(-m.channels // block.channels) * self.batch.part_count(m))
        constants = {
            "G": self.types["G"], "M": self.types["M"],
            "ALIGNED": facts.aligned, "SIDE_ALIGNED": facts.side_aligned, "CHANNELS_ALIGNED": facts.channels_aligned,
            "MOMENTS_ALIGNED": facts.moments_aligned, "CHANNELS_ARE_ROWS": facts.channels_are_rows,
            "PADDED": padded, "EVEN": facts.even, "SHARE": self.batch.exchanges_lows, "PIECES": self.batch.kind.pieces,
            "BLOCK_R": block.rank, "BLOCK_C": block.channels, "BLOCK_S": block.side,
        }  # fmt: skip
        programs = min(len(tiles), self.batch.programs)
        kernel = CompiledLaunch(project_kernel, programs, constants, **block.options)
        planes, count, length = self.batch.parts_size, len(tiles), self.batch.shares_length
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.table, hypers,
            scratch.basis, scratch.padded, scratch.parts, scratch.lows, scratch.shares, planes, count, length,
        )  # fmt: skip

    def _combine(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kind, planes = self.batch.kind, self.batch.parts_size
        constants = {"M": self.types["M"], "RANK1": kind.mode == "rank1", "CHANNEL": kind.channel}
        kernel = CompiledLaunch(combine_kernel, len(tiles), constants | {"BLOCK": COMBINE_BLOCK})
        return lambda hypers, scratch: kernel(
            tiles, self.table, hypers, scratch.parts, planes, scratch.gains, scratch.blocks
        )

    def _decide(self) -> Launch:
        kind = self.batch.kind
        constants = {"CHANNEL": kind.channel, "LIMITED": kind.limited, "CAPTURABLE": kind.capturable}
        kernel = CompiledLaunch(decide_kernel, len(self.batch.matrices), constants | {"BLOCK": DECIDE_BLOCK})
        return lambda hypers, scratch: kernel(self.table, hypers, scratch.blocks, self.outcomes, self.skipped)

    def _updates(self) -> list[Launch]:
        if self.batch.kind.mode == "adamw":
            return self._adamws()
        if self.batch.kind.mode == "spectral":
            return [self._orthogonalize(), *self._applies()]
        return [self._decide(), *self._applies()]

    def _momenta(self) -> list[Launch]:
        levels = torch.cat(code_levels(torch.float32, self.batch.kind.device))
        return [self._momentum(levels, *each) for each in self._numbers_by(_alignment).items()]

    def _momentum(self, levels: Tensor, aligned: tuple[bool, bool], numbers: list[int]) -> Launch:
        tiles = self._tiles(numbers, momentum_tiles)
        constants = {
            "G": self.types["G"], "MOMENTUM": self.batch.kind.momentum, "MEASURED": not self.batch.kind.low_rank,
            "ALIGNED": aligned[0], "COLUMNS_ALIGNED": aligned[1],
        }  # fmt: skip
        kernel = CompiledLaunch(momentum_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.table, hypers, levels, scratch.directions, scratch.blocks
        )

    def _settle(self) -> Launch:
        constants = {"CAPTURABLE": self.batch.kind.capturable, "BLOCK": SETTLE_BLOCK}
        kernel = CompiledLaunch(settle_kernel, len(self.batch.matrices), constants, num_warps=16)
        return lambda hypers, scratch: kernel(
            self.table, hypers, scratch.blocks, self.outcomes, scratch.gains, self.skipped
        )

    def _low_rank(self) -> Launch:
        """Directions along a momentum of low rank: few numbers, which plain PyTorch follows."""
        jobs = {id(matrix.job): matrix.job for matrix in self.batch.matrices}.values()
        by_shape = groupby(jobs, lambda job: (id(job.group), job.weight.shape))
        stacks = [Stack(list(alike), factor=inverse_factor) for _, alike in by_shape]

        def launch(hypers: Tensor, scratch: Scratch) -> None:
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
        keep_basis, keep_rest = self._kept_rows(basis, True), self._kept_rows(self.batch.kind.moments, False)

        def launch(hypers: Tensor, scratch: Scratch) -> None:
            assert scratch.low_rank is not None
            basis_RC, low_RS = scratch.low_rank
            keep_basis(hypers, basis_RC.to(basis))
            keep_rest(hypers, low_RS)
            scratch.low_rank = None

        return launch

    def _kept_rows(self, dtype: torch.dtype, is_basis: bool) -> Callable[[Tensor, Tensor], None]:
        """A launch that writes rows of a momentum of low rank, given the hyper-parameters and their new values."""
        tiles = self._tiles(
            self._everything(), lambda matrix: block_tiles(matrix.rank, matrix.channels if is_basis else matrix.side)
        )
        constants = {"M": TRITON_TYPES[dtype], "BASIS": is_basis}
        kernel = CompiledLaunch(keep_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, value: kernel(tiles, self.table, hypers, self.outcomes, value)

    def _whole_vectors(self) -> bool:
        """Whether the directions of all matrices begin at whole vectors."""
        return all(matrix.size % 16 == 0 for matrix in self.batch.matrices)

    def _measure(self) -> Launch:
        tiles = self._tiles(self._everything(), momentum_tiles)
        kernel = CompiledLaunch(measure_kernel, len(tiles), {"ALIGNED": self._whole_vectors()})
        return lambda hypers, scratch: kernel(tiles, self.table, scratch.directions, scratch.blocks)

    def _unit(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.size // UNIT_BLOCK))
        kernel = CompiledLaunch(unit_kernel, len(tiles), {"ALIGNED": self._whole_vectors(), "BLOCK": UNIT_BLOCK})
        return lambda hypers, scratch: kernel(tiles, self.table, scratch.gains, scratch.directions)

    def _orthogonalize(self) -> Launch:
        def launch(hypers: Tensor, scratch: Scratch) -> None:
            at_once = self.batch.multiplied_at_once
            if len(scratch.directions) <= at_once:
                scratch.updates = orthogonalize_(scratch.directions, symmetric_product)
                return
            for directions in scratch.directions.split(at_once):
                directions.copy_(orthogonalize_(directions, symmetric_product))

        return launch

    def _moves(self, scratch: Scratch) -> Tensor:
        """Addresses of the weights, and of what each is moved by: its gradient, or what products have made of it."""
        if self.batch.kind.mode != "spectral":
            return self.addresses
        size = scratch.updates[0].numel() * scratch.updates.itemsize
        offsets = torch.arange(len(self.batch.matrices), device=self.addresses.device) * size
        return torch.stack([self.addresses[:, at.WEIGHT.value], offsets + scratch.updates.data_ptr()], dim=1)

    def _applies(self) -> list[Launch]:
        channel, in_groups = self.batch.kind.channel, self.batch.kind.group > 0

        def facts_of(kind: MatrixKind) -> tuple[Any, ...]:
            # One gain for the tensor needs neither rows nor columns, so all shapes share a launch.
            facts = _group_facts(kind) if in_groups else (kind.columns_aligned and channel, kind.elementwise)
            return kind.channels_are_rows and channel, *facts

        apply: Callable[..., Launch] = self._apply_int8 if in_groups else self._apply
        return [apply(*facts, sorted(numbers)) for facts, numbers in self._numbers_by(facts_of).items()]

    def _apply(self, channels_are_rows: bool, columns_aligned: bool, facts: ElementKind, numbers: list[int]) -> Launch:
        # Backwards, because the end of the gradients is what the projection has left in the L2 cache.
        tiles = self._tiles(numbers, element_tiles).flip(0).contiguous()
        kind = self.batch.kind
        aligned, shared, strided = facts
        constants = {
            "W": self.types["W"], "G": TRITON_TYPES[kind.moved_by],
            "CHANNEL": kind.channel, "CHANNELS_ARE_ROWS": channels_are_rows,
            "COLUMNS_ALIGNED": columns_aligned, "ALIGNED": aligned, "SHARED": shared, "STRIDED": strided,
            "ROUND": kind.stochastic, "PAIRS": PAIRS,
        }  # fmt: skip
        # One batch is updated while the next is projected, beside it where there are registers for both. Other weights
        # than these would have to keep some of theirs in memory.
        few_suffice = kind.weight == torch.bfloat16 and aligned and not strided
        options = {"maxnreg": UPDATE_REGISTERS} if kind.mode == "gemm" and few_suffice else {}
        kernel = CompiledLaunch(apply_kernel, len(tiles), constants, **options)
        return lambda hypers, scratch: kernel(
            tiles, self._moves(scratch), self.table, hypers, self.outcomes, scratch.gains
        )

    def _prepare(self) -> Launch:
        kernel = CompiledLaunch(prepare_kernel, len(self.batch.matrices), {})
        return lambda hypers, scratch: kernel(self.table, hypers, self.outcomes)

    def _elementwise_tiles(self) -> dict[ElementKind, Tensor]:
        """The tiles of the batch. The first of a weight also counts it, and so is there if it is empty."""
        return {
            facts: self._tiles(numbers, lambda matrix: max(1, element_tiles(matrix)))
            for facts, numbers in self._numbers_by(lambda kind: kind.elementwise).items()
        }

    def _finite(self, facts: ElementKind, tiles: Tensor) -> Launch:
        kernel = CompiledLaunch(finite_kernel, len(tiles), {"G": self.types["G"], "ALIGNED": facts[0], "PAIRS": PAIRS})
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.table, self.outcomes)

    def _adamws(self) -> list[Launch]:
        if self.batch.kind.group == 0:
            # Backwards, as in `_apply`.
            tiles = self._elementwise_tiles().items()
            return [self._adamw(facts, table.flip(0).contiguous()) for facts, table in tiles]
        return [self._adamw_groups(*facts, numbers) for facts, numbers in self._numbers_by(_group_facts).items()]

    def _adamw(self, facts: ElementKind, tiles: Tensor) -> Launch:
        kind = self.batch.kind
        constants = {
            **self.types, "ALIGNED": facts[0], "SHARED": facts[1], "STRIDED": facts[2],
            "ROUND": kind.stochastic, "CAPTURABLE": kind.capturable, "PAIRS": PAIRS,
        }  # fmt: skip
        kernel = CompiledLaunch(adamw_kernel, len(tiles), constants)
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.table, hypers, self.outcomes, self.skipped)

    def _row_squares(self, facts: MatrixKind) -> list[Launch]:
        """One launch per length of row, which decides the blocks: no result may depend on the rest of the batch."""
        lengths: dict[int, list[int]] = {}
        for number in self.batch.kinds[facts]:
            lengths.setdefault(self.batch.matrices[number].sides[1], []).append(number)
        return [self._squares_of_rows(facts, length, numbers) for length, numbers in lengths.items()]

    def _squares_of_rows(self, facts: MatrixKind, length: int, numbers: list[int]) -> Launch:
        block_r, block_c, warps = reduction_block(length, True, facts.columns_aligned)
        tiles = self._tiles(numbers, lambda matrix: -(-matrix.sides[0] // block_r))
        constants = {
            "G": self.types["G"], "ALIGNED": facts.aligned, "COLUMNS_ALIGNED": facts.columns_aligned,
            "BLOCK_R": block_r, "BLOCK_C": block_c,
        }  # fmt: skip
        kernel = CompiledLaunch(row_squares_kernel, len(tiles), constants, num_warps=warps)
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.table, hypers, self.outcomes, scratch.gains)

    def _factors(self) -> list[Launch]:
        """Factored weights: means of squares of rows and columns, their second moments, the size of the update."""
        ends = self._tiles(self._everything(), lambda matrix: sum(-(-side // COMBINE_BLOCK) for side in matrix.sides))
        block = {"BLOCK": COMBINE_BLOCK}
        means = CompiledLaunch(means_kernel, len(ends), block)
        factors = CompiledLaunch(factors_kernel, len(ends), block)
        clip = CompiledLaunch(clip_kernel, len(self.batch.matrices), block)
        alike = self._numbers_by(_alignment).items()
        sums = [self._tiled(squares_kernel, *each) for each in alike]
        sizes = [self._tiled(sizes_kernel, *each) for each in alike]
        table, grads, outcomes = self.table, self.addresses, self.outcomes
        return [
            self._prepare(),
            *(lambda hypers, scratch, k=k, t=t: k(t, grads, table, scratch.parts) for k, t in sums),
            lambda hypers, scratch: means(ends, table, scratch.parts, scratch.gains, scratch.blocks),
            lambda hypers, scratch: factors(ends, table, hypers, scratch.blocks, outcomes, scratch.gains),
            *(
                lambda hypers, scratch, k=k, t=t: k(t, grads, table, hypers, outcomes, scratch.parts, scratch.gains)
                for k, t in sizes
            ),
            lambda hypers, scratch: clip(table, outcomes, scratch.parts),
        ]

    def _tiled(self, kernel: Any, aligned: tuple[bool, bool], numbers: list[int]) -> tuple[CompiledLaunch, Tensor]:
        """A kernel over the tiles of factored weights, and these."""
        tiles = self._tiles(numbers, lambda matrix: math.prod(factor_tiles(matrix)))
        constants = {"G": self.types["G"], "ALIGNED": aligned[0], "COLUMNS_ALIGNED": aligned[1]}
        return CompiledLaunch(kernel, len(tiles), constants), tiles

    def _apply_int8(
        self, channels_are_rows: bool, aligned: bool, columns_aligned: bool, even: bool, numbers: list[int]
    ) -> Launch:
        tiles = self._group_tiles(numbers)
        kind = self.batch.kind
        constants = {
            "G": TRITON_TYPES[kind.moved_by],
            "CHANNEL": kind.channel, "CHANNELS_ARE_ROWS": channels_are_rows, "ALIGNED": aligned,
            "COLUMNS_ALIGNED": columns_aligned, "EVEN": even, "ROUND": kind.stochastic, "N": kind.group,
            "PAIRS": PAIRS,
        }  # fmt: skip
        kernel = CompiledLaunch(apply_int8_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self._moves(scratch), self.table, hypers, self.outcomes, scratch.gains
        )

    def _adamw_groups(self, aligned: bool, columns_aligned: bool, even: bool, numbers: list[int]) -> Launch:
        tiles = self._group_tiles(numbers)
        kind = self.batch.kind
        constants = {
            **self.types, "MOMENTUM": kind.momentum, "BY_ROW": kind.by_row, "BY_FACTORS": kind.by_factors,
            "ALIGNED": aligned,
            "COLUMNS_ALIGNED": columns_aligned, "EVEN": even, "ROUND": kind.stochastic, "CAPTURABLE": kind.capturable,
            "N": kind.group, "PAIRS": PAIRS,
        }  # fmt: skip
        kernel = CompiledLaunch(adamw_groups_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.table, hypers, self.outcomes, scratch.gains, self.skipped
        )

    def _group_tiles(self, numbers: list[int]) -> Tensor:
        """Runs of groups; backwards, as in `_apply`."""
        return self._tiles(numbers, lambda matrix: group_tiles(matrix, self.batch.kind.group)).flip(0).contiguous()

    @property
    def _moment_rows(self) -> int:
        """Rows of moments that one program steps; not more blocks than a projection has."""
        return self.batch.block.rank if self.batch.kind.mode == "gemm" else 1

    def _share(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = CompiledLaunch(share_kernel, len(tiles), {"BLOCK": COMBINE_BLOCK})
        planes, length = self.batch.parts_size, self.batch.shares_length
        return lambda hypers, scratch: kernel(tiles, self.table, hypers, scratch.parts, planes, scratch.shares, length)

    def _moments(self) -> Launch:
        rows = self._moment_rows
        tiles = self._tiles(
            self._everything(), lambda matrix: -(-matrix.kept // MOMENTS_BLOCK) * -(-matrix.rank // rows)
        )
        constants = {"M": self.types["M"], "BLOCK_R": rows, "BLOCK_C": MOMENTS_BLOCK}
        kernel = CompiledLaunch(moments_kernel, len(tiles), constants)
        planes = self.batch.parts_size
        return lambda hypers, scratch: kernel(tiles, self.table, hypers, scratch.low_sums, scratch.parts, planes)

    def _kept(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.kept // COMBINE_BLOCK))
        kernel = CompiledLaunch(kept_kernel, len(tiles), {"BLOCK_R": self._moment_rows, "BLOCK": COMBINE_BLOCK})
        planes, first = self.batch.parts_size, self.batch.blocks_size
        return lambda hypers, scratch: kernel(
            tiles, self.table, scratch.parts, planes, scratch.kept_gains, scratch.blocks[first:]
        )

    def _scaled(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = CompiledLaunch(scaled_kernel, len(tiles), {"CHANNEL": self.batch.kind.channel, "BLOCK": COMBINE_BLOCK})
        planes, length = self.batch.parts_size, self.batch.kept_gains_size
        return lambda hypers, scratch: kernel(
            tiles, self.table, scratch.parts, planes, scratch.all_gains, length, scratch.gains, scratch.blocks
        )


def element_tiles(matrix: Matrix) -> int:
    """Programs that an element-wise kernel needs for a matrix."""
    return -(-matrix.size // (PAIRS * PAIRED_TILE.value))


def reduction_block(side: int, channels_are_rows: bool, columns_aligned: bool) -> tuple[int, int, int]:
    """Channels, contracted elements and warps per tile of a reduction, as measured to read fastest."""
    if channels_are_rows:
        along = min(2048 if side >= 4096 else 1024, max(32, 1 << (side - 1).bit_length()))
        return (8192 if side < 1024 else 4096) // along, along, 4
    if not columns_aligned:
        return 512, 8, 2
    return (2048, 4, 8) if side >= 2048 else (512, 8, 4)


def group_tiles(matrix: Matrix, group: int) -> int:
    """Programs that a kernel of whole groups needs for a matrix."""
    rows, columns = matrix.sides
    return -(-rows * -(-columns // group) * group // (PAIRS * PAIRED_TILE.value))


def _alignment(kind: MatrixKind) -> tuple[bool, bool]:
    """Compile-time facts of a kernel that goes through rows and columns: whether both begin at whole vectors."""
    return kind.aligned, kind.columns_aligned


def _group_facts(kind: MatrixKind) -> tuple[bool, bool, bool]:
    """Compile-time facts of a kernel of whole groups: alignments, and whether rows are whole groups."""
    return kind.aligned, kind.columns_aligned, kind.shared
