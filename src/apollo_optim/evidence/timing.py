"""Times of calls on a device, and of optimizers' steps."""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..memory import held_bytes

SLOW_MS = 100
"""A call slower than this is timed by itself, five times at most."""
LONG_MS = 10_000
"""And fewer times where they would take longer than this: Muon's bf16 products on a CPU without them. A step on a CPU
that does so by itself is not taken again after the second; the first may have compiled."""
LEAST_MS = 500
"""A quicker one is timed for as long as this."""
TURNS = 20
"""In which several calls are timed, one after the other, so that they have the same moments of the host."""


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


class TimedCall:
    """A call that has been made before, and is timed; `once` has its milliseconds where they are known."""

    def __init__(self, call: Callable[[], Any], device: str, once: float | None = None):
        self._call, self._device = call, device
        self._once = times_ms(call, device, 0, 1)[0] if once is None else once
        self._measured: list[float] = []

    @property
    def slow(self) -> bool:
        return self._once > SLOW_MS

    def time_(self, warmup: int, repeats: int, turns: int = 1) -> None:
        """Take one of so many turns; a slow one has them all at once, and is warm."""
        if self.slow:
            warmup, repeats = 0, min(repeats, 5, int(LONG_MS / self._once))
        else:
            repeats = -(-max(repeats, int(LEAST_MS / self._once)) // turns)
        self._measured += times_ms(self._call, self._device, warmup, repeats)

    def row(self) -> dict[str, Any]:
        """Median and spread; of one too slow to be repeated, the first time."""
        return summary(self._measured or [self._once])


class TimedStep(TimedCall):
    """The step of an optimizer that has taken some; of a `capturable` one on a GPU, replays of a CUDA graph of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str):
        self._optimizer = optimizer
        (second,) = times_ms(optimizer.step, device, 1, 1)
        long = device == "cpu" and second > LONG_MS
        self._transient = transient_bytes(optimizer.step) if device == "cuda" else 0
        graphed = device == "cuda" and all(group.get("capturable") for group in optimizer.param_groups)
        super().__init__(_captured(optimizer) if graphed else optimizer.step, device, second if long else None)

    def row(self) -> dict[str, Any]:
        """Milliseconds of a step, bytes of the state, and bytes that a step takes on a GPU and gives back."""
        return super().row() | {"state_bytes": held_bytes(self._optimizer), "transient_bytes": self._transient}


def step_rows(
    builds: Mapping[str, Callable[[], torch.optim.Optimizer]],
    device: str,
    together: bool,
    warmup: int,
    repeats: int,
    may_fail: Collection[str] = (),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The row of each optimizer, by name: `together` they are timed in turns, else each when the last one is gone.

    Those that `may_fail`, as other packages' may, are left out where they do.
    """
    for names in [list(builds)] if together else [[name] for name in builds]:
        timed: dict[str, TimedStep] = {}
        for name in names:
            try:
                timed[name] = TimedStep(builds[name](), device)
            except Exception as error:
                if name not in may_fail:
                    raise
                print(f"{name} cannot run here: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        time_in_turns_(list(timed.values()), warmup, repeats)
        yield from [(name, each.row()) for name, each in timed.items()]
        del timed
        free_memory(device)


def free_memory(device: str) -> None:
    """Leave what nothing refers to any more to whoever is next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def time_in_turns_(timed: Sequence[TimedCall], warmup: int, repeats: int) -> None:
    """Time several, a little of each at a time; slow ones, and one alone, at once."""
    quick = [each for each in timed if not each.slow]
    turns = TURNS if len(quick) > 1 else 1
    for _ in range(turns):
        for each in quick:
            each.time_(warmup, repeats, turns)
    for each in timed:
        if each.slow:
            each.time_(warmup, repeats)


def transient_bytes(call: Callable[[], Any]) -> int:
    """Bytes of a GPU that a call takes at most, beyond what is taken before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _captured(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay
