"""A run's checkpoints, on every rank at once: the first writes, all of them read."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..distributed import local
from ..quant import Int8Weight
from .checkpoint import Checkpoints
from .metrics import DivergedError
from .ranks import Ranks
from .snapshot import Position, random_states, restore_, saved_position, writers


class Keeper:
    """Saves a model with its optimizer, and brings them back."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        warn: Callable[[str], None],
    ):
        self.checkpoints, self.model, self.optimizer, self.ranks, self.warn = checkpoints, model, optimizer, ranks, warn
        self.failed = False
        """Whether the last checkpoint could not be written; the first rank knows."""

    def last(self) -> Position | None:
        """Where the last whole checkpoint stands; None where there is none."""
        step = self.ranks.shared(self.checkpoints.latest(self.warn) if self.ranks.first else None)
        return None if step is None else saved_position(self.checkpoints.path(step))

    def restore_(self, position: Position) -> None:
        """Bring model, optimizer and random states back to where they were at a position."""
        restore_(self.model, self.optimizer, self.checkpoints.path(position.step), self.ranks.rank)

    def save(self, position: Position, validation: float | None) -> None:
        """Save all of it. A disk that is full costs this checkpoint and a warning, not the run.

        DivergedError, and no earlier checkpoint is given up, where the weights are not finite.
        """
        self._check_weights(position.step)
        randoms = self.ranks.gathered(random_states(self.ranks.device))
        files = writers(self.model, self.optimizer, randoms, position, self.ranks.first)
        if not self.ranks.first:
            return
        try:
            self.checkpoints.save(position.step, files, validation)
            self.failed = False
        except OSError as error:
            self.failed = True
            steps = self.checkpoints.steps()
            instead = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
            self.warn(f"the checkpoint of step {position.step} could not be written ({error}); {instead}")

    def _check_weights(self, step: int) -> None:
        """The loss of the last step was of the weights before it."""
        bad = next((name for name, weight in self.model.named_parameters() if not _is_finite(weight)), None)
        if self.ranks.any(bad is not None):
            raise DivergedError(step, f"step {step} left weights that are not finite ({bad or 'on another rank'})")


def _is_finite(weight: Tensor) -> bool:
    held = weight.scale if isinstance(weight, Int8Weight) else local(weight.detach())
    return bool(held.isfinite().all())
