"""A step of a set of weights that stays the same from step to step."""

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import columns as at
from ..kernels.hyper import TEMPLATE_WIDTH, hyper_kernel
from ..quant.int8 import Int8Weight
from ..stepping.plain import refresh_by_host, renew_basis_
from ..stepping.weight import Job, Report
from .batches import Batch, batches
from .launches import Bound, GroupLaunches, Launch, Launches, Scratch
from .streams import WARM, Recording, gpu_number, raw_stream
from .tables import SentRows, Slots, hyper_rows, templates

T = TypeVar("T")

VALUES, GRAD, DTYPE = methodcaller("values"), attrgetter("grad"), attrgetter("dtype")
KEPT_BYTES = 2**25
"""Scratch up to this size is kept between steps: taking it anew would cost a small model more time than memory."""


class FusedWeights:
    """Weights of one device; `prepared_` must agree before every step."""

    def __init__(self, jobs: Sequence[Job], pool: dict[Any, Any] | None = None):
        """`pool` is shared by the many of these that step a model a few weights at a time.

        What is the same for all of them goes to the device once.
        """
        self.jobs = list(jobs)
        self._weights = [job.weight for job in jobs]
        self._sharded = any(job.part is not None for job in jobs)
        self._int8_weights = [weight for weight in self._weights if isinstance(weight, Int8Weight)]
        self.device = jobs[0].weight.device
        self._gpu = gpu_number(self.device)
        self.capturable: bool = jobs[0].group["capturable"]
        self.groups: list[Mapping[str, Any]] = []
        self._steps: list[int] = []
        self.batches = batches(self.jobs, self._hyper_rows_of_jobs(pool))
        self.matrices = [matrix for batch in self.batches for matrix in batch.matrices]
        self._keeps_scratch = sum(batch.scratch_bytes for batch in self.batches) <= KEPT_BYTES
        self.verdicts = torch.zeros(len(self.matrices), at.VERDICT_WIDTH.value, dtype=torch.float32, device=self.device)
        self.addresses = torch.zeros(len(self.matrices), at.ADDRESS_WIDTH.value, dtype=torch.int64, device=self.device)
        self._slots = _shared(pool, Slots, tuple(self.addresses.shape), torch.int64, self.device)
        self._places = self._places_of_matrices()
        self._states = [job.state for job in jobs]
        self._state_addresses = self._addresses_of_state()
        moments = [(job.state, name) for job in jobs for name in ("exp_avg", "exp_avg_sq") if name in job.state]
        self._padded = [(state, name) for state, name in moments if not state[name].is_contiguous()]
        """State with gaps between its rows."""
        self._strides = self._strides_of_padded()
        self._weight_facts = self._facts_of_weights()
        self._grad_dtypes = list(map(DTYPE, self._grads()))
        self._grad_alignment = _alignment(self._grads())
        self._known_weights: list[int] = []
        self._known_grads: list[int] = []
        self._known_templates = b""
        self.was_captured = False
        """Whether a CUDA graph holds launches of this object, and so addresses of its tables."""
        self._spare: Tensor | None = self._page() if self.capturable else None
        self._captured_pages: list[Tensor] = []

    def _hyper_rows_of_jobs(self, pool: dict[Any, Any] | None) -> list[int]:
        """Each job's row of hyper-parameters: one per group and step count, or its own where the device counts."""
        rows: dict[tuple[int, int], int] = {}
        row_of = []
        for job in self.jobs:
            key = id(job.group), 0 if self.capturable else int(job.state["step"])
            if key not in rows:
                rows[key] = len(self.groups)
                self.groups.append(job.group)
                self._steps.append(key[1])
            row_of.append(rows[key])
        if not self.capturable:
            self._share_step_counts()
            self._rows = _shared(pool, SentRows, self.device, len(self.groups))
            return row_of
        table = [(job.state["step"].data_ptr(), row) for job, row in zip(self.jobs, row_of, strict=True)]
        self._step_table = torch.tensor(table, dtype=torch.int64, device="cpu").to(self.device)
        self._work_out_hypers = Bound(hyper_kernel, len(self.jobs), {})
        return list(range(len(self.jobs)))

    def _share_step_counts(self) -> None:
        """Let the weights' step counts lie side by side, so that one write advances them all."""
        self._step_counts = torch.stack([job.state["step"] for job in self.jobs])
        self._counted = self._step_counts.tolist()
        for job, step in zip(self.jobs, self._step_counts.unbind(), strict=True):
            job.state["step"] = step

    def _page(self) -> Tensor:
        """Host memory that the device can copy addresses from without the host waiting."""
        pinned = self.device.type == "cuda"
        return torch.zeros(self.addresses.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def _places_of_matrices(self) -> list[tuple[int, int, int]]:
        """For each matrix: whose it is, and how far into weight and gradient it begins, in bytes."""
        number_of = {id(job): number for number, job in enumerate(self.jobs)}
        places = []
        for matrix in self.matrices:
            offset, job = matrix.expert * matrix.size, matrix.job
            places.append((number_of[id(job)], offset * job.stored.itemsize, offset * job.grad.itemsize))
        return places

    def _grads(self) -> list[Tensor]:
        """What this rank holds of each gradient."""
        if self._sharded:
            return [job.grad for job in self.jobs]
        return list(map(GRAD, self._weights))

    def _stored(self) -> list[Tensor]:
        """What this rank holds of each weight. Another part would have been noticed before, but not other codes."""
        return [job.stored for job in self.jobs] if self._int8_weights else self._weights

    def _addresses_of_state(self) -> list[int]:
        """Where state lies, and scales of int8 weights, which the launches were told once. Some send it to the host."""
        try:
            addresses = list(map(Tensor.data_ptr, chain.from_iterable(map(VALUES, self._states))))
        except TypeError:  # somebody keeps other things there, too
            entries = chain.from_iterable(map(VALUES, self._states))
            addresses = [entry.data_ptr() for entry in entries if isinstance(entry, Tensor)]
        return addresses + [weight.scale.data_ptr() for weight in self._int8_weights]

    def _strides_of_padded(self) -> list[tuple[int, ...]]:
        """What comes back from the host has lost the gaps between its rows, and may come back to the same address."""
        return [state[name].stride() for state, name in self._padded]

    def _facts_of_weights(self) -> list[tuple[Any, ...]]:
        """What the launches were chosen for of weights, wherever these lie."""
        facts = [(w.dtype, w.device, w.data_ptr() % 16 == 0) for w in self._stored()]
        return facts + [(weight.group_size,) for weight in self._int8_weights]

    def prepared_(self) -> bool:
        """Make this step's gradients ready for the launches; False where the launches no longer fit."""
        capturing = self._is_capturing()
        if capturing and not self.capturable:
            raise RuntimeError("a CUDA graph cannot capture this step, because the host counts it: set capturable=True")
        if not self.capturable and self._step_counts.tolist() != self._counted:
            return False
        if self._addresses_of_state() != self._state_addresses or self._strides_of_padded() != self._strides:
            return False
        grads, stored = self._grads(), self._stored()
        if not all(map(Tensor.is_contiguous, grads)):
            self._make_grads_contiguous_()
            grads = self._grads()
        if not all(map(Tensor.is_contiguous, stored)) or list(map(DTYPE, grads)) != self._grad_dtypes:
            return False
        of_weights, of_grads = list(map(Tensor.data_ptr, stored)), list(map(Tensor.data_ptr, grads))
        if of_weights != self._known_weights and self._facts_of_weights() != self._weight_facts:
            return False
        if of_grads != self._known_grads and _alignment(grads) != self._grad_alignment:
            return False
        # A graph brings its own addresses at every replay, and leaves them in the table.
        moved = (of_weights, of_grads) != (self._known_weights, self._known_grads)
        if moved or self.was_captured or capturing:
            self._known_weights, self._known_grads = of_weights, of_grads
            self._upload_addresses()
        return True

    def _make_grads_contiguous_(self) -> None:
        """A sharded gradient's part need not lie as its whole says it does, so it is copied in any case."""
        for job in self.jobs:
            if not job.grad.is_contiguous() and job.parameter.grad is not None:
                job.parameter.grad = job.parameter.grad.clone(memory_format=torch.contiguous_format)

    def _upload_addresses(self) -> None:
        rows = array("q")
        for number, into_weight, into_grad in self._places:
            rows.extend((self._known_weights[number] + into_weight, self._known_grads[number] + into_grad))
        if not self._is_capturing():
            self._slots.send(rows.tobytes(), self.addresses)
            return
        # A copy that a graph will replay reads a page of its own, which was made before, because pinning memory may
        # wait for the device.
        page = self._taken_spare().copy_(torch.frombuffer(rows, dtype=torch.int64).view(self.addresses.shape))
        self.addresses.copy_(page, non_blocking=True)

    def _taken_spare(self) -> Tensor:
        """The page made ready for a capture, kept from now on for as long as this object lives."""
        page = self._spare if self._spare is not None else self._page()
        self._spare = None
        self._captured_pages.append(page)
        return page

    def _is_capturing(self) -> bool:
        return self._gpu is not None and torch.cuda.is_current_stream_capturing()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Where kernels are launched."""
        elsewhere = self._gpu is not None and torch.cuda.current_device() != self._gpu
        return torch.cuda.device(self.device) if elsewhere else nullcontext()

    def _advanced_hypers(self) -> Tensor:
        """The hyper-parameters of the next step, which is taken with them."""
        if self._is_capturing():
            self.was_captured = True
        elif self.capturable and self._spare is None:
            self._spare = self._page()
        return self._device_hypers() if self.capturable else self._rows.on_device(self._advanced_rows())

    def _project(self, bases: Launch | None, projections: list[Launch], scratch: Scratch, hypers: Tensor) -> None:
        """Launch what reads the gradients of a batch, by bases that are made anew where they have changed."""
        refreshes = None if self.capturable else self._refreshes()
        if bases is not None and (refreshes is None or refreshes != scratch.refreshes):
            bases(hypers, scratch)
            scratch.refreshes = refreshes
        for launch in projections:
            launch(hypers, scratch)

    def _refreshes(self) -> list[int]:
        """How often each group has renewed its bases; on a graph's replay only the device knows."""
        return [(step - 1) // group["refresh_every"] for group, step in zip(self.groups, self._steps, strict=True)]

    def _advanced_rows(self) -> bytes:
        """The hyper-parameters of the next step, worked out by the host."""
        self._counted = [count + 1 for count in self._counted]
        advanced = array("f", self._counted)
        # A tenth of the time that an addition takes, of a few numbers that nobody differentiates by.
        ctypes.memmove(self._step_counts.data_ptr(), advanced.tobytes(), advanced.itemsize * len(advanced))
        self._steps = [step + 1 for step in self._steps]
        return hyper_rows(self.groups, self._steps)

    def _device_hypers(self) -> Tensor:
        packed = templates(self.groups)
        if packed != self._known_templates:
            if self._is_capturing():
                raise RuntimeError(
                    "no step was taken before this capture, or an option has changed since: take one step outside the "
                    "graph first, and make lr a tensor on the device to change it between replays"
                )
            self._known_templates = packed
            host = torch.frombuffer(bytearray(packed), dtype=torch.float64).view(-1, TEMPLATE_WIDTH.value)
            pinned = host.pin_memory() if self.device.type == "cuda" else host
            self._device_templates = pinned.to(self.device, non_blocking=True)
        hypers = torch.empty(len(self.jobs), at.HYPER_WIDTH.value, dtype=torch.float32, device=self.device)
        self._work_out_hypers(self._step_table, self._device_templates, hypers)
        return hypers

    def reports(self) -> list[Report]:
        """How the last step went, by weight. Waits for the device."""
        verdicts = self.verdicts.cpu()
        rows: dict[int, list[int]] = {}
        for row, matrix in enumerate(self.matrices):
            rows.setdefault(id(matrix.job), []).append(row)
        return [_report(job, verdicts[rows[id(job)]]) for job in self.jobs]


def _alignment(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each begins where vectors may."""
    return [tensor.data_ptr() % 16 == 0 for tensor in tensors]


def _shared(pool: dict[Any, Any] | None, make: Callable[..., T], *given: Any) -> T:
    """What `make` makes of this, or has made of it for another set of weights that shares with this one."""
    made: dict[Any, Any] = {} if pool is None else pool
    key = make, *given
    if key not in made:
        made[key] = make(*given)
    return made[key]


def _report(job: Job, verdicts: Tensor) -> Report:
    """One weight's, from the verdicts on its matrices. A rank that holds none of the experts has no numbers to give."""
    has_gains = job.shape is not None and job.shape.experts != 0
    return Report(
        (verdicts[:, at.FINITE.value] != 0).all(),
        verdicts[:, at.MEAN_GAIN.value].mean() if has_gains else None,
        verdicts[:, at.SHRINK.value].mean() if has_gains and job.rule.limits_growth else None,
    )


MOMENTS = "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"


class StoredBases:
    """Those of a set of weights, where there are any."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = [job for job in jobs if "basis" in job.state]

    def renew_(self, groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> "list[Refused]":
        """Make all bases that begin after these steps of the groups; the weights of which a gradient is not finite.

        Waits for the device where there is one to make, and only there.
        """
        if not self._jobs or all(step % group["refresh_every"] != 0 for group, step in zip(groups, steps, strict=True)):
            return []
        return [Refused(job) for job in self._jobs if refresh_by_host(job) and not renew_basis_(job)]


class Refused:
    """A weight that this step must leave as it was, as a plain step would: it is the next that begins its basis.

    The kernels do refuse its gradient, but channels that are in order would have it in their moments.
    """

    def __init__(self, job: Job):
        self._step = job.state["step"]
        self._before = [(job.state[name], job.state[name].clone()) for name in MOMENTS if name in job.state]

    def restore_(self) -> None:
        """Undo what the kernels, and who counts their steps, have done to its state."""
        for moment, before in self._before:
            moment.copy_(before)
        self._step.sub_(1)


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
        if key not in pool and kept + batch.scratch_bytes <= KEPT_BYTES:
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
