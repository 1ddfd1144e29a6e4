"""A step of weights of which each rank holds a part: the kernels' launches, and what ranks exchange between them.

A batch's step is a generator, as a weight's is in plain PyTorch, so that what all of them ask of other ranks travels
together. Ranks form the same batches, whatever their parts are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from ...stepping.collectives import Request, Step, bytes_over_channels, summed
from ...stepping.weight import Job
from . import layout as at
from .launch import Launch
from .launch_shared import SharedLaunch, SharedLaunches, SharedScratch
from .plan import Batch
from .totals import Totals
from .weights import FusedWeights


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
