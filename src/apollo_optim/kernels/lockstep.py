"""Steps of many sharded weights side by side, so that what they ask of other ranks travels together.

A weight's step is a generator. Where it needs other ranks it yields a request for one mesh axis, and is resumed with
the answer. All requests that wait for the same kind of answer over the same axis make one collective.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Axis

T = TypeVar("T")

BUCKET_BYTES = 2**27
"""Requests that wait together: beyond this they are sent, so that not all of a large model's are held at once."""


class Request(NamedTuple):
    """What a step needs from the other ranks of an axis of size N."""

    kind: str
    """One of COLLECTIVES."""
    axis: Axis
    tensor: Tensor
    cost: int
    """Bytes to count it with: the same number on every rank, however unequal their parts are."""


Step = Generator[Request, Tensor, T]


# torch 2.13 has new names for these two, and warns of the old ones.
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _sum(packed: Tensor, axis: Axis) -> Tensor:
    dist.all_reduce(packed, group=axis.group)
    return packed


def _scatter(packed: Tensor, axis: Axis) -> Tensor:
    own = packed.new_empty(packed.numel() // axis.size)
    _reduce_scatter(own, packed, group=axis.group)
    return own


def _gather(packed: Tensor, axis: Axis) -> Tensor:
    everyone = packed.new_empty(axis.size * packed.numel())
    _all_gather(everyone, packed, group=axis.group)
    return everyone.view(axis.size, -1)


COLLECTIVES: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "scatter": _scatter,  # [N, ...] -> [...], the sum of all ranks' rows of this rank's number
    "reduce": _sum,  # [...] -> [...]
    "gather": _gather,  # [...] -> [N, ...]
    # Last: sums are short, and wait until nothing else is left to do, so that one serves the whole model.
    "sum": _sum,  # [...] -> [...]
}
PRIORITY = {kind: number for number, kind in enumerate(COLLECTIVES)}


class _Queue:
    """Requests that one collective answers."""

    def __init__(self, kind: str, axis: Axis):
        self.kind = kind
        self.axis = axis
        self.waiting: list[tuple[int, Tensor]] = []
        self.cost = 0

    @property
    def priority(self) -> tuple[int, tuple[str, int]]:
        return PRIORITY[self.kind], self.axis.order

    def answers(self) -> list[Tensor]:
        """One answer for each request, in order, where its tensor was."""
        # Rows of a scatter go to different ranks, so they are packed side by side, and everything else end to end.
        rows = self.axis.size if self.kind == "scatter" else 1
        tensors = [tensor for _, tensor in self.waiting]
        packed = torch.cat([tensor.reshape(rows, -1) for tensor in tensors], dim=1).to(self.axis.device)
        answer = COLLECTIVES[self.kind](packed.view(-1), self.axis)
        lengths = [tensor.numel() // rows for tensor in tensors]
        pieces = answer.to(tensors[0].device).split(lengths, dim=-1)
        return [piece.view(self._shape(tensor)) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _shape(self, tensor: Tensor) -> Sequence[int]:
        """Of the answer to a request."""
        if self.kind == "scatter":
            return tensor.shape[1:]
        return (self.axis.size, *tensor.shape) if self.kind == "gather" else tensor.shape


class Lockstep(Generic[T]):
    """Runs steps to their end, in an order that is the same on every rank."""

    def __init__(self, steps: Sequence[Step[T]]):
        self._steps = steps
        self._results: dict[int, T] = {}
        self._queues: dict[tuple[str, str, torch.dtype, torch.device], _Queue] = {}

    def results(self) -> list[T]:
        """What each step returns."""
        for number in range(len(self._steps)):
            self._advance(number, None)
        while self._queues:
            self._send(min(self._queues, key=lambda key: self._queues[key].priority))
        return [self._results[number] for number in range(len(self._steps))]

    def _advance(self, number: int, answer: Tensor | None) -> None:
        try:
            # pyrefly: ignore[bad-argument-type] (a generator is begun with None)
            request = self._steps[number].send(answer)
        except StopIteration as end:
            self._results[number] = end.value
            return
        key = request.kind, request.axis.group.group_name, request.tensor.dtype, request.tensor.device
        queue = self._queues.setdefault(key, _Queue(request.kind, request.axis))
        queue.waiting.append((number, request.tensor))
        queue.cost += request.cost
        if queue.cost >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: tuple[str, str, torch.dtype, torch.device]) -> None:
        queue = self._queues.pop(key)
        answers = queue.answers()
        for (number, _), answer in zip(queue.waiting, answers, strict=True):
            self._advance(number, answer)
