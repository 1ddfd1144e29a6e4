"""The launches of weights that are stepped in groups of a row, because such a group shares a scale."""

from typing import Any

from torch import Tensor

from . import launch
from .adamw_int8 import adamw_int8_kernel
from .apply import PAIRED_TILE
from .int8 import apply_int8_kernel
from .launch import Bound, Launch, Launches
from .plan import Matrix, Subset

AS_WRITTEN: dict[str, Any] = {"enable_fp_fusion": False}
"""No product and sum rounded as one: what is written back unchanged must be what was read, and equal the plain twin."""


class GroupLaunches(Launches):
    """Makes the launches of one batch of int8 weights."""

    def steps(self) -> list[Launch]:
        """What steps the weights, once the bases are made."""
        if self.batch.kind.mode != "adamw":
            return super().steps()
        finite = [self._finite(aligned, table) for aligned, table in self._by_alignment().items()]
        merged: dict[tuple[bool, bool, bool], list[int]] = {}
        for subset, numbers in self.batch.subsets.items():
            merged.setdefault(_facts(subset), []).extend(numbers)
        return [self._prepare(), *finite, *(self._adamw_groups(*facts, numbers) for facts, numbers in merged.items())]

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
            "G": self.types["G"], "M": self.types["M"], "ALIGNED": aligned, "COLUMNS_ALIGNED": columns_aligned,
            "EVEN": even, "ROUND": kind.stochastic, "CAPTURABLE": kind.capturable, "N": kind.group,
            "PAIRS": launch.PAIRS,
        }  # fmt: skip
        kernel = Bound(adamw_int8_kernel, len(tiles), constants, **AS_WRITTEN)
        return lambda hypers, scratch: kernel(
            tiles, self.addresses, self.batch.metas, hypers, self.verdicts, self.skipped
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
