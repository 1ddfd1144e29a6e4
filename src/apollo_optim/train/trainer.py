"""One optimizer step: micro-batches, gradient, learning rate. Nothing here asks the device a question."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .ranks import Ranks


class Examples(Protocol):
    """What is learned from, row by row: the same row for the same number, on any rank and in any order."""

    def rows(self, first: int, count: int) -> Tensor:
        """`count` rows from row `first` on, [count, ...], on the host."""
        ...

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and labels of rows, each [count, length]."""
        ...

    def targets(self, first: int, count: int) -> int:
        """How many labels of those rows a loss is taken of."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run."""

    steps: int
    """Optimizer steps of the whole run."""
    batch_rows: int
    """Rows of an optimizer step, over all ranks."""
    micro_batch: int
    """Rows of a forward pass on one rank."""
    clip: float | None
    """Largest norm of the whole gradient."""
    lr_factor: Callable[[int], float]
    """What every learning rate is multiplied by in the step after so many others."""

    def micro_batches(self, ranks: Ranks) -> int:
        """Forward passes of an optimizer step on each rank."""
        return self.batch_rows // ranks.world // self.micro_batch

    def first_row(self, step: int, micro: int, ranks: Ranks) -> int:
        """The first row of a micro-batch: each rank reads its own stretch of every batch."""
        return step * self.batch_rows + (ranks.rank * self.micro_batches(ranks) + micro) * self.micro_batch


Batch = tuple[Tensor, Tensor]
"""Tokens and labels on the device."""


class Trainer:
    """Takes optimizer steps. `objective` is the model with its loss, compiled and wrapped for the ranks."""

    def __init__(
        self,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        examples: Examples,
        plan: Plan,
        ranks: Ranks,
        step: int = 0,
    ):
        self.objective, self.optimizer, self.examples, self.plan, self.ranks = (
            objective,
            optimizer,
            examples,
            plan,
            ranks,
        )
        self.step = step
        # A checkpoint brings these along with the learning rate of its last step.
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def advance(self, batches: Iterator[Batch], measure: bool) -> tuple[Tensor, Tensor]:
        """Take a step; this rank's share of its loss, and the norm of the whole gradient if that is to be measured."""
        self.set_lr()
        loss = self._backward(batches)
        norm = self._clipped_norm(measure)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm

    def set_lr(self) -> None:
        """Give every group its own learning rate times what the schedule says of the next step."""
        factor = self.plan.lr_factor(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor

    def _backward(self, batches: Iterator[Batch]) -> Tensor:
        """This rank's part of the loss, averaged over the targets of the whole batch; gradients are of all ranks."""
        count, rows = self.plan.micro_batches(self.ranks), self.plan.micro_batch
        whole = self.examples.targets(self.step * self.plan.batch_rows, self.plan.batch_rows)
        total = torch.zeros((), device=self.ranks.device)
        for micro in range(count):
            share = self.examples.targets(self.plan.first_row(self.step, micro, self.ranks), rows) / whole
            with nullcontext() if micro == count - 1 else self._without_sync():
                loss = self.objective(*next(batches)) * share
                # Ranks average their gradients; shares already add up to one over all of them.
                (loss * self.ranks.world).backward()
            total += loss.detach()
        return total

    def _without_sync(self) -> AbstractContextManager[None]:
        """Gradients stay on their rank until the last micro-batch."""
        return self.objective.no_sync() if isinstance(self.objective, DistributedDataParallel) else nullcontext()

    def _clipped_norm(self, measure: bool) -> Tensor:
        parameters = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        if self.plan.clip is not None:
            return nn.utils.clip_grad_norm_(parameters, self.plan.clip)
        if measure:
            return nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None])
        return torch.zeros((), device=self.ranks.device)
