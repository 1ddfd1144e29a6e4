"""What a step of a sharded weight asks of other ranks, as parts of its generator.

Shapes: E experts (where there are any), R rank, S this rank's part of the contracted side, C its channels, P those of
them whose moments it keeps.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..distributed import Axis, Part
from .lockstep import Request, Step


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
        low_RC = low_RP[..., : _length(channels, axis)]
    return low_RC


def gathered(part: Part, piece_P: Tensor) -> Step[Tensor]:
    """All of this rank's channels [..., C], from those whose moments each rank keeps [..., P]."""
    if not part.moments_are_shared_out or part.local_matrix is None:
        return piece_P
    cost = _cost(part, piece_P)
    levels: list[tuple[Axis, int]] = []
    length = part.local_matrix.channels
    for axis in part.axes("S"):
        levels.append((axis, length))
        length = _length(length, axis)
    for axis, length in reversed(levels):
        chunk = -(-length // axis.size)
        everyone = yield Request("gather", axis, pad(piece_P, (0, chunk - piece_P.shape[-1])), cost)
        piece_P = everyone.movedim(0, -2).flatten(-2)[..., :length]
    return piece_P


def gathered_gradient(part: Part, grad: Tensor) -> Step[Tensor]:
    """All of the gradient, of this rank's experts, from what each rank has of it."""
    axes = part.axes("SC")
    places = list(itertools.product(*(range(axis.size) for axis in axes)))
    ranges = [_ranges_at(part, axes, place) for place in places]
    lengths = [[stop - first for first, stop in each] for each in ranges]
    longest = max(map(math.prod, lengths))
    flat = pad(grad.reshape(-1), (0, longest - grad.numel()))
    for axis in axes:
        flat = yield Request("gather", axis, flat, math.prod(part.shape) * grad.itemsize)
    experts = [grad.shape[0]] if part.matrix is not None and part.matrix.batch else []
    whole = grad.new_empty(*experts, *part.shape[len(experts) :])
    for place, each, shape in zip(places, ranges, lengths, strict=True):
        index = (slice(None),) * len(experts) + tuple(slice(*span) for span in each[len(experts) :])
        # The axis that was gathered last comes first.
        whole[index] = flat[tuple(reversed(place))][: math.prod(shape)].view(shape)
    return whole


def _ranges_at(part: Part, axes: tuple[Axis, ...], place: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """What a rank holds that differs from this one in its places on `axes` only."""
    coordinate = list(part.coordinate)
    for axis, number in zip(axes, place, strict=True):
        coordinate[axis.index] = number
    return part.ranges_at(coordinate)


def _length(channels: int, axis: Axis) -> int:
    """How many of `channels` fall to this rank of an axis that splits them as torch.chunk would."""
    chunk = -(-channels // axis.size)
    return min(max(channels - axis.rank * chunk, 0), chunk)


def _cost(part: Part, tensor: Tensor) -> int:
    """Bytes of a tensor [..., C] as every rank counts them."""
    assert part.matrix is not None
    return bytes_over_channels(part, math.prod(tensor.shape[len(part.matrix.batch) : -1]), tensor.itemsize)


def bytes_over_channels(part: Part, rows: int, itemsize: int = 4) -> int:
    """What `rows` numbers for each of this rank's channels take: the same on every rank, however unequal the parts."""
    assert part.matrix is not None
    whole = math.prod(part.matrix.batch) * rows * part.matrix.channels * itemsize
    return whole // math.prod(axis.size for axis in part.axes("EC"))
