"""The one place that picks how each weight is stepped: together by Triton kernels, or one by one in plain PyTorch."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.projection import keeps_basis
from ..distributed import Part, align_gradient_
from ..quant.blocks import BLOCK
from ..quant.int8 import Int8Weight
from ..stepping import plain, sharded
from ..stepping.collectives import Lockstep
from ..stepping.weight import Job, Report

if TYPE_CHECKING:
    from .fused.shared_step import SharedStep
    from .fused.step import FusedStep

FUSED_DTYPES = torch.float32, torch.bfloat16, torch.float16
MIN_CAPABILITY = (8, 0)
MIN_COLUMNS = 8
MOST_GROUP = 1024
"""Elements of a group that a kernel's tile can hold."""


def unfusable(job: Job) -> str | None:
    """Why the kernels cannot step this weight, or None."""
    if reason := _no_triton(job.weight.device):
        return reason
    if job.weight.dtype not in FUSED_DTYPES or job.dtype != torch.float32:
        return f"the kernels compute in float32, not for a weight of {job.weight.dtype} with {job.dtype} arithmetic"
    if job.grad.dtype not in FUSED_DTYPES:
        return f"there is no kernel for a gradient of {job.grad.dtype}"
    if isinstance(job.weight, Int8Weight) and job.weight.group_size > MOST_GROUP:
        return f"there is no kernel for groups of {job.weight.group_size}, more than {MOST_GROUP}"
    # Of a part every rank must say the same, so the whole is asked.
    if not (job.parameter if job.is_split else job.weight).is_contiguous():
        return "the weight is not contiguous"
    if job.part is not None and (reason := _unfusable_part(job, job.part)):
        return reason
    if job.shape is None:
        return _ungrouped(job)
    if "exp_avg_scale" in job.state and (job.rule.projection == "identity" or job.shape.full_rank):
        return "there is no kernel for moments of full rank with state_dtype=torch.int8"
    if job.rule.granularity == "element":
        return f"there is no kernel for projection={job.rule.projection!r}, granularity={job.rule.granularity!r}"
    if job.rule.second_moment == "factored":
        return "there is no kernel for second_moment='factored'"
    if job.is_split and keeps_basis(job.rule, job.shape):
        return f"there is no kernel for projection={job.rule.projection!r} where a weight is spread over several ranks"
    columns = job.shape.columns if job.part is None else job.part.fewest_columns
    return f"rows shorter than {MIN_COLUMNS}" if columns < MIN_COLUMNS else None


def _unfusable_part(job: Job, part: Part) -> str | None:
    """Why the kernels cannot step a part of this weight, or None."""
    if not part.is_split:
        return None
    if isinstance(job.weight, Int8Weight):
        return "it is int8 and spread over several ranks"
    if job.shape is None:
        inner = next((dim for dim in range(2, len(part.shape)) if part.splits_dim(dim)), None)
        return None if inner is None else f"it is not projected, and spread over several ranks on dimension {inner}"
    if job.shape.full_rank and job.rule.granularity == "channel" and part.axes("S"):
        return "its channels, of full rank, are spread over several ranks"
    if not job.shape.full_rank and len(part.axes("S")) > 1:
        return "its smaller side is spread over several axes of a mesh"
    return None


def _ungrouped(job: Job) -> str | None:
    """Why rows of a weight that is not projected cannot be cut into groups as the kernels need them."""
    narrow = "exp_avg_scale" in job.state
    if narrow and job.group_size != BLOCK:
        return f"with state_dtype=torch.int8 there are kernels for groups of {BLOCK} only, not of {job.group_size}"
    if narrow and job.by_row and job.weight.dim() > 2:
        return "rows of more than one dimension have no kernel with state_dtype=torch.int8"
    return None


def _no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda":
        if interpreted:
            return "TRITON_INTERPRET=1 runs kernels on the CPU"
        if torch.version.hip is not None:
            return "the kernels are for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability(device)
        return None if capability >= MIN_CAPABILITY else f"compute capability {capability} is below {MIN_CAPABILITY}"
    # Triton's interpreter runs the kernels on the CPU, for tests.
    return None if interpreted else f"the kernels need a CUDA device, not {device}"


class Stepper:
    """Steps a set of weights, in one call, for as long as they and their options stay as they are."""

    def __init__(
        self,
        jobs: Sequence[Job],
        name_of: Callable[[Job], str],
        skipped: dict[torch.device, Tensor],
        pool: dict[Any, Any] | None = None,
    ):
        """`pool` is shared by steppers that take a model's weights a few at a time: see `FusedStep`."""
        self.jobs = list(jobs)
        self.device_types = frozenset(job.weight.device.type for job in jobs)
        self.skipped, self._pool = skipped, pool
        self._sharded = [job for job in jobs if job.part is not None]
        self._plain: list[Job] = []
        self._split: list[Job] = []
        self._plain_reports: list[Report] = []
        fused: dict[tuple[torch.device, bool], list[Job]] = {}
        shared: dict[tuple[torch.device, bool], list[Job]] = {}
        for job in jobs:
            device, wanted = job.weight.device, job.group["fused"]
            if device not in skipped:
                skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
            reason = "fused=False" if wanted is False else unfusable(job)
            if reason is None and (wanted or device.type == "cuda"):
                (shared if job.is_split else fused).setdefault((device, job.group["capturable"]), []).append(job)
            elif wanted:
                raise RuntimeError(f"fused=True, but {name_of(job)} {tuple(job.weight.shape)} cannot be: {reason}")
            else:
                (self._split if job.is_split else self._plain).append(job)
        self._plain_devices = [(job, job.weight.device) for job in (*self._plain, *self._split)]
        self._fused = [self._fused_step(together) for together in fused.values()]
        self._shared = [self._shared_step(together) for together in shared.values()]

    def _fused_step(self, jobs: list[Job]) -> "FusedStep":
        from .fused.step import FusedStep

        return FusedStep(jobs, self.skipped[jobs[0].weight.device], self._pool)

    def _shared_step(self, jobs: list[Job]) -> "SharedStep":
        from .fused.shared_step import SharedStep

        return SharedStep(jobs, self.skipped[jobs[0].weight.device])

    def prepared_(self) -> bool:
        """Make the gradients ready to step; False where weights, gradients or state no longer are what they were."""
        for job in self._sharded:
            align_gradient_(job.parameter)
        if any(job.weight.device != device for job, device in self._plain_devices):
            return False
        return all(fused.prepared_() for fused in (*self._fused, *self._shared))

    def step_(self) -> None:
        """Step every weight and its state."""
        for fused in self._fused:
            fused.step_()
        self._plain_reports = [plain.step_(job) for job in self._plain]
        if self._shared or self._split:
            self._plain_reports += self._step_with_other_ranks()
        for job, report in zip([*self._plain, *self._split], self._plain_reports, strict=True):
            self.skipped[job.weight.device].add_(~report.finite)

    def _step_with_other_ranks(self) -> list[Report]:
        """Step what is spread over ranks; reports of the weights that are stepped in plain PyTorch."""
        # Begun first, so that these have no gap between their launches while the host works on the others.
        batches = [step for shared in self._shared for step in shared.steps()]
        weights = [sharded.step_(job) for job in self._split]
        results: list[Report | None] = Lockstep([*batches, *weights]).results()
        return [report for report in results if report is not None]

    @property
    def was_captured(self) -> bool:
        """Whether a CUDA graph holds launches of these steps, and so addresses of their tables."""
        return any(fused.was_captured for fused in (*self._fused, *self._shared))

    def reports(self) -> list[Report]:
        """How the last step went, weight by weight. Waits for the device."""
        fused = (*self._fused, *self._shared)
        return [report for each in fused for report in each.reports()] + self._plain_reports
