"""Times of calls on a device."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


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
