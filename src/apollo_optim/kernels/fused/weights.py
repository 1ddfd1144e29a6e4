"""A set of weights that is stepped by kernels, for as long as it stays the same: its tables, and what moves in them."""

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...quant.int8 import Int8Weight
from ...stepping.weight import Job, Report
from ...streams import gpu_number
from . import layout as at
from .hyper import TEMPLATE_WIDTH, SentRows, hyper_kernel, hyper_rows, templates
from .launch import Bound, Launch, Scratch
from .plan import batches
from .slots import Slots

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
    made, key = {} if pool is None else pool, (make, *given)
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
