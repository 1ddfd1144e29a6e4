"""How many sequences go through the model at once."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..in_backward import InBackward
from .ranks import Ranks

CPU_TOKENS = 4096
"""On a CPU memory is no limit and larger micro-batches are no faster: their activations leave the caches."""

SPARE = 0.08
"""Share of a GPU's memory that is left free for evaluation, communication and fragmentation."""


def largest_micro_batch(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    length: int,
    ranks: Ranks,
    in_backward: Callable[[], InBackward] | None = None,
) -> int:
    """The largest part of `rows` sequences, by halves, that every rank's device can train on at once.

    On a GPU it is found by trying: forward, backward and an optimizer step at learning rate zero, which leaves weights
    as they are; the optimizer is then set back. To be called `uncompiled`, or every size would take a compilation; a
    compiled objective needs less. `in_backward` makes a handle where weights are stepped in backward; it is tried
    without the other ranks, which may find another size.
    """
    if ranks.device.type != "cuda":
        return next((part for part in parts(rows) if part * length <= CPU_TOKENS), 1)
    before = copy.deepcopy(optimizer.state_dict())

    def attempt(part: int) -> None:
        tokens = torch.zeros(part, length, dtype=torch.long, device=ranks.device)
        handle = None if in_backward is None else in_backward()
        trial(objective, optimizer, tokens, handle, accumulates=part < rows)

    with _spare_memory(ranks.device):
        found = largest_that_fits(parts(rows), attempt, lambda: _clear(objective, optimizer, before))
    return ranks.least(found)


def parts(rows: int) -> list[int]:
    """`rows`, and then again and again the largest divisor of it that is at most half of the one before."""
    found = [rows]
    while found[-1] > 1:
        found.append(next(part for part in range(found[-1] // 2, 0, -1) if rows % part == 0))
    return found


def largest_that_fits(sizes: list[int], attempt: Callable[[int], None], clear: Callable[[], None]) -> int:
    """The first of `sizes` whose attempt does not run out of memory; `clear` is called after each."""
    for size in sizes:
        try:
            attempt(size)
            return size
        except torch.OutOfMemoryError:
            pass
        finally:
            clear()
    raise ValueError(
        "--micro-batch auto: not even one sequence fits into the device's memory; use --activation-checkpointing, a "
        "shorter --sequence, or a method with less state"
    )


def trial(
    objective: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, handle: InBackward | None, accumulates: bool
) -> None:
    """A step, and the worst moment, which is a later one: the optimizer has its state, and gradients wait for those of
    another micro-batch; with a `handle` to step in backward only where a step `accumulates` several.
    """
    for group in optimizer.param_groups:
        set_lr_(group, 0.0)
    try:
        objective(tokens, tokens).backward()
        optimizer.step()
        if handle is not None and accumulates:
            with handle.accumulate():
                objective(tokens, tokens).backward()
        objective(tokens, tokens).backward()
    finally:
        if handle is not None:
            handle.remove()


def set_lr_(group: dict[str, Any], lr: float) -> None:
    """Give a group of an optimizer this learning rate, in its tensor where it has one."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _clear(objective: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, object]) -> None:
    objective.zero_grad(set_to_none=True)
    optimizer.load_state_dict(before)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def _spare_memory(device: torch.device) -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(1 - SPARE, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
