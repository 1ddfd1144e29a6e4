"""The step of a weight of which each rank holds a part: the stages of the plain step, and sums where ranks must agree.

Every weight asks for one round of sums, sent together with all others': of the norms that its rule needs, and of
whether its gradient is finite. Nothing is written before that is known. A rule whose norms depend on its moments
therefore computes those twice, to measure and to keep, and holds only the low-rank gradient in between.

Shapes: E experts (where there are any), R rank, S this rank's part of the contracted side, C its channels, P those of
them whose moments it keeps.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.direction import (
    Direction,
    Factors,
    Moments,
    clip_of,
    corrected_step,
    limited_by,
    normalized_gradient,
    rowwise_direction,
    scaled_residual,
    update_factors_,
    update_moments_,
    with_momentum,
)
from ..core.limiter import Limited, Scalar, gain, gain_of_norms
from ..core.orthogonal import orthogonalize_, product_dtype, to_unit_norm_
from ..core.projection import keeps_basis, lift, project
from ..core.rule import Rule
from ..core.shape import MatrixShape
from ..distributed import Part
from . import plain
from .collectives import Step, dealing_axes, dealt, gathered, gathered_gradient, returned, scattered, spread_, summed
from .crossing import CrossingMoments
from .plain import Bases, all_of_each_matrix, bases_of, refresh_by_host
from .spectral import LOW_RANK, Stack
from .weight import Report, WeightStep


class WeightShard(NamedTuple):
    """This rank's part of a weight, with which it begins a step."""

    job: WeightStep
    norm: Tensor
    """Norm of its part of the gradient, at the rule's granularity."""

    @property
    def part(self) -> Part:
        assert self.job.part is not None
        return self.job.part

    @property
    def grad(self) -> Tensor:
        """Made anew each time: kept, those of all weights would wait for the norms in the arithmetic's precision."""
        return plain.ascent(self.job, self.job.grad)

    @property
    def shape(self) -> MatrixShape:
        assert self.job.shape is not None
        return self.job.shape

    @property
    def grad_SC(self) -> Tensor:
        return self.shape.matrix(self.grad)

    @property
    def bad(self) -> tuple[Tensor, str]:
        """A flag, set where this part of the gradient is not finite, and the axes to count it over."""
        return ~plain.is_finite(self.norm), "W"

    @property
    def square(self) -> tuple[Tensor, str]:
        """Square of the norm of this part of the gradient, to be summed over all ranks; infinite where not finite."""
        return torch.where(plain.is_finite(self.norm), self.norm.double().square().sum(), torch.inf), "W"


def all_finite(shard: WeightShard) -> Step[tuple[Tensor, Tensor]]:
    """Find out whether all of the gradient is finite, and the square of its norm."""
    (square,) = yield from summed(shard.part, shard.square)
    return (square if shard.norm.ndim > 0 else square.to(shard.job.dtype)).isfinite(), square


def whole_gradient(shard: WeightShard) -> Step[Tensor | None]:
    """All of the gradient [(E,) S, C], where this step decomposes it and a rank has not got it."""
    job = shard.job
    if not shard.part.axes("SC") or not keeps_basis(job.rule, shard.shape) or not refresh_by_host(job):
        return None
    whole = yield from gathered_gradient(shard.part, job.grad)
    return all_of_each_matrix(shard.shape).matrix(plain.ascent(job, whole))


def bases_of_step(shard: WeightShard, step: Scalar) -> Step[Bases]:
    """The basis of this step, renewed where that is due; the gradient is then known to be finite."""
    job = shard.job
    source_SC = yield from whole_gradient(shard)
    kept_RS = plain.working_copy(job, "basis") if "basis" in job.state else None
    bases = bases_of(job, shard.grad_SC if source_SC is None else source_SC, kept_RS, step)
    if source_SC is not None and kept_RS is not None:
        plain.write_back_(job, "basis", kept_RS, torch.ones((), dtype=torch.bool, device=kept_RS.device), step)
    return bases


class _Low(NamedTuple):
    """This rank's part of the projected space, before anything of it is kept."""

    basis_RS: Tensor | None
    low_RP: Tensor
    step_RP: Tensor
    square_sum: tuple[Tensor, str]
    """Sum of the second moment [(E)], to be summed over all ranks that keep parts of it."""


def step_(job: WeightStep) -> Step[Report]:
    """Step what this rank holds of one weight; a gradient that is not finite anywhere leaves all of it as it was."""
    assert job.part is not None
    # Blocks of 4-bit codes never cross ranks (`check_blocks`).
    crossing = None if job.in_4_bits else CrossingMoments.of(job.part, job.state)
    if crossing is None:
        return (yield from _step(job))
    yield from crossing.read()
    report = yield from _step(replace(job, crossing=crossing))
    yield from crossing.keep_()
    return report


def _step(job: WeightStep) -> Step[Report]:
    shard = WeightShard(job, plain.channel_norms(job, plain.ascent(job, job.grad)))
    if job.rule.is_spectral:
        return (yield from _step_spectral(shard))
    is_local = _is_local(job, shard.part)
    if not is_local and job.rule.second_moment == "factored":
        return (yield from _step_factored(shard))
    if not is_local and job.by_row:
        return (yield from _step_by_row(shard))
    measures = not is_local and (job.rule.granularity != "element" or job.rule.residual)
    if not measures or refresh_by_host(job):
        finite, square = yield from all_finite(shard)
        if plain.refuses(job, finite):
            return Report(finite)
        if plain.awaits_gradient(job, square):
            return plain.decay_(job, shard.grad, finite)
        if is_local:
            source_SC = yield from whole_gradient(shard)
            return plain.step_finite_(job, shard.grad, shard.norm, finite, source_SC)
        if not measures:
            return (yield from _step_lifted(shard, finite))
    return (yield from (_step_residual(shard) if job.rule.residual else _step_scaled(shard)))


def _is_local(job: WeightStep, part: Part) -> bool:
    """True if a rank needs nothing of others to step its part, but to know that the gradient is finite."""
    if job.shape is None:
        return not (job.by_row and part.axes("N"))
    if not part.axes("SC"):
        return True
    if job.rule.granularity != "element" or job.rule.second_moment == "factored":
        return False
    # With the identity for a basis there is neither a sum over the side nor a residual.
    return job.shape.full_rank or not (job.rule.residual or part.axes("S"))


def _step_by_row(shard: WeightShard) -> Step[Report]:
    """AdamW with one second moment per row, where ranks hold parts of rows: the mean square is that of all of it."""
    job = shard.job
    bad, square_R = yield from summed(shard.part, shard.bad, (shard.grad.flatten(1).square().sum(dim=1), "N"))
    finite = bad == 0
    if plain.refuses(job, finite):
        return Report(finite)
    mean_square_R = (square_R / math.prod(shard.part.shape[1:])).to(job.dtype)
    step, working = plain.coming_step(job), plain.working_state(job)
    moments = working.get("exp_avg"), working["exp_avg_sq"]
    direction = rowwise_direction(shard.grad, mean_square_R, *moments, plain.adam_of(job, step))
    plain.keep_(job, working, finite, step)
    return plain.apply_(job, shard.grad, direction, finite, step)


def _projected(shard: WeightShard, step: Scalar) -> Step[tuple[Tensor | None, Tensor]]:
    """The basis of this step, and the low-rank gradient of the channels whose moments this rank keeps."""
    basis_RS = (yield from bases_of_step(shard, step)).current_RS
    low_RP = project(shard.grad_SC, basis_RS)
    # The identity sums nothing: each rank keeps moments of its own rows.
    return basis_RS, low_RP if basis_RS is None else (yield from scattered(shard.part, low_RP))


def _measured(shard: WeightShard, step: Scalar) -> Step[_Low]:
    """Moments and the step they lead to, computed but not kept."""
    job = shard.job
    basis_RS, low_RP = yield from _projected(shard, step)
    moments = Moments(_copied(job, "exp_avg"), _copied(job, "exp_avg_sq"))
    update_moments_(moments, low_RP, job.group["betas"])
    step_RP = corrected_step(moments, plain.adam_of(job, step))
    kept = "SC" if basis_RS is None else "P"
    # Only a residual needs its basis again.
    kept_RS = basis_RS if job.rule.residual else None
    return _Low(kept_RS, low_RP, step_RP, (moments.exp_avg_sq.sum(dim=(-2, -1)), kept))


def _copied(job: WeightStep, name: str) -> Tensor:
    """A state tensor to compute with, apart from what is kept."""
    wide = plain.working_copy(job, name)
    return wide.clone() if wide is job.state[name] else wide


def _keep_moments_(job: WeightStep, low_RP: Tensor, finite: Tensor, step: Scalar) -> Moments:
    """The moments of this step, once they and its number are kept."""
    moments = Moments(plain.working_copy(job, "exp_avg"), plain.working_copy(job, "exp_avg_sq"))
    update_moments_(moments, low_RP, job.group["betas"])
    plain.keep_(job, moments._asdict(), finite, step)
    return moments


def _keep_(shard: WeightShard, low: _Low, sums: list[Tensor], finite: Tensor, step: Scalar) -> Limited:
    """Keep this step's moments; `sums` are the squares of what the limiter measures and of the second moment."""
    job, whole = shard.job, shard.shape.global_shape
    _keep_moments_(job, low.low_RP, finite, step)
    norm, mean_square = sums[0].sqrt().to(job.dtype), (sums[1] / (whole.rank * whole.channels)).to(job.dtype)
    last_norm = plain.working_copy(job, "last_norm") if "last_norm" in job.state else torch.zeros_like(norm)
    limited = limited_by(job.rule, norm, last_norm, mean_square[..., None, None], plain.adam_of(job, step))
    if "last_norm" in job.state:
        plain.write_back_(job, "last_norm", limited.last_norm, finite, step)
    return limited


def _step_scaled(shard: WeightShard) -> Step[Report]:
    """A gain on the gradient, per channel or matrix."""
    job, part = shard.job, shard.part
    step = plain.coming_step(job)
    low = yield from _measured(shard, step)
    if job.rule.granularity == "tensor":
        gain_C, sums = yield from _tensor_gain(shard, low)
    elif shard.shape.global_shape.full_rank and part.axes("S"):
        gain_C, sums = yield from _channel_gain_of_parts(shard, low)
    else:
        gain_C, sums = yield from _channel_gain(shard, low)
    bad, scaled_square, moment_square, total_gain = sums
    finite = bad == 0
    if plain.refuses(job, finite):
        return Report(finite)
    limited = _keep_(shard, low, [scaled_square, moment_square], finite, step)
    direction = Direction(gain=gain_C * limited.shrink.unsqueeze(-1), limited=limited)
    plain.apply_(job, shard.grad, direction, finite, step)
    if limited.shrink.numel() == 0:
        return Report(finite)
    gains = 1 if job.rule.granularity == "tensor" else shard.shape.global_shape.channels
    return Report(finite, (total_gain / gains * limited.shrink).mean(), limited.shrink.mean())


def _channel_gain(shard: WeightShard, low: _Low) -> Step[tuple[Tensor, list[Tensor]]]:
    """Gains [(E,) C] where a rank has all of a channel's low-rank gradient; sums of bad, scaled, moments, gains."""
    gain_C = yield from gathered(shard.part, shard.job.scale * gain(low.step_RP, low.low_RP, "channel"))
    scaled = torch.linalg.vector_norm(gain_C * shard.norm, dim=-1).double().square()
    sums = yield from summed(shard.part, shard.bad, (scaled, "SC"), low.square_sum, (gain_C.sum(dim=-1), "C"))
    return gain_C, sums


def _channel_gain_of_parts(shard: WeightShard, low: _Low) -> Step[tuple[Tensor, list[Tensor]]]:
    """`_channel_gain` where the rows of a channel are spread over ranks: the norms of their parts are summed first."""
    part, job = shard.part, shard.job
    step_square = torch.linalg.vector_norm(low.step_RP, dim=-2).double().square()
    grad_square = shard.norm.double().square()
    values = shard.bad, low.square_sum, (step_square, "S"), (grad_square, "S")
    bad, moments, step_square, grad_square = yield from summed(part, *values)
    gain_C = job.scale * gain_of_norms(step_square.sqrt(), grad_square.sqrt(), job.dtype)
    scaled = (gain_C.square() * grad_square).sum(dim=-1)
    scaled, total = yield from summed(part, (scaled, "C"), (gain_C.sum(dim=-1), "C"))
    return gain_C.to(job.dtype), [bad, scaled, moments, total]


def _tensor_gain(shard: WeightShard, low: _Low) -> Step[tuple[Tensor, list[Tensor]]]:
    """One gain per matrix [(E,) 1]; sums of bad, scaled, moments, gains."""
    kept = low.square_sum[1]
    squares = [torch.linalg.vector_norm(each, dim=(-2, -1)).double().square() for each in (low.step_RP, low.low_RP)]
    grad_square = shard.norm.squeeze(-1).double().square()
    values = shard.bad, low.square_sum, *((square, kept) for square in squares), (grad_square, "SC")
    bad, moments, step_square, low_square, grad_square = yield from summed(shard.part, *values)
    total = shard.job.scale * gain_of_norms(step_square.sqrt(), low_square.sqrt(), shard.job.dtype)
    return total.unsqueeze(-1).to(shard.job.dtype), [bad, total.square() * grad_square, moments, total]


def _step_residual(shard: WeightShard) -> Step[Report]:
    """Fira: the lifted step, and what the basis leaves out of the gradient."""
    job, part = shard.job, shard.part
    step = plain.coming_step(job)
    low = yield from _measured(shard, step)
    both = yield from gathered(part, torch.cat([low.low_RP, low.step_RP], dim=-2))
    low_RC, step_RC = both.split(shard.shape.rank, dim=-2)
    # Twice, too: in between it would be as large as the gradient.
    norm = torch.linalg.vector_norm(scaled_residual(shard.grad_SC, low_RC, step_RC, low.basis_RS), dim=(-2, -1))
    bad, *sums = yield from summed(part, shard.bad, (norm.double().square(), "SC"), low.square_sum)
    finite = bad == 0
    if plain.refuses(job, finite):
        return Report(finite)
    limited = _keep_(shard, low, sums, finite, step)
    residual_SC = scaled_residual(shard.grad_SC, low_RC, step_RC, low.basis_RS)
    update_SC = lift(step_RC, low.basis_RS).addcmul_(residual_SC, limited.shrink[..., None, None]).mul_(job.scale)
    return plain.apply_(job, shard.grad, Direction(update=update_SC, limited=limited), finite, step)


def _step_lifted(shard: WeightShard, finite: Tensor) -> Step[Report]:
    """GaLore, the side being split: each rank takes Adam's step where it keeps the moments, and lifts all of it."""
    job = shard.job
    step = plain.coming_step(job)
    basis_RS, low_RP = yield from _projected(shard, step)
    moments = _keep_moments_(job, low_RP, finite, step)
    step_RC = yield from gathered(shard.part, corrected_step(moments, plain.adam_of(job, step)))
    return plain.apply_(job, shard.grad, Direction(update=lift(step_RC, basis_RS).mul_(job.scale)), finite, step)


def _step_spectral(shard: WeightShard) -> Step[Report]:
    """Artemis: each rank keeps the momentum of its part; one orthogonalises all of it, and returns to each its part."""
    job = shard.job
    finite, _ = yield from all_finite(shard)
    if plain.refuses(job, finite):
        return Report(finite)
    step = plain.coming_step(job)
    dtype = product_dtype(job.dtype, job.grad.device)
    # The whole has no name here, so that it is gone once it is taken apart.
    own = yield from returned(
        shard.part, (yield from _orthogonalized_at_owner(shard, finite, step)), job.grad, dtype, job.owner
    )
    plain.advance_(job, finite)
    update_SC = shard.shape.matrix(own.to(job.dtype)) * job.scale
    return plain.apply_(job, shard.grad, Direction(update=update_SC), finite, step)


def _orthogonalized_at_owner(shard: WeightShard, finite: Tensor, step: Scalar) -> Step[Tensor | None]:
    """All of a weight's update before it is scaled; None where another rank has it."""
    ahead = yield from _ahead_at_owner(shard, finite, step)
    if ahead is None:
        return None
    whole = all_of_each_matrix(shard.shape)
    stack = ahead.reshape(-1, whole.rows, whole.columns)
    return orthogonalize_(to_unit_norm_(stack), shard.job.symmetric_product).reshape(ahead.shape)


def _ahead_at_owner(shard: WeightShard, finite: Tensor, step: Scalar) -> Step[Tensor | None]:
    """All that is to be orthogonalised of a weight, once the momentum of this step is kept; None where another does."""
    job, part = shard.job, shard.part
    if job.rule.projection != "power":
        return (yield from dealt(part, _ahead(job, shard.shape, job.grad, finite, step), job.owner))
    # Of a momentum that is kept as a few directions every rank has all, which the owner finds for the others.
    grad = yield from dealt(part, job.grad, job.owner)
    ahead = None if grad is None else _ahead(job, all_of_each_matrix(shard.shape), grad, finite, step)
    yield from spread_(part, [job.state[name] for name in sorted(job.state) if name.startswith(LOW_RANK)], job.owner)
    return ahead


def _ahead(job: WeightStep, shape: MatrixShape, grad: Tensor, finite: Tensor, step: Scalar) -> Tensor:
    """The directions to orthogonalise of these matrices, once their momentum is kept."""
    stack = Stack([job], shape)
    return stack.ahead(grad.reshape(1, stack.rows, stack.columns), finite.view(1), [step]).view(grad.shape)


def turn_key(rule: Rule, shape: Sequence[int]) -> int:
    """Sort key of sharded weights in the order in which they are stepped: of their rules and whole shapes."""
    return -math.prod(shape) if rule.is_spectral else 0


def dealt_out(jobs: Iterable[WeightStep]) -> list[WeightStep]:
    """The steps with an owner each, where one rank orthogonalises a whole weight: in turns, and the largest first.

    Those of a turn are as large as each other, or nearly, so that ranks have done with theirs at the same time. Others
    stay in their order, after them.
    """
    turns: Counter[str] = Counter()
    result = []
    for job in sorted(jobs, key=lambda job: turn_key(job.rule, job.parameter.shape)):
        owner = 0
        if job.rule.is_spectral and job.part is not None and (axes := dealing_axes(job.part)):
            name = axes[-1].group.group_name
            owner = turns[name] % axes[-1].size
            turns[name] += 1
        result.append(replace(job, owner=owner))
    return result


def _step_factored(shard: WeightShard) -> Step[Report]:
    """Flora and Adafactor: row and column means of the squared gradient are summed along the sides that are split."""
    job, part, whole = shard.job, shard.part, shard.shape.global_shape
    factors = Factors(plain.working_copy(job, "exp_avg_sq_side"), plain.working_copy(job, "exp_avg_sq_channel"))
    sums = _sums_of_squares(shard.grad_SC)
    values = shard.square, *sums, (factors.side_S.sum(dim=-1), "S")
    square, side, channel, total, side_before = yield from summed(part, *values)
    finite = square.to(job.dtype).isfinite()
    if plain.refuses(job, finite):
        return Report(finite)
    if plain.awaits_gradient(job, square):
        return plain.decay_(job, shard.grad, finite)
    step = plain.coming_step(job)
    bases = yield from bases_of_step(shard, step)
    adam = plain.adam_of(job, step)
    means = Factors((side / whole.channels).to(job.dtype), (channel / whole.side).to(job.dtype))
    update_factors_(factors, means, adam.betas)
    plain.keep_(job, dict(zip(("exp_avg_sq_side", "exp_avg_sq_channel"), factors, strict=True)), finite, step)
    mean = torch.lerp(side_before / whole.side, total / (whole.side * whole.channels), 1 - adam.betas[1]).to(job.dtype)
    if job.by_factors:
        return (yield from _step_clipped(shard, factors, mean, finite, step))
    normalized_SC = normalized_gradient(shard.grad_SC, factors, mean, adam)
    exp_avg_RC = yield from _momentum(shard, normalized_SC, bases, finite, step)
    update_SC = lift(exp_avg_RC, bases.current_RS) * (job.scale / adam.corrections[0])
    return plain.apply_(job, shard.grad, Direction(update=update_SC), finite, step)


def _step_clipped(shard: WeightShard, factors: Factors, mean: Tensor, finite: Tensor, step: Scalar) -> Step[Report]:
    """The rest of Adafactor's step: the root mean square of the normalised gradient is that of all ranks."""
    job, whole, adam = shard.job, shard.shape.global_shape, plain.adam_of(shard.job, step)
    # Twice, too: in between it would be as large as the gradient.
    square = normalized_gradient(shard.grad_SC, factors, mean, adam).square().sum(dim=(-2, -1))
    (square,) = yield from summed(shard.part, (square, "SC"))
    normalized_SC = normalized_gradient(shard.grad_SC, factors, mean, adam)
    normalized_SC *= clip_of(square / (whole.side * whole.channels)).to(job.dtype)[..., None, None]
    exp_avg = plain.working_copy(job, "exp_avg") if "exp_avg" in job.state else None
    update_SC = with_momentum(normalized_SC, None if exp_avg is None else shard.shape.matrix(exp_avg), adam)
    if exp_avg is not None:
        plain.write_back_(job, "exp_avg", exp_avg, finite, step)
    return plain.apply_(job, shard.grad, Direction(update=update_SC), finite, step)


def _sums_of_squares(grad_SC: Tensor) -> tuple[tuple[Tensor, str], ...]:
    """Sums of squares of rows, columns and all of the gradient, with the letters still to be summed over."""
    square_SC = grad_SC.square()
    return (square_SC.sum(dim=-1), "C"), (square_SC.sum(dim=-2), "S"), (square_SC.sum(dim=(-2, -1)), "SC")


def _momentum(shard: WeightShard, normalized_SC: Tensor, bases: Bases, finite: Tensor, step: Scalar) -> Step[Tensor]:
    """Flora's momentum after this step, of all channels of this rank [(E,) R, C]."""
    job, part, basis_RS = shard.job, shard.part, bases.current_RS
    low_RP = project(normalized_SC, basis_RS)
    if basis_RS is not None:
        low_RP = yield from scattered(part, low_RP)
    exp_avg_RP = plain.working_copy(job, "exp_avg")
    if basis_RS is not None and bases.previous_RS is not None:
        # new @ old.T @ m, summed over the parts of the side.
        (change_RR,) = yield from summed(part, (basis_RS @ bases.previous_RS.mT, "S"))
        exp_avg_RP.copy_(bases.of_renewed(change_RR.to(job.dtype) @ exp_avg_RP, exp_avg_RP))
    exp_avg_RP.lerp_(low_RP, 1 - job.group["betas"][0])
    plain.write_back_(job, "exp_avg", exp_avg_RP, finite, step)
    return exp_avg_RP if basis_RS is None else (yield from gathered(part, exp_avg_RP))
