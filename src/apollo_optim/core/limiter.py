"""The gain of a scaled update, and the limiter: how much its norm may grow from one step to the next.

Shapes: E experts (where there are any), R rank, S the smaller side, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .rule import Granularity

Scalar = float | Tensor


def effective_scale(scale: float | str, rank: int, side: int, caps: bool) -> float:
    """The factor on the update: `scale`, or sqrt(S / R) for "auto", which is also its ceiling where a rule caps it."""
    full_rank_equivalent = (side / rank) ** 0.5
    if isinstance(scale, str):
        return full_rank_equivalent
    return min(scale, full_rank_equivalent) if caps else scale


def gain(step_RC: Tensor, low_RC: Tensor, granularity: Granularity) -> Tensor:
    """|step| / |low| per channel [(E,) C] or per matrix [(E,) 1]; zero where there is no gradient to scale."""
    return gain_of_norms(norms(step_RC, granularity), norms(low_RC, granularity), low_RC.dtype)


def norms(matrix: Tensor, granularity: Granularity) -> Tensor:
    """Norms per channel [(E,) C] or per matrix [(E,) 1]."""
    if granularity == "channel":
        return torch.linalg.vector_norm(matrix, dim=-2)
    return torch.linalg.vector_norm(matrix, dim=(-2, -1)).unsqueeze(-1)


def gain_of_norms(step_norm: Tensor, low_norm: Tensor, dtype: torch.dtype) -> Tensor:
    """|step| / |low|; zero where there is no gradient to scale, or none whose square is a number of this dtype.

    The norm of several numbers is 0 there; that of one number is not, and its gain might be infinite.
    """
    return (step_norm / low_norm).masked_fill_(low_norm.to(dtype).square() == 0, 0.0)


def first_step_size(step: Scalar, betas: tuple[float, float]) -> Scalar:
    """The size of Adam's step, per element, on the first gradient that is not zero, if that is gradient `step`.

    m_hat / sqrt(v_hat) with one nonzero gradient in the averages: 1 at step 1, then less until about (1 - beta1)**-2.
    """
    beta1, beta2 = betas
    return (1 - beta1) / (1 - beta1**step) * ((1 - beta2**step) / (1 - beta2)) ** 0.5


class Limited(NamedTuple):
    shrink: Tensor
    """Factor on the update, at most 1."""
    last_norm: Tensor
    """The norm that the next step's growth is measured from."""


def limited_growth(norm: Tensor, last_norm: Tensor, limit: float, below_eps: Tensor, first_size: Scalar) -> Limited:
    """The limiter: |update| <= limit * |previous update|, unless there was none.

    A previous norm of zero limits nothing, and what is then measured from is the norm that a full first step would
    have had. A zero update leaves the previous norm alone; one made tiny by eps, not by the gradient, counts as none.
    """
    none_before = last_norm == 0
    ceiling = limit * last_norm
    shrink = (ceiling / norm).clamp_(max=1.0).masked_fill_(none_before, 1.0)
    full_size = first_size.clamp(max=1.0) if isinstance(first_size, Tensor) else min(first_size, 1.0)
    measured = torch.where(none_before, norm / full_size, norm * shrink).masked_fill_(below_eps, 0.0)
    return Limited(shrink, torch.where(norm > 0, measured, last_norm))
