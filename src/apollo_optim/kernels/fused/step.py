"""A step of a set of weights that stays the same from step to step."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...stepping.weight import Job
from ...streams import raw_stream
from . import weights
from .launch import Launch, Launches, Scratch
from .launch_groups import GroupLaunches
from .plan import Batch
from .recording import WARM, Recording
from .stored import StoredBases
from .weights import FusedWeights


class Stage(NamedTuple):
    """A batch with its launches."""

    batch: Batch
    kept: Scratch | None
    bases: Launch | None
    projections: list[Launch]
    updates: list[Launch]


@cache
def _projecting_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all whose batches overlap: scratch that was taken on a stream can be taken again on no other."""
    return torch.cuda.Stream(device, priority=-1)


class FusedStep(FusedWeights):
    """Steps weights of one device together; `prepared_` must agree before every `step_`."""

    def __init__(self, jobs: Sequence[Job], skipped: Tensor, pool: dict[Any, Any] | None = None):
        """Those that share `pool` share scratch, too: on one stream they are stepped one after the other."""
        super().__init__(jobs, pool)
        self._stream = None if pool is None else raw_stream(self._gpu)
        """Where scratch is shared: the stream on which it is."""
        self._elsewhere = False
        """Whether this step is taken on another stream."""
        stages = self._new_stages(skipped, {} if pool is None else pool)
        self._elementwise = [stage for stage in stages if stage.batch.kind.mode == "adamw"]
        self._projected = [stage for stage in stages if stage.batch.kind.mode != "adamw"]
        self._overlaps = len(self._projected) > 1 and any(s.batch.kind.mode == "gemm" for s in self._projected)
        both, on_gpu = bool(self._elementwise and self._projected), self.device.type == "cuda"
        keeps_all = all(stage.kept is not None for stage in stages)
        self._projects_beside = keeps_all and not self._overlaps
        """Whether a small model's projections, of which one waits for another, go before AdamW's many programs."""
        self._side: torch.cuda.Stream | None = None
        if on_gpu and self._overlaps:
            self._side = _projecting_stream(self.device)
        elif on_gpu and both:
            self._side = torch.cuda.Stream(self.device, -1 if self._projects_beside else 0)
        records = on_gpu and not self.capturable and keeps_all
        self._until_recorded = WARM if records else -1
        self._stored_bases = StoredBases(jobs)
        self._recordings: dict[bool, Recording] = {}
        """By whether they renew the bases that are kept; those in shared scratch are made anew in any case."""

    def _new_stages(self, skipped: Tensor, pool: dict[Any, Any]) -> list[Stage]:
        stages = []
        first = 0
        for number, batch in enumerate(self.batches):
            rows = slice(first, first := first + len(batch.matrices))
            made_by = GroupLaunches if batch.kind.group > 0 else Launches
            launches = made_by(batch, self.addresses[rows], self.verdicts[rows], skipped)
            kept = self._kept_scratch(number, batch, pool)
            stages.append(Stage(batch, kept, launches.bases(), launches.projections(), launches.updates()))
        return stages

    def _kept_scratch(self, number: int, batch: Batch, pool: dict[Any, Any]) -> Scratch | None:
        """Scratch for every step; None where it is taken anew, because all who share keep as much as may be."""
        if not self._keeps_scratch or (self.capturable and self._stream is not None):
            return None
        key = Scratch, self._stream, number, batch.scratch_sizes
        kept = sum(scratch.bytes for scratch in pool.values() if isinstance(scratch, Scratch))
        if key not in pool and kept + batch.scratch_bytes <= weights.KEPT_BYTES:
            pool[key] = Scratch(batch)
        return pool.get(key)

    def step_(self) -> None:
        """Step every weight and its state."""
        with self._on_device():
            refused = self._stored_bases.renew_(self.groups, self._steps)
            self._elsewhere = self._stream is not None and raw_stream(self._gpu) != self._stream
            if self._until_recorded < 0 or self._elsewhere:
                self._launch(self._advanced_hypers())
            else:
                self._step_recorded(self._advanced_rows())
            for kept in refused:
                kept.restore_()
        # Autograd sees no kernel write. A graph that still needs the old weight must fail, not use the new one.
        increment_version(self._weights)

    def _step_recorded(self, rows: bytes) -> None:
        """A step by a recording, which is made where there is none; by launches until kernels are compiled."""
        if self._until_recorded > 0:
            self._until_recorded -= 1
            self._launch(self._rows.on_device(rows))
            return
        renews = self._renews_bases()
        hypers = self._rows.resident(rows, self._stream)
        if renews not in self._recordings:
            self._recordings[renews] = self._new_recording(renews, hypers)
        self._recordings[renews].replay()
        if self._stream is None:
            self._set_bases(self._refreshes())

    def _new_recording(self, renews: bool, hypers: Tensor) -> Recording:
        if not renews:
            return Recording(self._launch, hypers)
        self._set_bases(None)
        try:
            return Recording(self._launch, hypers)
        finally:
            self._set_bases(None)  # they are made when it is replayed, and not before

    def _renews_bases(self) -> bool:
        """Whether this step needs other bases than those in the scratch; in shared scratch all are made anew."""
        return self._stream is None and any(scratch.refreshes != self._refreshes() for scratch in self._bases())

    def _set_bases(self, refreshes: list[int] | None) -> None:
        """Say which bases the scratch has, or that it has none."""
        for scratch in self._bases():
            scratch.refreshes = refreshes

    def _bases(self) -> list[Scratch]:
        """Scratch with bases that are kept."""
        stages = [stage for stage in self._projected if stage.bases is not None]
        return [stage.kept for stage in stages if stage.kept is not None]

    def _launch(self, hypers: Tensor) -> None:
        """Queue the kernels of all batches."""
        if self._overlaps and self._side is not None:
            self._step_overlapped(self._side, hypers)
            return
        beside, here = self._elementwise, self._projected
        if self._projects_beside:
            beside, here = here, beside
        with self._beside():
            for stage in beside:
                self._step_stage(stage, hypers)
        for stage in here:
            self._step_stage(stage, hypers)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _beside(self) -> AbstractContextManager[Any]:
        """A stream on which some weights can be stepped while the others are: a small model waits on both less."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _step_stage(self, stage: Stage, hypers: Tensor) -> None:
        scratch = self._projection_of(stage, hypers)
        self._update(stage, scratch, hypers)

    def _step_overlapped(self, side: torch.cuda.Stream, hypers: Tensor) -> None:
        """Project a batch, which keeps the tensor cores busy, while the last one's update keeps the memory busy.

        The stream that projects has the higher priority: updates have many small programs, which take any room.
        """
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for stage in self._elementwise:
            self._step_stage(stage, hypers)
        under_way: deque[tuple[torch.Event, Scratch]] = deque()
        try:
            for stage in self._projected:
                with torch.cuda.stream(side):
                    if len(under_way) == 2:
                        # Its memory is free for this stream to take again only when the other one has done with it.
                        done, scratch = under_way.popleft()
                        side.wait_event(done)
                        del scratch
                    scratch = self._projection_of(stage, hypers)
                    if stage.kept is None:
                        scratch.end_projection_()
                main.wait_stream(side)
                self._update(stage, scratch, hypers)
                under_way.append((main.record_event(), scratch))
        finally:
            main.wait_stream(side)
            if not self._is_capturing():  # a capture must end on the stream on which it began
                # What is given back now is that stream's memory, and may be taken there for anything.
                side.wait_stream(main)

    def _projection_of(self, stage: Stage, hypers: Tensor) -> Scratch:
        """What the projections of a batch have found."""
        scratch = Scratch(stage.batch) if stage.kept is None or self._elsewhere else stage.kept
        if self._stream is not None:
            scratch.refreshes = None
        self._project(stage.bases, stage.projections, scratch, hypers)
        return scratch

    def _update(self, stage: Stage, scratch: Scratch, hypers: Tensor) -> None:
        for launch in stage.updates:
            launch(hypers, scratch)
