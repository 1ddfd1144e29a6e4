"""Loss on text that was not trained on, by source, the work shared between ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .loop import ALL
from .ranks import Ranks
from .trainer import Examples


@torch.no_grad()
def validation_losses(
    objective: nn.Module, sources: Mapping[str, tuple[Examples, int]], rows: int, ranks: Ranks
) -> dict[str, float]:
    """Mean loss by source and over all of them; `sources` are with how many rows to read, `rows` of them at a time."""
    training = objective.training
    objective.eval()
    sums = {name: _summed(objective, source, count, rows, ranks) for name, (source, count) in sources.items()}
    objective.train(training)
    totals = dict(zip(sums, ranks.sum_(torch.stack(list(sums.values()))).tolist(), strict=True))
    losses = {name: loss / targets for name, (loss, targets) in totals.items()}
    return {**losses, ALL: sum(loss for loss, _ in totals.values()) / sum(targets for _, targets in totals.values())}


def _summed(objective: nn.Module, source: Examples, count: int, rows: int, ranks: Ranks) -> Tensor:
    """Summed loss and targets of this rank's part of the first `count` rows: every world-th batch of `rows`."""
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for first in range(ranks.rank * rows, count, ranks.world * rows):
        number = min(rows, count - first)
        targets = source.targets(first, number)
        batch = source.split(source.rows(first, number).to(ranks.device))
        total[0] += objective(*batch) * targets
        total[1] += targets
    return total


def unigram_loss(
    training: Examples, rows: int, validation: Mapping[str, tuple[Examples, int]], vocabulary: int
) -> float:
    """Mean loss on the validation text of predicting every token by how often `rows` rows of the training have it."""
    counts = _counts(training, rows, vocabulary) + 1  # as if each had been seen once more: none is impossible
    found = torch.stack([_counts(source, count, vocabulary) for source, count in validation.values()]).sum(0)
    return float(-(found * (counts / counts.sum()).log()).sum() / found.sum())


def _counts(source: Examples, rows: int, vocabulary: int) -> Tensor:
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for first in range(0, rows, 256):
        _, labels = source.split(source.rows(first, min(256, rows - first)))
        counts += torch.bincount(labels.flatten(), minlength=vocabulary)
    return counts
