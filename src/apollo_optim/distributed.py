"""Sharded weights (DTensors): what this rank holds of one, how its state is placed, and which ranks share the rest.

A mesh axis splits a weight's experts E, its contracted side S or its channels C. Every state tensor says by letters
what its dimensions are, and is placed by them:

    R  the rank, which nothing splits
    P  the channels of moments: split like the weight's channels, and further among the ranks that share the side
    W  all dimensions of a weight that is not projected, or its rows alone
    N  what is in one of its rows
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .core.shape import MatrixShape, Range

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


ORDINARY = frozenset({Tensor, nn.Parameter})

Split = tuple[int, ...]
"""The mesh axes that split one dimension, in the order in which they do."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a weight's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: str = ""
    """The kind of each dimension, by the letters above: it decides where its parts lie."""
    on_host: bool = False
    """True if it is kept on the CPU wherever the weight is."""
    by_rows: bool = False
    """True if kernels go through it in rows of many, which on a GPU then begin at whole vectors."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a mesh, of more than one rank."""

    mesh: "DeviceMesh"
    index: int

    @cached_property
    def size(self) -> int:
        return self.mesh.size(self.index)

    @cached_property
    def place(self) -> int:
        """This rank's number in the group of ranks."""
        return self.mesh.get_local_rank(self.index)

    @cached_property
    def group(self) -> "ProcessGroup":
        return self.mesh.get_group(self.index)

    @cached_property
    def order(self) -> tuple[str, int]:
        """Sort key of axes, the same on all ranks: ranks that meet in one sum must not wait for each other in two."""
        names = self.mesh.mesh_dim_names
        return names[self.index] if names else "", self.index

    @property
    def device(self) -> torch.device:
        """The device of its collectives, which is not the weight's where that is offloaded to the host."""
        kind = self.mesh.device_type
        return (
            torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )


@dataclass(frozen=True)
class Part:
    """This rank's part of one weight and of its state."""

    mesh: "DeviceMesh"
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    matrix: MatrixShape | None
    """The whole weight as matrices; None for AdamW."""
    splits: tuple[Split, ...]
    """The mesh axes that split each dimension of the weight."""
    entries: Mapping[str, Entry]
    """The whole of each state tensor."""

    @cached_property
    def letters(self) -> Mapping[str, Split]:
        """The axes that split what each letter stands for."""
        matrix, splits = self.matrix, self.splits
        everything = tuple(axis for split in splits for axis in split)
        if matrix is None:
            within_rows = tuple(axis for split in splits[1:] for axis in split)
            return {"W": everything, "N": within_rows, "E": (), "R": (), "S": (), "C": (), "P": ()}
        experts = len(matrix.batch)
        rows, columns = splits[experts], splits[experts + 1]
        channels, side = (rows, columns) if matrix.channels_are_rows else (columns, rows)
        shared = (*channels, *side)
        # Parts made in another order than the mesh's are strided, which torch means as we do only where all are equal.
        if _are_strided(shared) and matrix.channels % math.prod(self.mesh.size(axis) for axis in shared) != 0:
            shared = channels
        batch = splits[0] if experts else ()
        return {"W": everything, "E": batch, "R": (), "S": side, "C": channels, "P": shared}

    @cached_property
    def is_split(self) -> bool:
        """True if other ranks hold other parts."""
        return bool(self.axes("W"))

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """This rank's part of each dimension of the weight."""
        return self.ranges_at(self.coordinate)

    @cached_property
    def coordinate(self) -> Sequence[int]:
        """This rank's place in the mesh."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "a rank steps only weights whose mesh it belongs to"
        return coordinate

    def ranges_at(self, coordinate: Sequence[int]) -> tuple[Range, ...]:
        """The part of each dimension of the weight that the rank at `coordinate` of the mesh holds."""
        pairs = zip(self.shape, self.splits, strict=True)
        return tuple(range_of(length, split, self.mesh, coordinate) for length, split in pairs)

    @cached_property
    def local_matrix(self) -> MatrixShape | None:
        """This rank's part of the weight as matrices."""
        return None if self.matrix is None else self.matrix.part(self.ranges)

    def splits_dim(self, dim: int) -> bool:
        """True if ranks hold different parts of this dimension."""
        return any(self.mesh.size(axis) > 1 for axis in self.splits[dim])

    @property
    def fewest_columns(self) -> int:
        """The fewest columns that any rank holds, of the ranks that hold some."""
        assert self.matrix is not None
        dim = len(self.matrix.batch) + 1
        split = self.splits[dim]
        coordinates = itertools.product(*(range(self.mesh.size(axis)) for axis in split))
        ranges = (
            range_of(self.shape[dim], split, self.mesh, dict(zip(split, coordinate, strict=True)))
            for coordinate in coordinates
        )
        return min(stop - first for first, stop in ranges if stop > first) * math.prod(self.shape[dim + 1 :])

    @property
    def largest_matrix(self) -> MatrixShape | None:
        """The largest part that any rank holds, as matrices: torch.chunk leaves no part longer than the first."""
        return None if self.matrix is None else self.matrix.part(self.ranges_at([0] * self.mesh.ndim))

    def axes(self, letters: str) -> tuple[MeshAxis, ...]:
        """The axes that split what these letters stand for, in the order in which they do."""
        if letters not in self._axes:
            found = dict.fromkeys(axis for letter in letters for axis in self.letters[letter])
            self._axes[letters] = tuple(MeshAxis(self.mesh, index) for index in found if self.mesh.size(index) > 1)
        return self._axes[letters]

    @cached_property
    def _axes(self) -> dict[str, tuple[MeshAxis, ...]]:
        return {}

    @property
    def moments_are_shared_out(self) -> bool:
        """True if ranks that share the side keep the moments of some channels each, not all those of all."""
        return len(self.letters["P"]) > len(self.letters["C"])

    def _state_splits(self, name: str) -> tuple[Split, ...]:
        if self.matrix is None:  # there is a number for each element, or for each row
            splits = self.splits[: len(self.entries[name].shape)]
        else:
            splits = tuple(self.letters[letter] for letter in self.entries[name].dims)
        # As moments are, scales are not split in strides where those would be unequal.
        if name.endswith("_scale") and splits and _are_strided(splits[-1]):
            uneven = self.entries[name].shape[-1] % math.prod(self.mesh.size(axis) for axis in splits[-1]) != 0
            return (*splits[:-1], ()) if uneven else splits
        return splits

    def ranks_of(self, name: str) -> int:
        """Among how many ranks a state tensor is split."""
        return math.prod(self.mesh.size(axis) for split in self._state_splits(name) for axis in split)

    def axes_of_columns(self, name: str) -> tuple[MeshAxis, ...]:
        """The axes that split the last dimension of a state tensor."""
        split = self._state_splits(name)[-1]
        return tuple(MeshAxis(self.mesh, index) for index in split if self.mesh.size(index) > 1)

    def state_ranges(self, name: str) -> tuple[Range, ...]:
        """This rank's part of each dimension of a state tensor."""
        pairs = zip(self.entries[name].shape, self._state_splits(name), strict=True)
        return tuple(range_of(length, split, self.mesh, self.coordinate) for length, split in pairs)

    def placements(self, name: str) -> tuple["Placement", ...]:
        """The layout of a state tensor on the mesh."""
        return placements_of(self._state_splits(name), self.mesh)

    def placed(self, name: str, whole: Tensor) -> Tensor:
        """A state tensor placed where it belongs, sharing no memory with `whole`, which is all of it anywhere."""
        from torch.distributed.tensor import DTensor

        if isinstance(whole, DTensor):
            if whole.device_mesh == self.mesh and whole.placements == self.placements(name):
                return whole.clone()
            whole = whole.full_tensor()
        if not self.entries[name].dims:
            return whole.clone()
        index = tuple(slice(*span) for span in self.state_ranges(name))
        return self.wrapped(name, whole[index].clone(memory_format=torch.contiguous_format))

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a state tensor."""
        return tuple(stop - first for first, stop in self.state_ranges(name))

    def wrapped(self, name: str, local: Tensor) -> Tensor:
        """A state tensor, placed where it belongs, of which this rank holds `local`."""
        return _wrapped(local, self.mesh, self.placements(name), self.entries[name].shape)

    def is_placed(self, name: str, tensor: Tensor) -> bool:
        """True if a state tensor lies where it belongs."""
        if not self.entries[name].dims:
            return not is_sharded(tensor)
        here: Any = tensor
        return is_sharded(tensor) and here.device_mesh == self.mesh and here.placements == self.placements(name)


def _are_strided(split: Split) -> bool:
    """True if the parts that these axes make do not lie in the order of their ranks."""
    return sorted(split) != list(split)


def is_sharded(tensor: Tensor) -> bool:
    """True if this is a DTensor. Asked at every step, and without importing what would make one."""
    return type(tensor) not in ORDINARY and hasattr(type(tensor), "device_mesh")


def splitting_axes(tensor: Tensor) -> tuple[MeshAxis, ...]:
    """The axes of a mesh whose ranks hold different parts of a tensor; none for an ordinary one."""
    if not is_sharded(tensor):
        return ()
    held: Any = tensor
    pairs = enumerate(held.placements)
    return tuple(
        MeshAxis(held.device_mesh, i) for i, each in pairs if not each.is_replicate() and held.device_mesh.size(i) > 1
    )


def is_offloaded(tensor: Tensor) -> bool:
    """True if this is a DTensor whose parts lie on the host, while its mesh is of other devices."""
    held: Any = tensor
    return is_sharded(tensor) and held.device_mesh.device_type != tensor.device.type


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    held: Any = tensor
    if not is_sharded(tensor):
        return tensor
    # What `to_local` gives where nothing is recorded, without the view that torch 2.13 makes of a parameter's part.
    return held.to_local() if torch.is_grad_enabled() else held._local_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    spread: Any = tensor
    return spread.full_tensor() if is_sharded(tensor) else tensor


def placed_as(weight: Tensor, rows: Tensor) -> Tensor:
    """A DTensor whose rows lie where those of a weight do, which is split by nothing else; this rank's are `rows`."""
    held: Any = weight
    return _wrapped(rows, held.device_mesh, held.placements, (len(weight), *rows.shape[1:]))


def _wrapped(local: Tensor, mesh: "DeviceMesh", placements: Sequence["Placement"], shape: Sequence[int]) -> Tensor:
    """A DTensor of this whole shape, of which this rank holds `local`; no rank asks another."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def is_placed_as(weight: Tensor, other: Tensor) -> bool:
    """True if two tensors are sharded in the same way."""
    one: Any = weight
    two: Any = other
    if not (is_sharded(one) and is_sharded(two)):
        return is_sharded(one) == is_sharded(two)
    return one.device_mesh == two.device_mesh and one.placements == two.placements


def sampled(tensor: Tensor, part: Part | None, count: int) -> list[float]:
    """Up to `count` of a tensor's elements, evenly spread, the same on every rank.

    Asks the device and the other ranks; none where there is nothing to ask, as on the meta device and in a capture.
    """
    if tensor.is_meta or tensor.numel() == 0 or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return []
    count = min(count, tensor.numel())
    flat = torch.arange(count, device="cpu") * tensor.numel() // count
    indices = torch.unravel_index(flat, tensor.shape) if tensor.dim() > 0 else ()
    if part is None or not part.is_split:
        return _values_at(local(tensor), indices).reshape(-1).tolist()
    # Each rank gives the elements that it holds, and zeros for those of others.
    spans = list(zip(indices, part.ranges, strict=True))
    is_here = torch.stack([(first <= index) & (index < stop) for index, (first, stop) in spans]).all(dim=0)
    given = torch.zeros(count, dtype=torch.float64, device="cpu")
    given[is_here] = _values_at(local(tensor), [(index - first)[is_here] for index, (first, _) in spans])
    for axis in part.axes("W"):
        given = given.to(axis.device)
        torch.distributed.all_reduce(given, group=axis.group)
    return given.tolist()


def _values_at(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Elements of an ordinary tensor, on the host."""
    return tensor.detach()[tuple(index.to(tensor.device) for index in indices)].cpu().double()


def split_as(weight: Tensor, value: Tensor) -> Tensor:
    """A tensor that is whole on every rank, sharded as a weight is: each takes its own part, and none asks another."""
    if not is_sharded(weight):
        return value
    from torch.distributed.tensor import distribute_tensor

    spread: Any = weight
    return distribute_tensor(value.to(weight.device), spread.device_mesh, spread.placements, src_data_rank=None)


def fill_(tensor: Tensor, value: Tensor) -> None:
    """tensor <- value, which is the whole of it on every rank."""
    tensor.copy_(split_as(tensor, value))


def align_gradient_(weight: Tensor) -> None:
    """Place a gradient as its weight is: one that ranks have yet to add up is added up."""
    held: Any = weight
    if is_sharded(weight) and held.grad.placements != held.placements:
        weight.grad = held.grad.redistribute(placements=held.placements)


def part_of(name: str, weight: Tensor, matrix: MatrixShape | None, entries: Mapping[str, Entry]) -> Part:
    """This rank's part of a DTensor, the weight called `name`, and of its state."""
    held: Any = weight
    mesh, shape = held.device_mesh, tuple(weight.shape)
    splits = tuple(split_of(name, dim, held.placements, mesh) for dim in range(len(shape)))
    if matrix is not None:
        _check_columns(name, matrix, splits, mesh)
    part = Part(mesh, shape, matrix, splits, entries)
    expected, found = tuple(stop - first for first, stop in part.ranges), tuple(local(weight).shape)
    if expected != found:
        raise ValueError(f"{name} {shape}: this rank holds {found} of it; {held.placements} on {mesh} are {expected}")
    return part


def _check_columns(name: str, matrix: MatrixShape, splits: tuple[Split, ...], mesh: "DeviceMesh") -> None:
    """Raise ValueError where a rank's columns of a flattened weight would not lie together, or not as its state's."""
    first, *inner = splits[len(matrix.batch) + 1 :]
    if not inner:
        return
    length = matrix.weight[len(matrix.batch) + 1]
    uneven = length % math.prod(mesh.size(axis) for axis in first) != 0
    if uneven or any(mesh.size(axis) > 1 for split in inner for axis in split):
        raise ValueError(
            f"{name} {matrix.weight} is stepped as a matrix of {matrix.rows} x {matrix.columns}, and sharded inside "
            "its columns. Shard it on dimension 0, or evenly on dimension 1, or leave it to AdamW (rank=None)"
        )


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
    """The part of `length` at `coordinate`, after each axis has split it as torch.chunk does."""
    first, stop = 0, length
    for axis in split:
        chunk = -(-(stop - first) // mesh.size(axis))
        begin = min(first + coordinate[axis] * chunk, stop)
        first, stop = begin, min(begin + chunk, stop)
    return first, stop
