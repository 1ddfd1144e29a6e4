"""The largest micro-batch that fits into memory."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..in_backward import InBackward
from .ranks import Ranks
from .schedule import divisors

CPU_TOKENS = 4096
"""Tokens of a micro-batch on a CPU, where larger ones are no faster: their activations leave the caches."""

SPARE = 0.08
"""Share of a GPU's memory to leave free for evaluation, communication and fragmentation."""


def largest_micro_batch(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    length: int,
    ranks: Ranks,
    in_backward: Callable[[], InBackward] | None = None,
) -> int:
    """The largest of `parts(rows)` sequences that every rank's device can train on at once.

    On a GPU sizes are tried: forward, backward and an optimizer step at learning rate zero, which leaves the weights
    as they are; the optimizer's state is then restored. Call it `uncompiled`, or every size would be compiled; compiled
    models need less memory. `in_backward` makes a handle, if weights are stepped in backward; it must not communicate,
    because other ranks may try other sizes.
    """
    if ranks.device.type != "cuda":
        return next((part for part in parts(rows) if part * length <= CPU_TOKENS), 1)
    before = copy.deepcopy(optimizer.state_dict())

    def attempt(part: int) -> None:
        tokens = torch.zeros(part, length, dtype=torch.long, device=ranks.device)
        handle = None if in_backward is None else in_backward()
        trial(objective, optimizer, tokens, handle, accumulates=part < rows)

    torch.cuda.set_per_process_memory_fraction(1 - SPARE, ranks.device)
    try:
        found = largest_that_fits(parts(rows), attempt, lambda: _clear(objective, optimizer, before))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, ranks.device)
    return ranks.least(found)


def parts(rows: int) -> list[int]:
    """`rows`, and divisors of it: each the largest that is at most half of the one before."""
    found: list[int] = []
    for part in reversed(divisors(rows)):
        if not found or 2 * part <= found[-1]:
            found.append(part)
    return found


def largest_that_fits(sizes: list[int], attempt: Callable[[int], None], clear: Callable[[], None]) -> int:
    """The first of `sizes` whose attempt does not run out of memory; calls `clear` after each."""
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
    """Take a step, and then reach the peak of memory: the optimizer has its state, and gradients of one micro-batch are
    held while the next runs. With a `handle` to step in backward they are held only if a step `accumulates` several.
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
    """Set the learning rate of a parameter group, in place if it is a tensor."""
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
