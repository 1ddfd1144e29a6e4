"""Numbers of a run: measured without making the device wait, and kept as JSON lines."""

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..options import is_number
from .checkpoint import kept_name, replace_text_
from .ranks import Ranks

Record = dict[str, Any]
"""One line of the log: kind ("train" or "validation"), step, and what was measured."""


class DivergedError(ArithmeticError):
    """A loss, or what the next would be computed from, was infinite or not a number."""

    def __init__(self, step: int, found: str):
        super().__init__(found)
        self.step = step


@dataclass(frozen=True)
class Line:
    """A line of the log whose numbers are still on their way from the device."""

    record: Record
    losses: list[float]
    unread: Tensor
    norm: Tensor | None
    arrived: "torch.cuda.Event | None"


class Meter:
    """Loss, speed and memory, averaged from one line of the log to the next.

    Losses stay on the device. A line is read a step after it was closed, when its numbers have long been computed, so
    that the host never waits and still every step's loss is seen.
    """

    def __init__(self, ranks: Ranks, *, step: int, batch_tokens: int, flops: float, seconds: float = 0.0):
        """`step` were taken before, in `seconds`; `flops` of a token as a share of what all devices can do a second."""
        self.ranks = ranks
        self.losses: list[float] = []
        self._step = step
        self._batch_tokens = batch_tokens
        self._flops = flops
        self._seconds = seconds
        self._unread: list[Tensor] = []
        self._line: Line | None = None
        self._since = time.perf_counter()
        self._steps_since = 0

    def add(self, loss: Tensor) -> None:
        """Note the loss of one more step: this rank's share of it."""
        self._unread.append(loss)
        self._step += 1
        self._steps_since += 1

    def close(self, lr: float, norm: Tensor | None) -> None:
        """End the line with the last step that was added; `norm` is None where no gradient was left to measure."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        self._seconds += seconds
        speed = self._steps_since * self._batch_tokens / seconds
        self._line = Line(
            record={
                "kind": "train",
                "step": self._step,
                "tokens": self._step * self._batch_tokens,
                "lr": lr,
                "tokens_per_second": speed,
                "mfu": speed * self._flops if self._flops else None,
                "memory": memory_used(self.ranks.device),
                "seconds": self._seconds,
            },
            losses=self.losses,
            **self._sent(norm),
        )
        self.losses = []
        self._since, self._steps_since = now, 0

    def _sent(self, norm: Tensor | None) -> dict[str, Any]:
        """What is unread, summed over the ranks and on its way to the host."""
        unread = self.ranks.sum_(torch.stack(self._unread)) if self._unread else torch.empty(0)
        self._unread = []
        if unread.device.type != "cuda":
            return {"unread": unread, "norm": norm, "arrived": None}
        sent_norm = None if norm is None else norm.to("cpu", non_blocking=True)
        sent = {"unread": unread.to("cpu", non_blocking=True), "norm": sent_norm}
        arrived = torch.cuda.Event()
        arrived.record()
        return {**sent, "arrived": arrived}

    def line(self) -> Record | None:
        """The line that was closed, once. DivergedError where one of its steps had no finite loss."""
        if self._line is None:
            return None
        line, self._line = self._line, None
        if line.arrived is not None:
            line.arrived.synchronize()
        last = line.record["step"]
        losses = line.losses + self._checked(line.unread.tolist(), last)
        mean = sum(losses) / len(losses)
        norm = None if line.norm is None else line.norm.item()
        return {**line.record, "loss": mean, "perplexity": perplexity(mean), "grad_norm": norm}

    def read(self) -> None:
        """Wait for the device until `losses` holds every step since the last line. DivergedError as in `line`."""
        sent = self._sent(None)
        if sent["arrived"] is not None:
            sent["arrived"].synchronize()
        self.losses += self._checked(sent["unread"].tolist(), self._step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is spent in here is not training."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _checked(self, losses: list[float], last: int) -> list[float]:
        for number, loss in enumerate(losses, start=last - len(losses) + 1):
            if not math.isfinite(loss):
                raise DivergedError(number, f"the loss of step {number} is {loss}")
        return losses


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf


def memory_used(device: torch.device) -> int:
    """The most bytes in use at once so far: on a GPU by tensors, on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """`metrics.jsonl`: a record a line, each flushed as it is written."""

    def __init__(self, path: Path, step: int):
        """Continue after `step`: what an interrupted run wrote beyond it goes, for it will be written again.

        A file that has lines which no run writes is kept as it was, under another name.
        """
        self.path = path
        found, strange = _read(path)
        if strange:
            shutil.copyfile(path, kept_name(path))
        kept = [record for record in found if record["step"] <= step]
        replace_text_(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def records(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`; lines that are none, because a crash cut them off or worse, are left out."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Record], int]:
    """The records of a `metrics.jsonl`, and how many lines no run can have written: the last may be cut off."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [_record(line) for line in lines]
    strange = sum(record is None for record in found[:-1])
    return [record for record in found if record is not None], strange


def _record(line: bytes) -> Record | None:
    """A line of the log, where it is one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("train", "validation"):
        return None
    return record if type(record.get("step")) is int and record["step"] >= 0 and _has_numbers(record) else None


def _has_numbers(record: Record) -> bool:
    """Whether a record has all that is read of its kind; a norm or a perplexity may be infinite."""
    numbers: list[Any]
    if record["kind"] == "validation":
        sources = record.get("perplexity_by_source")
        numbers = [*sources.values()] if isinstance(sources, dict) else [None]
        finite = ["loss"]
    else:
        numbers = [record.get(name) for name in ("mfu", "grad_norm") if record.get(name, 0) is not None]
        finite = ["tokens", "lr", "tokens_per_second", "memory", "seconds", "loss"]
    numbers += [record.get(name) for name in ("step", "perplexity", *finite)]
    # Not every integer that JSON can hold is one that can be drawn.
    sound = all(is_number(number) and (isinstance(number, float) or abs(number) < 2**63) for number in numbers)
    return sound and all(math.isfinite(record[name]) for name in finite)
