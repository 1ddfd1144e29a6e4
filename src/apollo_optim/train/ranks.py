"""The processes of a run: one alone, or those that torchrun started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

# Ranks may wait long for a corpus to be tokenised; a rank that dies closes its connections, which ends the wait.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and communication with the others."""

    rank: int
    world: int
    device: torch.device
    host: Any = None
    """A process group on the CPU, for communication that must not wait for the devices; None when alone."""

    @property
    def first(self) -> bool:
        """True in the process that writes and prints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """True if `flag` is set on any rank."""
        return self.least(-int(flag)) < 0

    def least(self, number: int) -> int:
        """The smallest `number` of any rank."""
        if self.world == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.host)
        return int(found)

    def sum_(self, numbers: Tensor) -> Tensor:
        """Sum `numbers` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def shared(self, value: Value) -> Value:
        """The first rank's `value`."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def gathered(self, value: Value) -> list[Value]:
        """Every rank's `value`, in order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host)
        return values

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.world > 1:
            dist.barrier(group=self.host)

    def new_host_group(self) -> Any:
        """Another process group on the CPU, for a thread beside training; called by all ranks."""
        return dist.new_group(backend="gloo", timeout=PATIENCE)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block on the first rank before the others, which find what it has made."""
        if not self.first:
            self.barrier()
        try:
            yield
        finally:
            # Also after an error, which each of the others meets by itself.
            if self.first:
                self.barrier()


def device_of(device: str | None) -> torch.device:
    """The device of this name; by default cuda if there is a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def by_device(on_gpu: Value, on_cpu: Value) -> Callable[[], Value]:
    """A factory of defaults that differ between machines with a GPU and without."""
    return lambda: on_gpu if torch.cuda.is_available() else on_cpu


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """True in the first process; for use before the ranks are joined."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined(place: torch.device) -> Iterator[Ranks]:
    """Connect the ranks of this run, each on its own device of the kind.

    Contexts may be nested, and share one connection. After it was closed there can be no other, because torchrun keeps
    the old addresses of the ranks.
    """
    world = world_size()
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if world == 1:
        yield Ranks(rank=0, world=1, device=place)
        return
    outermost = not dist.is_initialized()
    if outermost:
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    try:
        host = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield Ranks(rank=dist.get_rank(), world=world, device=place, host=host)
    finally:
        if outermost:
            dist.destroy_process_group()
