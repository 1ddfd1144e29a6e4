"""What a rank holds of a weight when a step begins, and what it asks of others before it can begin.

Shapes: E experts (where there are any), R rank, S this rank's part of the contracted side, C its channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.projection import keeps_basis
from ..core.scaling import Scalar
from ..core.shape import MatrixShape
from ..distributed import Part
from . import plain
from .basis import Bases, all_of_each_matrix, bases_of, refresh_by_host
from .exchange import gathered_gradient, summed
from .job import Job
from .lockstep import Step


class Held(NamedTuple):
    """What this rank begins a step with."""

    job: Job
    part: Part
    norm: Tensor
    """Of its part of the gradient, at the rule's granularity."""

    @property
    def grad(self) -> Tensor:
        """Made anew each time: kept, those of all weights would wait for the norms in the arithmetic's precision."""
        return plain.ascent(self.job)

    @property
    def shape(self) -> MatrixShape:
        assert self.job.shape is not None
        return self.job.shape

    @property
    def grad_SC(self) -> Tensor:
        return self.shape.matrix(self.grad)

    @property
    def bad(self) -> tuple[Tensor, str]:
        """Whether this part of the gradient is not finite, to be counted over all ranks."""
        return ~plain.is_finite(self.norm), "W"

    @property
    def square(self) -> tuple[Tensor, str]:
        """Of the norm of this part of the gradient, infinite where that is not finite; to be summed over all ranks."""
        return torch.where(plain.is_finite(self.norm), self.norm.double().square().sum(), torch.inf), "W"


def all_finite(held: Held) -> Step[tuple[Tensor, Tensor]]:
    """Whether all of the gradient is finite, and the square of its norm."""
    (square,) = yield from summed(held.part, held.square)
    return (square if held.norm.ndim > 0 else square.to(held.job.dtype)).isfinite(), square


def whole_gradient(held: Held) -> Step[Tensor | None]:
    """All of the gradient [(E,) S, C], where this step decomposes it and a rank has not got it."""
    job = held.job
    if not held.part.axes("SC") or not keeps_basis(job.rule, held.shape) or not refresh_by_host(job):
        return None
    whole = yield from gathered_gradient(held.part, job.grad)
    whole_SC = all_of_each_matrix(held.shape).matrix(whole.to(job.dtype))
    return -whole_SC if job.group["maximize"] else whole_SC


def bases_of_step(held: Held, step: Scalar) -> Step[Bases]:
    """The basis of this step, renewed where that is due; the gradient is then known to be finite."""
    job = held.job
    source_SC = yield from whole_gradient(held)
    kept_RS = plain.opened(job, "basis") if "basis" in job.state else None
    bases = bases_of(job, held.grad_SC if source_SC is None else source_SC, kept_RS, step)
    if source_SC is not None and kept_RS is not None:
        plain.close_(job, "basis", kept_RS, torch.ones((), dtype=torch.bool, device=kept_RS.device), step)
    return bases
