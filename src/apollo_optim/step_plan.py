"""What steps an optimizer's weights is kept from step to step, for as long as it fits them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .distributed import ORDINARY, align_gradient_, is_sharded, local
from .fused.support import unfusable
from .options import planned
from .stepping import plain, sharded
from .stepping.collectives import Lockstep
from .stepping.weight import Job, Report

if TYPE_CHECKING:
    from .fused.sharded_step import SharedStep
    from .fused.step import FusedStep


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
        from .fused.sharded_step import SharedStep

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


Layouts = list[torch.layout | None]

FACTS = operator.attrgetter("shape", "dtype")
LAYOUT = operator.attrgetter("grad.layout")
"""Of a weight."""


@dataclass
class Kept:
    """What steps a set of weights, and what it was made for: these very objects, these facts and options."""

    groups: list[Any] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Of the parameters in each group."""
    plan: tuple[Any, ...] = ()
    layouts: Layouts = field(default_factory=list)
    """Of the gradients."""
    stepper: Stepper | None = None

    def takes(self, weights: list[Tensor], layouts: Layouts) -> bool:
        """Whether it was made for these weights, with such gradients."""
        return self.is_of(weights) and layouts == self.layouts

    def is_of(self, weights: list[Tensor]) -> bool:
        """Whether it was made for these weights."""
        return _same(weights, self.weights)

    def is_for(self, groups: list[Any], states: list[Any]) -> bool:
        """Whether it was made for its weights as they are now, in these groups and with these states."""
        same = _same(groups, self.groups) and _same(states, self.states) and self.counts == counts_of(groups)
        return same and self.plan == plan_of(groups, self.weights)

    def knows_groups(self, weights: list[Tensor], groups: list[Any]) -> bool:
        """Whether, of these, its own groups are those that the weights are in."""
        there = set(map(id, groups)).issuperset(map(id, self.groups))
        return there and self.is_of(weights) and self.counts == counts_of(self.groups)


def _same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def counts_of(groups: list[Any]) -> list[int]:
    """Of the parameters in each group."""
    return [len(group["params"]) for group in groups]


def plan_of(groups: list[Any], weights: list[Tensor]) -> tuple[Any, ...]:
    """What decides how weights are stepped, beside their gradients. Asked at every step."""
    # A sharding framework may swap what a rank holds of a parameter.
    ordinary = ORDINARY.issuperset(map(type, weights))
    held = None if ordinary else [local(weight).data_ptr() if is_sharded(weight) else None for weight in weights]
    return list(map(FACTS, weights)), held, list(map(planned, groups))


def layouts_of(weights: list[Tensor]) -> Layouts:
    """Of the gradients; None where there is none."""
    try:
        return list(map(LAYOUT, weights))
    except AttributeError:
        return [None if (grad := weight.grad) is None else grad.layout for weight in weights]


def has_gradient(block: list[Tensor]) -> bool:
    """Whether the weights of a block, which all have gradients or all have none, have them."""
    return bool(block) and block[0].grad is not None


class Steppers:
    """What an optimizer steps by: one stepper for all of its weights, or one for each of several parts."""

    def __init__(self):
        self.whole = Kept()
        self._parts: dict[Tensor, Kept] = {}
        """By their first weights."""
        self.pool: dict[Any, Any] = {}
        """What the steppers of parts share."""
        self.blocks: list[list[Tensor]] = []
        """Where not all weights always have gradients: those that do have them together. `whole` steps the first."""
        self._parted: list[Tensor] = []
        """The weights that are in blocks."""
        self.last: list[Stepper] = []
        """Those that took the last step."""
        self._captured: list[Stepper] = []

    def part_of(self, first: Tensor) -> Kept:
        """What steps the part that begins with this weight."""
        if first not in self._parts:
            self._parts[first] = Kept()
        return self._parts[first]

    def parted(self, weights: list[Tensor]) -> list[list[Tensor]]:
        """The blocks of all weights, parted once more where only some of a block have gradients now.

        What steps a block is made once, however often weights come and go; a block that was parted stays so.
        """
        if not _same(weights, self._parted):
            self.forget()
            self.blocks, self._parted = [weights], weights
        absent = []
        for number, block in enumerate(self.blocks):
            present = [weight for weight in block if weight.grad is not None]
            if 0 < len(present) < len(block):
                self.blocks[number] = present
                absent.append([weight for weight in block if weight.grad is None])
        self.blocks += absent
        return self.blocks

    def replace_(self, kept: Kept, stepper: Stepper | None) -> None:
        """Step by another one; a CUDA graph that holds launches of the old keeps it alive."""
        if kept.stepper is not None and kept.stepper.was_captured:
            self._captured.append(kept.stepper)
        kept.stepper = stepper

    def forget(self) -> None:
        """Begin anew: a stepper of all weights and those of parts each count the steps for themselves."""
        self.replace_(self.whole, None)
        self.whole = Kept()
        self.forget_parts()
        self.blocks = []
        self._parted = []
        self.last.clear()

    def forget_parts(self) -> None:
        """Let the weights be parted in another way."""
        for kept in self._parts.values():
            self.replace_(kept, None)
        self._parts.clear()
        self.pool.clear()
