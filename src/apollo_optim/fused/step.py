"""The step of a set of whole weights by the kernels: its streams, its recordings, its scratch."""

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..stepping.plain import refresh_by_host, renew_basis_
from ..stepping.weight import WeightStep
from .batches import KernelBatch
from .launches import BatchLaunches, Scratch
from .streams import WARM, Recording, raw_stream
from .tables import Addresses, WeightTables

KEPT_BYTES = 2**25
"""Scratch up to this size is kept between steps: taking it anew would cost a small model more time than memory."""

MOMENTS = "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"


@cache
def _projecting_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of projections, one a device: memory that was taken on a stream can be taken again on no other."""
    return torch.cuda.Stream(device, priority=-1)


class FusedStep:
    """Steps weights of one device together by the kernels. `prepare_` comes before every `step_`."""

    def __init__(self, jobs: Sequence[WeightStep], skipped: Tensor, pool: dict[Any, Any] | None = None):
        """Plans that share `pool` share scratch, too: on one stream they are stepped one after the other."""
        self.tables = WeightTables(jobs, pool)
        self._weights = [job.weight for job in jobs]
        self._stream = None if pool is None else raw_stream(self.tables.gpu)
        """The stream on which shared scratch is used; None where scratch is not shared."""
        self._elsewhere = False
        """True if this step is taken on another stream."""
        all_launches = launches_of_batches(self.tables, skipped, self._stream)
        self._elementwise = [launches for launches in all_launches if not launches.batch.kind.is_projected]
        self._projected = [launches for launches in all_launches if launches.batch.kind.is_projected]
        self._overlaps = len(self._projected) > 1 and any(each.batch.kind.mode == "gemm" for each in self._projected)
        both, on_gpu = bool(self._elementwise and self._projected), self.tables.device.type == "cuda"
        keeps_all = all(launches.scratch is not None for launches in all_launches)
        self._keeps_bases = any(launches.bases for launches in all_launches) and keeps_all and pool is None
        """True if bases stay in the scratch for the next step; where that is shared, all are made anew."""
        self._projects_beside = keeps_all and not self._overlaps
        """True if a small model's projections, of which one waits for another, go before AdamW's many programs."""
        self._side: torch.cuda.Stream | None = None
        if on_gpu and self._overlaps:
            self._side = _projecting_stream(self.tables.device)
        elif on_gpu and both:
            self._side = torch.cuda.Stream(self.tables.device, -1 if self._projects_beside else 0)
        by_host = any(launches.batch.kind.low_rank for launches in all_launches)
        records = on_gpu and not self.tables.capturable and keeps_all and not by_host
        self._until_recorded = WARM if records else -1
        self._with_basis = [job for job in jobs if "basis" in job.state]
        """Weights that keep a basis in state, which the host makes of gradients before kernels project by it."""
        self._recordings: dict[bool, Recording] = {}
        """CUDA graphs of the launches, keyed by whether they renew the bases in the scratch."""

    def prepare_(self, addresses: Addresses) -> None:
        """Bring the tables up to date with where weights and gradients lie."""
        if self.tables.prepare_(addresses):
            self._recordings.clear()  # which read the rows of before

    def step_(self) -> None:
        """Step every weight and its state."""
        tables = self.tables
        with tables.on_device():
            before = self._renew_stored_bases_() if self._with_basis else []
            self._elsewhere = self._stream is not None and raw_stream(tables.gpu) != self._stream
            if self._until_recorded < 0 or self._elsewhere:
                self._launch(tables.advanced_hypers())
            else:
                self._step_recorded(tables.advanced_packed())
            tables.kept_bases = tables.refreshes() if self._keeps_bases else None
            for tensor, value in before:
                tensor.copy_(value)
        # Autograd sees no kernel write. A graph that still needs the old weight must fail, not use the new one.
        increment_version(self._weights)

    def _renew_stored_bases_(self) -> list[tuple[Tensor, Tensor]]:
        """Make the bases that begin at this step, where the host waits for the device.

        Returns step count and moments, with their values, of weights whose gradients cannot begin a basis: this step
        must leave them as they are, as a plain step would. The kernels do refuse a gradient that is not finite, but
        channels that are in order would have it in their moments.
        """
        tables = self.tables
        if all(step % group["refresh_every"] != 0 for group, step in zip(tables.groups, tables.counts, strict=True)):
            return []
        refused = [job for job in self._with_basis if refresh_by_host(job) and not renew_basis_(job)]
        kept = [job.state[name] for job in refused for name in ("step", *MOMENTS) if name in job.state]
        return [(tensor, tensor.clone()) for tensor in kept]

    def _step_recorded(self, packed: bytes) -> None:
        """A step by a recording, which is made where there is none; by launches until kernels are compiled."""
        if self._until_recorded > 0:
            self._until_recorded -= 1
            self._launch(self.tables.hypers.on_device(packed))
            return
        hypers = self.tables.hypers.resident(packed, self._stream)
        renews = self.tables.renews_bases()
        if renews not in self._recordings:
            self._recordings[renews] = Recording(self._launch, hypers)
        self._recordings[renews].replay()

    def _launch(self, hypers: Tensor) -> None:
        """Queue the kernels of all batches."""
        renews = self.tables.renews_bases()
        if renews:
            self.tables.kept_bases = None  # for as long as they are not all made
        if self._overlaps and self._side is not None:
            self._step_overlapped(self._side, hypers, renews)
            return
        beside, here = self._elementwise, self._projected
        if self._projects_beside:
            beside, here = here, beside
        with self._beside():
            for launches in beside:
                self._step_batch(launches, hypers, renews)
        for launches in here:
            self._step_batch(launches, hypers, renews)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _beside(self) -> AbstractContextManager[Any]:
        """A stream on which some weights can be stepped while the others are: a small model waits on both less."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _step_batch(self, launches: BatchLaunches, hypers: Tensor, renews_bases: bool) -> None:
        launches.update(launches.project(hypers, renews_bases, self._elsewhere))

    def _step_overlapped(self, side: torch.cuda.Stream, hypers: Tensor, renews_bases: bool) -> None:
        """Project a batch, which keeps the tensor cores busy, while the last one's update keeps the memory busy.

        The stream that projects has the higher priority: updates have many small programs, which take any room.
        """
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for launches in self._elementwise:
            self._step_batch(launches, hypers, renews_bases)
        under_way: deque[tuple[torch.Event, Scratch]] = deque()
        try:
            for launches in self._projected:
                with torch.cuda.stream(side):
                    if len(under_way) == 2:
                        # Its memory is free for this stream to take again only when the other one has done with it.
                        done, scratch = under_way.popleft()
                        side.wait_event(done)
                        del scratch
                    scratch = launches.project(hypers, renews_bases, self._elsewhere)
                    if launches.scratch is None:
                        scratch.end_projection_()
                main.wait_stream(side)
                launches.update(scratch)
                under_way.append((main.record_event(), scratch))
        finally:
            main.wait_stream(side)
            if not self.tables.is_capturing():  # a capture must end on the stream on which it began
                # What is given back now is that stream's memory, and may be taken there for anything.
                side.wait_stream(main)


def launches_of_batches(tables: WeightTables, skipped: Tensor, stream: int | None = None) -> list[BatchLaunches]:
    """The launches of every batch, over its rows of the tables; `stream` is where scratch is used that plans share."""
    pool: dict[Any, Any] = {} if tables.pool is None else tables.pool
    fits = sum(batch.scratch_bytes for batch in tables.batches) <= KEPT_BYTES
    keeps = fits and (tables.pool is None or not tables.capturable)
    result = []
    first = 0
    for number, batch in enumerate(tables.batches):
        rows = slice(first, first := first + len(batch.matrices))
        scratch = _kept_scratch(pool, (Scratch, stream, number, batch.scratch_key), batch) if keeps else None
        result.append(BatchLaunches(batch, tables.addresses[rows], tables.outcomes[rows], skipped, scratch))
    return result


def _kept_scratch(pool: dict[Any, Any], key: Hashable, batch: KernelBatch) -> Scratch | None:
    """Scratch reused across steps; None when it is allocated per step, because the pool holds enough already."""
    kept = sum(scratch.bytes for scratch in pool.values() if isinstance(scratch, Scratch))
    if key not in pool and kept + batch.scratch_bytes <= KEPT_BYTES:
        pool[key] = Scratch(batch)
    return pool.get(key)
