"""The step of weights whose update is orthogonalised: on a GPU, those of one shape together.

    m      <- beta m + (1 - beta) g           kept in 4 bits, as other moments are, or a few directions of it
    update  = scale * sqrt(C) * orthogonalized(beta m + (1 - beta) g)

Shapes: N weights of one shape, each of R rows (its matrices below each other, where it has several) and I columns; M
matrices of all of them, of O rows each. A few rows are worked on at a time, so that nothing but what is multiplied is
ever there whole.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..core.direction import look_ahead_
from ..core.limiter import Scalar
from ..core.orthogonal import LIFT, orthogonalized, product_dtype
from ..core.projection import InverseFactor, LowRank, inverse_factor, power_iteration
from ..core.random import ROUND_WEIGHT, RoundingKey, rounding_bits, rounding_key
from ..core.shape import MatrixShape
from ..quant.blocks import packed, unpacked
from ..quant.groups import row_pieces
from ..quant.int8 import Int8Weight
from ..quant.rounding import Quantized, rounded, rounds
from . import plain
from .weight import Report, WeightStep

PIECE = 2**22
"""Elements that are worked on at a time: their temporaries take up to 60 times as many bytes."""

LOW_RANK = "basis", "exp_avg"
"""State of a momentum of low rank, in the order of `LowRank`."""


def stacks_of(jobs: Iterable[WeightStep]) -> list["Stack"]:
    """The weights in stacks of one shape and one group. On the CPU, where launches are free, each has its own."""
    alike: dict[tuple[object, ...], list[WeightStep]] = {}
    for job in jobs:
        device = job.weight.device
        own = job.name if device.type == "cpu" else None
        kind = own, id(job.group), device, job.weight.shape, job.weight.dtype, job.grad.dtype, type(job.weight)
        alike.setdefault(kind, []).append(job)
    stacks: list[Stack] = []
    for each in alike.values():
        most = max(1, PIECE // each[0].weight.numel())
        stacks += [Stack(each[first : first + most]) for first in range(0, len(each), most)]
    return stacks


class Stack:
    """Weights of one shape that are stepped together."""

    def __init__(
        self, jobs: Sequence[WeightStep], shape: MatrixShape | None = None, factor: InverseFactor = inverse_factor
    ):
        """`shape` is that of the gradients, where a rank has more of those than of the weights."""
        self.jobs, self.first, self._factor = list(jobs), jobs[0], factor
        shape = shape or self.first.shape
        assert shape is not None
        self.shape = shape
        self.rows, self.columns = math.prod(shape.batch) * shape.rows, shape.columns
        self._pieces = row_pieces(self.rows, len(self.jobs) * self.columns, PIECE)
        self._seeds = [int(job.state["seed"]) for job in jobs]
        # By a tensor where step numbers are, too: a CUDA graph must not wait for the host.
        self._seeds_N11 = torch.tensor(self._seeds, device=self.first.weight.device).view(-1, 1, 1)

    def step_(self) -> list[Report]:
        """Step every weight and its state; a gradient that is not finite leaves both as they were."""
        grad_NRI = self.gradients()
        norm_N = torch.linalg.vector_norm(grad_NRI, dim=(-2, -1), dtype=self.first.dtype)
        finite_N = norm_N.square().isfinite()
        reports = [Report(finite) for finite in finite_N.unbind()]
        if len(self.jobs) == 1 and plain.refuses(self.first, reports[0].finite):
            return reports
        steps = [plain.coming_step(job) for job in self.jobs]
        ahead_NRI = self.ahead(grad_NRI, finite_N, steps)
        ahead_MOI = ahead_NRI.view(-1, self.shape.rows, self.columns)
        update_NRI = orthogonalized(ahead_MOI, self.first.symmetric_product).reshape(grad_NRI.shape)
        for job, report in zip(self.jobs, reports, strict=True):
            plain.advance_(job, report.finite)
        self._apply_(update_NRI, finite_N, steps)
        return reports

    def gradients(self) -> Tensor:
        """All gradients as they came. [N, R, I]"""
        return _stacked([job.grad.reshape(self.rows, self.columns) for job in self.jobs])

    def ahead(self, grad_NRI: Tensor, finite_N: Tensor, steps: Sequence[Scalar]) -> Tensor:
        """The directions to orthogonalise, of any size, once the momentum of this step is kept. [N, R, I]"""
        dtype = product_dtype(self.first.dtype, grad_NRI.device)
        if "exp_avg" not in self.first.state or self.first.rule.projection == "power":
            lifted_NRI = (plain.ascent(self.first, grad_NRI) * LIFT).to(dtype)
            if "exp_avg" in self.first.state:
                lifted_MOI = lifted_NRI.view(-1, self.shape.rows, self.columns)
                self._keep_(self.look_ahead_at_low_rank_(lifted_MOI, 1), finite_N, steps)
            return lifted_NRI
        result_NRI = torch.empty(grad_NRI.shape, dtype=dtype, device=grad_NRI.device)
        if self.first.in_4_bits:
            for rows in self._pieces:
                ahead_NRI = self._look_ahead_in_4_bits(plain.ascent(self.first, grad_NRI[:, rows]), finite_N, rows)
                result_NRI[:, rows] = ahead_NRI.mul_(LIFT)
            return result_NRI
        beta = self.first.group["betas"][0]
        for n, (job, step) in enumerate(zip(self.jobs, steps, strict=True)):
            exp_avg = plain.working_copy(job, "exp_avg")
            result_NRI[n] = look_ahead_(exp_avg.flatten(0, -2), plain.ascent(self.first, grad_NRI[n]), beta).mul_(LIFT)
            plain.write_back_(job, "exp_avg", exp_avg, finite_N[n], step)
        return result_NRI

    def _look_ahead_in_4_bits(self, grad_NRI: Tensor, finite_N: Tensor, rows: slice) -> Tensor:
        kept = [[job.state[name].flatten(0, -2)[rows] for job in self.jobs] for name in ("exp_avg", "exp_avg_scale")]
        old = Quantized(*map(_stacked, kept))
        exp_avg_NRI = unpacked(old, self.columns, grad_NRI.dtype)
        ahead_NRI = look_ahead_(exp_avg_NRI, grad_NRI, self.first.group["betas"][0])
        for targets, new, before in zip(kept, packed(exp_avg_NRI), old, strict=True):
            _write_(targets, torch.where(finite_N.view(-1, 1, 1), new, before))
        return ahead_NRI

    def look_ahead_at_low_rank_(self, lifted_MOI: Tensor, sign: int) -> LowRank:
        """lifted <- beta m + (1 - beta) lifted. Returns the leading directions of the new m, to be kept.

        `lifted` is `sign * LIFT` times the gradients before, and times what is looked ahead to after, in the dtype of
        products; `sign` is 1 or -1.
        """
        beta = self.first.group["betas"][0]
        old = LowRank(*map(self._kept, LOW_RANK))
        lifted_MCS = lifted_MOI if self.shape.channels_are_rows else lifted_MOI.mT
        new = power_iteration(old, beta, lifted_MCS, sign * (1 - beta) / LIFT, self.first.dtype, self._factor)
        # With all of m, of which only a part is kept.
        basis_RC, low_RS = (each.to(lifted_MOI.dtype) for each in old)
        pair = (basis_RC.mT, low_RS) if self.shape.channels_are_rows else (low_RS.mT, basis_RC)
        lifted_MOI.baddbmm_(*pair, beta=1 - beta**2, alpha=sign * beta**2 * LIFT)
        return new

    def _kept(self, name: str) -> Tensor:
        """A state tensor of all matrices in its own dtype, or where that is of 8 bits, the arithmetic's. [M, ...]"""
        narrow = f"{name}_scale" in self.first.state
        each = [plain.working_copy(job, name) if narrow else job.state[name] for job in self.jobs]
        return _stacked(each).flatten(0, -3)

    def _keep_(self, new: LowRank, finite_N: Tensor, steps: Sequence[Scalar]) -> None:
        """Write the momentum of all weights back."""
        for name, value in zip(LOW_RANK, new, strict=True):
            for n, (job, own) in enumerate(zip(self.jobs, value.chunk(len(self.jobs)), strict=True)):
                plain.write_back_(job, name, own.view(job.state[name].shape), finite_N[n], steps[n])

    def _apply_(self, update_NRI: Tensor, finite_N: Tensor, steps: Sequence[Scalar]) -> None:
        """weight <- (1 - lr * decay) * weight - lr * update"""
        job, factor = self.first, -plain.lr_of(self.first)
        if isinstance(job.weight, Int8Weight):
            for n, (each, step) in enumerate(zip(self.jobs, steps, strict=True)):
                assert isinstance(each.weight, Int8Weight)
                plain.apply_int8_(each.weight, self._sized(update_NRI[n]), factor, each, finite_N[n], step)
            return
        weights = [each.weight.reshape(self.rows, self.columns) for each in self.jobs]
        draws = rounds(job.weight.dtype) and job.group["rounding"] == "stochastic"
        key = self._rounding_key(steps) if draws else None
        for rows in self._pieces:
            old_NRI = _stacked([weight[rows] for weight in weights]).to(job.dtype)
            new_NRI = old_NRI.clone()
            plain.add_update_(new_NRI, self._sized(update_NRI[:, rows]), factor, job)
            new_NRI = torch.where(finite_N.view(-1, 1, 1), new_NRI, old_NRI)
            if key is not None:
                first, stop = rows.start * self.columns, rows.stop * self.columns
                position_RI = torch.arange(first, stop, device=new_NRI.device).view(-1, self.columns)
                new_NRI = rounded(new_NRI.float(), rounding_bits(key, position_RI), job.weight.dtype)
            _write_([weight[rows] for weight in weights], new_NRI)
        for each, weight in zip(self.jobs, weights, strict=True):
            if weight.data_ptr() != each.weight.data_ptr():  # what was written is a copy
                each.weight.copy_(weight.reshape(each.weight.shape))

    def _sized(self, update: Tensor) -> Tensor:
        return update.to(self.first.dtype) * self.first.scale

    def _rounding_key(self, steps: Sequence[Scalar]) -> RoundingKey:
        """Whose random numbers round each weight."""
        if isinstance(steps[0], Tensor):
            step_N11 = torch.stack([torch.as_tensor(step) for step in steps]).long().view(-1, 1, 1)
            return rounding_key(self._seeds_N11, step_N11, ROUND_WEIGHT)
        keys = [rounding_key(seed, int(step), ROUND_WEIGHT) for seed, step in zip(self._seeds, steps, strict=True)]
        if len(keys) == 1:
            return keys[0]
        key_2N11 = torch.tensor(keys).T.contiguous().to(self._seeds_N11.device, non_blocking=True)[..., None, None]
        return key_2N11[0], key_2N11[1]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all of these; of one, itself."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _write_(targets: Sequence[Tensor], value: Tensor) -> None:
    """targets <- value, one of its first dimension each"""
    torch._foreach_copy_(list(targets), list(value.unbind()))
