"""Timing calls on a device, and the steps of optimizers."""

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
"""All repeats of a slow call together take no longer than this. A step on a CPU that alone takes longer is timed once,
the second time (the first may have compiled): Muon's bf16 products on a CPU that has none are such."""
LEAST_MS = 500
"""A quick call is repeated for this long."""
TURNS = 20
"""Turns that quick calls take, a part of their repeats in each, so that a busy moment of the host slows all alike."""


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
    """Times a call that has been made before. `once` is the milliseconds that it took, where they are known."""

    def __init__(self, call: Callable[[], Any], device: str, once: float | None = None):
        self._call, self._device = call, device
        self._once = times_ms(call, device, 0, 1)[0] if once is None else once
        self._measured: list[float] = []

    @property
    def slow(self) -> bool:
        return self._once > SLOW_MS

    def time_(self, warmup: int, repeats: int, turns: int = 1) -> None:
        """Take one of `turns` turns. A slow call takes all of its repeats at once, without a warm-up."""
        if self.slow:
            warmup, repeats = 0, min(repeats, 5, int(LONG_MS / self._once))
        else:
            repeats = -(-max(repeats, int(LEAST_MS / self._once)) // turns)
        self._measured += times_ms(self._call, self._device, warmup, repeats)

    def row(self) -> dict[str, Any]:
        """Median and spread, or for a call too slow to repeat its one time."""
        return summary(self._measured or [self._once])


class TimedStep(TimedCall):
    """Times an optimizer's step, or on a GPU, if the optimizer is `capturable`, replays of a CUDA graph of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str):
        self._optimizer = optimizer
        (second,) = times_ms(optimizer.step, device, 1, 1)
        long = device == "cpu" and second > LONG_MS
        self._transient = transient_bytes(optimizer.step) if device == "cuda" else 0
        graphed = device == "cuda" and all(group.get("capturable") for group in optimizer.param_groups)
        super().__init__(_captured(optimizer) if graphed else optimizer.step, device, second if long else None)

    def row(self) -> dict[str, Any]:
        """Milliseconds of a step, bytes of the state, and bytes of the GPU that a step needs for its duration."""
        return super().row() | {"state_bytes": held_bytes(self._optimizer), "transient_bytes": self._transient}


def step_rows(
    builds: Mapping[str, Callable[[], torch.optim.Optimizer]],
    device: str,
    together: bool,
    warmup: int,
    repeats: int,
    may_fail: Collection[str] = (),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and row of each optimizer, timed in turns if `together`, or else each after the last one is freed.

    Optimizers in `may_fail`, such as other packages', are left out if they fail.
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
    """Free what nothing refers to any more, also for other processes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def time_in_turns_(timed: Sequence[TimedCall], warmup: int, repeats: int) -> None:
    """Time quick calls in turns, if there are several, and each slow one at once."""
    quick = [each for each in timed if not each.slow]
    turns = TURNS if len(quick) > 1 else 1
    for _ in range(turns):
        for each in quick:
            each.time_(warmup, repeats, turns)
    for each in timed:
        if each.slow:
            each.time_(warmup, repeats)


def transient_bytes(call: Callable[[], Any]) -> int:
    """The most bytes of the GPU that a call takes beyond what was taken before."""
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
