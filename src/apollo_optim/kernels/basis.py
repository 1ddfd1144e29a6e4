"""The basis of a step: made from the seed, or from the gradient and kept in state.

Shapes: E experts (where there are any), R rank, S the smaller side, C channels.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.projection import gaussian_basis, keeps_basis, random_rows, svd_basis, svd_lowrank_basis
from ..core.scaling import Scalar
from ..core.shape import MatrixShape
from .job import Job

KEPT_BASIS = 2**13
"""Elements up to which a basis is kept until others push it out: making a short one takes longer than using it."""


class Bases(NamedTuple):
    """What this rank's rows are projected by; None is the identity."""

    current_RS: Tensor | None
    previous_RS: Tensor | None = None
    """Where this step has begun a new basis, the one before it."""


def refresh_number(job: Job, step: Scalar) -> int | Tensor:
    """How many times the basis has been renewed before this step."""
    if isinstance(step, Tensor):
        return ((step - 1) // job.group["refresh_every"]).long()
    return (int(step) - 1) // job.group["refresh_every"]


def is_due(job: Job, step: Scalar) -> bool:
    """Whether a new basis begins at this step."""
    return (int(step) - 1) % job.group["refresh_every"] == 0


def refresh_by_host(job: Job) -> bool:
    """Whether the coming step computes a basis from the gradient, or carries momentum over to a new one."""
    if job.shape is None or job.shape.full_rank or job.group["capturable"]:
        return False
    decides = keeps_basis(job.rule, job.shape) or job.rule.second_moment == "factored"
    return decides and is_due(job, int(job.state["step"]) + 1)


def makes_first_basis(job: Job) -> bool:
    """Whether the coming step makes the weight's first basis of its gradient."""
    return job.shape is not None and keeps_basis(job.rule, job.shape) and int(job.state["step"]) == 0


def bases_of(job: Job, source_SC: Tensor, kept_RS: Tensor | None, step: Scalar) -> Bases:
    """The basis of this step; where it is due, an SVD of the whole gradient `source_SC` is written to `kept_RS`."""
    assert job.shape is not None
    if job.rule.projection == "identity" or job.shape.full_rank:
        return Bases(None)
    if kept_RS is not None:
        return _decomposed(job, source_SC, kept_RS, step)
    seed, refresh = int(job.state["seed"]), refresh_number(job, step)
    small = math.prod(job.shape.batch) * job.shape.rank * job.shape.side <= KEPT_BASIS
    make = _kept_basis if small and isinstance(refresh, int) else gaussian_basis
    basis_RS = make(job.shape, seed, refresh, job.dtype, source_SC.device)
    if job.rule.second_moment != "factored" or not is_due(job, step) or refresh == 0:
        return Bases(basis_RS)
    return Bases(basis_RS, gaussian_basis(job.shape, seed, refresh - 1, job.dtype, source_SC.device))


def _decomposed(job: Job, source_SC: Tensor, kept_RS: Tensor, step: Scalar) -> Bases:
    if not is_due(job, step):
        return Bases(kept_RS)
    assert job.shape is not None
    seed, refresh, whole = int(job.state["seed"]), refresh_number(job, step), all_of_each_matrix(job.shape)
    sides = slice(job.shape.begins.side, job.shape.begins.side + job.shape.side)
    previous_RS = kept_RS.clone()
    if job.rule.projection == "svd":
        new_RS = svd_basis(source_SC, job.shape.rank)
    else:
        new_RS = svd_lowrank_basis(source_SC, whole, seed, refresh)
    # A matrix without a gradient keeps its basis; of several, one that had none so far must have some direction.
    other_RS = previous_RS
    if refresh == 0 and whole.experts is not None:
        other_RS = random_rows(whole, seed, source_SC.dtype, source_SC.device)[..., sides]
    has_gradient_11 = new_RS[..., :1, :].any(dim=-1, keepdim=True)
    # Narrowed before its first use, so that every step of the period projects by the same numbers.
    kept_RS.copy_(torch.where(has_gradient_11, new_RS[..., sides], other_RS).to(job.state["basis"].dtype))
    return Bases(kept_RS, previous_RS)


def all_of_each_matrix(shape: MatrixShape) -> MatrixShape:
    """The shape of a gathered gradient: this rank's experts, and all rows and columns of theirs."""
    if shape.whole is None:
        return shape
    ranges = [(0, length) for length in shape.whole.weight]
    if shape.experts is not None:
        ranges[0] = shape.begins.expert, shape.begins.expert + shape.experts
    return shape.whole.part(ranges)


@lru_cache(maxsize=1024)
def _kept_basis(shape: MatrixShape, seed: int, refresh: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return gaussian_basis(shape, seed, refresh, dtype, device)
