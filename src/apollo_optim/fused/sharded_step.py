"""The step by the kernels of weights of which each rank holds a part: launches, and what ranks exchange between them.

A batch's step is a generator, as a weight's is in plain PyTorch, so that what all of them ask of other ranks travels
together. Ranks form the same batches, whatever their parts are.

Shapes: W weights, M matrices, K the most rows of the table of block sums that one of them has.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.direction import clip_of
from ..distributed import Part
from ..kernels import columns as at
from ..stepping.collectives import Request, Step, bytes_over_channels, summed
from ..stepping.weight import WeightStep
from .batches import KernelBatch, block_count
from .launches import BatchLaunches, Launch, Scratch, new_parts
from .step import launches_of_batches
from .tables import Addresses, WeightTables


class ShardedBatch:
    """A batch of which each rank holds a part: its launches, and what ranks exchange between them."""

    def __init__(self, launches: BatchLaunches):
        batch = launches.batch
        assert batch.part is not None
        projected = [(job.part, job.shape.rank) for job in batch.jobs if job.part is not None and job.shape is not None]
        self.launches, self.kind, self.part = launches, batch.kind, batch.part
        self.weights = [job.weight for job in batch.jobs]
        self.totals = Totals(batch, batch.part) if batch.kind.is_projected else None
        """The sums that its limiter and gains need; None for what is not projected."""
        self.factors = FactorTotals(launches, batch.part) if batch.kind.mode == "factored" else None
        """The sums that its second moments need where these are factored."""
        self._low_bytes = sum(bytes_over_channels(part, rank) for part, rank in projected)
        self._gain_bytes = sum(bytes_over_channels(part, 1) for part, _ in projected)

    def agree_on_finite(self) -> Step[None]:
        """Refuse what another rank has found a bad part of."""
        finite = self.launches.outcomes[:, at.FINITE.value]
        (bad,) = yield from summed(self.part, (finite == 0, "W"))
        finite.copy_(bad == 0)

    def add_up_lows(self, scratch: Scratch) -> Step[None]:
        """Low-rank gradients of the channels that this rank keeps, from every rank's share in those of all."""
        shares = scratch.shares
        assert shares is not None
        (axis,) = self.part.axes("S")
        if self.launches.scratch is None:
            scratch.end_projection_()
        if self.part.moments_are_shared_out:
            scratch.low_sums = yield Request("scatter", axis, shares.view(axis.size, -1), self._low_bytes)
        else:
            scratch.low_sums = yield Request("reduce", axis, shares, self._low_bytes)

    def gather_gains(self, scratch: Scratch) -> Step[None]:
        """Gains of all channels, where there is one for each of them."""
        scratch.all_gains = scratch.kept_gains
        if self.kind.channel and self.part.moments_are_shared_out:
            (axis,) = self.part.axes("S")
            everyone = yield Request("gather", axis, scratch.kept_gains, self._gain_bytes)
            # Between its rows lie those of other batches that were gathered with it.
            scratch.all_gains = everyone.contiguous()


class ShardedFusedStep:
    """Steps weights of one device that are spread over ranks. `prepare_` comes before `steps` are begun."""

    def __init__(self, jobs: Sequence[WeightStep], skipped: Tensor):
        for job in jobs:
            if not job.weight.is_contiguous():
                # Other ranks' parts may be, and have all chosen the kernels: it is too late to choose otherwise.
                raise RuntimeError(
                    f"this rank's part {tuple(job.weight.shape)} of a weight {tuple(job.parameter.shape)} is not "
                    "contiguous: make it so, or pass fused=False"
                )
        self.tables = WeightTables(jobs)
        all_launches = launches_of_batches(self.tables, skipped)
        self._keeps_bases = all(launches.scratch is not None for launches in all_launches)
        self._batches = [ShardedBatch(launches) for launches in all_launches]

    def prepare_(self, addresses: Addresses) -> None:
        """Bring the tables up to date with where weights and gradients lie."""
        self.tables.prepare_(addresses)

    def steps(self) -> list[Step[None]]:
        """One step for each batch, all of them to be taken side by side, and begun in this order."""
        with self.tables.on_device():
            hypers = self.tables.advanced_hypers()
        renews_bases = self.tables.renews_bases()
        if renews_bases:
            self.tables.kept_bases = None  # for as long as they are not all made
        return [self._step(batch, hypers, renews_bases) for batch in self._batches]

    def _step(self, batch: ShardedBatch, hypers: Tensor, renews_bases: bool) -> Step[None]:
        launches = batch.launches
        with self.tables.on_device():
            scratch = launches.project(hypers, renews_bases)
        if self._keeps_bases and batch is self._batches[-1]:
            self.tables.kept_bases = self.tables.refreshes()
        if batch.factors is not None:
            yield from self._find_factors(launches, batch.factors, scratch)
        elif batch.totals is not None:
            yield from self._find_gains(batch, batch.totals, scratch)
        else:
            yield from batch.agree_on_finite()
        self._launch(launches.updates, scratch)
        # Autograd sees no kernel write. A graph that still needs the old weight must fail, not use the new one.
        increment_version(batch.weights)

    def _find_gains(self, batch: ShardedBatch, totals: "Totals", scratch: Scratch) -> Step[None]:
        scratch.blocks.zero_()
        if batch.kind.shares_lows:
            yield from batch.add_up_lows(scratch)
            self._launch(batch.launches.moments, scratch)
            yield from batch.gather_gains(scratch)
        self._launch(batch.launches.sums, scratch)
        if batch.launches.scratch is None:
            scratch.end_sums_()
        yield from totals.added_up(scratch.blocks)

    def _find_factors(self, launches: BatchLaunches, factors: "FactorTotals", scratch: Scratch) -> Step[None]:
        if launches.scratch is None:
            scratch.parts = None  # for as long as means are added up, those of all batches together
        yield from factors.add_up_means(scratch)
        if launches.scratch is None:
            scratch.parts = new_parts(launches.batch)
        self._launch(launches.sums, scratch)
        if launches.scratch is None:
            scratch.end_sums_()
        yield from factors.clip()

    def _launch(self, launches: Sequence[Launch], scratch: Scratch) -> None:
        with self.tables.on_device():
            for launch in launches:
                launch(scratch)


class Totals:
    """The sums over ranks that a batch needs before its weights can be stepped."""

    def __init__(self, batch: KernelBatch, part: Part):
        self.part = part
        # Of the identity's moments each rank keeps those of its own rows and columns.
        kept = "SC" if batch.kind.mode == "identity" else "P"
        if batch.kind.channel:
            self.columns = [(at.B_SCALED_SQ.value, "SC"), (at.B_MOMENT_SQ.value, kept), (at.B_GAIN.value, "C")]
        else:
            low = at.B_MOMENT_SQ.value, at.B_STEP_SQ.value, at.B_LOW_SQ.value
            self.columns = [*((column, kept) for column in low), (at.B_GRAD_SQ.value, "SC")]
        tables = (0, batch.sizes.blocks) if batch.kind.shares_lows else (0,)
        spare = len(tables) * batch.sizes.blocks
        firsts = list(accumulate(map(block_count, batch.matrices), initial=0))
        rows_of = [[table + row for table in tables for row in range(*span)] for span in pairwise(firsts)]
        counts = [job.matrix_count for job in batch.jobs]
        ends = accumulate(counts, initial=0)
        weights = [list(chain(*rows_of[first:end])) for first, end in pairwise(ends)]
        numbers = [number for number, count in enumerate(counts) for _ in range(count)]
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


class FactorTotals:
    """The sums over ranks that a batch of factored weights needs before its second moments, and before its update."""

    def __init__(self, launches: BatchLaunches, part: Part):
        batch = launches.batch
        self.part, self.factor_M = part, launches.outcomes[:, at.FACTOR.value]
        device, is_tall = batch.kind.device, [matrix.is_tall for matrix in batch.matrices]
        places: dict[str, list[Tensor]] = {"S": [], "C": []}
        firsts = batch.matrix_table[:, at.GAINS.value].tolist()
        for first, tall, matrix in zip(firsts, is_tall, batch.matrices, strict=True):
            rows, columns = matrix.sides
            of_columns, of_rows = torch.arange(first, first + columns + rows, device="cpu").split([columns, rows])
            places["S"].append(of_columns if tall else of_rows)
            places["C"].append(of_rows if tall else of_columns)
        self.sides, self.channels = (torch.cat(each).to(device) for each in places.values())
        """Places of the means among the gains."""
        self.is_tall_M = torch.tensor(is_tall, device="cpu").to(device)
        first_rows = list(accumulate(map(block_count, batch.matrices), initial=0))
        self.rows_MK = _index([range(*span) for span in pairwise(first_rows)], batch.sizes.blocks, device)

    def add_up_means(self, scratch: Scratch) -> Step[None]:
        """Make means of squares, and sums of them and of the second moments of rows, those of all ranks."""
        scratch.blocks[-1].zero_()
        own_M = scratch.blocks[self.rows_MK].sum(dim=1, dtype=torch.float64)
        square_M, before_M = own_M[:, at.B_GRAD_SQ.value], own_M[:, at.B_MOMENT_SQ.value]
        side, channel, square_M, of_wide_M, of_tall_M = yield from summed(
            self.part,
            (scratch.gains[self.sides], "C"),
            (scratch.gains[self.channels], "S"),
            (square_M, "SC"),
            (before_M.masked_fill(self.is_tall_M, 0), "S"),
            (before_M.masked_fill(~self.is_tall_M, 0), "C"),
        )
        scratch.gains[self.sides], scratch.gains[self.channels] = side.float(), channel.float()
        scratch.blocks.zero_()
        first_M = self.rows_MK[:, 0]
        scratch.blocks[first_M, at.B_GRAD_SQ.value] = square_M.float()
        scratch.blocks[first_M, at.B_MOMENT_SQ.value] = (of_wide_M + of_tall_M).float()

    def clip(self) -> Step[None]:
        """Compute the factor on each update from the ranks' parts of its mean square."""
        (mean_M,) = yield from summed(self.part, (self.factor_M, "SC"))
        self.factor_M.copy_(clip_of(mean_M))


def _index(runs: Sequence[Sequence[int]], spare: int, device: torch.device) -> Tensor:
    """One row of numbers for each run, the short ones filled up with `spare`."""
    longest = max(map(len, runs))
    rows = [[*run, *[spare] * (longest - len(run))] for run in runs]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
