"""The loop of every training run: when to log, evaluate, save and stop."""

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from .metrics import DivergedError, Meter, Record, perplexity
from .signals import Stop
from .trainer import Batch, Trainer

ALL = "all"
"""The key of what is measured over every source together."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """Every how many steps something is done; at the last step in any case."""

    log: int
    evaluate: int
    save: int


@dataclass(frozen=True, kw_only=True)
class Events:
    """What the loop takes and calls on its way, on every rank."""

    batches: Generator[Batch, None, None]
    """The micro-batches of every step to come, on the device."""
    record: Callable[[Record], None]
    """With each line of the log."""
    evaluate: Callable[[], dict[str, float]]
    """The validation loss by source, and over all of them."""
    save: Callable[[float | None], None]
    """With the validation loss, where it has just been measured."""
    after_step: Callable[[int], None]
    """With the number of steps taken."""


def train(trainer: Trainer, meter: Meter, rhythm: Rhythm, events: Events, stop: Stop, evaluated: int = 0) -> str | None:
    """None at the end of the run; or the signal that asked to stop before it, with the run saved.

    A run that was stopped did not wait for an evaluation: it is made up for if it is later than step `evaluated`.
    """
    steps = trainer.plan.steps
    if trainer.step > evaluated and _due(trainer.step, rhythm.evaluate, steps):
        _evaluate(trainer.step, meter, events)
    stopped: str | None = None
    with closing(events.batches) as batches:
        while trainer.step < steps and stopped is None:
            logs = _due(trainer.step + 1, rhythm.log, steps)
            loss, norm = trainer.advance(batches, measure=logs)
            events.after_step(trainer.step)
            meter.add(loss)
            _write_line(meter, events)
            if logs:
                meter.close(float(trainer.optimizer.param_groups[0]["lr"]), norm)
            if trainer.ranks.any(stop.requested is not None):
                stopped = stop.requested or "a signal to another rank"
            _evaluate_and_save(trainer, meter, rhythm, events, stopped is not None)
    return stopped


def _evaluate_and_save(trainer: Trainer, meter: Meter, rhythm: Rhythm, events: Events, stopping: bool) -> None:
    step, steps = trainer.step, trainer.plan.steps
    evaluates, saves = _due(step, rhythm.evaluate, steps) and not stopping, stopping or _due(step, rhythm.save, steps)
    if not (evaluates or saves):
        return
    # Whatever is saved was checked before: a loss that is not finite ends the run here.
    _write_line(meter, events)
    meter.read()
    validation = _evaluate(step, meter, events) if evaluates else None
    if saves:
        with meter.paused():
            events.save(validation)


def _evaluate(step: int, meter: Meter, events: Events) -> float:
    """The validation loss over all sources, written to the log."""
    with meter.paused():
        losses = events.evaluate()
        if not math.isfinite(losses[ALL]):
            raise DivergedError(step, f"the validation loss after step {step} is {losses[ALL]}")
        events.record(validation_record(step, losses))
    return losses[ALL]


def validation_record(step: int, losses: dict[str, float]) -> Record:
    """The line of the log for an evaluation."""
    by_source = {source: perplexity(loss) for source, loss in losses.items() if source != ALL}
    overall = {"loss": losses[ALL], "perplexity": perplexity(losses[ALL])}
    return {"kind": "validation", "step": step, **overall, "perplexity_by_source": by_source}


def _write_line(meter: Meter, events: Events) -> None:
    line = meter.line()
    if line is not None:
        events.record(line)


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or step % every == 0
