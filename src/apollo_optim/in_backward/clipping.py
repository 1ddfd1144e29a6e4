"""Clipping of gradients that are applied one by one: by the global norm of the batch before."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import MeshAxis, local, splitting_axes
from ..optimizer import ProjectedOptimizer
from ..param_groups import check_dense

PREVIOUS_NORM = "previous_norm"
"""Key of the first group under which the norm of the last batch is kept, and so saved and loaded."""

NORM_EPS = 1e-6
"""Added to the norm that divides, as in `torch.nn.utils.clip_grad_norm_`."""


class PreviousNormClip:
    """Clips by the global norm of the previous batch, and measures this one's. Never asks the device."""

    def __init__(self, optimizer: ProjectedOptimizer, limit: float):
        self._optimizer, self._limit = optimizer, limit
        self._tables: list[tuple[tuple[MeshAxis, ...], Tensor]] = []
        """Norms of single gradients that are computed alike, and the axes over whose ranks they are summed up. Each
        weight has its own entry in one of them, so that neither the order nor the streams of the gradients matter."""
        self._norms: dict[Tensor, Tensor] = {}
        self._factors: dict[torch.device, Tensor] = {}
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._adopt())
        self._adopt()

    def remove(self) -> None:
        self._hook.remove()
        self._optimizer.param_groups[0].pop(PREVIOUS_NORM, None)

    def clip_(self, weight: Tensor) -> None:
        """Note the norm of the weight's gradient, and scale it by what the previous batch's asks for."""
        assert weight.grad is not None
        check_dense(f"a weight {tuple(weight.shape)}", weight)
        grad, norm = local(weight.grad), self._norm_of(weight)
        torch.linalg.vector_norm(grad, dtype=norm.dtype, out=norm)
        if grad.device not in self._factors:
            self._factors[grad.device] = self._factors[self._previous.device].to(grad.device)
        grad.mul_(self._factors[grad.device])

    def forget(self) -> None:
        """Forget the norms of this batch: the next one may leave some of its weights out."""
        for _, norms in self._tables:
            norms.zero_()

    def advance(self) -> None:
        """Take this batch's norm for the previous one's."""
        total = self._previous.new_zeros(())
        for axes, norms in self._tables:
            if axes:  # of whole gradients, from those of this rank's parts
                squares = norms.double().square()
                for axis in axes:
                    dist.all_reduce(squares, group=axis.group)
                norms.copy_(squares.sqrt())
            # A gradient that is not finite is not applied, so it does not count either.
            norms.masked_fill_(~norms.isfinite(), 0)
            total = torch.hypot(total, torch.linalg.vector_norm(norms).to(total))
        self.forget()
        # Where no weight had a gradient, as in a step that only makes state, the last norm stays.
        self._previous.copy_(torch.where(total > 0, total, self._previous))
        self._set_factors()

    @torch.no_grad()
    def _adopt(self) -> None:
        """Go on from the norm in the options: none yet, or that of a checkpoint, wherever it was loaded."""
        group = self._optimizer.param_groups[0]
        device, dtype, _ = _kind(self._optimizer._weights()[0])
        before = group.get(PREVIOUS_NORM, torch.zeros((), dtype=dtype, device=device))
        self._previous = group[PREVIOUS_NORM] = before.to(device, dtype)
        self._factors.setdefault(device, torch.ones_like(self._previous))
        self._set_factors()

    def _set_factors(self) -> None:
        """Update the factors in place, because a CUDA graph holds their addresses."""
        factor = (self._limit / (self._previous + NORM_EPS)).clamp(max=1.0).masked_fill(self._previous == 0, 1.0)
        for own in self._factors.values():
            own.copy_(factor)

    def _norm_of(self, weight: Tensor) -> Tensor:
        """The entry of a table that the norm of the weight's gradient is written to."""
        norm = self._norms.get(weight)
        if norm is None or norm.device != weight.device or norm.dtype != _dtype(weight):
            device, dtype, axes = kind = _kind(weight)
            alike = [other for other in self._optimizer._weights() if _kind(other) == kind]
            norms = torch.zeros(len(alike), device=device, dtype=dtype)
            self._tables.append((axes, norms))
            self._norms.update(zip(alike, norms.unbind(), strict=True))
        return self._norms[weight]


def _kind(weight: Tensor) -> tuple[torch.device, torch.dtype, tuple[MeshAxis, ...]]:
    """The device and dtype in which the norm of a weight's gradient is computed, and the axes of its ranks."""
    return weight.device, _dtype(weight), splitting_axes(weight)


def _dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
