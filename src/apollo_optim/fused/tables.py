"""The tables that kernels read at every step: hyper-parameters, addresses, and what became of each weight."""

import ctypes
import math
import operator
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.direction import Adam, least_eps
from ..core.limiter import first_step_size
from ..kernels import columns as at
from ..kernels.hyper import TEMPLATE_WIDTH, hyper_kernel
from ..stepping.weight import Report, WeightStep
from .batches import batches_of
from .streams import CompiledLaunch, gpu_number, raw_stream

T = TypeVar("T")
Addresses = tuple[list[int], list[int]]
"""Addresses of the weights, or their codes, and of their gradients."""

ROW = struct.Struct("<11f2i12x")
"""The columns LR .. SIGN, STEP_BITS and REFRESH_BITS of `columns`, in that order, filled up to a whole row."""
assert (at.LR.value, at.SIGN.value, at.STEP_BITS.value, at.REFRESH_BITS.value) == (0, 10, 11, 12)
assert ROW.size == 4 * at.HYPER_WIDTH.value

RECENT = 16
"""The number of last rows that are remembered."""


TEMPLATE = struct.Struct("<dq10d")
"""The columns T_LR .. T_REFRESH, in that order."""
assert TEMPLATE.size == 8 * TEMPLATE_WIDTH.value


OPTIONS = operator.itemgetter("weight_decay", "eps", "growth_limit", "maximize", "refresh_every")


def packed_hypers(groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> bytes:
    """The hyper-parameters of each group at its step, a float32 row each."""
    rows = [
        _row(float(group["lr"]), tuple(group["betas"]), step, OPTIONS(group))
        for group, step in zip(groups, steps, strict=True)
    ]
    return b"".join(rows)


@lru_cache(RECENT)  # where weights are stepped a few at a time, all of them ask for the same
def _row(lr: float, betas: tuple[float, float], step: int, options: tuple[Any, ...]) -> bytes:
    weight_decay, eps, growth_limit, maximize, refresh_every = options
    correction1, correction2 = Adam(betas, eps, step).corrections
    return ROW.pack(
        lr,
        1 - lr * weight_decay,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        least_eps(eps),
        correction1,
        correction2**0.5,
        growth_limit or 0.0,
        min(1.0, first_step_size(step, betas)),
        -1.0 if maximize else 1.0,
        step,
        (step - 1) // refresh_every,
    )


class HyperRows:
    """Rows of hyper-parameters on the device, sent once for all steps on a stream that ask for the same."""

    def __init__(self, device: torch.device, count: int):
        self.device, self._gpu = device, gpu_number(device)
        self._shape = count, at.HYPER_WIDTH.value
        self._ring = PinnedRing(self._shape, torch.float32, device)
        self._recent: dict[tuple[bytes, int], Tensor] = {}
        self._resident: dict[int | None, tuple[Tensor, bytes]] = {}

    def _new(self) -> Tensor:
        return torch.empty(self._shape, dtype=torch.float32, device=self.device)

    def on_device(self, packed: bytes) -> Tensor:
        """The table that `packed_hypers` packed."""
        stream = raw_stream(self._gpu)
        rows = self._recent.get((packed, stream))
        if rows is None:
            rows = self._new()
            self._ring.send(packed, rows)
            if len(self._recent) == RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[packed, stream] = rows
        return rows

    def resident(self, packed: bytes, stream: int | None) -> Tensor:
        """These rows at an address that stays: what is recorded for this stream, the current one, reads them there."""
        rows, known = self._resident.get(stream) or (self._new(), b"")
        if packed != known:
            self._ring.send(packed, rows)
            self._resident[stream] = rows, packed
        return rows


def templates(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """One float64 row for each group: what `hyper_kernel` needs beside the step count."""
    packed = bytearray()
    for group in groups:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        packed += TEMPLATE.pack(
            0.0 if on_device else float(lr),
            lr.data_ptr() if on_device else 0,
            on_device and lr.dtype == torch.float64,
            group["weight_decay"],
            beta1,
            beta2,
            math.log(beta1) if beta1 > 0 else -math.inf,
            math.log(beta2) if beta2 > 0 else -math.inf,
            least_eps(group["eps"]),
            group["growth_limit"] or 0.0,
            -1.0 if group["maximize"] else 1.0,
            group["refresh_every"],
        )
    return bytes(packed)


COUNT = 64
"""Tables that may be on their way before the host waits for the oldest."""


class PinnedRing:
    """Host memory for tables of one shape, used in turn."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._on_gpu = device.type == "cuda"
        slots = torch.zeros(COUNT, *shape, dtype=dtype, device="cpu", pin_memory=self._on_gpu)
        self._size = math.prod(shape) * dtype.itemsize
        self._slots = slots.unbind()
        self._start = slots.data_ptr()
        self._arrived: list[torch.cuda.Event | None] = [None] * COUNT
        """Recorded when the device has read each slot."""
        self.sent = 0

    def send(self, packed: bytes, target: Tensor) -> None:
        """target <- a table of these bytes, in its turn on the current stream."""
        assert len(packed) == self._size
        turn = self.sent % COUNT
        arrived = self._arrived[turn]
        if arrived is not None and not arrived.query():
            arrived.synchronize()
        ctypes.memmove(self._start + turn * self._size, packed, self._size)
        target.copy_(self._slots[turn], non_blocking=True)
        if self._on_gpu:
            arrived = self._arrived[turn] = arrived or torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(target.device))
        self.sent += 1


class WeightTables:
    """The tables by which the kernels find a set of weights of one device, and the numbers of their next step.

    The launches read everything that changes from step to step (addresses, step counts, options) from these tables, so
    that a plan stays valid while those change. `prepare_` brings the tables up to date before every step.
    """

    def __init__(self, jobs: Sequence[WeightStep], pool: dict[Any, Any] | None = None):
        """`pool` is shared by plans of a model that is stepped a few weights at a time: they send equal rows once."""
        # To the kernels a factored weight is one of AdamW's, with another second moment.
        self.jobs = [replace(job, shape=None) if job.by_factors else job for job in jobs]
        self.device = jobs[0].weight.device
        self.gpu = gpu_number(self.device)
        self.capturable: bool = jobs[0].group["capturable"]
        self.pool = pool
        self.groups: list[Mapping[str, Any]] = []
        """The parameter group of each row of hyper-parameters."""
        self.counts: list[int] = []
        """Steps taken with each row."""
        self.batches = batches_of(self.jobs)
        self._write_rows(self._rows_of_weights())
        self.matrices = [matrix for batch in self.batches for matrix in batch.matrices]
        size = len(self.matrices)
        self.outcomes = torch.zeros(size, at.OUTCOME_WIDTH.value, dtype=torch.float32, device=self.device)
        self.addresses = torch.zeros(size, at.ADDRESS_WIDTH.value, dtype=torch.int64, device=self.device)
        self._ring = _shared(pool, PinnedRing, tuple(self.addresses.shape), torch.int64, self.device)
        self._offsets = self._offsets_of_matrices()
        self._known: Addresses = [], []
        self._known_templates = b""
        self.kept_bases: list[int] | None = None
        """Refresh numbers of the bases in scratch that is kept from step to step; None where there are none."""
        self.was_captured = False
        """True if a CUDA graph holds launches that read these tables."""
        self._spare: Tensor | None = self._page() if self.capturable else None
        self._captured_pages: list[Tensor] = []

    def _rows_of_weights(self) -> list[int]:
        """Each weight's row of hyper-parameters: one per group and step count, or its own where the device counts."""
        if not self.capturable:
            self._share_step_counts()
            return self._grouped_rows()
        self.groups = list({id(job.group): job.group for job in self.jobs}.values())
        row_of = {id(group): row for row, group in enumerate(self.groups)}
        table = [(job.state["step"].data_ptr(), row_of[id(job.group)]) for job in self.jobs]
        self._step_table = torch.tensor(table, dtype=torch.int64, device="cpu").to(self.device)
        self._work_out_hypers = CompiledLaunch(hyper_kernel, len(self.jobs), {})
        return list(range(len(self.jobs)))

    def _grouped_rows(self) -> list[int]:
        """Rows where the host counts steps: weights that agree in group and step count share one."""
        row_of: dict[tuple[int, float], int] = {}
        self.groups.clear()
        self.counts.clear()
        rows: list[int] = []
        for job, count in zip(self.jobs, self._counted, strict=True):
            key = id(job.group), count
            if key not in row_of:
                row_of[key] = len(self.groups)
                self.groups.append(job.group)
                self.counts.append(int(count))
            rows.append(row_of[key])
        self.hypers = _shared(self.pool, HyperRows, self.device, len(self.groups))
        return rows

    def _share_step_counts(self) -> None:
        """Let the weights' step counts lie side by side, so that one write advances them all."""
        self._step_counts = torch.stack([job.state["step"] for job in self.jobs])
        self._counted: list[float] = self._step_counts.tolist()
        for job, step in zip(self.jobs, self._step_counts.unbind(), strict=True):
            job.state["step"] = step

    def _page(self) -> Tensor:
        """Host memory that the device can copy addresses from without the host waiting."""
        pinned = self.device.type == "cuda"
        return torch.zeros(self.addresses.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def _offsets_of_matrices(self) -> list[tuple[int, int, int]]:
        """For each matrix: the number of its weight, and where it begins in weight and gradient, in bytes."""
        number_of = {id(job): number for number, job in enumerate(self.jobs)}
        offsets = []
        for matrix in self.matrices:
            offset, job = matrix.expert * matrix.size, matrix.job
            offsets.append((number_of[id(job)], offset * job.stored.itemsize, offset * job.grad.itemsize))
        return offsets

    def prepare_(self, addresses: Addresses) -> bool:
        """Bring the tables up to date with where weights and gradients lie; whether weights had to be grouped anew.

        They are, by their step counts, where somebody has written to those.

        Raises RuntimeError where a CUDA graph is being captured that would replay this step with the same step count.
        """
        if not self.capturable and self.is_capturing():
            raise RuntimeError("a CUDA graph cannot capture this step, because the host counts it: set capturable=True")
        recounted = not self.capturable and self._step_counts.tolist() != self._counted
        if recounted:
            self.kept_bases = None  # which belong to the rows of before
            self._counted = self._step_counts.tolist()
            self._write_rows(self._grouped_rows())
        # A graph brings its own addresses at every replay, and leaves them in the table.
        if addresses != self._known or self.was_captured or self.is_capturing():
            self._known = addresses
            self._upload_addresses()
        return recounted

    def _write_rows(self, rows: list[int]) -> None:
        """Tell each matrix its row of hyper-parameters."""
        row_of = {id(job): row for job, row in zip(self.jobs, rows, strict=True)}
        for batch in self.batches:
            column = [row_of[id(matrix.job)] for matrix in batch.matrices]
            batch.matrix_table[:, at.HYPER.value] = torch.tensor(column, dtype=torch.int64, device="cpu").to(
                self.device
            )

    def _upload_addresses(self) -> None:
        of_weights, of_grads = self._known
        rows = array("q")
        for number, into_weight, into_grad in self._offsets:
            rows.extend((of_weights[number] + into_weight, of_grads[number] + into_grad))
        if not self.is_capturing():
            self._ring.send(rows.tobytes(), self.addresses)
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

    def is_capturing(self) -> bool:
        return self.gpu is not None and torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager[Any]:
        """The context in which kernels are launched."""
        elsewhere = self.gpu is not None and torch.cuda.current_device() != self.gpu
        return torch.cuda.device(self.device) if elsewhere else nullcontext()

    def advanced_hypers(self) -> Tensor:
        """Count a step; the hyper-parameters of it, on the device."""
        if self.is_capturing():
            self.was_captured = True
        elif self.capturable and self._spare is None:
            self._spare = self._page()
        return self._device_hypers() if self.capturable else self.hypers.on_device(self.advanced_packed())

    def advanced_packed(self) -> bytes:
        """Count a step on the host; its hyper-parameters, packed."""
        self._counted = [count + 1 for count in self._counted]
        advanced = array("f", self._counted)
        # A tenth of the time that an addition takes, of a few numbers that nobody differentiates by.
        ctypes.memmove(self._step_counts.data_ptr(), advanced.tobytes(), advanced.itemsize * len(advanced))
        self.counts = [count + 1 for count in self.counts]
        return packed_hypers(self.groups, self.counts)

    def refreshes(self) -> list[int] | None:
        """The number of times that the bases of each row have been renewed; None where only the device knows."""
        if self.capturable:
            return None
        return [(count - 1) // group["refresh_every"] for group, count in zip(self.groups, self.counts, strict=True)]

    def renews_bases(self) -> bool:
        """True if this step needs other bases than those that are kept."""
        return self.kept_bases is None or self.kept_bases != self.refreshes()

    def _device_hypers(self) -> Tensor:
        packed = templates(self.groups)
        if packed != self._known_templates:
            if self.is_capturing():
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
        """Outcomes of the last step, by weight. Waits for the device."""
        outcomes = self.outcomes.cpu()
        rows: dict[int, list[int]] = {}
        for row, matrix in enumerate(self.matrices):
            rows.setdefault(id(matrix.job), []).append(row)
        return [_report(job, outcomes[rows[id(job)]]) for job in self.jobs]


def _shared(pool: dict[Any, Any] | None, make: Callable[..., T], *given: Any) -> T:
    """`make(*given)`, made once for all plans that share the pool."""
    made: dict[Any, Any] = {} if pool is None else pool
    key = make, *given
    if key not in made:
        made[key] = make(*given)
    return made[key]


def _report(job: WeightStep, outcomes: Tensor) -> Report:
    """One weight's, from the outcomes of its matrices. A rank that holds none of the experts has no numbers to give."""
    has_gains = job.shape is not None and job.shape.experts != 0 and not job.rule.is_spectral
    return Report(
        (outcomes[:, at.FINITE.value] != 0).all(),
        outcomes[:, at.MEAN_GAIN.value].mean() if has_gains else None,
        outcomes[:, at.SHRINK.value].mean() if has_gains and job.rule.limits_growth else None,
    )
