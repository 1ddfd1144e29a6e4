"""A step of weights of which each rank holds a part: the kernels' launches, and what ranks exchange between them.

A batch's step is a generator, as a weight's is in plain PyTorch, so that what all of them ask of other ranks travels
together. Ranks form the same batches, whatever their parts are.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import columns as at
from ..stepping.collectives import Request, Step, bytes_over_channels, summed
from ..stepping.weight import Job
from .batches import Batch, block_count
from .launches import Launch, SharedLaunch, SharedLaunches, SharedScratch
from .step import FusedWeights


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


class Costs(NamedTuple):
    """Bytes that a batch exchanges, as every rank counts them."""

    lows: int
    gains: int


class Stage(NamedTuple):
    """A batch with its launches, by what they wait for."""

    batch: Batch
    verdicts: Tensor
    weights: list[Tensor]
    costs: Costs
    kept: SharedScratch | None
    bases: Launch | None
    projections: list[Launch]
    moments: list[SharedLaunch]
    """What waits for the sum of low-rank gradients, where ranks have shares in them."""
    sums: list[SharedLaunch]
    totals: Totals | None
    updates: list[Launch]


class SharedStep(FusedWeights):
    """Steps weights of one device that are spread over ranks; `prepared_` must agree before `steps` are begun."""

    def __init__(self, jobs: Sequence[Job], skipped: Tensor):
        for job in jobs:
            if not job.weight.is_contiguous():
                # Other ranks' parts may be, and have all chosen the kernels: it is too late to choose otherwise.
                raise RuntimeError(
                    f"this rank's part {tuple(job.weight.shape)} of a weight {tuple(job.parameter.shape)} is not "
                    "contiguous: make it so, or pass fused=False"
                )
        super().__init__(jobs)
        self._stages = list(self._new_stages(skipped))

    def _new_stages(self, skipped: Tensor) -> Iterator[Stage]:
        first = 0
        for batch in self.batches:
            rows = slice(first, first := first + len(batch.matrices))
            verdicts = self.verdicts[rows]
            launches = SharedLaunches(batch, self.addresses[rows], verdicts, skipped)
            jobs = list({id(matrix.job): matrix.job for matrix in batch.matrices}.values())
            yield Stage(
                batch=batch,
                verdicts=verdicts,
                weights=[job.weight for job in jobs],
                costs=_costs(jobs),
                kept=SharedScratch(batch) if self._keeps_scratch else None,
                bases=launches.bases(),
                projections=launches.projections(),
                moments=launches.moments(),
                sums=launches.sums(),
                totals=None if batch.kind.mode == "adamw" else Totals(batch),
                updates=launches.updates(),
            )

    def steps(self) -> list[Step[None]]:
        """One step for each batch, all of them to be taken side by side."""
        with self._on_device():
            hypers = self._advanced_hypers()
        return [self._step(stage, hypers) for stage in self._stages]

    def _step(self, stage: Stage, hypers: Tensor) -> Step[None]:
        scratch = stage.kept or SharedScratch(stage.batch)
        with self._on_device():
            self._project(stage.bases, stage.projections, scratch, hypers)
        if stage.totals is None:
            yield from _all_finite(stage)
        else:
            scratch.blocks.zero_()
            if stage.batch.exchanges_lows:
                yield from _lows_added_up(stage, scratch)
                self._launch(stage.moments, scratch, hypers)
                yield from _gains_gathered(stage, scratch)
            self._launch(stage.sums, scratch, hypers)
            if stage.kept is None:
                scratch.end_sums_()
            yield from stage.totals.added_up(scratch.blocks)
        self._launch(stage.updates, scratch, hypers)
        # Autograd sees no kernel write. A graph that still needs the old weight must fail, not use the new one.
        increment_version(stage.weights)

    def _launch(self, launches: Sequence[SharedLaunch], scratch: SharedScratch, hypers: Tensor) -> None:
        with self._on_device():
            for launch in launches:
                launch(hypers, scratch)


def _costs(jobs: Sequence[Job]) -> Costs:
    projected = [(job.part, job.shape.rank) for job in jobs if job.part is not None and job.shape is not None]
    return Costs(
        lows=sum(bytes_over_channels(part, rank) for part, rank in projected),
        gains=sum(bytes_over_channels(part, 1) for part, _ in projected),
    )


def _all_finite(stage: Stage) -> Step[None]:
    """Refuse what another rank has found a bad part of."""
    assert stage.batch.part is not None
    finite = stage.verdicts[:, at.FINITE.value]
    (bad,) = yield from summed(stage.batch.part, (finite == 0, "W"))
    finite.copy_(bad == 0)


def _lows_added_up(stage: Stage, scratch: SharedScratch) -> Step[None]:
    """Low-rank gradients of the channels that this rank keeps, from every rank's share in those of all."""
    part, shares = stage.batch.part, scratch.shares
    assert part is not None
    assert shares is not None
    (axis,) = part.axes("S")
    if stage.kept is None:
        scratch.end_projection_()
    if part.moments_are_shared_out:
        scratch.low_sums = yield Request("scatter", axis, shares.view(axis.size, -1), stage.costs.lows)
    else:
        scratch.low_sums = yield Request("reduce", axis, shares, stage.costs.lows)


def _gains_gathered(stage: Stage, scratch: SharedScratch) -> Step[None]:
    """Gains of all channels, where there is one for each of them."""
    part = stage.batch.part
    assert part is not None
    scratch.all_gains = scratch.kept_gains
    if stage.batch.kind.channel and part.moments_are_shared_out:
        (axis,) = part.axes("S")
        everyone = yield Request("gather", axis, scratch.kept_gains, stage.costs.gains)
        # Between its rows lie those of other batches that were gathered with it.
        scratch.all_gains = everyone.contiguous()
