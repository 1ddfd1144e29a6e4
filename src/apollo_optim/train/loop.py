"""The training loop, from the first step or the last checkpoint to the end.

A command makes a `Task`: a model with its objective and optimizer, examples to train and evaluate on, and what to do
with the result. `Loop` restores the last checkpoint, takes steps (`Trainer`), and decides when to log, evaluate, save
and stop. Pre-training and fine-tuning differ in the task alone.
"""

import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import whole
from ..in_backward import InBackward, step_in_backward
from ..optimizer import ProjectedOptimizer
from .checkpoint import Checkpointer, Position
from .config import TrainingOptions
from .data.batches import Batch, prefetched
from .display import TrainingDisplay
from .methods import Prepared
from .metrics import DivergedError, Meter, Record, optimizer_numbers, peak_flops, perplexity
from .micro_batch import largest_micro_batch, set_lr_
from .ranks import Ranks

ALL = "all"
"""The key of numbers over all sources together."""
EVALUATION_TOKENS = 16_384
"""Tokens in one forward pass of an evaluation, which holds all their logits at once."""


class Examples(Protocol):
    """Rows to learn from. A row number stands for the same row on every rank and in any order."""

    def batch(self, first: int, count: int) -> Batch:
        """The arguments of the objective for `count` rows from row `first` on, in host memory."""
        ...

    def targets(self, first: int, count: int) -> int:
        """The labels of those rows that count for the loss."""
        ...

    def tokens(self, first: int, count: int) -> int:
        """The tokens of those rows that the model reads, without padding."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its objective and optimizer, the examples it learns from, and what to do when it is trained."""

    prepared: Prepared
    objective: nn.Module
    """The model with its loss, compiled if asked for: tokens and labels to the mean loss of the labels."""
    examples: Examples
    validation: Mapping[str, tuple[Examples, int]]
    """Examples by source, and how many rows of each to evaluate on."""
    flops: float
    """FLOPs of training on one token."""
    finish: Callable[[], None]
    """Exports a trained run and prints its result, on the first rank."""
    unchanging: Mapping[str, str] = field(default_factory=dict[str, str])
    """Saved in run.json; a run is not resumed with other values, such as another corpus."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Saved in run.json for people to read."""
    description: str = ""
    """The run in a few lines, shown before it begins."""
    notes: Sequence[str] = ()
    """Remarks on options that are probably a mistake, shown even by a quiet run."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The way from a batch to one optimizer step: rows, clipping and learning rate."""

    batch_rows: int
    """Rows per optimizer step, over all ranks."""
    micro_batch: int
    """Rows per forward pass on one rank."""
    clip: float | None
    """Largest norm of the whole gradient."""
    lr_factor: Callable[[int], float]
    """Factor on every learning rate, by the number of steps taken before."""

    def micro_batches(self, ranks: Ranks) -> int:
        """Forward passes per optimizer step on each rank."""
        return self.batch_rows // ranks.world // self.micro_batch

    def first_row(self, step: int, micro: int, ranks: Ranks) -> int:
        """The first row of a micro-batch; each rank reads consecutive rows of every batch."""
        return step * self.batch_rows + (ranks.rank * self.micro_batches(ranks) + micro) * self.micro_batch


class Trainer:
    """Takes optimizer steps. `objective` is the model with its loss, compiled and wrapped for the ranks."""

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        examples: Examples,
        plan: Plan,
        ranks: Ranks,
        step: int = 0,
        in_backward: InBackward | None = None,
    ):
        """`in_backward` is the handle if weights are stepped inside the backward pass."""
        self.objective, self.optimizer, self.examples, self.plan = objective, optimizer, examples, plan
        self.ranks, self.step, self.in_backward = ranks, step, in_backward
        # After a resume `lr` is that of the last step; the checkpoint has `initial_lr` too.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def advance(self, batches: Iterator[Batch], measure: bool) -> tuple[Tensor, Tensor | None]:
        """Take a step. Returns this rank's share of the loss, and the norm of the whole gradient if it is to `measure`.

        Stepping in backward frees gradients one by one, so there is no norm then.
        """
        self.set_lr()
        loss = self._backward(batches)
        norm = self._clipped_norm(measure)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm

    def set_lr(self) -> None:
        """Set every group's learning rate for the next step."""
        factor = self.plan.lr_factor(self.step)
        for group in self.optimizer.param_groups:
            set_lr_(group, group["initial_lr"] * factor)

    def _backward(self, batches: Iterator[Batch]) -> Tensor:
        """This rank's share of the mean loss over the targets of the batch. Gradients are averaged over the ranks."""
        count, rows = self.plan.micro_batches(self.ranks), self.plan.micro_batch
        all_targets = self.examples.targets(self.step * self.plan.batch_rows, self.plan.batch_rows)
        total = torch.zeros((), device=self.ranks.device)
        for micro in range(count):
            share = self.examples.targets(self.plan.first_row(self.step, micro, self.ranks), rows) / all_targets
            with self._communicating(micro == count - 1):
                loss = self.objective(*next(batches)) * share
                # Ranks average their gradients; shares already add up to one over all of them.
                (loss * self.ranks.world).backward()
            total += loss.detach()
        return total

    def _communicating(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch: before the last of a step, gradients only accumulate on their own rank."""
        if self.in_backward is not None:
            return nullcontext() if last else self.in_backward.accumulate()
        sync: Any = getattr(self.objective, "set_requires_gradient_sync", None)
        if sync is not None:  # of FSDP
            sync(last)
        if last or not isinstance(self.objective, DistributedDataParallel):
            return nullcontext()
        return self.objective.no_sync()

    def _clipped_norm(self, measure: bool) -> Tensor | None:
        if self.in_backward is not None:
            return None
        parameters = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        if self.plan.clip is not None:
            return whole(nn.utils.clip_grad_norm_(parameters, self.plan.clip))
        if measure:
            return whole(nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None]))
        return None


class Loop:
    """Trains a task on this rank: restores, takes steps, logs, evaluates, saves and stops."""

    def __init__(self, task: Task, options: TrainingOptions, checkpointer: Checkpointer, ranks: Ranks):
        """Restores the last whole checkpoint, if there is one."""
        self.task, self.options, self.checkpointer, self.ranks = task, options, checkpointer, ranks
        self.schedule, self.steps = options.schedule, options.steps
        self.position = checkpointer.last()
        self.micro_batch = self._micro_batch()
        if self.position is not None:
            checkpointer.restore_(self.position)

    @property
    def begins_at(self) -> int:
        """Steps taken before this process."""
        return 0 if self.position is None else self.position.step

    @property
    def moved(self) -> str:
        """A remark on a run that goes on with another number of ranks; empty if the number is the same."""
        if self.position is None or self.position.world == self.ranks.world:
            return ""
        return f", on {self.ranks.world} ranks after {self.position.world}: the same up to rounding, not to the bit"

    def train(
        self, record: Callable[[Record], None], earlier: Sequence[Record], shown: TrainingDisplay | None = None
    ) -> str | None:
        """Train to the end, or until a signal. Returns the signal's name after saving, or None at the end.

        `record` takes each line of the log. `earlier` holds the lines so far: the clock goes on from theirs, and an
        evaluation that a stopped run skipped is made up for. `shown` displays progress and signals.
        """
        trainer, meter = self._trainer(), self._meter(earlier)
        evaluated = max((line["step"] for line in earlier if line["kind"] == "validation"), default=0)
        stopped: str | None = None
        with Stop(shown.screen.note) if shown else Stop() as stop, closing(self._batches(trainer, shown)) as batches:
            if trainer.step > evaluated and self._due(trainer.step, self.options.run.eval_every):
                self._evaluate(trainer.step, meter, record)
            while trainer.step < self.steps and stopped is None:
                logs = self._due(trainer.step + 1, self.options.run.log_every)
                loss, norm = trainer.advance(batches, measure=logs)
                self.task.prepared.after_step(trainer.step)
                meter.add(loss)
                _write_line(meter, record)
                if logs:
                    lr = self.task.prepared.options["lr"] * trainer.plan.lr_factor(trainer.step - 1)
                    meter.close(lr, norm, self._optimizer_numbers())
                if self.ranks.any(stop.requested is not None):
                    stopped = stop.requested or "a signal to another rank"
                self._evaluate_and_save(trainer.step, meter, record, stopped is not None)
            self.checkpointer.wait()
        return stopped

    def _optimizer_numbers(self) -> dict[str, float]:
        """Statistics of the last step, only if a tracker wants them: they make the host wait for the device."""
        return optimizer_numbers(self.task.prepared.optimizer) if self.ranks.first and self.options.run.sinks else {}

    def losses(self) -> dict[str, float]:
        """The validation loss by source, and over all sources."""
        rows = max(min(self.micro_batch, EVALUATION_TOKENS // self.schedule.sequence), 1)
        with uncompiled():
            return validation_losses(self.task.objective, self.task.validation, rows, self.ranks)

    def _due(self, step: int, every: int) -> bool:
        """True if `step` is a multiple of `every`, or the last step."""
        return step == self.steps or step % every == 0

    def _evaluate_and_save(self, step: int, meter: Meter, record: Callable[[Record], None], stopping: bool) -> None:
        run = self.options.run
        evaluates, saves = self._due(step, run.eval_every) and not stopping, stopping or self._due(step, run.save_every)
        if not (evaluates or saves):
            return
        # Check before saving: a loss that is not finite ends the run here.
        _write_line(meter, record)
        meter.read()
        validation = self._evaluate(step, meter, record) if evaluates else None
        if saves:
            world, losses = self.ranks.world, tuple(meter.losses)
            with meter.paused():
                position = Position(step=step, micro_batch=self.micro_batch, world=world, window=losses)
                self.checkpointer.save(position, validation)

    def _evaluate(self, step: int, meter: Meter, record: Callable[[Record], None]) -> float:
        """Log the validation losses; returns the one over all sources."""
        with meter.paused():
            losses = self.losses()
            if not math.isfinite(losses[ALL]):
                raise DivergedError(step, f"the validation loss after step {step} is {losses[ALL]}")
            record(validation_record(step, losses))
        return losses[ALL]

    def _trainer(self) -> Trainer:
        schedule, prepared = self.schedule, self.task.prepared
        plan = Plan(
            batch_rows=schedule.batch_rows,
            micro_batch=self.micro_batch,
            clip=schedule.clip,
            lr_factor=lambda step: schedule.lr_factor(step, self.steps) * prepared.lr_factor(step),
        )
        objective, handle = self.task.objective, None
        if self.options.run.step_in_backward:
            # FSDP averages gradients itself.
            averages = self.ranks.world > 1 and self.options.run.shard == "ddp"
            handle = self._handle("world" if averages else None)
        else:
            objective = data_parallel(objective, self.ranks)
        return Trainer(objective, prepared.optimizer, self.task.examples, plan, self.ranks, self.begins_at, handle)

    def _handle(self, group: str | None = None) -> InBackward:
        """Step the weights inside backward from now on."""
        prepared = self.task.prepared
        assert isinstance(prepared.optimizer, ProjectedOptimizer)
        clip = self.schedule.clip_previous
        return step_in_backward(prepared.model, prepared.optimizer, clip_norm=clip, group=group)

    def _meter(self, earlier: Sequence[Record]) -> Meter:
        rows, peak = self.schedule.batch_rows, peak_flops(self.ranks.device)
        meter = Meter(
            self.ranks,
            step=self.begins_at,
            tokens=lambda step, steps: self.task.examples.tokens(step * rows, steps * rows),
            flops=self.task.flops / (peak * self.ranks.world) if peak else 0.0,
            seconds=max((line["seconds"] for line in earlier if line["kind"] == "train"), default=0.0),
        )
        meter.losses += [] if self.position is None else self.position.window
        return meter

    def _micro_batch(self) -> int:
        """Rows per forward pass: as asked for, else as in the checkpoint, else as many as fit."""
        rows = self.schedule.rows_of_a_rank(self.ranks.world)
        if self.schedule.micro_batch != "auto":
            return self.schedule.micro_batch
        if self.position is not None and self.position.world == self.ranks.world:
            return self.position.micro_batch
        objective, optimizer = self.task.objective, self.task.prepared.optimizer
        handle = self._handle if self.options.run.step_in_backward else None
        with uncompiled():
            return largest_micro_batch(objective, optimizer, rows, self.schedule.sequence, self.ranks, handle)

    def _batches(self, trainer: Trainer, shown: TrainingDisplay | None) -> Generator[Batch, None, None]:
        """All micro-batches still to be read, loaded ahead of time and sent to the device."""
        examples, device, plan = self.task.examples, self.ranks.device, trainer.plan
        count = plan.micro_batches(self.ranks)

        def load(number: int) -> Batch:
            return examples.batch(plan.first_row(*divmod(number, count), self.ranks), plan.micro_batch)

        ahead = prefetched(load, range(self.begins_at * count, self.steps * count), pin=device.type == "cuda")
        with closing(ahead):
            for number, batch in enumerate(ahead):
                if shown:
                    shown.reached(self.begins_at + number / count)  # the micro-batches before this one are done
                yield _sent(batch, device)


def _sent(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; the host does not wait for the copy."""
    return tuple(each.to(device, non_blocking=True) for each in batch)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules eagerly, where a compilation would not pay for itself."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _write_line(meter: Meter, record: Callable[[Record], None]) -> None:
    line = meter.line()
    if line is not None:
        record(line)


def validation_record(step: int, losses: Mapping[str, float]) -> Record:
    """The log line of an evaluation."""
    by_source = {source: perplexity(loss) for source, loss in losses.items() if source != ALL}
    overall = {"loss": losses[ALL], "perplexity": perplexity(losses[ALL])}
    return {"kind": "validation", "step": step, **overall, "perplexity_by_source": by_source}


def data_parallel(objective: nn.Module, ranks: Ranks) -> nn.Module:
    """The objective in DistributedDataParallel, unless this rank is alone or FSDP has split it already."""
    if ranks.world == 1 or hasattr(objective, "set_requires_gradient_sync"):
        return objective
    on_gpu = ranks.device.type == "cuda"
    # Otherwise DDP rebuilds its buckets after the first step, and a resumed run sums gradients in another order.
    exact = not on_gpu or torch.are_deterministic_algorithms_enabled()
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(
        objective,
        device_ids=[ranks.device] if on_gpu else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=exact,
    )


@torch.no_grad()
def validation_losses(
    objective: nn.Module, sources: Mapping[str, tuple[Examples, int]], rows: int, ranks: Ranks
) -> dict[str, float]:
    """Mean loss by source and over all sources. `sources` says how many rows to read, `rows` of them at a time."""
    training = objective.training
    objective.eval()
    sums = {name: _summed(objective, source, count, rows, ranks) for name, (source, count) in sources.items()}
    objective.train(training)
    totals = dict(zip(sums, ranks.sum_(torch.stack(list(sums.values()))).tolist(), strict=True))
    losses = {name: loss / targets for name, (loss, targets) in totals.items()}
    return {**losses, ALL: sum(loss for loss, _ in totals.values()) / sum(targets for _, targets in totals.values())}


def _summed(objective: nn.Module, source: Examples, count: int, rows: int, ranks: Ranks) -> Tensor:
    """The sum of losses and the number of targets in this rank's share of the first `count` rows.

    A rank reads every world-th batch of `rows`. All read equally many batches, because a sharded model is gathered by
    all ranks at once; a batch beyond the last row counts for nothing.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for round_begins in range(0, count, ranks.world * rows):
        first = round_begins + ranks.rank * rows
        number = min(rows, count - first)
        targets = source.targets(first, number) if number > 0 else 0
        batch = _sent(source.batch(min(first, count - 1), max(number, 1)), ranks.device)
        total[0] += objective(*batch) * targets
        total[1] += targets
    return total


SIGNALS = signal.SIGTERM, signal.SIGINT

# A terminal sends Ctrl-C to torchrun and to its workers, and torchrun passes it on: one press, two signals.
ONE_PRESS = 1.0

# Seconds that an interrupted run has to end by itself.
GRACE = 1.0

END = b"\0"
"""Ends the listener; no signal has this number."""


class Stop:
    """In this context SIGTERM and Ctrl-C only set `requested`; a second Ctrl-C ends the process at once.

    Python runs a signal handler only between two operations, and a backward pass is one. So a thread listens too: it
    passes the news to `say` at once, and ends the process if the main thread does not.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.requested: str | None = None
        self._say = say
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "Stop":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._write, END)
        self._listener.join()
        os.close(self._write)
        os.close(self._read)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._since > ONE_PRESS:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        since: float | None = None
        while (heard := os.read(self._read, 1)) != END:
            number, now = heard[0], time.monotonic()
            if number not in SIGNALS:
                continue
            if since is None:
                since = now
                first, again = ("Ctrl-C", "again") if number == signal.SIGINT else ("SIGTERM", "Ctrl-C")
                self._say(f"{first}: finishing this step, then saving; {again} to quit at once")
            elif number == signal.SIGINT and now - since > ONE_PRESS:
                self._say("quitting at once: steps since the last checkpoint are lost; --resume goes on from there")
                if not self._ended.wait(GRACE):
                    os._exit(128 + signal.SIGINT)
