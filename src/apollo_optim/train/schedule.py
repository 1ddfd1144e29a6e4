"""The length of a run, its batches, and the learning rate of every step."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ..flags import check_each
from .ranks import by_device

LONGEST = 10**15
"""Steps, tokens or epochs of a run at most: a million in a second would take thirty years."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long it trains, in what batches, and how the learning rate moves."""

    steps: int | None = None
    """Optimizer steps; by default as many as --tokens makes, or as the paper gave the model (1m: 500, 9m: 2000)."""
    tokens: int | None = None
    """Training tokens, rounded up to whole steps; in place of --steps."""
    sequence: int = 256
    """Tokens of a sequence; the paper's 256, or 1024 for its long contexts."""
    batch_tokens: int = field(default_factory=by_device(131_072, 4096))
    """Tokens of an optimizer step over all ranks and micro-batches; by default the paper's 131,072, on a CPU 4096."""
    micro_batch: int | Literal["auto"] = "auto"
    """Sequences of a forward pass on one device; auto: the largest that fits."""
    warmup: float = 0.1
    """Fraction of the steps over which the learning rate rises from zero."""
    final_lr: float = 0.1
    """Fraction of the learning rate that the cosine ends at."""
    clip: float | None = None
    """Largest norm of the whole gradient; by default any: the projected optimizers limit each weight's growth."""
    clip_previous: float | None = None
    """The same with --step-in-backward, by the norm of the step before: the present one is not known in time."""

    def check(self) -> None:
        """Raise ValueError for the first number that is not possible."""
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"--steps {self.steps} and --tokens {self.tokens} say the same thing; leave one out")
        check_each(self, "above 0", lambda number: number > 0, "clip", "clip_previous")
        length = f"above 0 and at most {LONGEST:,}"
        check_each(self, length, lambda number: 0 < number <= LONGEST, "steps", "tokens", "batch_tokens")
        check_each(self, "a fraction from 0 to 1", lambda share: 0 <= share <= 1, "warmup", "final_lr")
        check_each(self, "at least 2 tokens", lambda length: length >= 2, "sequence")
        if self.batch_tokens < self.sequence or self.batch_tokens % self.sequence:
            raise ValueError(
                f"--batch-tokens must be a multiple of --sequence {self.sequence}, got {self.batch_tokens}; "
                f"{max(round(self.batch_tokens / self.sequence), 1) * self.sequence} is"
            )
        check_each(self, '"auto" or at least 1 sequence', lambda rows: rows == "auto" or rows >= 1, "micro_batch")

    @property
    def batch_rows(self) -> int:
        """Sequences of an optimizer step."""
        return self.batch_tokens // self.sequence

    def rows_of_a_rank(self, world: int) -> int:
        """Sequences of an optimizer step on each of `world` ranks."""
        if self.batch_rows % world:
            raise ValueError(
                f"--batch-tokens {self.batch_tokens} is {self.batch_rows} sequences of {self.sequence}, which {world} "
                "ranks cannot share evenly; choose a multiple of sequence times ranks: "
                f"{math.ceil(self.batch_rows / world) * world * self.sequence}"
            )
        rows = self.batch_rows // world
        check_micro_batch(self.micro_batch, rows)
        return rows

    def total_steps(self, default: int | None) -> int:
        """Optimizer steps of the run; `default` if neither --steps nor --tokens is given."""
        if self.tokens is not None:
            return math.ceil(self.tokens / self.batch_tokens)
        steps = self.steps or default
        if steps is None:
            raise ValueError("--steps or --tokens must say how long to train: the paper does not, for this model")
        return steps

    def lr_factor(self, step: int, total: int) -> float:
        """Factor on learning rates after `step` of `total` steps: a linear warm-up, then a cosine."""
        rise = round(self.warmup * total)
        if step < rise:
            return (step + 1) / rise
        # 1 in the last step of the warm-up, and `final_lr` in the last step of the run.
        progress = (step + 1 - rise) / max(total - rise, 1)
        return self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def check_micro_batch(micro_batch: int | Literal["auto"], rows: int) -> None:
    """Raise ValueError if the micro-batch does not divide the rows that a rank reads in a step."""
    if micro_batch != "auto" and rows % micro_batch:
        nearest = min(divisors(rows), key=lambda count: abs(count - micro_batch))
        raise ValueError(
            f"--micro-batch {micro_batch} does not divide the {rows} sequences that a rank reads in a step; {nearest} "
            "does"
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order, in as many tries as its square root: for `LONGEST`, seconds."""
    low = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*low, *(number // part for part in low)})
