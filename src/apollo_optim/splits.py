"""How the axes of a mesh split the dimensions of a tensor, as torch's placements say it and as we do."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .core.shape import Range

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Split = tuple[int, ...]
"""The mesh axes that split one dimension, in the order in which they do."""


def split_of(name: str, dim: int, placements: Sequence["Placement"], mesh: "DeviceMesh") -> Split:
    """The axes that split a dimension, in the order in which they do.

    Axes split from the first to the last, but for one that is strided: it comes after those behind it whose parts it
    strides over (FSDP, on the first axis, splits what tensor parallelism has split before it on the second).
    """
    from torch.distributed.tensor import Replicate, Shard

    order: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) and not hasattr(placement, "split_factor"):
            raise ValueError(f"{name} is placed {tuple(placements)}; expected Shard and Replicate only")
        if placement.dim != dim:
            continue
        before = 0
        while math.prod(mesh.size(other) for other in order[:before]) < getattr(placement, "split_factor", 1):
            before += 1
            if before > len(order):
                raise ValueError(f"{name} is placed {tuple(placements)}, which strides over parts that there are not")
        order.insert(before, axis)
    return tuple(order)


def placements_of(splits: Sequence[Split], mesh: "DeviceMesh") -> tuple["Placement", ...]:
    """The inverse of `split_of`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, split in enumerate(splits):
        for number, axis in enumerate(split):
            stride = math.prod(mesh.size(before) for before in split[:number] if before > axis)
            placements[axis] = Shard(dim) if stride == 1 else _StridedShard(dim, split_factor=stride)
    return tuple(placements)


def range_of(length: int, split: Split, mesh: "DeviceMesh", coordinate: Sequence[int] | Mapping[int, int]) -> Range:
    """What is left of `length` at `coordinate` once each axis has split it as torch.chunk would."""
    first, stop = 0, length
    for axis in split:
        chunk = -(-(stop - first) // mesh.size(axis))
        begin = min(first + coordinate[axis] * chunk, stop)
        first, stop = begin, min(begin + chunk, stop)
    return first, stop
