"""Sums over the ranks that hold parts of a batch's matrices: from its table of block sums, and back into it.

Shapes: W weights, M matrices, K the most rows of the table that one of them has.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from ...stepping.collectives import Step, summed
from . import layout as at
from .plan import Batch, block_count


class Totals:
    """What the ranks of a batch have to add up before its weights can be stepped."""

    def __init__(self, batch: Batch):
        assert batch.part is not None
        self.part = batch.part
        # Of the identity's moments each rank keeps those of its own rows and columns.
        kept = "SC" if batch.kind.mode == "identity" else "P"
        if batch.kind.channel:
            self.columns = [(at.B_SCALED_SQ.value, "SC"), (at.B_MOMENT_SQ.value, kept), (at.B_GAIN.value, "C")]
        else:
            low = at.B_MOMENT_SQ.value, at.B_STEP_SQ.value, at.B_LOW_SQ.value
            self.columns = [*((column, kept) for column in low), (at.B_GRAD_SQ.value, "SC")]
        tables = (0, batch.blocks_size) if batch.exchanges_lows else (0,)
        spare = len(tables) * batch.blocks_size
        firsts = list(accumulate((block_count(matrix) for matrix in batch.matrices), initial=0))
        rows_of = [[table + row for table in tables for row in range(*span)] for span in pairwise(firsts)]
        ends = accumulate(batch.counts, initial=0)
        weights = [list(chain(*rows_of[first:end])) for first, end in pairwise(ends)]
        numbers = [number for number, count in enumerate(batch.counts) for _ in range(count)]
        device = batch.kind.device
        self.rows_MK, self.rows_WK = _index(rows_of, spare, device), _index(weights, spare, device)
        self.first_M = torch.tensor(firsts[:-1], device="cpu").to(device)
        self.weight_M = torch.tensor(numbers, device="cpu").to(device)

    def added_up(self, blocks: Tensor) -> Step[None]:
        """Leave in each matrix's first row of the table what all ranks have in all of its rows together."""
        own_M, own_W = (blocks[rows].sum(dim=1, dtype=torch.float64) for rows in (self.rows_MK, self.rows_WK))
        # As on one rank, squares whose sum float32 cannot hold are not finite.
        bad_W = own_W[:, at.B_BAD.value] + ~own_W[:, at.B_GRAD_SQ.value].float().isfinite()
        values = [(own_M[:, column], letters) for column, letters in self.columns]
        bad_W, *totals = yield from summed(self.part, (bad_W, "W"), *values)
        total_M = torch.zeros_like(own_M)
        total_M[:, at.B_BAD.value] = bad_W[self.weight_M]
        for (column, _), total in zip(self.columns, totals, strict=True):
            total_M[:, column] = total
        blocks.zero_()
        blocks[self.first_M] = total_M.float()


def _index(runs: Sequence[Sequence[int]], spare: int, device: torch.device) -> Tensor:
    """One row of numbers for each run, the short ones filled up with `spare`."""
    longest = max(map(len, runs))
    rows = [[*run, *[spare] * (longest - len(run))] for run in runs]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
