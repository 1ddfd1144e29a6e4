"""The kernels that a batch goes through, in order, with everything but the step's own numbers already bound."""

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...core.random import NORMALS_PER_COUNTER, normal_table
from . import layout as at
from .adamw import adamw_kernel, finite_kernel, prepare_kernel
from .apply import PAIRED_TILE, apply_kernel
from .gemm import pad_kernel, project_kernel
from .matrix import Matrix, Placing, Subset
from .plan import COMBINE_BLOCK, Batch, padded_elements, tile_table
from .reduce import normals_kernel, reduce_columns_kernel, reduce_rows_kernel, stored_kernel
from .scale import combine_kernel, decide_kernel
from .tile import UPDATE_REGISTERS

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
        launches = []
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
