"""A training run from its first step or its last checkpoint to its end, whatever is trained on what."""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..in_backward import InBackward, step_in_backward
from ..optimizer import ProjectedOptimizer
from .data import prefetched
from .display import TrainingDisplay
from .evaluation import validation_losses
from .keeper import Keeper
from .loop import Events, Rhythm, train
from .methods import Prepared
from .metrics import Meter, Record
from .micro_batch import largest_micro_batch
from .ranks import Ranks
from .schedule import Schedule, lr_factor
from .signals import Stop
from .snapshot import Position
from .trainer import Batch, Examples, Plan, Trainer

EVALUATION_TOKENS = 16_384
"""Tokens of a forward pass in an evaluation, which has all their logits at once."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained on what, as pre-training and fine-tuning each prepare it."""

    prepared: Prepared
    objective: nn.Module
    """The model with its loss, compiled if it is to be."""
    plain: nn.Module
    """The same, not compiled."""
    examples: Examples
    validation: Mapping[str, tuple[Examples, int]]
    """By source, with how many rows to evaluate on."""
    flops: float
    """Of training on one token, as a share of what one device can do a second; 0 where that is not known."""
    in_backward: bool = False
    """Whether weights are stepped inside the backward pass."""


class Session:
    """One process's part in a run."""

    def __init__(self, subject: Subject, schedule: Schedule, steps: int, keeper: Keeper, ranks: Ranks):
        self.subject, self.schedule, self.steps, self.keeper, self.ranks = subject, schedule, steps, keeper, ranks
        self.position = keeper.last()
        self.micro_batch = self._micro_batch()
        if self.position is not None:
            keeper.restore_(self.position)

    @property
    def begins_at(self) -> int:
        """Steps that were taken before."""
        return 0 if self.position is None else self.position.step

    @property
    def moved(self) -> str:
        """What to know of a run that goes on with other ranks than before; nothing otherwise."""
        if self.position is None or self.position.world == self.ranks.world:
            return ""
        return f", on {self.ranks.world} ranks after {self.position.world}: the same up to rounding, not to the bit"

    def train(
        self,
        record: Callable[[Record], None],
        rhythm: Rhythm,
        earlier: Sequence[Record],
        shown: TrainingDisplay | None = None,
    ) -> str | None:
        """None at the end; or the signal that stopped the run before it, once it is saved.

        `earlier` are the lines of the log so far: it goes on with their clock, and makes up for a missed evaluation.
        `shown` is told how far the run is, and that a signal has come.
        """
        trainer, meter = self._trainer(), self._meter(earlier)
        evaluated = max((line["step"] for line in earlier if line["kind"] == "validation"), default=0)

        def save(validation: float | None) -> None:
            self.keeper.save(self._reached(trainer.step, meter.losses), validation)

        events = Events(
            batches=self._batches(trainer, shown),
            record=record,
            evaluate=self.losses,
            save=save,
            after_step=self.subject.prepared.after_step,
        )
        with Stop(shown.screen.note) if shown else Stop() as stop:
            return train(trainer, meter, rhythm, events, stop, evaluated)

    def losses(self) -> dict[str, float]:
        """The validation loss by source, and over all of them."""
        return validation_losses(self.subject.plain, self.subject.validation, self._evaluation_rows(), self.ranks)

    def _trainer(self) -> Trainer:
        schedule, prepared = self.schedule, self.subject.prepared
        plan = Plan(
            steps=self.steps,
            batch_rows=schedule.batch_rows,
            micro_batch=self.micro_batch,
            clip=schedule.clip,
            lr_factor=lambda step: (
                lr_factor(step, self.steps, schedule.warmup, schedule.final_lr) * prepared.lr_factor(step)
            ),
        )
        objective, handle = self.subject.objective, None
        if self.subject.in_backward:
            handle = self._handle("world" if self.ranks.world > 1 else None)
        else:
            objective = wrapped(objective, self.ranks)
        return Trainer(objective, prepared.optimizer, self.subject.examples, plan, self.ranks, self.begins_at, handle)

    def _handle(self, group: str | None = None) -> InBackward:
        """Has the weights stepped in backward, from now on."""
        prepared = self.subject.prepared
        assert isinstance(prepared.optimizer, ProjectedOptimizer)
        clip = self.schedule.clip_previous
        return step_in_backward(prepared.model, prepared.optimizer, clip_norm=clip, group=group)

    def _meter(self, earlier: Sequence[Record]) -> Meter:
        meter = Meter(
            self.ranks,
            step=self.begins_at,
            batch_tokens=self.schedule.batch_tokens,
            flops=self.subject.flops / self.ranks.world,
            seconds=max((line["seconds"] for line in earlier if line["kind"] == "train"), default=0.0),
        )
        meter.losses += [] if self.position is None else self.position.window
        return meter

    def _micro_batch(self) -> int:
        """Rows of a forward pass: as many as were asked for, or as before, or as fit."""
        rows = self.schedule.rows_of_a_rank(self.ranks.world)
        if self.schedule.micro_batch != "auto":
            return self.schedule.micro_batch
        if self.position is not None and self.position.world == self.ranks.world:
            return self.position.micro_batch
        subject = self.subject
        optimizer, handle = subject.prepared.optimizer, self._handle if subject.in_backward else None
        return largest_micro_batch(subject.plain, optimizer, rows, self.schedule.sequence, self.ranks, handle)

    def _evaluation_rows(self) -> int:
        return max(min(self.micro_batch, EVALUATION_TOKENS // self.schedule.sequence), 1)

    def _batches(self, trainer: Trainer, shown: TrainingDisplay | None) -> Generator[Batch, None, None]:
        """The micro-batches from the first step here to the last, read ahead of time and sent to the device."""
        examples, device, plan = self.subject.examples, self.ranks.device, trainer.plan
        count = plan.micro_batches(self.ranks)

        def load(number: int) -> Tensor:
            return examples.rows(plan.first_row(*divmod(number, count), self.ranks), plan.micro_batch)

        ahead = prefetched(load, self.begins_at * count, self.steps * count, pin=device.type == "cuda")
        with closing(ahead):
            for number, rows in enumerate(ahead):
                if shown:
                    shown.reached(self.begins_at + number / count)  # the micro-batches before this one are done
                yield examples.split(rows.to(device, non_blocking=True))

    def _reached(self, step: int, losses: Sequence[float]) -> Position:
        return Position(step=step, micro_batch=self.micro_batch, world=self.ranks.world, window=tuple(losses))


def wrapped(objective: nn.Module, ranks: Ranks) -> nn.Module:
    """The objective as the ranks train it together."""
    if ranks.world == 1 or hasattr(objective, "set_requires_gradient_sync"):
        return objective  # alone, or split among the ranks already
    on_gpu = ranks.device.type == "cuda"
    # Else it arranges gradients anew after the first step of a process, and sums of a resumed run take another order.
    exact = not on_gpu or torch.are_deterministic_algorithms_enabled()
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(
        objective,
        device_ids=[ranks.device] if on_gpu else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=exact,
    )
