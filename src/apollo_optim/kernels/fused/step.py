"""A step of a set of weights that stays the same from step to step."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...quant.int8 import Int8Weight
from ..job import Job, Report
from .hyper import hyper_kernel, hyper_rows, templates
from .launch import Launch, Launches, Scratch
from .launch_groups import GroupLaunches
from .layout import ADDRESS_WIDTH, FINITE, HYPER_WIDTH, MEAN_GAIN, SHRINK, VERDICT_WIDTH
from .plan import batches

KEPT_BYTES = 2**20
"""Scratch up to this size is kept between steps: taking it anew would cost a small model more time than memory."""

HYPER_SLOTS = 1024
"""Host copies of the hyper-parameters, used in turn. A step is several launches, and the driver lets the host run about
a thousand launches ahead, so the device has read a slot long before its turn comes again."""


class FusedStep:
    """Steps weights of one device together; `prepared_` must agree before every `step_`."""

    def __init__(self, jobs: Sequence[Job], skipped: Tensor):
        self.jobs = list(jobs)
        self._weights = [job.weight for job in jobs]
        self._int8_weights = [weight for weight in self._weights if isinstance(weight, Int8Weight)]
        self._wide_weights = [weight for weight in self._weights if not isinstance(weight, Int8Weight)]
        self.device = jobs[0].weight.device
        self.capturable: bool = jobs[0].group["capturable"]
        pinned = self.device.type == "cuda"
        self.groups: list[Mapping[str, Any]] = []
        self._steps: list[int] = []
        self.batches = batches(self.jobs, self._hyper_rows_of_jobs())
        self.matrices = [matrix for batch in self.batches for matrix in batch.matrices]
        self.verdicts = torch.zeros(len(self.matrices), VERDICT_WIDTH.value, dtype=torch.float32, device=self.device)
        self.addresses = torch.zeros(len(self.matrices), ADDRESS_WIDTH.value, dtype=torch.int64, device=self.device)
        movable = "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "last_norm"
        self._moved = [(job.state, [name for name in movable if name in job.state]) for job in jobs]
        self._facts = self._current_facts()
        self._slot = 0
        self._hyper_slots = torch.zeros(
            HYPER_SLOTS, len(self.groups), HYPER_WIDTH.value, dtype=torch.float32, device="cpu", pin_memory=pinned
        )
        self._known_addresses: list[int] = []
        self._known_templates: Tensor | None = None
        self.was_captured = False
        """Whether a CUDA graph holds launches of this object, and so addresses of its tables."""
        self._spare: Tensor | None = self._page()
        self._captured_pages: list[Tensor] = []
        modes = {batch.kind.mode == "adamw" for batch in self.batches}
        self._side = torch.cuda.Stream(self.device) if len(modes) == 2 and self.device.type == "cuda" else None
        self._kept = [Scratch(batch) if batch.scratch_bytes <= KEPT_BYTES else None for batch in self.batches]
        self._launches: list[tuple[Launch | None, list[Launch]]] = []
        first = 0
        for batch in self.batches:
            rows = slice(first, first := first + len(batch.matrices))
            kind = GroupLaunches if batch.kind.group > 0 else Launches
            launches = kind(batch, self.addresses[rows], self.verdicts[rows], skipped)
            self._launches.append((launches.bases(), launches.steps()))

    def _hyper_rows_of_jobs(self) -> list[int]:
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
            return row_of
        table = [(job.state["step"].data_ptr(), row) for job, row in zip(self.jobs, row_of, strict=True)]
        self._step_table = torch.tensor(table, dtype=torch.int64, device="cpu").to(self.device)
        return list(range(len(self.jobs)))

    def _share_step_counts(self) -> None:
        """Let the weights' step counts lie side by side, so that one addition advances them all."""
        self._step_counts = torch.stack([job.state["step"] for job in self.jobs])
        self._counted = self._step_counts.tolist()
        for job, step in zip(self.jobs, self._step_counts, strict=True):
            job.state["step"] = step

    def _page(self) -> Tensor:
        """Host memory that the device can copy addresses from without the host waiting."""
        pinned = self.device.type == "cuda"
        return torch.zeros(self.addresses.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def _current_addresses(self) -> list[int]:
        """Where everything lies that a training loop may have moved: a state sent to the host and back, too."""
        weights = self._weights
        addresses = [weight.data_ptr() for weight in self._wide_weights]
        addresses += [part.data_ptr() for weight in self._int8_weights for part in (weight.codes, weight.scale)]
        # pyrefly: ignore[missing-attribute] (only weights with a gradient are stepped)
        addresses += [weight.grad.data_ptr() for weight in weights]
        return addresses + [state[name].data_ptr() for state, names in self._moved for name in names]

    def _current_facts(self) -> list[tuple[Any, ...]]:
        """What the launches were chosen for, and what was moved may break."""
        return [
            (
                job.grad.dtype,
                job.stored.dtype,
                job.stored.device,
                job.stored.is_contiguous(),
                (job.stored.data_ptr() | job.grad.data_ptr()) % 16 == 0,
                [job.state[name].data_ptr() for name in names],
            )
            for job, (_, names) in zip(self.jobs, self._moved, strict=True)
        ] + [(weight.scale.data_ptr(), weight.group_size) for weight in self._int8_weights]

    def prepared_(self) -> bool:
        """Make this step's gradients ready for the launches; False where the launches no longer fit."""
        for weight in self._weights:
            if not weight.grad.is_contiguous():  # pyrefly: ignore[missing-attribute]
                weight.grad = weight.grad.contiguous()  # pyrefly: ignore[missing-attribute]
        if not self.capturable and self._step_counts.tolist() != self._counted:
            return False
        addresses = self._current_addresses()
        moved = addresses != self._known_addresses
        if moved and self._current_facts() != self._facts:
            return False
        # A graph brings its own addresses at every replay, and leaves them in the table.
        if moved or self.was_captured or self._is_capturing():
            self._known_addresses = addresses
            self._upload_addresses()
        return True

    def _upload_addresses(self) -> None:
        rows = []
        for matrix in self.matrices:
            weight, grad = matrix.job.stored, matrix.job.grad
            offset = matrix.expert * matrix.size
            rows.append((weight.data_ptr() + offset * weight.itemsize, grad.data_ptr() + offset * grad.itemsize))
        # A copy that is still under way, or that a graph will replay, reads a page of its own. A capture takes one that
        # was made before, because pinning memory may wait for the device.
        page = self._taken_spare() if self._is_capturing() else self._page()
        page.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.addresses.copy_(page, non_blocking=True)

    def _taken_spare(self) -> Tensor:
        """The page made ready for a capture, kept from now on for as long as this object lives."""
        page = self._spare if self._spare is not None else self._page()
        self._spare = None
        self._captured_pages.append(page)
        return page

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def step_(self) -> None:
        """Step every weight and its state."""
        elsewhere = self.device.type == "cuda" and torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if elsewhere else nullcontext():
            if self._is_capturing():
                self.was_captured = True
            elif self._spare is None:
                self._spare = self._page()
            hypers = self._device_hypers() if self.capturable else self._host_hypers()
            with self._beside():
                self._run("adamw", hypers)
            self._run("projected", hypers)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)

    def _beside(self) -> AbstractContextManager[Any]:
        """A stream on which AdamW's weights can be stepped while the others are: a small model waits on both less."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _run(self, which: str, hypers: Tensor) -> None:
        for batch, kept, (bases, steps) in zip(self.batches, self._kept, self._launches, strict=True):
            if (batch.kind.mode == "adamw") == (which == "adamw"):
                self._launch(kept or Scratch(batch), bases, steps, hypers)

    def _launch(self, scratch: Scratch, bases: Launch | None, steps: list[Launch], hypers: Tensor) -> None:
        # The scratch of one batch is gone before the next takes its own.
        refreshes = None if self.capturable else self._refreshes()
        if bases is not None and (refreshes is None or refreshes != scratch.refreshes):
            bases(hypers, scratch)
            scratch.refreshes = refreshes
        for launch in steps:
            launch(hypers, scratch)

    def _refreshes(self) -> list[int]:
        """How often each group has renewed its bases; on a graph's replay only the device knows."""
        return [(step - 1) // group["refresh_every"] for group, step in zip(self.groups, self._steps, strict=True)]

    def _host_hypers(self) -> Tensor:
        if self._is_capturing():
            raise RuntimeError("a CUDA graph cannot capture this step, because the host counts it: set capturable=True")
        self._step_counts += 1
        self._counted = [count + 1 for count in self._counted]
        self._steps = [step + 1 for step in self._steps]
        self._slot = (self._slot + 1) % HYPER_SLOTS
        slot = self._hyper_slots[self._slot].copy_(hyper_rows(self.groups, self._steps))
        return slot.to(self.device, non_blocking=True)

    def _device_hypers(self) -> Tensor:
        host = templates(self.groups)
        if self._known_templates is None or not torch.equal(host, self._known_templates):
            if self._is_capturing():
                raise RuntimeError(
                    "no step was taken before this capture, or an option has changed since: take one step outside the "
                    "graph first, and make lr a tensor on the device to change it between replays"
                )
            self._known_templates = host
            pinned = host.pin_memory() if self.device.type == "cuda" else host
            self._device_templates = pinned.to(self.device, non_blocking=True)
        hypers = torch.empty(len(self.jobs), HYPER_WIDTH.value, dtype=torch.float32, device=self.device)
        hyper_kernel[(len(self.jobs),)](self._step_table, self._device_templates, hypers)
        return hypers

    def reports(self) -> list[Report]:
        """How the last step went, by weight. Waits for the device."""
        verdicts = self.verdicts.cpu()
        rows: dict[int, list[int]] = {}
        for row, matrix in enumerate(self.matrices):
            rows.setdefault(id(matrix.job), []).append(row)
        return [_report(job, verdicts[rows[id(job)]]) for job in self.jobs]


def _report(job: Job, verdicts: Tensor) -> Report:
    """One weight's, from the verdicts on its matrices."""
    return Report(
        (verdicts[:, FINITE.value] != 0).all(),
        None if job.shape is None else verdicts[:, MEAN_GAIN.value].mean(),
        verdicts[:, SHRINK.value].mean() if job.rule.limits_growth and job.shape is not None else None,
    )
