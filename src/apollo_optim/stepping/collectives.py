"""Steps of many sharded weights side by side, so that what they ask of other ranks travels together.

A weight's step is a generator. Where it needs other ranks it yields a request for one mesh axis, and is resumed with
the answer. All requests that wait for the same kind of answer over the same axis make one collective.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..core.shape import Range
from ..distributed import MeshAxis, Part, range_of

T = TypeVar("T")

BUCKET_BYTES = 2**27
"""Requests that wait together: beyond this they are sent, so that not all of a large model's are held at once."""


class Request(NamedTuple):
    """A collective that a step needs, over an axis of size N."""

    kind: str
    """One of COLLECTIVES."""
    axis: MeshAxis
    tensor: Tensor
    cost: int
    """Bytes to count it with: the same number on every rank, however unequal their parts are."""
    owner: int = 0
    """The place on the axis of the rank to which rows are dealt, or which returns them."""

    @property
    def answer_shape(self) -> Sequence[int]:
        if self.kind in ("scatter", "return"):
            return self.tensor.shape[1:]
        if self.kind == "gather":
            return (self.axis.size, *self.tensor.shape)
        if self.kind == "deal":
            return (self.axis.size if self.axis.place == self.owner else 0, *self.tensor.shape)
        return self.tensor.shape


Step = Generator[Request, Tensor, T]
"""A step that needs other ranks: it yields requests, is sent their answers, and returns its result."""

QueueKey = tuple[str, str, torch.dtype, torch.device]
"""The key of requests that are sent together: kind, name of the group of ranks, dtype and device."""


# torch 2.13 has new names for these two, and warns of the old ones.
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _sum(packed: Tensor, axis: MeshAxis) -> Tensor:
    dist.all_reduce(packed, group=axis.group)
    return packed


def _max(packed: Tensor, axis: MeshAxis) -> Tensor:
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=axis.group)
    return packed


def _scatter(packed: Tensor, axis: MeshAxis) -> Tensor:
    own = packed.new_empty(packed.numel() // axis.size)
    _reduce_scatter(own, packed, group=axis.group)
    return own


def _gather(packed: Tensor, axis: MeshAxis) -> Tensor:
    everyone = packed.new_empty(axis.size * packed.numel())
    _all_gather(everyone, packed, group=axis.group)
    return everyone.view(axis.size, -1)


def _packed(send: Callable[[Tensor, MeshAxis], Tensor], requests: Sequence[Request]) -> list[Tensor]:
    """Answers by a collective to which every rank gives as much as the others."""
    axis, tensors = requests[0].axis, [request.tensor for request in requests]
    # Rows of a scatter go to different ranks, so they are packed side by side, and everything else end to end.
    rows = axis.size if requests[0].kind == "scatter" else 1
    packed = torch.cat([tensor.reshape(rows, -1) for tensor in tensors], dim=1).to(axis.device)
    answer = send(packed.view(-1), axis)
    pieces = answer.to(tensors[0].device).split([tensor.numel() // rows for tensor in tensors], dim=-1)
    return [piece.view(request.answer_shape) for piece, request in zip(pieces, requests, strict=True)]


def _exchanged(requests: Sequence[Request]) -> list[Tensor]:
    """Answers to what every rank deals to the owner of each request, or to what that returns to every rank."""
    axis, deals = requests[0].axis, requests[0].kind == "deal"
    by_owner = sorted(range(len(requests)), key=lambda number: requests[number].owner)
    owned = [0] * axis.size  # elements of one rank's piece of all that each owns, filled up as everyone's is
    for request in requests:
        owned[request.owner] += math.prod(request.tensor.shape if deals else request.answer_shape)
    own = [owned[axis.place]] * axis.size
    sent, received = (owned, own) if deals else (own, owned)
    rows_sent, rows_received = (1, axis.size) if deals else (axis.size, 1)
    tensors = [requests[number].tensor for number in by_owner]
    packed = torch.cat([tensor.reshape(rows_sent, -1) for tensor in tensors], dim=1).to(axis.device)
    answer = packed.new_empty(sum(received))
    dist.all_to_all_single(answer, packed.view(-1), received, sent, group=axis.group)
    shapes = [requests[number].answer_shape for number in by_owner]
    answer_rows = answer.to(tensors[0].device).view(rows_received, -1)
    pieces = answer_rows.split([math.prod(shape) // rows_received for shape in shapes], dim=1)
    answers = {number: piece.reshape(shape) for number, piece, shape in zip(by_owner, pieces, shapes, strict=True)}
    return [answers[number] for number in range(len(requests))]


COLLECTIVES: dict[str, Callable[[Sequence[Request]], list[Tensor]]] = {
    # First: of scales, without which a step cannot begin, so that the rest of it goes with that of other weights.
    "max": partial(_packed, _max),  # [...] -> [...]
    "scatter": partial(_packed, _scatter),  # [N, ...] -> [...], the sum of all ranks' rows of this rank's number
    "reduce": partial(_packed, _sum),  # [...] -> [...]
    "gather": partial(_packed, _gather),  # [...] -> [N, ...]
    "deal": _exchanged,  # [...] -> [N, ...] at the owner, [0, ...] elsewhere
    "return": _exchanged,  # [N, ...] at the owner, [0, ...] elsewhere -> [...]
    # Last: sums are short, and wait until nothing else is left to do, so that one serves the whole model.
    "sum": partial(_packed, _sum),  # [...] -> [...]
}
"""Answers to requests of each kind by one collective, in the order in which they are sent where several wait."""


def answers_to(requests: Sequence[Request]) -> list[Tensor]:
    """An answer to each of these requests, all of one kind over one axis, by one collective."""
    return COLLECTIVES[requests[0].kind](requests)


def in_lockstep(steps: Sequence[Step[T]], answers: Callable[[Sequence[Request]], list[Tensor]] = answers_to) -> list[T]:
    """The results of all steps, run side by side in an order that is the same on every rank.

    `answers` sends what waits together, as `answers_to` does.
    """
    results: dict[int, T] = {}
    queues: dict[QueueKey, list[tuple[int, Request]]] = {}
    """Requests that wait to be sent together, each with the number of its step."""
    costs: Counter[QueueKey] = Counter()
    ready: list[tuple[int, Tensor | None]] = [(number, None) for number in reversed(range(len(steps)))]
    """Steps that can go on, with the answers they have waited for; the next is the last."""

    # Functions, so that no request and no answer outlives its use while the next ones take memory.
    def resume(number: int, answer: Tensor | None) -> QueueKey | None:
        """Let a step go on to its next request or its end; the queue that is full now, if one is."""
        try:
            # pyrefly: ignore[bad-argument-type] (a generator is begun with None)
            request = steps[number].send(answer)
        except StopIteration as end:
            results[number] = end.value
            return None
        key = request.kind, request.axis.group.group_name, request.tensor.dtype, request.tensor.device
        queues.setdefault(key, []).append((number, request))
        costs[key] += request.cost
        return key if costs[key] >= BUCKET_BYTES else None

    def send(key: QueueKey) -> None:
        """Send a queue, and let its steps go on before any others."""
        del costs[key]
        numbers, requests = zip(*queues.pop(key), strict=True)
        ready.extend(reversed(list(zip(numbers, answers(requests), strict=True))))

    def priority(key: QueueKey) -> tuple[int, tuple[str, int]]:
        return list(COLLECTIVES).index(key[0]), queues[key][0][1].axis.order

    while ready or queues:
        key = resume(*ready.pop()) if ready else min(queues, key=priority)
        if key is not None:
            send(key)
    return [results[number] for number in range(len(steps))]


def summed(part: Part, *values: tuple[Tensor, str]) -> Step[list[Tensor]]:
    """Each tensor added up in float64 over the ranks that split what its letters stand for."""
    totals = [value.double() for value, _ in values]
    over = [part.axes(letters) for _, letters in values]
    for axis in sorted({axis for axes in over for axis in axes}, key=lambda axis: axis.order):
        chosen = [number for number, axes in enumerate(over) if axis in axes]
        # Free of charge: sums are short, and are to wait for those of all other weights.
        answer = yield Request("sum", axis, torch.cat([totals[number].reshape(-1) for number in chosen]), cost=0)
        pieces = answer.split([totals[number].numel() for number in chosen])
        for number, piece in zip(chosen, pieces, strict=True):
            totals[number] = piece.view_as(totals[number])
    return totals


def largest(axes: Iterable[MeshAxis], cost: int, *values: Tensor) -> Step[list[Tensor]]:
    """The largest of each element over the ranks of these axes."""
    flat = torch.cat([value.reshape(-1) for value in values])
    for axis in sorted(axes, key=lambda axis: axis.order):
        flat = yield Request("max", axis, flat, cost)
    pieces = flat.split([value.numel() for value in values])
    return [piece.view_as(value) for piece, value in zip(pieces, values, strict=True)]


def scattered(part: Part, low_RC: Tensor) -> Step[Tensor]:
    """Low-rank gradients of this rank's channels [(E,) R, P], from every rank's share in those of all [(E,) R, C]."""
    cost = _cost(part, low_RC)
    for axis in part.axes("S"):
        if not part.moments_are_shared_out:
            low_RC = yield Request("reduce", axis, low_RC, cost)
            continue
        channels = low_RC.shape[-1]
        chunk = -(-channels // axis.size)
        padded = pad(low_RC, (0, chunk * axis.size - channels))
        rows_NRP = padded.unflatten(-1, (axis.size, chunk)).movedim(-2, 0)
        low_RP = yield Request("scatter", axis, rows_NRP, cost)
        low_RC = low_RP[..., : _length(channels, part, axis)]
    return low_RC


def gathered(part: Part, piece_P: Tensor) -> Step[Tensor]:
    """All of this rank's channels [..., C], from those whose moments each rank keeps [..., P]."""
    if not part.moments_are_shared_out or part.local_matrix is None:
        return piece_P
    cost = _cost(part, piece_P)
    levels: list[tuple[MeshAxis, int]] = []
    length = part.local_matrix.channels
    for axis in part.axes("S"):
        levels.append((axis, length))
        length = _length(length, part, axis)
    for axis, length in reversed(levels):
        chunk = -(-length // axis.size)
        everyone = yield Request("gather", axis, pad(piece_P, (0, chunk - piece_P.shape[-1])), cost)
        piece_P = everyone.movedim(0, -2).flatten(-2)[..., :length]
    return piece_P


def gathered_gradient(part: Part, grad: Tensor) -> Step[Tensor]:
    """All of the gradient, of this rank's experts, from what each rank has of it."""
    axes = part.axes("SC")
    if not axes:
        return grad
    pieces = _Pieces(part, grad, axes)
    flat = pieces.flat()
    for axis in axes:
        flat = yield Request("gather", axis, flat, pieces.whole_bytes)
    return pieces.put_together(flat)


def dealt(part: Part, piece: Tensor, owner: int) -> Step[Tensor | None]:
    """All of a tensor that is split as the gradient is, at its owner; None elsewhere."""
    axes = dealing_axes(part)
    if not axes:
        return piece
    pieces = _Pieces(part, piece, axes)
    flat = pieces.flat()
    for axis in axes[:-1]:
        flat = yield Request("gather", axis, flat, pieces.whole_bytes)
    flat = yield Request("deal", axes[-1], flat, turn_bytes(axes[-1]), owner)
    return pieces.put_together(flat) if is_owner(part, owner) else None


def returned(part: Part, whole: Tensor | None, grad: Tensor, dtype: torch.dtype, owner: int) -> Step[Tensor]:
    """This rank's piece of a tensor of `dtype`, split as `grad` is; its owner has all of it, `whole`, others None."""
    axes = dealing_axes(part)
    if whole is not None and not axes:
        return whole
    pieces = _Pieces(part, grad, axes[-1:])
    rows_NL = grad.new_empty(0, pieces.longest, dtype=dtype) if whole is None else pieces.taken_apart(whole)
    del whole
    row_L = yield Request("return", axes[-1], rows_NL, turn_bytes(axes[-1]), owner)
    return row_L[: grad.numel()].view(grad.shape)


def spread_(part: Part, tensors: Sequence[Tensor], owner: int) -> Step[None]:
    """Give every rank what the owner of a matrix has of a momentum of low rank in these tensors, bit for bit."""
    axes, matrix = dealing_axes(part), part.matrix
    if not axes or not tensors:
        return
    assert matrix is not None
    cost = math.prod(matrix.batch) * matrix.rank * (matrix.side + matrix.channels) * tensors[0].itemsize
    axis, sizes = axes[-1], [tensor.nbytes for tensor in tensors]
    total, chunk = sum(sizes), -(-sum(sizes) // axis.size)
    # A chunk to each rank, which all of them gather: the owner alone would have to send everything to everyone.
    rows_NL = torch.empty(0, chunk, dtype=torch.uint8, device=tensors[0].device)
    if is_owner(part, owner):
        own = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        rows_NL = pad(own, (0, axis.size * chunk - total)).view(axis.size, chunk)
    row_L = yield Request("return", axis, rows_NL, turn_bytes(axis), owner)
    everyone = yield Request("gather", axis, row_L, cost)
    for tensor, piece in zip(tensors, everyone.reshape(-1)[:total].split(sizes), strict=True):
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def dealing_axes(part: Part) -> tuple[MeshAxis, ...]:
    """The axes that split a matrix: it is dealt out over the last, which has the most ranks, and gathered before."""
    return tuple(sorted(part.axes("SC"), key=lambda axis: axis.size))


def is_owner(part: Part, owner: int) -> bool:
    """True if this rank has all of a matrix that is dealt out to `owner`."""
    axes = dealing_axes(part)
    return not axes or axes[-1].place == owner


def turn_bytes(axis: MeshAxis) -> int:
    """The cost that a matrix that is dealt out is counted with, so that they are sent once each rank has one."""
    return -(-BUCKET_BYTES // axis.size)


class _Pieces:
    """The pieces of a tensor that is split as a gradient is, of this rank's experts, over some of the axes."""

    def __init__(self, part: Part, own: Tensor, axes: Sequence[MeshAxis]):
        self.part, self.own = part, own
        self._experts = 1 if part.matrix is not None and part.matrix.batch else 0
        self.places = list(itertools.product(*(range(axis.size) for axis in axes)))
        self._ranges = [_ranges_at(part, axes, place)[self._experts :] for place in self.places]
        """The ranges of every dimension but that of experts that the rank at each place has."""
        self._shapes = [(*own.shape[: self._experts], *(stop - first for first, stop in each)) for each in self._ranges]
        self.longest = max(map(math.prod, self._shapes))

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.part.shape) * self.own.itemsize

    def flat(self) -> Tensor:
        """This rank's piece, filled up to the longest. [L]"""
        flat, missing = self.own.reshape(-1), self.longest - self.own.numel()
        return pad(flat, (0, missing)) if missing else flat  # `pad` copies in any case

    def put_together(self, flat: Tensor) -> Tensor:
        """The whole of the flat pieces [..., L] of all places; the axis that was sent over last comes first."""
        whole = self.own.new_empty(*self.own.shape[: self._experts], *self.part.shape[self._experts :])
        for place, ranges, shape in zip(self.places, self._ranges, self._shapes, strict=True):
            whole[self._index(ranges)] = flat[tuple(reversed(place))][: math.prod(shape)].view(shape)
        return whole

    def taken_apart(self, whole: Tensor) -> Tensor:
        """The flat pieces of all places, filled up to the longest. [N, L]"""
        rows_NL = whole.new_zeros(len(self.places), self.longest)
        for row_L, ranges, shape in zip(rows_NL, self._ranges, self._shapes, strict=True):
            row_L[: math.prod(shape)].view(shape).copy_(whole[self._index(ranges)])
        return rows_NL

    def _index(self, ranges: Sequence[Range]) -> tuple[slice, ...]:
        return (slice(None),) * self._experts + tuple(slice(*span) for span in ranges)


def _ranges_at(part: Part, axes: Sequence[MeshAxis], place: tuple[int, ...]) -> tuple[Range, ...]:
    """The part of a rank that differs from this one in its places on `axes` only."""
    coordinate = list(part.coordinate)
    for axis, number in zip(axes, place, strict=True):
        coordinate[axis.index] = number
    return part.ranges_at(coordinate)


def _length(channels: int, part: Part, axis: MeshAxis) -> int:
    """The number of `channels` that fall to this rank where an axis splits them."""
    first, stop = range_of(channels, (axis.index,), part.mesh, part.coordinate)
    return stop - first


def _cost(part: Part, tensor: Tensor) -> int:
    """Bytes of a tensor [..., C] as every rank counts them."""
    assert part.matrix is not None
    return bytes_over_channels(part, math.prod(tensor.shape[len(part.matrix.batch) : -1]), tensor.itemsize)


def bytes_over_channels(part: Part, rows: int, itemsize: int = 4) -> int:
    """Bytes of `rows` numbers for each of this rank's channels, counted alike on every rank."""
    assert part.matrix is not None
    whole = math.prod(part.matrix.batch) * rows * part.matrix.channels * itemsize
    return whole // math.prod(axis.size for axis in part.axes("EC"))
