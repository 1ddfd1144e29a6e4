"""The gradients of a backward on their way to the mean of all ranks, a few at a time."""

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..param_groups import check_dense

if TYPE_CHECKING:
    from torch.distributed import Work


IN_FLIGHT = 4
"""Gradients that travel while backward goes on: enough to keep a network busy, few enough not to count in memory."""


def checked_group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """The process group that is meant; None where it has one rank only, or there is none."""
    if group is None:
        return None
    if not dist.is_initialized():
        raise ValueError(f"group={group!r} needs torch.distributed: call init_process_group() first, under torchrun")
    found = dist.group.WORLD if group == "world" else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f'group must be "world", a torch.distributed.ProcessGroup that this rank belongs to, or None, got {group!r}'
        )
    return found if dist.get_world_size(found) > 1 else None


def maximum_(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`numbers`, replaced by the largest of any rank."""
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return numbers


def first_(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`tensor`, replaced by the first rank's."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            first_(getattr(tensor, name), group)
        return tensor
    plain = tensor.detach().contiguous()
    dist.broadcast(plain, group=group, group_src=0)
    if plain.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(plain)
    return tensor


def agree(facts: Iterable[Any], device: torch.device, group: dist.ProcessGroup) -> bool:
    """True if these read the same on all ranks."""
    digest = zlib.crc32(repr(list(facts)).encode())
    largest, minus_smallest = maximum_(torch.tensor([digest, -digest], device=device), group).tolist()
    return largest == -minus_smallest


class Averaging:
    """Averages the gradients of one batch after another, and hands each weight to `step_` with the mean.

    Ranks must send the same gradients in the same order, or they add up what does not belong together, or wait for
    ever. Autograd promises neither where ranks go different ways through a model. So there is an order of all weights,
    and a gradient waits for those before it; for one that never came, zeros are sent. The order is that in which
    gradients came on the first rank in the first batch, and in that batch the reverse of the model's.
    """

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, step_: Callable[[Tensor], None]):
        self._group, self._step_ = group, step_
        self._size = dist.get_world_size(group)
        self._places = _places(reversed(list(model.parameters())))
        self._learnt = False
        self._came: list[Tensor] = []
        """Weights whose gradients came in this batch, in order."""
        self._ahead: deque[Tensor] = deque()
        """Weights whose gradients have not been sent, in order."""
        self._waiting: dict[Tensor, Tensor] = {}
        """Gradients that came before it was their turn."""
        self._flying: deque[tuple[Tensor, Tensor, Work]] = deque()
        self._absent: dict[Tensor, Tensor] = {}
        """Mean gradients of weights that had no gradient on this rank."""

    def begin(self, weights: list[Tensor]) -> None:
        """Make ready for the gradients of a batch."""
        trained = [weight for weight in weights if weight.requires_grad]
        last = len(self._places)
        self._ahead = deque(sorted(trained, key=lambda weight: self._places.get(weight, last)))
        self._came = []

    def add(self, weight: Tensor) -> None:
        """Take the weight's gradient, which is complete on this rank, and send what it is the turn of."""
        self._came.append(weight)
        self._waiting[weight] = _taken(weight)
        while self._ahead and self._ahead[0] in self._waiting:
            first = self._ahead.popleft()
            self._send(first, self._waiting.pop(first))

    def finish(self, weights: list[Tensor], left: list[Tensor]) -> bool:
        """Send and step what is left, of these weights, all of the optimizer's; `left` have a gradient of this rank.

        Returns whether the order is another one from now on.
        """
        listed = set(self._ahead)
        # Gradients that someone has written by hand, to weights that are not trained.
        self._ahead.extend(weight for weight in left if weight not in listed)
        while self._ahead:
            self._send_late(self._ahead.popleft())
        while self._flying:
            self._land()
        self._step_absent(weights)
        return not self._learnt and self._learn_order(weights)

    def _send_late(self, weight: Tensor) -> None:
        if weight in self._waiting:
            self._send(weight, self._waiting.pop(weight))
        elif weight.grad is not None:
            self._send(weight, _taken(weight))
        else:
            grad = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
            self._absent[weight] = grad
            self._send(weight, grad)

    def _send(self, weight: Tensor, grad: Tensor) -> None:
        """Begin to replace a gradient by its mean over the ranks.

        Divided before it is added up, as in DistributedDataParallel, whose numbers these are: half precision then
        overflows no sooner than on one rank.
        """
        work = dist.all_reduce(grad.mul_(1 / self._size), group=self._group, async_op=True)
        assert work is not None
        self._flying.append((weight, grad, work))
        if len(self._flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest mean, which on a GPU its stream does and not this thread, and step its weight."""
        weight, grad, work = self._flying.popleft()
        work.wait()
        if weight not in self._absent:
            weight.grad = grad
            self._step_(weight)

    def _step_absent(self, weights: list[Tensor]) -> None:
        """Step weights that had no gradient here, but on another rank."""
        used = torch.ones(len(weights), dtype=torch.int32, device=weights[0].device)
        if self._absent:
            # Only where something is absent does this rank wait for the device.
            used.copy_(torch.tensor([weight not in self._absent for weight in weights], device="cpu"))
        maximum_(used, self._group)
        if self._absent:
            for weight, anywhere in zip(weights, used.tolist(), strict=True):
                if anywhere and weight in self._absent:
                    weight.grad = self._absent[weight]
                    self._step_(weight)
            self._absent.clear()

    def _learn_order(self, weights: list[Tensor]) -> bool:
        """Take over the order in which gradients came on the first rank; whether any did."""
        index = {weight: number for number, weight in enumerate(weights)}
        came = [index[weight] for weight in self._came]
        padded = torch.tensor([*came, *[-1] * (len(weights) - len(came))], device=weights[0].device)
        order = [weights[number] for number in first_(padded, self._group).tolist() if number >= 0]
        if order:
            self._places, self._learnt = _places(order), True
        return self._learnt


def _places(order: Iterable[Tensor]) -> dict[Tensor, int]:
    return {weight: place for place, weight in enumerate(order)}


def _taken(weight: Tensor) -> Tensor:
    """The gradient, taken from its weight: nothing may add to it while it is averaged."""
    grad = weight.grad
    assert grad is not None
    check_dense(f"a weight {tuple(weight.shape)}", weight)
    weight.grad = None
    # The same layout on every rank: they add up memory, not elements.
    return grad.contiguous()
