"""Times of calls on a device, and of optimizers' steps."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..memory import held_bytes

SLOW_MS = 100
"""A step slower than this is timed by itself, five times at most."""
LONG_MS = 10_000
"""And fewer times where they would take longer than this: Muon's bf16 products on a CPU without them."""
LEAST_MS = 500
"""A quicker one is timed for as long as this."""
TURNS = 20
"""In which several optimizers are timed, one after the other, so that they have the same moments of the host."""


def times_ms(call: Callable[[], Any], device: str, warmup: int, repeats: int) -> list[float]:
    """Milliseconds of each call after a warm-up: CUDA events on a GPU, the wall clock elsewhere."""
    for _ in range(warmup):
        call()
    if device != "cuda":
        measured: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            measured.append(1e3 * (time.perf_counter() - start))
        return measured
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def summary(measured: Sequence[float]) -> dict[str, float]:
    """Median and spread (the middle 80%) in milliseconds."""
    ordered = sorted(measured)
    cut = len(ordered) // 10
    return {
        "median_ms": round(statistics.median(ordered), 4),
        "low_ms": round(ordered[cut], 4),
        "high_ms": round(ordered[-1 - cut], 4),
    }


class TimedStep:
    """An optimizer that has taken its first steps, and is timed; `graphed`, by replays of a CUDA graph of its step."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str, graphed: bool = False):
        self._optimizer, self._device = optimizer, device
        for _ in range(2):
            optimizer.step()
        self._transient = _transient_bytes(optimizer) if device == "cuda" else 0
        self._step = _captured(optimizer) if graphed else optimizer.step
        self._once = times_ms(self._step, device, 0, 1)[0]
        self._measured: list[float] = []

    @property
    def slow(self) -> bool:
        return self._once > SLOW_MS

    def time_(self, warmup: int, repeats: int, turns: int = 1) -> None:
        """Take one of so many turns; a slow one has them all at once."""
        if self.slow:
            warmup, repeats = 1, max(1, min(repeats, 5, int(LONG_MS / self._once)))
        else:
            repeats = -(-max(repeats, int(LEAST_MS / self._once)) // turns)
        self._measured += times_ms(self._step, self._device, warmup, repeats)

    def row(self) -> dict[str, Any]:
        """Milliseconds of a step, bytes of the state, and bytes that a step takes on a GPU and gives back."""
        held = {"state_bytes": held_bytes(self._optimizer), "transient_bytes": self._transient}
        return summary(self._measured) | held


def time_in_turns_(timed: Sequence[TimedStep], warmup: int, repeats: int) -> None:
    """Time several, a little of each at a time; slow ones, and one alone, at once."""
    quick = [each for each in timed if not each.slow]
    turns = TURNS if len(quick) > 1 else 1
    for _ in range(turns):
        for each in quick:
            each.time_(warmup, repeats, turns)
    for each in timed:
        if each.slow:
            each.time_(warmup, repeats)


def _transient_bytes(optimizer: torch.optim.Optimizer) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _captured(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay
