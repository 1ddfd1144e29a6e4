"""Training a model by a method on random tokens, and measuring its memory: what the benchmarks run."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..in_backward import step_in_backward
from ..memory import bytes_of
from ..optimizer import ProjectedOptimizer
from ..train.methods import prepared_method
from ..train.model import built_model, objective
from ..train.pretrain import PretrainOptions

ALLOCATOR = "expandable_segments:True"
"""Keeps the memory that the allocator reserves close to what tensors take."""
PEAK_KINDS = "weights", "state", "gradients", "activations", "rest"
WATCHED_STEPS = 3
"""Steps in which every gradient is watched. The first makes the state, and later ones are alike."""
Result = TypeVar("Result")


class Workload:
    """A model, its loss and its optimizer, as `apollo pretrain` builds them, on random tokens."""

    def __init__(self, options: PretrainOptions, vocabulary: int):
        self.options, self.vocabulary = options, vocabulary
        self.device = options.run.place().type
        self.sequence = options.schedule.sequence
        self.model = built_model(options.model, vocabulary, self.device, seed=0)
        prepared = prepared_method(options.method, self.model, options.steps)
        self.optimizer = prepared.optimizer
        self.objective: nn.Module = objective(options.model, self.model, self.device)
        self.in_backward = options.run.step_in_backward
        if self.in_backward:
            assert isinstance(self.optimizer, ProjectedOptimizer)  # the options were checked
            step_in_backward(self.model, self.optimizer, clip_norm=options.schedule.clip_previous)

    def tokens(self, rows: int) -> Tensor:
        """Random sequences, each with one more token for its last label."""
        return torch.randint(self.vocabulary, (rows, self.sequence + 1), device=self.device)

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of sequences."""
        return self.objective(tokens[:, :-1], tokens[:, 1:])

    def step(self, tokens: Tensor) -> Tensor:
        """Take a training step; returns its loss."""
        loss = self.loss(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def draw_gradients_(model: nn.Module) -> None:
    """Give every trained weight a random gradient of a realistic size."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = 1e-4 * torch.randn(weight.shape, dtype=weight.dtype, device=weight.device)


def apart(call: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a call in a process of its own, whose memory can be measured."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


class PeakWatch:
    """Finds the peak of memory in a training, and what the memory held then.

    A step is cut into stretches, and each backward stretch ends when a gradient is complete. At the end of the stretch
    with the highest peak, weights, state and gradients (with the one just completed) are counted. Activations are what
    else was alive and had not been at the start of the step; the rest is temporary, or was there at the start.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, buckets: int = 0):
        """`buckets` are bytes that always hold all gradients, as those of DistributedDataParallel do."""
        self.model, self.optimizer, self.buckets = model, optimizer, buckets
        self.device = next(model.parameters()).device
        self.found: dict[str, Any] = {"peak": -1}
        self._held = 0

    def step(self, forward: Callable[[], Tensor], closely: bool = True) -> Tensor:
        """Take a training step; returns its loss. Without `closely`, the backward pass is one stretch."""
        if closely:
            self.begin()
        loss = forward()
        self.mark("forward")
        with self.stretches() if closely else contextlib.nullcontext():
            loss.backward()
        self.mark("backward")
        self.optimizer.step()
        self.mark("optimizer step")
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def begin(self) -> None:
        """Note the memory at the start of a step, before there are gradients."""
        self.mark("between steps")
        self._held = self.allocated() - sum(self._kept(None).values())

    def mark(self, stretch: str, grad: Tensor | None = None) -> None:
        """End a stretch. `grad` is complete and not yet in its weight's `grad`."""
        peak = self.highest()
        if peak > self.found["peak"]:
            kinds = self._kept(grad)
            kinds["activations"] = max(0, self.allocated() - sum(kinds.values()) - self._held)
            self.found = {"peak": peak, **kinds, "rest": max(0, peak - sum(kinds.values())), "peak_in": stretch}

    @contextlib.contextmanager
    def stretches(self) -> Iterator[None]:
        """End a stretch of backward at each gradient that is complete."""
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        hooks = [weight.register_hook(partial(self.mark, f"backward to {name}")) for name, weight in trained.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def allocated(self) -> int:
        """Bytes of tensors on the GPU now; 0 on a CPU, whose allocator does not count."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def highest(self) -> int:
        """The most bytes of tensors on the GPU since the last call; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def _kept(self, grad: Tensor | None) -> dict[str, int]:
        """Bytes of weights, state and gradients, with a gradient that is not yet in its weight's `grad`."""
        weights = list(self.model.parameters())
        values = (value for entries in self.optimizer.state.values() for value in entries.values())
        state = [value for value in values if isinstance(value, Tensor) and value.device == self.device]
        gradients = self.buckets or sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        return {
            "weights": sum(map(bytes_of, weights)),
            "state": sum(map(bytes_of, state)),
            "gradients": gradients + (0 if grad is None else grad.nbytes),
        }


class WatchedTraining(NamedTuple):
    """Measurements of a training."""

    peak: dict[str, Any]
    """Bytes at the peak, in all and by `PEAK_KINDS`, and the stretch that it was in."""
    losses: list[float]
    ms_per_step: float
    """Time of the steps that were not watched closely."""


def watched_training(work: Workload, batches: Iterable[Tensor], buckets: int = 0) -> WatchedTraining:
    """Train on these batches, a step each; the peak includes the building of the model."""
    watch = PeakWatch(work.model, work.optimizer, buckets)
    losses: list[Tensor] = []
    begun = time.perf_counter()
    for number, tokens in enumerate(batches):
        losses.append(watch.step(partial(work.loss, tokens.to(work.device)), closely=number < WATCHED_STEPS))
        if number + 1 == WATCHED_STEPS:
            losses[-1].item()  # waits for the device
            begun = time.perf_counter()
    values = torch.stack(losses).tolist()
    ms = 1e3 * (time.perf_counter() - begun)
    return WatchedTraining(watch.found, values, ms / max(1, len(values) - WATCHED_STEPS))


def process_memory(context: int | None = None) -> dict[str, Any]:
    """Bytes of the GPU that this process takes, with its context, where that is known from, and what is reserved.

    `context`, what a process takes besides its tensors, is needed where other processes are on the device.
    """
    listed = listed_processes()
    free, total = torch.cuda.mem_get_info()
    if os.getpid() in listed:
        process, by = listed[os.getpid()], "nvidia-smi"
    # In a container processes have other numbers, or are not listed at all.
    elif context is not None:
        process, by = torch.cuda.memory_reserved() + context, "reserved + context of an idle process"
    elif len(listed) == 1:
        process, by = *listed.values(), "nvidia-smi, the only process"
    else:
        process, by = total - free, "all that is taken of the device"
    return {"reserved": torch.cuda.max_memory_reserved(), "process": process, "process_by": by}


def listed_processes() -> dict[int, int]:
    """Bytes by process number, as nvidia-smi lists them; empty where it does not."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parsed_processes(ran.stdout.splitlines())


def parsed_processes(lines: Iterable[str]) -> dict[int, int]:
    """Bytes by process number, from lines of a number and MiB; other lines are left out."""
    found = (re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", line) for line in lines)
    return {int(match[1]): int(match[2]) * 2**20 for match in found if match}
