"""The kernels that a batch goes through, in order, with everything but the step's own numbers already bound."""

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..core.random import NORMALS_PER_COUNTER, normal_table
from ..kernels import columns as at
from ..kernels.adamw import adamw_groups_kernel, adamw_kernel, finite_kernel, prepare_kernel, row_squares_kernel
from ..kernels.apply import PAIRED_TILE, apply_kernel
from ..kernels.gains import combine_kernel
from ..kernels.int8 import apply_int8_kernel
from ..kernels.limiter import decide_kernel
from ..kernels.project import (
    normals_kernel,
    pad_kernel,
    project_kernel,
    reduce_columns_kernel,
    reduce_rows_kernel,
    stored_kernel,
)
from ..kernels.sharded import kept_kernel, moments_kernel, scaled_kernel, share_kernel
from .batches import COMBINE_BLOCK, UPDATE_REGISTERS, Batch, padded_elements, tile_table
from .matrix import Matrix, Placing, Subset

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}

PAIRS = 4
"""Pairs of 1024 elements that one program of an element-wise kernel takes."""

PAD_BLOCK = 8, 512
NORMALS_BLOCK = 256
STORED_BLOCK = 1024
DECIDE_BLOCK = 128
# Channels, contracted elements and warps per tile where every element has moments of its own, which take registers.
IDENTITY_ROWS_BLOCK = 32, 64, 4
IDENTITY_COLUMNS_BLOCK = 512, 4, 4


class Bound:
    """A kernel with its grid and compile-time facts.

    Triton looks at every argument and every global of a kernel at each launch. Here none of that changes once it is
    compiled, so later launches go straight to the compiled kernel: a tenth of the host's time on a small model.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], **options: Any):
        """`constants` are in the order of the kernel's arguments, after all others."""
        self.kernel, self.grid, self.constants, self.options = kernel, (programs, 1, 1), constants, options
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.grid[0] == 0:  # a rank that holds nothing of these weights
            return
        if self._compiled is not None:
            self._compiled(*arguments, *self.constants.values())
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = None if compiled is None else compiled[self.grid]


class Scratch:
    """What a batch needs only between its own launches."""

    def __init__(self, batch: Batch):
        device = batch.kind.device
        self.bytes = batch.scratch_bytes
        self.basis: Tensor | None = torch.empty(batch.basis_size, dtype=batch.kind.scratch_basis, device=device)
        self.padded: Tensor | None = torch.empty(batch.padded_size, dtype=batch.kind.grad, device=device)
        self.lows: Tensor | None = torch.empty(batch.lows_size, dtype=torch.float32, device=device)
        # Zero, because nothing is written where chunks of channels are filled up.
        self.shares: Tensor | None = torch.zeros(batch.shares_size, dtype=torch.float32, device=device)
        self.parts: Tensor | None = torch.empty(4 * batch.parts_size, dtype=torch.float32, device=device)
        self.gains = torch.empty(batch.gains_size, dtype=torch.float32, device=device)
        self.blocks = torch.empty(batch.blocks_size, at.BLOCK_WIDTH.value, dtype=torch.float32, device=device)
        self.refreshes: list[int] | None = None
        """Of the bases that are in it, where it is kept from step to step."""

    def end_projection_(self) -> None:
        """Give back what only the projection reads."""
        self.basis = self.padded = self.lows = self.shares = None


Launch = Callable[[Tensor, Scratch], None]
"""A launch, given the hyper-parameters of this step and the batch's scratch."""


class Launches:
    """Makes the launches of one batch, whose matrices have these rows of the addresses and verdicts."""

    def __init__(self, batch: Batch, addresses: Tensor, verdicts: Tensor, skipped: Tensor):
        self.batch, self.addresses, self.verdicts, self.skipped = batch, addresses, verdicts, skipped
        kind = batch.kind
        self.types = {"W": TRITON_TYPES[kind.weight], "G": TRITON_TYPES[kind.grad], "M": TRITON_TYPES[kind.moments]}

    def bases(self) -> Launch | None:
        """What makes the bases; None where there are none, or state keeps them."""
        has_bases = self.batch.kind.mode in ("rank1", "gemm")
        return self._normals() if has_bases and self.batch.kind.basis is None else None

    def projections(self) -> list[Launch]:
        """What reads the gradients, and steps the moments of projected ones, once the bases are made."""
        if self.batch.kind.mode == "adamw":
            return [self._prepare(), *(self._finite(*tiles) for tiles in self._by_placing().items())]
        # At every step, so that whoever writes to state is heeded.
        copies = [] if self.batch.kind.basis is None else [self._stored(self.batch.kind.basis)]
        return copies + self._projections()

    def updates(self) -> list[Launch]:
        """What steps the weights by what the projections have found."""
        if self.batch.kind.mode == "adamw":
            # Backwards, as in `_apply`.
            tiles = self._by_placing().items()
            return [self._adamw(placing, table.flip(0).contiguous()) for placing, table in tiles]
        return [self._combine(), self._decide(), *self._applies()]

    def _tiles(self, numbers: list[int], count: Callable[[Matrix], int]) -> Tensor:
        matrices = self.batch.matrices
        return tile_table([(number, count(matrices[number])) for number in numbers], self.batch.kind.device)

    def _everything(self) -> list[int]:
        return list(range(len(self.batch.matrices)))

    def _normals(self) -> Launch:
        def count(matrix: Matrix) -> int:
            return -(-matrix.rank // NORMALS_PER_COUNTER) * -(-matrix.side // NORMALS_BLOCK)

        tiles = self._tiles(self._everything(), count)
        table = normal_table(self.batch.kind.device).to(self.batch.kind.grad)
        kernel = Bound(normals_kernel, len(tiles), {"BLOCK": NORMALS_BLOCK})
        return lambda hypers, scratch: kernel(tiles, self.batch.metas, hypers, table, scratch.basis)

    def _stored(self, dtype: torch.dtype) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.rank * matrix.side // STORED_BLOCK))
        constants = {"B": TRITON_TYPES[dtype], "PIECES": self.batch.kind.pieces, "BLOCK": STORED_BLOCK}
        kernel = Bound(stored_kernel, len(tiles), constants)
        return lambda hypers, scratch: kernel(tiles, self.batch.metas, scratch.basis)

    def _projections(self) -> list[Launch]:
        launches: list[Launch] = []
        for subset, numbers in self.batch.subsets.items():
            if self.batch.kind.mode != "gemm":
                launches += self._reductions(subset, numbers)
                continue
            if padded := padded_elements(self.batch.kind, self.batch.matrices[numbers[0]]) > 0:
                launches.append(self._pad(numbers))
            launches.append(self._gemm(subset, numbers, padded))
        return launches

    def _reductions(self, subset: Subset, numbers: list[int]) -> list[Launch]:
        # A matrix's block follows from its own shape, so that its sums do not depend on the company it is in.
        by_block: dict[tuple[int, int, int], list[int]] = {}
        for number in numbers:
            side = self.batch.matrices[number].side
            if self.batch.kind.mode == "identity":
                block = IDENTITY_ROWS_BLOCK if subset.channels_are_rows else IDENTITY_COLUMNS_BLOCK
            else:
                block = reduction_block(side, subset.channels_are_rows, subset.columns_aligned)
            by_block.setdefault(block, []).append(number)
        return [self._reduction(subset, block, alike) for block, alike in by_block.items()]

    def _pad(self, numbers: list[int]) -> Launch:
        rows, columns = PAD_BLOCK
        tiles = self._tiles(numbers, lambda m: -(-m.sides[0] // rows) * -(-m.sides[1] // columns))
        constants = {"G": self.types["G"], "BLOCK_R": rows, "BLOCK_C": columns}
        kernel = Bound(pad_kernel, len(tiles), constants)
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.batch.metas, scratch.padded)

    def _reduction(self, subset: Subset, block: tuple[int, int, int], numbers: list[int]) -> Launch:
        rows = subset.channels_are_rows
        block_c, block_s, warps = block
        tiles = self._tiles(numbers, lambda m: -(-m.channels // block_c) * self.batch.part_count(m))
        constants = {
            "G": self.types["G"], "M": self.types["M"],
            "ALIGNED": subset.aligned, "COLUMNS_ALIGNED": subset.columns_aligned,
            "IDENTITY": self.batch.kind.mode == "identity",
        }  # fmt: skip
        blocks = {"BLOCK_C": block_c, "BLOCK_S": block_s} if rows else {"BLOCK_S": block_s, "BLOCK_C": block_c}
        function = reduce_rows_kernel if rows else reduce_columns_kernel
        kernel = Bound(function, len(tiles), constants | blocks, num_warps=warps)
        metas, planes = self.batch.metas, self.batch.parts_size
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, metas, hypers, scratch.basis, scratch.parts, planes
        )

    def _gemm(self, subset: Subset, numbers: list[int], padded: bool) -> Launch:
        block = self.batch.block
        tiles = self._tiles(numbers, lambda m: -(-m.channels // block.channels) * self.batch.part_count(m))
        constants = {
            "G": self.types["G"], "M": self.types["M"],
            "ALIGNED": subset.aligned, "SIDE_ALIGNED": subset.side_aligned, "CHANNELS_ALIGNED": subset.channels_aligned,
            "MOMENTS_ALIGNED": subset.moments_aligned, "CHANNELS_ARE_ROWS": subset.channels_are_rows,
            "PADDED": padded, "EVEN": subset.even, "SHARE": self.batch.exchanges_lows, "PIECES": self.batch.kind.pieces,
            "BLOCK_R": block.rank, "BLOCK_C": block.channels, "BLOCK_S": block.side,
        }  # fmt: skip
        programs = min(len(tiles), self.batch.programs)
        kernel = Bound(project_kernel, programs, constants, **block.options)
        metas, planes, count, length = self.batch.metas, self.batch.parts_size, len(tiles), self.batch.shares_length
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, metas, hypers,
            scratch.basis, scratch.padded, scratch.parts, scratch.lows, scratch.shares, planes, count, length,
        )  # fmt: skip

    def _combine(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kind, planes = self.batch.kind, self.batch.parts_size
        constants = {"M": self.types["M"], "RANK1": kind.mode == "rank1", "CHANNEL": kind.channel}
        kernel = Bound(combine_kernel, len(tiles), constants | {"BLOCK": COMBINE_BLOCK})
        return lambda hypers, scratch: kernel(
            tiles, self.batch.metas, hypers, scratch.parts, planes, scratch.gains, scratch.blocks
        )

    def _decide(self) -> Launch:
        kind = self.batch.kind
        constants = {"CHANNEL": kind.channel, "LIMITED": kind.limited, "CAPTURABLE": kind.capturable}
        kernel = Bound(decide_kernel, len(self.batch.matrices), constants | {"BLOCK": DECIDE_BLOCK})
        return lambda hypers, scratch: kernel(self.batch.metas, hypers, scratch.blocks, self.verdicts, self.skipped)

    def _applies(self) -> list[Launch]:
        channel = self.batch.kind.channel
        merged: dict[tuple[bool, bool, Placing], list[int]] = {}
        for subset, numbers in self.batch.subsets.items():
            # One gain for the tensor needs neither rows nor columns, so all shapes share a launch.
            rows, columns = (subset.channels_are_rows, subset.columns_aligned) if channel else (False, False)
            merged.setdefault((rows, columns, Placing.of(subset)), []).extend(numbers)
        return [self._apply(*facts, sorted(numbers)) for facts, numbers in merged.items()]

    def _apply(self, channels_are_rows: bool, columns_aligned: bool, placing: Placing, numbers: list[int]) -> Launch:
        # Backwards, because the end of the gradients is what the projection has left in the L2 cache.
        tiles = self._tiles(numbers, element_tiles).flip(0).contiguous()
        kind = self.batch.kind
        constants = {
            "W": self.types["W"], "G": self.types["G"], "CHANNEL": kind.channel, "CHANNELS_ARE_ROWS": channels_are_rows,
            "COLUMNS_ALIGNED": columns_aligned, **placing.constants, "ROUND": kind.stochastic, "PAIRS": PAIRS,
        }  # fmt: skip
        # One batch is updated while the next is projected, beside it where there are registers for both. Other weights
        # than these would have to keep some of theirs in memory.
        few_suffice = kind.weight == torch.bfloat16 and placing.aligned and not placing.strided
        options = {"maxnreg": UPDATE_REGISTERS} if kind.mode == "gemm" and few_suffice else {}
        kernel = Bound(apply_kernel, len(tiles), constants, **options)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, scratch.gains
        )

    def _prepare(self) -> Launch:
        kernel = Bound(prepare_kernel, len(self.batch.matrices), {})
        return lambda hypers, scratch: kernel(self.batch.metas, hypers, self.verdicts)

    def _by_placing(self) -> dict[Placing, Tensor]:
        """The element-wise tiles of the batch. The first of a weight also counts it, and so is there if it is empty."""
        merged: dict[Placing, list[int]] = {}
        for subset, numbers in self.batch.subsets.items():
            merged.setdefault(Placing.of(subset), []).extend(numbers)
        return {
            placing: self._tiles(numbers, lambda matrix: max(1, element_tiles(matrix)))
            for placing, numbers in merged.items()
        }

    def _finite(self, placing: Placing, tiles: Tensor) -> Launch:
        kernel = Bound(finite_kernel, len(tiles), {"G": self.types["G"], "ALIGNED": placing.aligned, "PAIRS": PAIRS})
        return lambda hypers, scratch: kernel(tiles, self.addresses, self.batch.metas, self.verdicts)

    def _adamw(self, placing: Placing, tiles: Tensor) -> Launch:
        kind = self.batch.kind
        facts = placing.constants | {"ROUND": kind.stochastic, "CAPTURABLE": kind.capturable, "PAIRS": PAIRS}
        kernel = Bound(adamw_kernel, len(tiles), self.types | facts)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, self.skipped
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


AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}
"""No product and sum rounded as one: what is written back unchanged must be what was read, and equal the plain twin."""


class GroupLaunches(Launches):
    """Makes the launches of one batch of weights whose rows are cut into groups."""

    def projections(self) -> list[Launch]:
        """What reads the gradients, and steps the moments of projected ones, once the bases are made."""
        if not self.batch.kind.by_row:
            return super().projections()
        return [self._prepare(), *(launch for subset in self.batch.subsets for launch in self._row_squares(subset))]

    def updates(self) -> list[Launch]:
        """What steps the weights by what the projections have found."""
        if self.batch.kind.mode != "adamw":
            return super().updates()
        merged: dict[tuple[bool, bool, bool], list[int]] = {}
        for subset, numbers in self.batch.subsets.items():
            merged.setdefault(_facts(subset), []).extend(numbers)
        return [self._adamw_groups(*facts, numbers) for facts, numbers in merged.items()]

    def _row_squares(self, subset: Subset) -> list[Launch]:
        """By length of row, because it decides the blocks, and no weight's result may depend on its company."""
        lengths: dict[int, list[int]] = {}
        for number in self.batch.subsets[subset]:
            lengths.setdefault(self.batch.matrices[number].sides[1], []).append(number)
        return [self._squares_of_rows(subset, length, numbers) for length, numbers in lengths.items()]

    def _squares_of_rows(self, subset: Subset, length: int, numbers: list[int]) -> Launch:
        block_r, block_c, warps = reduction_block(length, True, subset.columns_aligned)
        tiles = self._tiles(numbers, lambda matrix: -(-matrix.sides[0] // block_r))
        constants = {
            "G": self.types["G"], "ALIGNED": subset.aligned, "COLUMNS_ALIGNED": subset.columns_aligned,
            "BLOCK_R": block_r, "BLOCK_C": block_c,
        }  # fmt: skip
        kernel = Bound(row_squares_kernel, len(tiles), constants, num_warps=warps)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, scratch.gains
        )

    def _applies(self) -> list[Launch]:
        merged: dict[tuple[bool, bool, bool, bool], list[int]] = {}
        for subset, numbers in self.batch.subsets.items():
            # One gain for the tensor needs no orientation.
            rows = subset.channels_are_rows and self.batch.kind.channel
            merged.setdefault((rows, *_facts(subset)), []).extend(numbers)
        return [self._apply_int8(*facts, sorted(numbers)) for facts, numbers in merged.items()]

    def _apply_int8(
        self, channels_are_rows: bool, aligned: bool, columns_aligned: bool, even: bool, numbers: list[int]
    ) -> Launch:
        tiles = self._group_tiles(numbers)
        kind = self.batch.kind
        constants = {
            "G": self.types["G"], "CHANNEL": kind.channel, "CHANNELS_ARE_ROWS": channels_are_rows, "ALIGNED": aligned,
            "COLUMNS_ALIGNED": columns_aligned, "EVEN": even, "ROUND": kind.stochastic, "N": kind.group,
            "PAIRS": PAIRS,
        }  # fmt: skip
        kernel = Bound(apply_int8_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, scratch.gains
        )

    def _adamw_groups(self, aligned: bool, columns_aligned: bool, even: bool, numbers: list[int]) -> Launch:
        tiles = self._group_tiles(numbers)
        kind = self.batch.kind
        constants = {
            **self.types, "MOMENTUM": kind.momentum, "BY_ROW": kind.by_row, "ALIGNED": aligned,
            "COLUMNS_ALIGNED": columns_aligned, "EVEN": even, "ROUND": kind.stochastic, "CAPTURABLE": kind.capturable,
            "N": kind.group, "PAIRS": PAIRS,
        }  # fmt: skip
        kernel = Bound(adamw_groups_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, scratch.gains, self.skipped
        )

    def _group_tiles(self, numbers: list[int]) -> Tensor:
        """Runs of groups; backwards, as in `Launches._apply`."""
        return self._tiles(numbers, lambda matrix: group_tiles(matrix, self.batch.kind.group)).flip(0).contiguous()


def group_tiles(matrix: Matrix, group: int) -> int:
    """Programs that a kernel of whole groups needs for a matrix."""
    rows, columns = matrix.sides
    return -(-rows * -(-columns // group) * group // (PAIRS * PAIRED_TILE.value))


def _facts(subset: Subset) -> tuple[bool, bool, bool]:
    """What such a kernel is compiled for: alignments, and whether rows are whole groups."""
    return subset.aligned, subset.columns_aligned, subset.shared


MOMENTS_BLOCK = 64
"""Channels per program that steps moments."""


class SharedScratch(Scratch):
    """The same for a batch that is spread over ranks."""

    def __init__(self, batch: Batch):
        super().__init__(batch)
        device = batch.kind.device
        # Where ranks keep some channels each, rows for blocks of those follow; and last a row that stays zero.
        rows = batch.blocks_size * (2 if batch.exchanges_lows else 1) + 1
        self.blocks = torch.zeros(rows, at.BLOCK_WIDTH.value, dtype=torch.float32, device=device)
        self.kept_gains = torch.zeros(batch.kept_gains_size, dtype=torch.float32, device=device)
        self.low_sums: Tensor | None = None
        """Low-rank gradients of the channels that this rank keeps, once ranks have added them up."""
        self.all_gains: Tensor | None = None
        """What all ranks have kept, once they have exchanged it."""

    def end_sums_(self) -> None:
        """Give back what only sums over channels are made of."""
        self.end_projection_()
        self.parts = self.low_sums = self.all_gains = None


SharedLaunch = Callable[[Tensor, SharedScratch], None]


class SharedLaunches(Launches):
    """Makes the launches of one batch of which each rank has a part, in the order of what waits for other ranks."""

    def projections(self) -> list[Launch]:
        """What reads the gradients; where ranks have shares in low-rank gradients, those shares are left."""
        launches = super().projections()
        if self.batch.exchanges_lows and self.batch.kind.mode == "rank1":
            launches.append(self._share())
        return launches

    def sums(self) -> list[SharedLaunch]:
        """What sums up over channels, once their gains are known where other ranks keep some of them."""
        if self.batch.kind.mode == "adamw":
            return []
        return [self._scaled()] if self.batch.exchanges_lows else [self._combine()]

    def updates(self) -> list[Launch]:
        """What steps the weights once ranks have added up those sums."""
        return super().updates() if self.batch.kind.mode == "adamw" else [self._decide(), *self._applies()]

    def moments(self) -> list[SharedLaunch]:
        """What waits for the sum of low-rank gradients, where ranks have shares in them."""
        return [self._moments(), self._kept()] if self.batch.exchanges_lows else []

    @property
    def _rows(self) -> int:
        """Of a block whose moments one program steps; not more blocks than a projection has."""
        return self.batch.block.rank if self.batch.kind.mode == "gemm" else 1

    def _share(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = Bound(share_kernel, len(tiles), {"BLOCK": COMBINE_BLOCK})
        metas, planes, length = self.batch.metas, self.batch.parts_size, self.batch.shares_length
        return lambda hypers, scratch: kernel(tiles, metas, hypers, scratch.parts, planes, scratch.shares, length)

    def _moments(self) -> SharedLaunch:
        rows = self._rows
        tiles = self._tiles(
            self._everything(), lambda matrix: -(-matrix.kept // MOMENTS_BLOCK) * -(-matrix.rank // rows)
        )
        constants = {"M": self.types["M"], "BLOCK_R": rows, "BLOCK_C": MOMENTS_BLOCK}
        kernel = Bound(moments_kernel, len(tiles), constants)
        metas, planes = self.batch.metas, self.batch.parts_size
        return lambda hypers, scratch: kernel(tiles, metas, hypers, scratch.low_sums, scratch.parts, planes)

    def _kept(self) -> SharedLaunch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.kept // COMBINE_BLOCK))
        kernel = Bound(kept_kernel, len(tiles), {"BLOCK_R": self._rows, "BLOCK": COMBINE_BLOCK})
        metas, planes, first = self.batch.metas, self.batch.parts_size, self.batch.blocks_size
        return lambda hypers, scratch: kernel(
            tiles, metas, scratch.parts, planes, scratch.kept_gains, scratch.blocks[first:]
        )

    def _scaled(self) -> SharedLaunch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = Bound(scaled_kernel, len(tiles), {"CHANNEL": self.batch.kind.channel, "BLOCK": COMBINE_BLOCK})
        metas, planes, length = self.batch.metas, self.batch.parts_size, self.batch.kept_gains_size
        return lambda hypers, scratch: kernel(
            tiles, metas, scratch.parts, planes, scratch.all_gains, length, scratch.gains, scratch.blocks
        )
