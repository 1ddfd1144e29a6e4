"""The launches of weights that are stepped in groups of a row, because such a group shares a scale."""

from typing import Any

from torch import Tensor

from . import launch
from .adamw_groups import adamw_groups_kernel, row_squares_kernel
from .apply import PAIRED_TILE
from .int8 import apply_int8_kernel
from .launch import Bound, Launch, Launches
from .matrix import Matrix, Subset

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
        block_r, block_c, warps = launch.reduction_block(length, True, subset.columns_aligned)
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
            "PAIRS": launch.PAIRS,
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
            "N": kind.group, "PAIRS": launch.PAIRS,
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
    return -(-rows * -(-columns // group) * group // (launch.PAIRS * PAIRED_TILE.value))


def _facts(subset: Subset) -> tuple[bool, bool, bool]:
    """What such a kernel is compiled for: alignments, and whether rows are whole groups."""
    return subset.aligned, subset.columns_aligned, subset.shared
