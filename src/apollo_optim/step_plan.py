"""Plans of which weights step together and how, each kept for as long as its key stays the same."""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .distributed import ORDINARY, align_gradient_, is_sharded, local
from .fused.support import no_triton, unfusable
from .options import plan_options
from .quant.int8 import Int8Weight
from .stepping import plain, sharded, spectral
from .stepping.collectives import in_lockstep
from .stepping.weight import Report, WeightStep, stored

if TYPE_CHECKING:
    from .fused.sharded_step import ShardedFusedStep
    from .fused.step import FusedStep

Groups = list[dict[str, Any]]
Build = Callable[[Groups, list[Tensor]], list[WeightStep]]
"""Makes state where there is none, and the steps of those of the weights, all in these groups, that have gradients."""

OF_WEIGHT, OF_GRADIENT = operator.attrgetter("shape", "dtype"), operator.attrgetter("dtype", "layout")
GRAD, DEVICE, VALUES = operator.attrgetter("grad"), operator.attrgetter("device"), operator.methodcaller("values")
VECTOR_BYTES = 16
"""Alignment that lets kernels read whole vectors."""


class Gradients(NamedTuple):
    """Weights that may be stepped, with their gradients."""

    weights: list[Tensor]
    grads: list[Any]
    facts: list[Any]
    """Dtype and layout of each gradient; None where there is none."""
    are_complete: bool
    """True if every weight has one."""

    @classmethod
    def of(cls, weights: list[Tensor]) -> "Gradients":
        grads = list(map(GRAD, weights))
        try:
            return cls(weights, grads, list(map(OF_GRADIENT, grads)), True)
        except AttributeError:
            return cls(weights, grads, [None if grad is None else OF_GRADIENT(grad) for grad in grads], False)


class Key(NamedTuple):
    """The facts that a plan was made for. A plan is used again exactly where its key is equal.

    Addresses of weights and gradients, step counts and all options that `plan_options` leaves out are not in it: they
    are data, which a step reads when it is taken.
    """

    identities: list[int]
    """Ids of the weights, their groups and their state dicts, all of which the plan keeps alive."""
    options: list[Any]
    """The options of each group that decide how it is stepped, and its number of parameters."""
    weights: list[Any]
    """Shape and dtype of each weight."""
    gradients: list[Any]
    """Dtype and layout of each gradient, None where a weight has none."""
    memory: list[Any]
    """Devices, strides and alignment of weights and gradients, and where state lies, because launches were told."""


class StepPlan:
    """The step of a set of weights: together by kernels, one by one in plain PyTorch, or with other ranks."""

    def __init__(
        self,
        weights: list[Tensor],
        groups: Groups,
        steps: Sequence[WeightStep],
        skipped: dict[torch.device, Tensor],
        pool: dict[Any, Any] | None,
    ):
        """`pool` is shared by plans that step a model a few weights at a time: see `FusedStep`."""
        self.key: Key | None = None
        self.weights, self.groups, self.steps = weights, groups, list(steps)
        self._alive: list[Any] = []
        """State whose ids are in the key."""
        self._skipped = skipped
        self._devices = {job.weight.device for job in steps}
        for device in self._devices - skipped.keys():
            skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
        self._fused_steps: list[WeightStep] = []
        """Weights that kernels step."""
        others: list[WeightStep] = []
        for job in steps:
            if _by_kernels(job):
                self._fused_steps.append(job)
            else:
                others.append(_helped(job))
        self._split = sharded.dealt_out(job for job in others if job.is_split)
        self._plain = [job for job in others if not job.is_split and not job.rule.is_spectral]
        stacked = (job for job in others if not job.is_split and job.rule.is_spectral)
        self._stacks = spectral.stacks_of(stacked)
        self._plain_reports: list[Report] = []
        for job in steps:
            align_gradient_(job.parameter)
        _make_gradients_contiguous_(self._fused_steps)
        self.fused, self.sharded = self._kernel_steps(pool)
        self._states = [job.state for job in self._fused_steps]
        moments = [(state, name) for state in self._states for name in ("exp_avg", "exp_avg_sq") if name in state]
        self._padded = [(state, name) for state, name in moments if not state[name].is_contiguous()]
        """State with gaps between its rows."""
        self._addresses: tuple[list[int], list[int]] = [], []
        """Addresses of what kernels write and of gradients, as the last key found them."""
        self._places: Any = None
        """Devices and alignment of what lies there."""
        self._numbers = self._numbers_of_fused()

    def _kernel_steps(self, pool: dict[Any, Any] | None) -> "tuple[list[FusedStep], list[ShardedFusedStep]]":
        """The steps by kernels: of weights that this rank has all of, and of those that are spread over ranks."""
        if not self._fused_steps:
            return [], []
        from .fused.sharded_step import ShardedFusedStep  # imports Triton
        from .fused.step import FusedStep

        alike: dict[tuple[bool, torch.device, bool], list[WeightStep]] = {}
        for job in self._fused_steps:
            alike.setdefault((job.is_split, job.weight.device, job.group["capturable"]), []).append(job)
        counts = [(is_split, jobs, self._skipped[device]) for (is_split, device, _), jobs in alike.items()]
        return (
            [FusedStep(jobs, skipped, pool) for is_split, jobs, skipped in counts if not is_split],
            [ShardedFusedStep(jobs, skipped) for is_split, jobs, skipped in counts if is_split],
        )

    def _numbers_of_fused(self) -> list[list[int] | None]:
        """Places among the addresses of each set that kernels step; None for all of them."""
        present = [weight for weight in self.weights if weight.grad is not None]
        number_of = {id(weight): number for number, weight in enumerate(present)}
        found = [[number_of[id(job.parameter)] for job in each.tables.jobs] for each in (*self.fused, *self.sharded)]
        return [None if numbers == list(range(len(present))) else numbers for numbers in found]

    def key_of(self, gradients: Gradients, groups: Groups, states: list[int]) -> Key:
        """The key of these weights as they are now, with these ids of state. Notes where weights and gradients lie.

        Gradients are first made what kernels and other ranks expect: contiguous, and placed as their weights are.
        """
        weights, facts = gradients.weights, gradients.facts
        identities = [*map(id, weights), *map(id, groups), *states]
        options = [(plan_options(group), len(group["params"])) for group in groups]
        memory: list[Any] = []
        # Where gradients are others than before, sparse ones perhaps, the keys differ whatever the memory is.
        if self.key is None or facts == self.key.gradients:
            if not gradients.are_complete:
                gradients = Gradients.of([weight for weight in weights if weight.grad is not None])
            memory = self._memory(gradients)
        return Key(identities, options, list(map(OF_WEIGHT, weights)), facts, memory)

    def keep_key_(self, states: list[int], alive: Iterable[Any]) -> None:
        """Take the present for what this plan was made for; ids of state stay ids of what is `alive`."""
        self._alive = list(alive)
        self.key = self.key_of(Gradients.of(self.weights), self.groups, states)

    def _memory(self, gradients: Gradients) -> list[Any]:
        weights, held, grads = gradients.weights, gradients.weights, gradients.grads
        others: list[Any] = []
        ordinary = ORDINARY.issuperset(map(type, weights))
        if not ordinary:
            for weight in weights:
                align_gradient_(weight)
            # Asking each DTensor once: at every step, their number times a few microseconds.
            parts, grads = list(map(local, weights)), list(map(local, map(GRAD, weights)))
            held = list(map(stored, parts))
            others = list(map(_other_facts, weights, parts))
        if not self._fused_steps:
            return [list(map(DEVICE, weights)), others]
        if not all(map(Tensor.is_contiguous, grads)):
            _make_gradients_contiguous_(self._fused_steps)
            grads = list(map(local, map(GRAD, weights)))
        addresses = list(map(Tensor.data_ptr, held)), list(map(Tensor.data_ptr, grads))
        if addresses != self._addresses:  # what lies where it lay is on the same device, and as aligned
            self._addresses = addresses
            self._places = list(map(DEVICE, held)), [address % VECTOR_BYTES for address in chain(*addresses)]
        contiguous = list(map(Tensor.is_contiguous, held))
        padded = [state[name].stride() for state, name in self._padded]
        return [self._places, contiguous, others, self._state_addresses(), padded]

    def _state_addresses(self) -> list[int]:
        """Addresses of the state that kernels step. Some users send it to the host and back."""
        try:
            return list(map(Tensor.data_ptr, chain.from_iterable(map(VALUES, self._states))))
        except TypeError:  # somebody keeps other things there, too
            entries = chain.from_iterable(map(VALUES, self._states))
            return [entry.data_ptr() for entry in entries if isinstance(entry, Tensor)]

    def prepare_(self) -> None:
        """Bring what changes from step to step to the device. Nothing is stepped yet."""
        of_weights, of_grads = self._addresses
        for fused, numbers in zip((*self.fused, *self.sharded), self._numbers, strict=True):
            if numbers is None:
                fused.prepare_((of_weights, of_grads))
            else:
                fused.prepare_(([of_weights[n] for n in numbers], [of_grads[n] for n in numbers]))

    def run(self) -> None:
        """Step every weight and its state."""
        with _no_autocast(self._devices):
            for fused in self.fused:
                fused.step_()
            self._plain_reports = [plain.step_(job) for job in self._plain]
            self._plain_reports += [report for stack in self._stacks for report in stack.step_()]
            if self.sharded or self._split:
                self._plain_reports += self._step_with_other_ranks()
            finite: dict[torch.device, list[Tensor]] = {}
            for report in self._plain_reports:
                finite.setdefault(report.finite.device, []).append(report.finite)
            for device, each in finite.items():
                self._skipped[device].add_((~torch.stack(each)).sum())

    def _step_with_other_ranks(self) -> list[Report]:
        """Step what is spread over ranks; reports of the weights that are stepped in plain PyTorch."""
        # Begun first, so that these have no gap between their launches while the host works on the others.
        batches = [step for fused in self.sharded for step in fused.steps()]
        weights = [sharded.step_(job) for job in self._split]
        results: list[Report | None] = in_lockstep([*batches, *weights])
        return [report for report in results if report is not None]

    @property
    def was_captured(self) -> bool:
        """True if a CUDA graph holds launches of this plan, and so addresses of its tables."""
        return any(fused.tables.was_captured for fused in (*self.fused, *self.sharded))

    def reports(self) -> list[Report]:
        """Reports of the last step, weight by weight. Waits for the device."""
        fused = (*self.fused, *self.sharded)
        return [report for each in fused for report in each.tables.reports()] + self._plain_reports


def _by_kernels(job: WeightStep) -> bool:
    """True if kernels step this weight; raises RuntimeError where they are asked to and cannot."""
    wanted = job.group["fused"]
    reason = "fused=False" if wanted is False else unfusable(job)
    if reason is not None and wanted:
        raise RuntimeError(f"fused=True, but {job.name} {tuple(job.weight.shape)} cannot be: {reason}")
    return reason is None and (wanted or job.weight.device.type == "cuda")


def _helped(job: WeightStep) -> WeightStep:
    """The step of a weight that kernels do not step, but in which they round and multiply where they can."""
    device = job.weight.device
    if job.group["fused"] is False or device.type != "cuda" or no_triton(device) is not None:
        return job
    from .fused.products import symmetric_product
    from .fused.rounding import write_rounded_

    return replace(job, write_rounded_=write_rounded_, symmetric_product=symmetric_product)


def _make_gradients_contiguous_(jobs: Iterable[WeightStep]) -> None:
    """A sharded gradient's part need not lie as its whole says it does, so it is copied in any case."""
    for job in jobs:
        if job.parameter.grad is not None and not job.grad.is_contiguous():
            job.parameter.grad = job.parameter.grad.clone(memory_format=torch.contiguous_format)


def _other_facts(weight: Tensor, part: Tensor) -> Any:
    """Facts of a weight that is made of other tensors, which its plan was told once; this rank has `part` of it."""
    if isinstance(part, Int8Weight):
        return part.group_size, part.scale.data_ptr()
    # A sharding framework may swap what a rank holds of a parameter.
    return part.data_ptr() if is_sharded(weight) else None


def _no_autocast(devices: Iterable[torch.device]) -> ExitStack:
    """Keep torch.autocast from narrowing the projections of a step that is taken inside of it."""
    stack = ExitStack()
    for kind in {device.type for device in devices}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class PlanCache:
    """All plans of an optimizer: one for all of its weights, or one for each of several sets."""

    def __init__(self):
        self.skipped: dict[torch.device, Tensor] = {}
        """Gradients refused as not finite, counted on each device."""
        self.last: list[StepPlan] = []
        """The plans of the last step."""
        self.whole: StepPlan | None = None
        self._parts: dict[int, StepPlan] = {}
        """Plans of some of the weights, by the id of their first weight."""
        self.pool: dict[Any, Any] = {}
        """Scratch and tables that the plans of parts share."""
        self.blocks: list[list[Tensor]] = []
        """Sets of weights that have gradients together, where not all always have. `whole` steps the first."""
        self._captured: list[StepPlan] = []
        """Plans that were replaced, kept alive for the CUDA graphs that hold their launches."""

    def for_gradients(self, optimizer: Optimizer, build: Build) -> list[StepPlan]:
        """Plans that together step every weight that has a gradient. All are made before any is run."""
        self.last = []
        gradients = Gradients.of([weight for group in optimizer.param_groups for weight in group["params"]])
        # Ranks must step the same weights together, which they can agree on for all of them only.
        if (len(self.blocks) < 2 and gradients.are_complete) or any(map(is_sharded, gradients.weights)):
            return [self._plan_of_all(gradients, optimizer, build)]
        first, *others = self._parted_blocks(gradients.weights)
        plans = [self._plan_of_all(Gradients.of(first), optimizer, build)] if _has_gradients(first) else []
        return plans + [self.for_weights(block, optimizer, build) for block in others if _has_gradients(block)]

    def _plan_of_all(self, gradients: Gradients, optimizer: Optimizer, build: Build) -> StepPlan:
        plan, groups, state = self.whole, optimizer.param_groups, optimizer.state
        if plan is None or plan.key != plan.key_of(gradients, groups, _ids(state)):
            weights = gradients.weights
            plan = StepPlan(weights, list(groups), build(groups, weights), self.skipped, None)
            self._retire(self.whole)
            self.whole = plan
            plan.keep_key_(_ids(state), [*state, *(each for each in state.values() if isinstance(each, dict))])
        return self._ready(plan)

    def for_weights(self, weights: list[Tensor], optimizer: Optimizer, build: Build) -> StepPlan:
        """The plan of some of the weights, which have gradients.

        A weight must be stepped with the same others every time, unless those that it was stepped with are parted.
        """
        plan, groups, state = self._parts.get(id(weights[0])), optimizer.param_groups, optimizer.state
        if (
            plan is None
            or not set(map(id, groups)).issuperset(map(id, plan.groups))
            or plan.key != plan.key_of(Gradients.of(weights), plan.groups, _ids_of(weights, state))
        ):
            part = set(weights)
            own = [group for group in groups if not part.isdisjoint(group["params"])]
            made = StepPlan(weights, own, build(own, weights), self.skipped, self.pool)
            self._retire(plan)
            plan = self._parts[id(weights[0])] = made
            plan.keep_key_(_ids_of(weights, state), map(state.get, weights))
        return self._ready(plan)

    def _ready(self, plan: StepPlan) -> StepPlan:
        plan.prepare_()
        self.last.append(plan)
        return plan

    def _retire(self, plan: StepPlan | None) -> None:
        """Let go of a plan, unless a CUDA graph holds its launches."""
        if plan is not None and plan.was_captured:
            self._captured.append(plan)

    def _parted_blocks(self, weights: list[Tensor]) -> list[list[Tensor]]:
        """The blocks of all weights, parted once more where only some of a block have gradients now.

        The plan of a block is made once, however often weights come and go; a block that was parted stays so.
        """
        if set(map(id, weights)) != set(map(id, chain(*self.blocks))):
            self.forget()
            self.blocks = [weights]
        absent = []
        for number, block in enumerate(self.blocks):
            present = [weight for weight in block if weight.grad is not None]
            if 0 < len(present) < len(block):
                self.blocks[number] = present
                absent.append([weight for weight in block if weight.grad is None])
        self.blocks += absent
        return self.blocks

    def forget(self) -> None:
        """Begin anew, as when the weights are to be stepped in other sets."""
        self._retire(self.whole)
        self.whole = None
        self.forget_parts()
        self.blocks = []
        self.last.clear()

    def forget_parts(self) -> None:
        """Let the weights be parted in another way."""
        for plan in self._parts.values():
            self._retire(plan)
        self._parts.clear()
        self.pool.clear()


def _has_gradients(block: list[Tensor]) -> bool:
    """True if the weights of a block, which all have gradients or all have none, have them."""
    return bool(block) and block[0].grad is not None


def _ids_of(weights: list[Tensor], state: dict[Any, Any]) -> list[int]:
    """The id of each weight's state dict; 0 where that is missing or was emptied."""
    return [id(each) if each and "step" in each else 0 for each in map(state.get, weights)]


def _ids(state: dict[Any, Any]) -> list[int]:
    """The ids of all weights and state dicts, without looking any up, which is slow; users may keep other things."""
    return [*map(id, state), *[id(each) if "step" in each else 0 for each in state.values() if isinstance(each, dict)]]
