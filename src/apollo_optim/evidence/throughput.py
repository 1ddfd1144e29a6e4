"""The largest micro-batch that fits under a cap of memory, and the tokens a second at it."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..train.metrics import memory_used
from ..train.model import silence_libraries
from ..train.pretrain import PretrainOptions
from .timing import free_memory, summary, times_ms
from .workload import Workload, apart, process_memory

SPARE = 0.02
"""Share of the memory that a first guess leaves free."""
SMALLER = 0.94
"""After a micro-batch that did not fit, this share of it is tried."""
LARGER = 1.05
"""A larger micro-batch is tried if it would be at least this many times the one that fits."""
LEAST_S = 2.0
"""Passes are repeated for this long, and at least twice."""


class Attempt(NamedTuple):
    """A pass that fits into the memory: its time and its peak in bytes."""

    ms: float
    peak: int


def throughput(options: PretrainOptions, vocabulary: int, cap: int | None) -> dict[str, Any]:
    """The largest micro-batch and its speed, measured in a process of its own. A micro-batch of 0 does not fit.

    `options` decide the model, the method and the sequences of an optimizer step. `cap` is the bytes that the process
    may take, on a GPU with its context; None for all of the device's.
    """
    try:
        return apart(throughput_here, options, vocabulary, cap)
    except BrokenProcessPool:
        method = options.method.method
        raise ValueError(f"{method}: its process was killed, likely for want of memory: lower --cap-gb") from None


def throughput_here(options: PretrainOptions, vocabulary: int, cap: int | None) -> dict[str, Any]:
    """`throughput` in this process, whose memory is capped from now on."""
    silence_libraries()
    room = capped(options.run.place().type, cap)
    batch = options.schedule.batch_rows
    try:
        training = Passes(options, vocabulary, room)
        micro_batch, fitted = largest(training.attempt, training.probes, room, batch)
    except torch.OutOfMemoryError:
        return {"micro_batch": 0, "batch": batch, "tokens_per_s": 0.0, "room": room}
    first = fitted[micro_batch].ms
    repeats = max(2, min(10, int(LEAST_S * 1e3 / first)))
    passed = summary([first, *times_ms(lambda: training.run(micro_batch), training.device, 0, repeats)])
    in_backward = options.run.step_in_backward
    # Stepping in backward keeps no gradients to add up: its step is part of the pass, and its batch a micro-batch.
    step_ms = 0.0 if in_backward else summary(times_ms(training.optimizer.step, training.device, 1, 5))["median_ms"]
    batch = micro_batch if in_backward else batch
    seconds = 1e-3 * (batch / micro_batch * passed["median_ms"] + step_ms)
    return {
        "micro_batch": micro_batch,
        "batch": batch,
        **{f"pass_{name}": value for name, value in passed.items()},
        "step_ms": step_ms,
        "tokens_per_s": round(batch * options.schedule.sequence / seconds, 1),
        "room": room,
        "peak": fitted[micro_batch].peak,
        "peaks": " ".join(f"{size}:{each.peak}" for size, each in fitted.items()),
    }


def capped(device: str, asked: int | None) -> int:
    """Bytes that the cap leaves for tensors, on a CPU for the whole process. On a GPU the cap is set, too."""
    if device != "cuda":
        return asked or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = torch.cuda.get_device_properties(0).total_memory
    cap, context = min(asked or total, total), context_bytes()
    if context >= cap:
        raise ValueError(
            f"--cap-gb {cap / 1e9:g}: {context / 1e9:.1f} GB of the device are taken before any tensor is, by CUDA's "
            "context and by other processes: measure on a device that nothing else uses, or raise the cap"
        )
    torch.cuda.set_per_process_memory_fraction((cap - context) / total)
    return cap - context


def context_bytes() -> int:
    """Bytes that this process takes besides its tensors, with the library for products loaded.

    Where nvidia-smi does not list this process, what others take is included.
    """
    side = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda")
    (side @ side).sum().item()
    return process_memory()["process"] - torch.cuda.memory_reserved()


class Passes(Workload):
    """Forward and backward passes, which add up gradients as the micro-batches of a batch do."""

    def __init__(self, options: PretrainOptions, vocabulary: int, room: int):
        super().__init__(options, vocabulary)
        model, self.room = options.model, room
        self.warmup = 1 if model.compile else 0  # a size that is new is compiled
        # More tokens than a chunk of the loss has, so that its memory is what it is at any larger size.
        chunk = -(-model.loss_chunk // self.sequence) + 1 if self.device == "cuda" else 1
        self.probes = chunk, 2 * chunk
        self.run(1)
        self.optimizer.step()  # makes the state; gradients stay, as in the middle of a batch

    def run(self, micro_batch: int) -> None:
        """Run forward and backward, with the step if weights are stepped in backward."""
        self.loss(self.tokens(micro_batch)).backward()
        if self.in_backward:
            self.optimizer.step()

    def attempt(self, micro_batch: int) -> Attempt | None:
        """Time and peak of a pass; None if it does not fit."""
        forget_peak(self.device)
        taken: list[float] = []
        with suppress(torch.OutOfMemoryError):
            taken = times_ms(lambda: self.run(micro_batch), self.device, self.warmup, 1)
        if not taken:
            free_memory(self.device)
            if self.in_backward:
                self.optimizer.step()  # or the next backward would be taken for more of the failed one
            return None
        peak = highest(self.device)
        return Attempt(taken[0], peak) if peak <= self.room else None


def forget_peak(device: str) -> None:
    """Begin a new peak of memory. Where the system cannot, the peak stays the highest so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (kept := Path("/proc/self/clear_refs")).exists():
        kept.write_text("5")


def highest(device: str) -> int:
    """The peak since `forget_peak`: of tensors on a GPU, of the process on a CPU."""
    # `memory_used` reads `getrusage`, whose peak on Linux includes that of the process that started this one.
    if device == "cpu" and (told := Path("/proc/self/status")).exists():
        return 1024 * next(int(line.split()[1]) for line in told.read_text().splitlines() if line.startswith("VmHWM"))
    return memory_used(torch.device(device))


def guessed(fitted: Mapping[int, Attempt], room: int) -> int:
    """The micro-batch that fills `room` if peaks grow on as they do between the two largest of these."""
    (small, low), (large, high) = sorted(fitted.items())[-2:]
    each = max((high.peak - low.peak) / (large - small), 1)
    return max(1, int(large + (room - high.peak) / each))


def largest(
    attempt: Callable[[int], Attempt | None], probes: tuple[int, int], room: int, most: int
) -> tuple[int, dict[int, Attempt]]:
    """The largest micro-batch up to `most` that was seen to fit, and all that were; OutOfMemoryError if none does.

    Its size is extrapolated from the peaks of two small ones and then tried; if it does not fit, smaller ones are.
    """
    room = int(room * (1 - SPARE))
    fitted: dict[int, Attempt] = {}

    def fits(size: int) -> bool:
        if size not in fitted and (found := attempt(size)) is not None:
            fitted[size] = found
        return size in fitted

    sizes = sorted({min(probe, most) for probe in probes})
    size = next((size for size in sizes if not fits(size)), None)
    if size is not None:
        size -= 1
    elif len(sizes) == 2:
        size = min(guessed(fitted, room), most)
    else:
        size = most
    while size and not fits(size):
        size = min(size - 1, int(size * SMALLER))
    if not fitted:
        raise torch.OutOfMemoryError("not even one sequence fits")
    # The small ones may have had their peak elsewhere, and so have grown faster.
    better = min(guessed(fitted, room), most) if size > max(probes) else size
    if better > LARGER * size:
        fits(better)
    return max(fitted), fitted
