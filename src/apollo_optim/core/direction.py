"""The step of every member of the family, as one spine of small stages.

    low_RC   = basis_RS @ grad_SC
    m, v     = Adam moments of low_RC
    step_RC  = m_hat / (sqrt(v_hat) + eps)
    update   = scale * grad_SC * |step_RC| / |low_RC|      per channel or per tensor, its growth limited
             | scale * basis.T @ step_RC                   element-wise rules
             + scale * (grad - basis.T @ low) * gain       Fira's residual, its growth limited

Shapes: E experts (where there are any), R rank, S the smaller side, C channels. All arithmetic is in the dtype of
the gradient handed in: float32, or float64 where the weight or its state is.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .limiter import Limited, Scalar, first_step_size, gain, limited_growth
from .projection import lift, project
from .rule import Rule


class Moments(NamedTuple):
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Factors(NamedTuple):
    """Row and column means of a squared gradient, whose outer product stands in for its second moment."""

    side_S: Tensor
    channel_C: Tensor


@dataclass(frozen=True)
class Adam:
    """The numbers of one Adam step."""

    betas: tuple[float, float]
    eps: float
    step: Scalar
    """Number of this step, counted from 1: a Python number, or a tensor where the step must not ask the device."""

    @property
    def corrections(self) -> tuple[Scalar, Scalar]:
        """The bias correction of each moment, which began as zero: 1 - beta**step."""
        return 1 - self.betas[0] ** self.step, 1 - self.betas[1] ** self.step


LEAST_EPS = 1e-30
"""In place of 0: the root of any float32 stays what it is with it, and what had no gradient yet is 0, not 0 / 0."""


def least_eps(eps: float) -> float:
    """The number that is added to a denominator: `eps`, and at least `LEAST_EPS`."""
    return max(eps, LEAST_EPS)


class Direction(NamedTuple):
    """A step: `gain` times the gradient, or `update` as it stands (the other is None)."""

    gain: Tensor | None = None
    update: Tensor | None = None
    limited: Limited | None = None


def update_moments_(moments: Moments, grad: Tensor, betas: tuple[float, float]) -> None:
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2"""
    moments.exp_avg.lerp_(grad, 1 - betas[0])
    moments.exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])


def corrected_step(moments: Moments, adam: Adam) -> Tensor:
    """m_hat / (sqrt(v_hat) + eps), with both corrections in the denominator: one pass over memory less."""
    correction1, correction2 = adam.corrections
    denominator = moments.exp_avg_sq.sqrt().mul_(correction1 / correction2**0.5).add_(adam.eps * correction1)
    return torch.div(moments.exp_avg, denominator, out=denominator)


def limited_by(rule: Rule, norm: Tensor, last_norm: Tensor, exp_avg_sq: Tensor, adam: Adam) -> Limited:
    """The limiter with this step's numbers; without one, a factor of 1.

    `exp_avg_sq` is v [(E,) R, C], or its mean [(E,) 1, 1] where ranks have parts of it.
    """
    if rule.growth_limit is None:
        return Limited(torch.ones_like(norm), last_norm)
    # Where the root mean square of v_hat is below eps, eps and not the gradient sets the size of the step.
    below_eps = exp_avg_sq.mean(dim=(-2, -1)) / adam.corrections[1] < adam.eps**2
    return limited_growth(norm, last_norm, rule.growth_limit, below_eps, first_step_size(adam.step, adam.betas))


def projected_direction(
    grad_SC: Tensor,
    grad_norm_C: Tensor,
    basis_RS: Tensor | None,
    moments: Moments,
    last_norm: Tensor,
    rule: Rule,
    adam: Adam,
    scale: float,
) -> Direction:
    """A gain on the gradient by moments of its projection; of an element-wise rule, Adam's step on that lifted back."""
    low_RC = project(grad_SC, basis_RS)
    update_moments_(moments, low_RC, adam.betas)
    step_RC = corrected_step(moments, adam)
    if rule.granularity != "element":
        gain_C = scale * gain(step_RC, low_RC, rule.granularity)
        # |G diag(g)| from the norms of G's channels: no pass over the gradient. The product comes before the square,
        # because a large gain on a small gradient would overflow alone.
        # On the meta device torch 2.9 keeps a dimension of one that is reduced; torch 2.13 does not.
        norm = torch.linalg.vector_norm(gain_C * grad_norm_C, dim=-1).reshape(last_norm.shape)
        limited = limited_by(rule, norm, last_norm, moments.exp_avg_sq, adam)
        return Direction(gain=gain_C * limited.shrink.unsqueeze(-1), limited=limited)
    update_SC = lift(step_RC, basis_RS)
    if not rule.residual:
        return Direction(update=update_SC.mul_(scale))
    residual_SC = scaled_residual(grad_SC, low_RC, step_RC, basis_RS)
    norm = torch.linalg.vector_norm(residual_SC, dim=(-2, -1))
    limited = limited_by(rule, norm, last_norm, moments.exp_avg_sq, adam)
    update_SC = update_SC.addcmul_(residual_SC, limited.shrink[..., None, None]).mul_(scale)
    return Direction(update=update_SC, limited=limited)


def scaled_residual(grad_SC: Tensor, low_RC: Tensor, step_RC: Tensor, basis_RS: Tensor | None) -> Tensor:
    """The gradient less its projection, scaled per channel as the step scales the projection (Fira)."""
    return (grad_SC - lift(low_RC, basis_RS)) * gain(step_RC, low_RC, "channel").unsqueeze(-2)


def look_ahead_(exp_avg: Tensor, grad: Tensor, beta: float) -> Tensor:
    """Nesterov's momentum: m <- beta m + (1 - beta) g, and of that once more, beta m + (1 - beta) g."""
    exp_avg.lerp_(grad, 1 - beta)
    return grad.lerp(exp_avg, beta)


def factored_direction(
    grad_SC: Tensor,
    basis_RS: Tensor | None,
    exp_avg_RC: Tensor,
    factors: Factors,
    adam: Adam,
    scale: float,
) -> Direction:
    """Flora: Adafactor's normalised gradient, its momentum kept in the projected space and lifted back."""
    normalized_SC = normalized_by_(factors, grad_SC, adam)
    exp_avg_RC.lerp_(project(normalized_SC, basis_RS), 1 - adam.betas[0])
    return Direction(update=lift(exp_avg_RC, basis_RS) * (scale / adam.corrections[0]))


def adafactor_direction(grad_SC: Tensor, exp_avg_SC: Tensor | None, factors: Factors, adam: Adam) -> Direction:
    """Adafactor on a weight that is not projected; without an `exp_avg`, without momentum."""
    normalized_SC = normalized_by_(factors, grad_SC, adam)
    normalized_SC *= clip_of(normalized_SC.square().mean(dim=(-2, -1)))[..., None, None]
    return Direction(update=with_momentum(normalized_SC, exp_avg_SC, adam))


def normalized_by_(factors: Factors, grad_SC: Tensor, adam: Adam) -> Tensor:
    """The gradient over the root of its second moment, whose factors take it in first."""
    square_SC = grad_SC.square()
    update_factors_(factors, Factors(square_SC.mean(dim=-1), square_SC.mean(dim=-2)), adam.betas)
    return normalized_gradient(grad_SC, factors, factors.side_S.mean(dim=-1), adam)


def clip_of(mean_square: Tensor) -> Tensor:
    """The factor that brings an update of this mean square to a root mean square of at most 1 (Adafactor)."""
    return mean_square.clamp(min=1.0).rsqrt()


def with_momentum(normalized_SC: Tensor, exp_avg_SC: Tensor | None, adam: Adam) -> Tensor:
    """The corrected average of normalised gradients, or without an `exp_avg` this one itself."""
    if exp_avg_SC is None:
        return normalized_SC
    return exp_avg_SC.lerp_(normalized_SC, 1 - adam.betas[0]) / adam.corrections[0]


def update_factors_(factors: Factors, means: Factors, betas: tuple[float, float]) -> None:
    """f <- beta2 f + (1 - beta2) mean of g^2, along each side"""
    factors.side_S.lerp_(means.side_S, 1 - betas[1])
    factors.channel_C.lerp_(means.channel_C, 1 - betas[1])


def normalized_gradient(grad_SC: Tensor, factors: Factors, mean: Tensor, adam: Adam) -> Tensor:
    """grad / (sqrt(v_hat) + eps) with v the outer product of its factors; `mean` is that of all of v. [(E,) S, C]"""
    share_C = factors.channel_C.unsqueeze(-2) / mean[..., None, None].clamp_min(torch.finfo(mean.dtype).tiny)
    second_SC = factors.side_S.unsqueeze(-1) * share_C
    return grad_SC / second_SC.div_(adam.corrections[1]).sqrt_().add_(adam.eps)


def carried_over(exp_avg_RC: Tensor, old_basis_RS: Tensor, new_basis_RS: Tensor) -> Tensor:
    """The momentum seen from a new basis: new @ old.T @ m (Flora)."""
    return new_basis_RS @ (old_basis_RS.mT @ exp_avg_RC)


def rowwise_direction(
    grad: Tensor, mean_square_R: Tensor, exp_avg: Tensor | None, exp_avg_sq_R: Tensor, adam: Adam
) -> Direction:
    """AdamW with one second moment per row, the mean over its elements; without an `exp_avg`, without momentum too."""
    exp_avg_sq_R.lerp_(mean_square_R, 1 - adam.betas[1])
    denominator_R = (exp_avg_sq_R / adam.corrections[1]).sqrt_().add_(adam.eps)
    if exp_avg is not None:
        exp_avg.lerp_(grad, 1 - adam.betas[0])
        denominator_R *= adam.corrections[0]
    momentum = grad if exp_avg is None else exp_avg
    return Direction(update=momentum / denominator_R.view(-1, *(1,) * (grad.dim() - 1)))


def adamw_direction(grad: Tensor, moments: Moments, adam: Adam) -> Direction:
    """AdamW's step on a weight of any shape that is not projected."""
    update_moments_(moments, grad, adam.betas)
    return Direction(update=corrected_step(moments, adam))
