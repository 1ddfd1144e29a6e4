"""How much memory a training run takes at its highest, and what is alive then."""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from apollo_optim.quant import Int8Weight

KINDS = "weights", "state", "gradients", "activations", "rest"


class Memory(Protocol):
    """An allocator's own count."""

    def allocated(self) -> int:
        """Bytes of tensors now."""
        ...

    def highest(self) -> int:
        """Bytes of tensors at most since this was last asked."""
        ...


class GpuMemory:
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def highest(self) -> int:
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found


class NoMemory:
    """Of a CPU, whose allocator does not count: for trying a script."""

    def allocated(self) -> int:
        return 0

    def highest(self) -> int:
        return 0


def memory_of(device: str) -> Memory:
    return GpuMemory() if device == "cuda" else NoMemory()


def stored(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the parts it is made of."""
    parts = [tensor.codes, tensor.scale] if isinstance(tensor, Int8Weight) else [tensor]
    return sum(part.numel() * part.element_size() for part in parts)


class Meter:
    """The highest memory of a run. It is cut into stretches that end where a gradient is complete.

    Of the stretch with the highest peak, weights, state and gradients are what was alive at its end, the gradient that
    ended it included; activations are what else was alive and had not been at the start of the step; the rest is
    temporary, or was there at the start.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, memory: Memory, buckets: int = 0):
        self.model, self.optimizer, self.memory = model, optimizer, memory
        self.buckets = buckets
        """Bytes that hold gradients all the time, as those of DistributedDataParallel do."""
        self.device = next(model.parameters()).device
        self.found: dict[str, Any] = {"peak": -1}
        self._held = 0

    def begin(self) -> None:
        """A step begins, without gradients."""
        self.mark("between steps")
        self._held = self.memory.allocated() - self._weights() - self._state() - self.buckets

    def mark(self, stretch: str, grad: Tensor | None = None) -> None:
        """A stretch ends here, with this gradient not yet in its place."""
        peak = self.memory.highest()
        if peak > self.found["peak"]:
            kinds = {"weights": self._weights(), "state": self._state(), "gradients": self._gradients(grad)}
            kinds["activations"] = max(0, self.memory.allocated() - sum(kinds.values()) - self._held)
            self.found = {"peak": peak, **kinds, "rest": max(0, peak - sum(kinds.values())), "peak_in": stretch}

    @contextlib.contextmanager
    def stretches(self) -> Iterator[None]:
        """Backward passes in here are cut where each gradient is complete."""
        hooks = [
            weight.register_hook(lambda grad, name=name: self.mark(f"backward to {name}", grad))
            for name, weight in self.model.named_parameters()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _weights(self) -> int:
        return sum(map(stored, self.model.parameters()))

    def _state(self) -> int:
        values = (value for entries in self.optimizer.state.values() for value in entries.values())
        return sum(stored(value) for value in values if isinstance(value, Tensor) and value.device == self.device)

    def _gradients(self, grad: Tensor | None) -> int:
        kept = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        return (0 if grad is None else stored(grad)) + (self.buckets or sum(map(stored, kept)))


class Process(NamedTuple):
    """Memory of a whole process, its context included, and who says so."""

    bytes: int
    source: str


def process_memory(context: int | None) -> Process:
    """Of this process: by nvidia-smi, or else by what is taken of the device.

    `context` is what a process takes besides its tensors; it is needed where others are on the device.
    """
    listed = listed_processes()
    if os.getpid() in listed:
        return Process(listed[os.getpid()], "nvidia-smi")
    # In a container processes have other numbers, or are not listed at all.
    if context is not None:
        return Process(torch.cuda.memory_reserved() + context, "reserved + context of an idle process")
    if len(listed) == 1:
        return Process(*listed.values(), "nvidia-smi, the only process")
    return Process(device_bytes(), "all that is taken of the device")


def listed_processes() -> dict[int, int]:
    """Bytes by process number, as nvidia-smi lists them; nothing where it does not."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parsed_processes(ran.stdout.splitlines())


def parsed_processes(lines: Iterable[str]) -> dict[int, int]:
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    return {
        int(row[0]): int(row[1]) * 2**20 for row in cells if len(row) == 2 and row[0].isdigit() and row[1].isdigit()
    }


def device_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
