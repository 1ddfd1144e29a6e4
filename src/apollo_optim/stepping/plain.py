"""The step in plain PyTorch: any device, any rule, one weight at a time."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.direction import (
    Adam,
    Direction,
    Factors,
    Moments,
    adafactor_direction,
    adamw_direction,
    carried_over,
    factored_direction,
    least_eps,
    projected_direction,
    rowwise_direction,
)
from ..core.limiter import Scalar, norms
from ..core.projection import gaussian_basis, keeps_basis, random_rows, svd_basis, svd_lowrank_basis
from ..core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, ROUND_WEIGHT, RoundingKey, Word, rounding_key
from ..core.shape import MatrixShape
from ..quant.blocks import is_signed, narrowed, packed, unpacked, widened
from ..quant.groups import Draws, dequantized, quantized, row_pieces
from ..quant.int8 import Int8Weight
from ..quant.rounding import Quantized, rounds
from .weight import Report, WeightStep

PIECE = 2**16
"""Elements of a weight that AdamW takes at a time on the CPU: a few such pieces fit its cache."""

ROUNDING_STREAMS = {"weight": ROUND_WEIGHT, "exp_avg": ROUND_EXP_AVG, "exp_avg_sq": ROUND_EXP_AVG_SQ}

COMPUTED = "exp_avg", "exp_avg_sq", "exp_avg_sq_side", "exp_avg_sq_channel", "last_norm", "basis"
"""State that a step computes with. Users may keep other things beside it."""


def step_(job: WeightStep) -> Report:
    """Step one weight and its state; a gradient that is not finite leaves both as they were."""
    grad = ascent(job, job.grad)
    grad_norm = channel_norms(job, grad)
    finite = is_finite(grad_norm)
    if refuses(job, finite):
        return Report(finite)
    if awaits_gradient(job, grad_norm):
        return decay_(job, grad, finite)
    return step_finite_(job, grad, grad_norm, finite)


def ascent(job: WeightStep, grad: Tensor) -> Tensor:
    """A gradient in the arithmetic's dtype, in the direction in which what is minimised grows."""
    wide = grad.to(job.dtype)
    return -wide if job.group["maximize"] else wide


def is_finite(grad_norm: Tensor) -> Tensor:
    """True if a gradient with these norms is finite, and so will be its moments."""
    # Squared, as Adam will: values whose squares overflow would leave an infinite second moment behind.
    return (grad_norm.square() < math.inf).all()


def renew_basis_(job: WeightStep) -> bool:
    """Make the basis that begins at the coming step of the gradient.

    False, and no change, where that is not finite, or zero and the first: then it is the next step that begins it.
    """
    assert job.shape is not None
    grad = ascent(job, job.grad)
    grad_norm = channel_norms(job, grad)
    # Of all channels together, as the kernels will ask.
    finite = grad_norm.square().sum(-1).isfinite().all()
    if refuses(job, finite) or awaits_gradient(job, grad_norm):
        return False
    basis_RS, step = working_copy(job, "basis"), coming_step(job)
    bases_of(job, job.shape.matrix(grad), basis_RS, step)
    write_back_(job, "basis", basis_RS, finite, step)
    return True


def refuses(job: WeightStep, finite: Tensor) -> bool:
    """True if a step ends here because its gradient is not finite."""
    # Reading the flag is free on the CPU. Elsewhere it would stall the queue, so the writes are masked instead;
    # an SVD stalls it anyway, and must not be asked to decompose a NaN.
    asks = not finite.is_meta and (finite.device.type == "cpu" or refresh_by_host(job))
    return asks and not bool(finite)


def awaits_gradient(job: WeightStep, grad_norm: Tensor) -> bool:
    """True if there is a first basis to make, and no gradient yet to make it of: such a step is not counted."""
    makes_first = job.shape is not None and keeps_basis(job.rule, job.shape) and int(job.state["step"]) == 0
    return makes_first and not grad_norm.is_meta and not bool(grad_norm.any())


def decay_(job: WeightStep, grad: Tensor, finite: Tensor) -> Report:
    """Decay a weight whose gradient is zero, and leave its state as it was."""
    assert job.shape is not None
    nothing = Direction(gain=grad.new_zeros((*job.shape.batch, 1)))
    apply_(job, grad, nothing, finite, coming_step(job))
    return Report(finite)


def step_finite_(
    job: WeightStep, grad: Tensor, grad_norm: Tensor, finite: Tensor, source_SC: Tensor | None = None
) -> Report:
    """Step one weight by what this rank has of it; its writes are masked by `finite`.

    An SVD decomposes `source_SC`, which is the gradient itself unless that has to be gathered first.
    """
    step = coming_step(job)
    if job.shape is None and _lie_flat(job, grad):
        advance_(job, finite)
        _step_adamw_in_pieces_(job, grad, step)
        return Report(finite)
    working = working_state(job)
    direction = _direction(job, grad, grad_norm, working, step, source_SC)
    keep_(job, working, finite, step)
    return apply_(job, grad, direction, finite, step)


def channel_norms(job: WeightStep, grad: Tensor) -> Tensor:
    """Norms of the gradient at the rule's granularity: they size the update and show whether all of it is finite."""
    if job.shape is None or job.rule.granularity in ("element", "spectral"):
        return torch.linalg.vector_norm(grad)
    return norms(job.shape.matrix(grad), job.rule.granularity)


def advance_(job: WeightStep, finite: Tensor) -> None:
    """Count this step; not before what can fail, as an SVD can."""
    job.state["step"].add_(finite if job.group["capturable"] else 1)


def coming_step(job: WeightStep) -> Scalar:
    """The number of the step that is about to be taken: Python's, or a tensor where the host must not ask."""
    taken = job.state["step"]
    if not job.group["capturable"]:
        return int(taken) + 1
    return (taken.double() if taken.device.type in ("cpu", "cuda") else taken) + 1


def _as_integer(step: Scalar) -> int | Tensor:
    """The number of a step as random draws take it."""
    return step.long() if isinstance(step, Tensor) else int(step)


def working_state(job: WeightStep) -> dict[str, Tensor]:
    """Every state tensor that a step computes with."""
    return {name: working_copy(job, name) for name in COMPUTED if name in job.state}


def working_copy(job: WeightStep, name: str) -> Tensor:
    """A state tensor to compute with: itself where it can be updated in place, else a wide copy."""
    if f"{name}_scale" not in job.state:
        return _wide(job.state[name], job.dtype)
    if job.in_4_bits:
        assert job.shape is not None
        return unpacked(Quantized(job.state[name], job.state[f"{name}_scale"]), job.shape.columns, job.dtype)
    if job.crossing is not None:
        return job.crossing.widened(name, job.dtype)
    return widened(job.state[name], job.state[f"{name}_scale"], job.dtype)


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself where it can be updated in place, else a wide copy."""
    in_place = tensor.dtype == dtype and tensor.device.type == "cpu"
    return tensor if in_place else tensor.to(dtype, copy=True)


def keep_(job: WeightStep, working: Mapping[str, Tensor], finite: Tensor, step: Scalar) -> None:
    """Count this step, and write its state back."""
    advance_(job, finite)
    for name, tensor in working.items():
        write_back_(job, name, tensor, finite, step)


def write_back_(job: WeightStep, name: str, working: Tensor, finite: Tensor, step: Scalar) -> None:
    """Write a state tensor back."""
    if f"{name}_scale" in job.state:
        _write_codes_(job, name, working, finite, step)
    else:
        _write_(job, name, job.state[name], working, finite, step)


def _write_codes_(job: WeightStep, name: str, working: Tensor, finite: Tensor, step: Scalar) -> None:
    """Write a moment of few bits back, or have that done once other ranks know theirs."""
    key = _key(job, name, step)
    if job.crossing is not None:
        job.crossing.keep_later(name, working, finite, key)
        return
    old = Quantized(job.state[name], job.state[f"{name}_scale"])
    new = packed(working) if job.in_4_bits else narrowed(working, is_signed(old.codes), key, job.positions(name))
    for target, value in zip(old, new, strict=True):
        target.copy_(torch.where(finite, value, target))


def _write_(job: WeightStep, name: str, target: Tensor, working: Tensor, finite: Tensor, step: Scalar) -> None:
    """target <- its wide copy where the gradient is finite, rounded once"""
    if working is target:
        return
    value = torch.where(finite, working, target.to(job.dtype))
    at_random = name in ROUNDING_STREAMS and (name != "weight" or job.group["rounding"] == "stochastic")
    if at_random and rounds(target.dtype):
        job.write_rounded_(target, value, _key(job, name, step), job.positions(name))
    else:
        target.copy_(value)


def _key(job: WeightStep, name: str, step: Scalar) -> RoundingKey:
    """The key that rounds the weight, or a state tensor, at this step."""
    return rounding_key(int(job.state["seed"]), _as_integer(step), ROUNDING_STREAMS[name])


def _lie_flat(job: WeightStep, grad: Tensor) -> bool:
    """True if AdamW can be stepped in place on plain runs of memory."""
    if job.by_row or isinstance(job.weight, Int8Weight):
        return False
    tensors = job.weight, grad, job.state["exp_avg"], job.state["exp_avg_sq"]
    return all(t.device.type == "cpu" and t.dtype == job.dtype and t.is_contiguous() for t in tensors)


def _step_adamw_in_pieces_(job: WeightStep, grad: Tensor, step: Scalar) -> None:
    """AdamW a piece at a time: what a pass leaves for the next is in the cache, and no temporary is a weight's size."""
    adam = adam_of(job, step)
    tensors = job.weight, grad, job.state["exp_avg"], job.state["exp_avg_sq"]
    for weight, piece, m, v in zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True):
        add_update_(weight, *update_of(job, piece, adamw_direction(piece, Moments(m, v), adam)), job)


def adam_of(job: WeightStep, step: Scalar) -> Adam:
    """The numbers of this step."""
    return Adam(tuple(job.group["betas"]), least_eps(job.group["eps"]), step)


def _direction(
    job: WeightStep, grad: Tensor, grad_norm: Tensor, working: dict[str, Tensor], step: Scalar, source_SC: Tensor | None
) -> Direction:
    adam = adam_of(job, step)
    if job.by_row:
        mean_square_R = grad.flatten(1).square().mean(dim=1)
        return rowwise_direction(grad, mean_square_R, working.get("exp_avg"), working["exp_avg_sq"], adam)
    if job.shape is None:
        return adamw_direction(grad, Moments(working["exp_avg"], working["exp_avg_sq"]), adam)
    grad_SC = job.shape.matrix(grad)
    if job.by_factors:
        factors = Factors(working["exp_avg_sq_side"], working["exp_avg_sq_channel"])
        exp_avg_SC = job.shape.matrix(working["exp_avg"]) if "exp_avg" in working else None
        return adafactor_direction(grad_SC, exp_avg_SC, factors, adam)
    bases = bases_of(job, grad_SC if source_SC is None else source_SC, working.get("basis"), step)
    basis_RS = bases.current_RS
    if job.rule.second_moment == "factored":
        if basis_RS is not None and bases.previous_RS is not None:
            carried_RC = carried_over(working["exp_avg"], bases.previous_RS, basis_RS)
            working["exp_avg"].copy_(bases.of_renewed(carried_RC, working["exp_avg"]))
        factors = Factors(working["exp_avg_sq_side"], working["exp_avg_sq_channel"])
        return factored_direction(grad_SC, basis_RS, working["exp_avg"], factors, adam, job.scale)
    moments = Moments(working["exp_avg"], working["exp_avg_sq"])
    last_norm = working["last_norm"] if "last_norm" in working else grad.new_zeros(job.shape.batch)
    direction = projected_direction(grad_SC, grad_norm, basis_RS, moments, last_norm, job.rule, adam, job.scale)
    if direction.limited is not None and "last_norm" in working:
        working["last_norm"].copy_(direction.limited.last_norm)
    return direction


def apply_(job: WeightStep, grad: Tensor, direction: Direction, finite: Tensor, step: Scalar) -> Report:
    """weight <- (1 - lr * decay) * weight - lr * update. Returns the report of the step."""
    weight, update = job.weight, update_of(job, grad, direction)
    if isinstance(weight, Int8Weight):
        apply_int8_(weight, *update, job, finite, step)
    else:
        moved = _wide(weight, job.dtype)
        add_update_(moved, *update, job)
        _write_(job, "weight", weight, moved, finite, step)
    # A rank that holds none of the experts has no numbers to give.
    gain, shrink = direction.gain, None if direction.limited is None else direction.limited.shrink
    return Report(finite, *(each if each is not None and each.numel() > 0 else None for each in (gain, shrink)))


KEPT_BASIS = 2**13
"""Elements up to which a basis is kept until others push it out: making a short one takes longer than using it."""


class Bases(NamedTuple):
    """The basis of a step, this rank's rows of it; None is the identity."""

    current_RS: Tensor | None
    previous_RS: Tensor | None = None
    """The basis before, where this step begins a new one."""
    renewed_11: Tensor | None = None
    """True for each matrix that has a new one; None where all have."""

    def of_renewed(self, carried: Tensor, kept: Tensor) -> Tensor:
        """`carried` where the basis is new, `kept` where it stays: a narrow basis times itself is not quite 1."""
        return carried if self.renewed_11 is None else torch.where(self.renewed_11, carried, kept)


def refresh_number(job: WeightStep, step: Scalar) -> int | Tensor:
    """The number of times that the basis has been renewed before this step."""
    return (_as_integer(step) - 1) // job.group["refresh_every"]


def is_due(job: WeightStep, step: Scalar) -> bool:
    """True if a new basis begins at this step."""
    return (int(step) - 1) % job.group["refresh_every"] == 0


def refresh_by_host(job: WeightStep) -> bool:
    """True if the coming step computes a basis from the gradient, or carries momentum over to a new one."""
    if job.shape is None or job.shape.full_rank or job.group["capturable"]:
        return False
    decides = keeps_basis(job.rule, job.shape) or job.rule.second_moment == "factored"
    return decides and is_due(job, int(job.state["step"]) + 1)


def bases_of(job: WeightStep, source_SC: Tensor, kept_RS: Tensor | None, step: Scalar) -> Bases:
    """The basis of this step; where it is due, an SVD of the whole gradient `source_SC` is written to `kept_RS`."""
    assert job.shape is not None
    if job.rule.projection == "identity" or job.shape.full_rank:
        return Bases(None)
    if kept_RS is not None:
        return _decomposed(job, source_SC, kept_RS, step)
    seed, refresh = int(job.state["seed"]), refresh_number(job, step)
    small = math.prod(job.shape.batch) * job.shape.rank * job.shape.side <= KEPT_BASIS
    make = _kept_basis if small and isinstance(refresh, int) else _random_basis
    basis_RS = make(job.shape, seed, refresh, job.dtype, source_SC.device)
    if job.rule.second_moment != "factored" or not is_due(job, step) or refresh == 0:
        return Bases(basis_RS)
    return Bases(basis_RS, _random_basis(job.shape, seed, refresh - 1, job.dtype, source_SC.device))


def _decomposed(job: WeightStep, source_SC: Tensor, kept_RS: Tensor, step: Scalar) -> Bases:
    if not is_due(job, step):
        return Bases(kept_RS)
    assert job.shape is not None
    seed, refresh, whole = int(job.state["seed"]), refresh_number(job, step), all_of_each_matrix(job.shape)
    sides = slice(job.shape.first_side, job.shape.first_side + job.shape.side)
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
    return Bases(kept_RS, previous_RS, has_gradient_11)


def all_of_each_matrix(shape: MatrixShape) -> MatrixShape:
    """The shape of a gathered gradient: this rank's experts, and all rows and columns of theirs."""
    if shape.whole is None:
        return shape
    ranges = [(0, length) for length in shape.whole.weight]
    if shape.experts is not None:
        ranges[0] = shape.first_expert, shape.first_expert + shape.experts
    return shape.whole.part(ranges)


def _random_basis(shape: MatrixShape, seed: int, refresh: Word, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A basis from its seed, laid out as the gradient that it projects: transposed where that is.

    On ARM a product of which one side alone is transposed takes 0.6 ms more, however small it is (torch 2.13). Those of
    experts stay as they are: torch adds up small ones in an order that depends on how they lie.
    """
    basis_RS = gaussian_basis(shape, seed, refresh, dtype, device)
    return basis_RS.mT.contiguous().mT if shape.channels_are_rows and shape.experts is None else basis_RS


_kept_basis = lru_cache(maxsize=1024)(_random_basis)


def update_of(job: WeightStep, grad: Tensor, direction: Direction) -> tuple[Tensor, Scalar]:
    """- lr * update, as a tensor of the weight's shape and a factor on it"""
    if direction.gain is not None:
        assert job.shape is not None
        return grad, job.shape.spread(direction.gain * -lr_of(job))
    assert direction.update is not None
    return direction.update if job.shape is None else job.shape.restored(direction.update), -lr_of(job)


def add_update_(weight: Tensor, by: Tensor, factor: Scalar, job: WeightStep) -> None:
    """weight <- (1 - lr * decay) * weight + factor * by"""
    if job.group["weight_decay"] != 0:
        weight.mul_(1 - lr_of(job) * job.group["weight_decay"])
    if isinstance(factor, Tensor):
        weight.addcmul_(by, factor)
    else:
        weight.add_(by, alpha=factor)


def apply_int8_(weight: Int8Weight, by: Tensor, factor: Scalar, job: WeightStep, finite: Tensor, step: Scalar) -> None:
    """weight <- (1 - lr * decay) * weight + factor * by, a few rows at a time: there is never a whole wide copy."""
    seed, number, stochastic = int(job.state["seed"]), _as_integer(step), job.group["rounding"] == "stochastic"
    first = 0 if job.part is None else job.part.ranges[0][0]
    for rows in row_pieces(*weight.shape):
        old = Quantized(weight.codes[rows], weight.scale[rows])
        moved = dequantized(*old, weight.group_size, job.dtype)
        own = factor[rows] if isinstance(factor, Tensor) and factor.dim() > 0 and len(factor) > 1 else factor
        add_update_(moved, by[rows], own, job)
        draws = Draws(seed, number, first + rows.start) if stochastic else None
        new = quantized(moved.float(), weight.group_size, draws)
        for target, value in zip(old, new, strict=True):
            target.copy_(torch.where(finite, value, target))
    # Autograd sees codes written, and not the weight.
    increment_version(weight)


def lr_of(job: WeightStep) -> Scalar:
    """The learning rate; a tensor at least as wide as the arithmetic, for 1 - lr * decay not to be rounded to less."""
    lr = job.group["lr"]
    return lr.reshape(()).to(torch.promote_types(lr.dtype, job.dtype)) if isinstance(lr, Tensor) else lr
