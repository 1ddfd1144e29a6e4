"""The step in plain PyTorch: any device, any rule, one weight at a time."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..core.direction import (
    Adam,
    Direction,
    Factors,
    Moments,
    adamw_direction,
    carried_over,
    elementwise_direction,
    factored_direction,
    rowwise_direction,
    structured_direction,
)
from ..core.projection import gaussian_basis, keeps_basis, svd_basis, svd_lowrank_basis
from ..core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, ROUND_WEIGHT
from ..core.scaling import Scalar
from ..core.shape import MatrixShape
from ..quant.blocks import Blocks, is_signed, narrowed, widened
from ..quant.int8 import Int8Weight
from ..quant.rounding import rounds, write_rounded_
from .job import Job, Report
from .move import apply_int8_, move_, move_of

PIECE = 2**16
"""Elements of a weight that AdamW takes at a time on the CPU: a few such pieces fit its cache."""

KEPT_BASIS = 2**13
"""Elements up to which a basis is kept until others push it out: making a short one takes longer than using it."""

ROUNDING_STREAMS = {"exp_avg": ROUND_EXP_AVG, "exp_avg_sq": ROUND_EXP_AVG_SQ}


APART = "step", "seed", "exp_avg_scale", "exp_avg_sq_scale"
"""State that is read together with other state, or by itself."""


def step_(job: Job) -> Report:
    """Step one weight and its state; a gradient that is not finite leaves both as they were."""
    grad = job.grad.to(job.dtype)
    if job.group["maximize"]:
        grad = -grad
    grad_norm = _channel_norms(job, grad)
    # Squared, as Adam will: values whose squares overflow would leave an infinite second moment behind.
    finite = grad_norm.square().isfinite().all()
    # Reading the flag is free on the CPU. Elsewhere it would stall the queue, so the writes are masked instead;
    # an SVD stalls it anyway, and must not be asked to decompose a NaN.
    if (finite.device.type == "cpu" or _refresh_by_host(job)) and not finite:
        return Report(finite, None, None)

    step = _advanced_step_(job, finite)
    if job.shape is None and _lie_flat(job, grad):
        _step_adamw_in_pieces_(job, grad, step)
        return Report(finite, None, None)
    working = {name: _opened(job, name) for name in job.state if name not in APART}
    direction = _direction(job, grad, grad_norm, working, step)
    for name, tensor in working.items():
        _close_(job, name, tensor, finite, step)
    _apply_(job, grad, direction, finite, step)
    return Report(
        finite,
        None if direction.gain is None else direction.gain.mean(),
        None if direction.limited is None else direction.limited.shrink.mean(),
    )


def _channel_norms(job: Job, grad: Tensor) -> Tensor:
    """Norms of the gradient at the rule's granularity: they size the update and show whether all of it is finite."""
    if job.shape is None or job.rule.granularity == "element":
        return torch.linalg.vector_norm(grad)
    over = (-2,) if job.rule.granularity == "channel" else (-2, -1)
    norm = torch.linalg.vector_norm(job.shape.matrix(grad), dim=over)
    return norm if job.rule.granularity == "channel" else norm.unsqueeze(-1)


def _advanced_step_(job: Job, finite: Tensor) -> Scalar:
    """This step's number: a Python number, or a tensor where the host must not ask."""
    step = job.state["step"]
    if not job.group["capturable"]:
        step += 1
        return int(step)
    number = step + 1
    step += finite
    return number.double() if number.device.type in ("cpu", "cuda") else number


def _refresh(job: Job, step: Scalar) -> int | Tensor:
    """How many times the basis has been renewed before this step."""
    if isinstance(step, Tensor):
        return ((step - 1) // job.group["refresh_every"]).long()
    return (int(step) - 1) // job.group["refresh_every"]


def _is_due(job: Job, step: Scalar) -> bool:
    return (int(step) - 1) % job.group["refresh_every"] == 0


def _refresh_by_host(job: Job) -> bool:
    """Whether the coming step computes a basis from the gradient, or carries momentum over to a new one."""
    if job.shape is None or job.shape.full_rank or job.group["capturable"]:
        return False
    decides = keeps_basis(job.rule, job.shape) or job.rule.second_moment == "factored"
    return decides and _is_due(job, int(job.state["step"]) + 1)


def _opened(job: Job, name: str) -> Tensor:
    """A state tensor to compute with: itself where it can be updated in place, else a wide copy."""
    tensor = job.state[name]
    if f"{name}_scale" in job.state:
        return widened(tensor, job.state[f"{name}_scale"], job.dtype)
    in_place = tensor.dtype == job.dtype and tensor.device.type == "cpu"
    return tensor if in_place else tensor.to(job.dtype, copy=True)


def _close_(job: Job, name: str, working: Tensor, finite: Tensor, step: Scalar) -> None:
    """Write a state tensor back."""
    tensor = job.state[name]
    if working is tensor:
        return
    if f"{name}_scale" in job.state:
        _close_blocks_(job, name, working, finite, step)
        return
    _write_(tensor, torch.where(finite, working, tensor.to(job.dtype)), job, step, ROUNDING_STREAMS.get(name))


def _close_blocks_(job: Job, name: str, working: Tensor, finite: Tensor, step: Scalar) -> None:
    """The same in 8 bits."""
    number = step.long() if isinstance(step, Tensor) else int(step)
    old = Blocks(job.state[name], job.state[f"{name}_scale"])
    new = narrowed(working, is_signed(old.codes), int(job.state["seed"]), number, ROUNDING_STREAMS[name])
    for target, value in zip(old, new, strict=True):
        target.copy_(torch.where(finite, value, target))


def _write_(target: Tensor, value: Tensor, job: Job, step: Scalar, stream: int | None) -> None:
    if stream is not None and rounds(target.dtype):
        number = step.long() if isinstance(step, Tensor) else int(step)
        write_rounded_(target, value, int(job.state["seed"]), number, stream)
    else:
        target.copy_(value)


def _lie_flat(job: Job, grad: Tensor) -> bool:
    """Whether AdamW can be stepped in place on plain runs of memory."""
    if job.by_row or isinstance(job.weight, Int8Weight):
        return False
    tensors = job.weight, grad, job.state["exp_avg"], job.state["exp_avg_sq"]
    return all(t.device.type == "cpu" and t.dtype == job.dtype and t.is_contiguous() for t in tensors)


def _step_adamw_in_pieces_(job: Job, grad: Tensor, step: Scalar) -> None:
    """AdamW a piece at a time: what a pass leaves for the next is in the cache, and no temporary is a weight's size."""
    adam = Adam(tuple(job.group["betas"]), job.group["eps"], step)
    tensors = job.weight, grad, job.state["exp_avg"], job.state["exp_avg_sq"]
    for weight, piece, m, v in zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True):
        move_(weight, move_of(job, piece, adamw_direction(piece, Moments(m, v), adam)), job)


def _direction(job: Job, grad: Tensor, grad_norm: Tensor, working: dict[str, Tensor], step: Scalar) -> Direction:
    adam = Adam(tuple(job.group["betas"]), job.group["eps"], step)
    if job.by_row:
        return rowwise_direction(grad, working.get("exp_avg"), working["exp_avg_sq"], adam)
    if job.shape is None:
        return adamw_direction(grad, Moments(working["exp_avg"], working["exp_avg_sq"]), adam)
    grad_SC = job.shape.matrix(grad)
    basis_RS = _basis(job, grad_SC, working, step)
    if job.rule.second_moment == "factored":
        factors = Factors(working["exp_avg_sq_side"], working["exp_avg_sq_channel"])
        return factored_direction(grad_SC, basis_RS, working["exp_avg"], factors, adam, job.scale)
    moments = Moments(working["exp_avg"], working["exp_avg_sq"])
    last_norm = working.get("last_norm", grad.new_zeros(job.shape.batch))
    if job.rule.granularity == "element":
        direction = elementwise_direction(grad_SC, basis_RS, moments, last_norm, job.rule, adam, job.scale)
    else:
        direction = structured_direction(grad_SC, grad_norm, basis_RS, moments, last_norm, job.rule, adam, job.scale)
    if direction.limited is not None and "last_norm" in working:
        working["last_norm"].copy_(direction.limited.last_norm)
    return direction


def _basis(job: Job, grad_SC: Tensor, working: dict[str, Tensor], step: Scalar) -> Tensor | None:
    """The basis of this step; where it is new, state that lives in it follows."""
    assert job.shape is not None
    if job.rule.projection == "identity" or job.shape.full_rank:
        return None
    seed, refresh = int(job.state["seed"]), _refresh(job, step)
    device = grad_SC.device
    if keeps_basis(job.rule, job.shape):
        basis_RS = working["basis"]
        if not _is_due(job, step):
            return basis_RS
        old_RS = basis_RS.clone()
        if job.rule.projection == "svd":
            new_RS = svd_basis(grad_SC, job.shape.rank)
        else:
            new_RS = svd_lowrank_basis(grad_SC, job.shape, seed, refresh)
        # Narrowed before its first use, so that every step of the period projects by the same numbers.
        basis_RS.copy_(new_RS.to(job.state["basis"].dtype))
    else:
        small = math.prod(job.shape.batch) * job.shape.rank * job.shape.side <= KEPT_BASIS
        make = _kept_basis if small and isinstance(refresh, int) else gaussian_basis
        basis_RS = make(job.shape, seed, refresh, job.dtype, device)
        if job.rule.second_moment != "factored" or not _is_due(job, step) or refresh == 0:
            return basis_RS
        old_RS = gaussian_basis(job.shape, seed, refresh - 1, job.dtype, device)
    if job.rule.second_moment == "factored":
        working["exp_avg"].copy_(carried_over(working["exp_avg"], old_RS, basis_RS))
    return basis_RS


@lru_cache(maxsize=1024)
def _kept_basis(shape: MatrixShape, seed: int, refresh: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return gaussian_basis(shape, seed, refresh, dtype, device)


def _apply_(job: Job, grad: Tensor, direction: Direction, finite: Tensor, step: Scalar) -> None:
    """weight <- (1 - lr * decay) * weight - lr * update"""
    weight, move = job.weight, move_of(job, grad, direction)
    if isinstance(weight, Int8Weight):
        apply_int8_(weight, job, move, finite, step)
        return
    in_place = weight.dtype == job.dtype and weight.device.type == "cpu"
    moved = weight if in_place else weight.to(job.dtype, copy=True)
    move_(moved, move, job)
    if not in_place:
        stream = ROUND_WEIGHT if job.group["rounding"] == "stochastic" else None
        _write_(weight, torch.where(finite, moved, weight.to(job.dtype)), job, step, stream)
