"""The layout of a model on GPUs: the axes of a mesh, which weights they split, and what a rank then holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from ..choices import chosen
from ..core.shape import MatrixShape, matrix_shape
from ..distributed import Entry, Part, Split, range_of
from .models import Cut, Shape, Transformer, Weight

LAYOUTS = {
    "ddp": "every GPU holds the whole model; gradients are averaged",
    "fsdp": "FSDP2 over all GPUs",
    "hsdp": "FSDP2 inside groups, each a copy of the model",
    "tp": "tensor parallelism over all GPUs",
    "fsdp+tp": "tensor parallelism inside a node, FSDP2 over the nodes",
    "hsdp+tp": "the same, FSDP2 inside groups of nodes",
    "fsdp+ep": "FSDP2 over all GPUs, but experts are dealt out and tokens travel to them",
}
SPLITS = "rows", "channels"

NODE = 8
"""Default ranks of tensor parallelism, and default ranks that share a copy of the model under hsdp."""
EXPERT_GPUS = 64
"""Default GPUs that experts are dealt out over, as for DeepSeek-V3."""


@dataclass(frozen=True)
class FakeMesh:
    """A device mesh without processes, which answers as `DeviceMesh` does on the first rank: none holds more."""

    mesh_dim_names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_coordinate(self) -> Sequence[int]:
        return (0,) * self.ndim

    def get_local_rank(self, axis: int) -> int:
        return 0

    def get_group(self, axis: int) -> SimpleNamespace:
        return SimpleNamespace(group_name=self.mesh_dim_names[axis])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The axes of a mesh, and what they split."""

    gpus: int
    shard: int = 1
    """Ranks that share every weight by FSDP2."""
    replicas: int = 1
    """Copies of the model."""
    tensor: int = 1
    """Ranks of tensor parallelism."""
    expert: int = 1
    """Ranks that experts are dealt out over."""
    split: str = "rows"
    """The dimension of a matrix that FSDP2 splits: its rows, or its channels where they divide evenly."""

    @property
    def readers(self) -> int:
        """Ranks, or groups of tensor parallelism, that read different text."""
        return self.gpus // self.tensor

    def mesh(self, experts: bool) -> FakeMesh:
        """The mesh of experts, or of the other weights, without axes of one rank."""
        if experts and self.expert > 1:
            sizes = {"expert_shard": self.shard // self.expert, "expert": self.expert}
        else:
            sizes = {"replicate": self.replicas, "shard": self.shard, "tensor": self.tensor}
        names = tuple(name for name, size in sizes.items() if size > 1)
        return FakeMesh(names, tuple(sizes[name] for name in names))

    def part(self, weight: Weight, matrix: MatrixShape | None = None, state: Mapping[str, Entry] | None = None) -> Part:
        """The first rank's part of a weight, and of its state."""
        mesh: Any = self.mesh(weight.is_experts)
        return Part(mesh, weight.shape, matrix, _splits(self, weight.shape, weight.cut), state or {})

    def fsdp_ranks(self, weight: Weight) -> int:
        """Ranks over which FSDP2 splits a weight; 1 where it does not."""
        return self.shard // self.expert if weight.is_experts else self.shard

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        """The shape of the first rank's part of a weight."""
        return tuple(stop - first for first, stop in self.part(weight).ranges)

    def local_numbers(self, weights: Iterable[Weight]) -> int:
        """The count of numbers of these weights that the first rank holds."""
        return sum(math.prod(self.local_shape(weight)) for weight in weights)

    def gathered_numbers(self, weight: Weight) -> int:
        """The count of numbers that a rank has when FSDP2 has gathered a weight, padding included."""
        return math.prod(self.local_shape(weight)) * self.fsdp_ranks(weight)


@lru_cache(maxsize=1024)
def _splits(layout: Layout, shape: Shape, cut: Cut) -> tuple[Split, ...]:
    """The mesh axes that split each dimension of a weight. FSDP2 splits what the other axes leave."""
    mesh = layout.mesh(experts=len(shape) == 3)
    axes = {name: axis for axis, name in enumerate(mesh.mesh_dim_names)}
    splits: list[Split] = [()] * len(shape)
    if "expert" in axes:
        splits[0] += (axes["expert"],)
    if "tensor" in axes and cut != "none":
        splits[-2 if cut == "rows" else -1] += (axes["tensor"],)
    for name in ("shard", "expert_shard"):
        if name in axes:
            splits[_sharded_dim(layout, shape, splits, mesh, axes[name])] += (axes[name],)
    return tuple(splits)


def _sharded_dim(layout: Layout, shape: Shape, splits: Sequence[Split], mesh: FakeMesh, axis: int) -> int:
    """The dimension that FSDP2 splits over `axis`: the first, or another one that divides evenly."""

    def left(dim: int) -> int:
        held: Any = mesh
        first, stop = range_of(shape[dim], splits[dim], held, mesh.get_coordinate())
        return stop - first

    matrix = matrix_shape(shape, 1)
    if layout.split == "channels" and matrix is not None:
        dim = len(shape) - (2 if matrix.channels_are_rows else 1)
    elif mesh.mesh_dim_names[axis] == "expert_shard" and left(0) < mesh.size(axis):
        dim = 1  # fewer experts than ranks to share them
    else:
        return 0
    return dim if left(dim) % mesh.size(axis) == 0 else 0


def layout_of(
    model: Transformer,
    gpus: int,
    shard: str = "fsdp",
    replicas: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
    split: str = "rows",
) -> Layout:
    """The layout of this name; ValueError if it does not fit the model or the GPUs."""
    kinds = chosen("--shard", shard, LAYOUTS).split("+")
    chosen("--split", split, SPLITS)
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1, got {gpus}")
    for flag, given, kind in (("--replicas", replicas, "hsdp"), ("--expert-gpus", expert, "ep")):
        if given is not None and kind not in kinds:
            raise ValueError(f"{flag} has no effect with --shard {shard}; it is for {kind}")
    if tensor is not None and ("tp" not in kinds or shard == "tp"):
        raise ValueError(f"--tensor-gpus has no effect with --shard {shard}; it is for fsdp+tp and hsdp+tp")
    if split != "rows" and not {"fsdp", "hsdp"} & set(kinds):
        raise ValueError(f"--split has no effect with --shard {shard}; it is for fsdp and hsdp")
    if tensor is None:
        tensor = gpus if shard == "tp" else min(NODE, gpus) if "tp" in kinds else 1
    rest = _shared(gpus, tensor, "--tensor-gpus")
    if replicas is None:
        replicas = gpus if shard == "ddp" else max(rest // NODE, 1) if "hsdp" in kinds else 1
    if expert is None:
        expert = min(EXPERT_GPUS, gpus) if "ep" in kinds else 1
    _shared(gpus, expert, "--expert-gpus")
    sharers = _shared(rest, replicas, "--replicas")
    layout = Layout(gpus=gpus, shard=sharers, replicas=replicas, tensor=tensor, expert=expert, split=split)
    _check_shared(model, layout)
    return layout


def _shared(ranks: int, size: int, flag: str) -> int:
    """The number of groups of `size` that the ranks form; ValueError if they do not divide evenly."""
    if size < 1 or ranks % size:
        fitting = [each for each in range(1, ranks + 1) if ranks % each == 0]
        nearest = min(fitting, key=lambda each: abs(each - size))
        raise ValueError(f"{flag} {size} does not divide {ranks} GPUs; {nearest} does")
    return ranks // size


def _check_shared(model: Transformer, layout: Layout) -> None:
    """Raise ValueError if ranks cannot share the model's heads or experts evenly."""
    heads = model.attention.key_heads
    if heads % layout.tensor:
        raise ValueError(
            f"tensor parallelism over {layout.tensor} GPUs cannot share the model's {heads} heads of keys and values; "
            f"{math.gcd(heads, layout.tensor)} GPUs can"
        )
    if layout.expert == 1:
        return
    if model.experts is None:
        raise ValueError("--shard fsdp+ep needs a model with experts; fsdp and hsdp are for this one")
    if model.experts.count % layout.expert:
        raise ValueError(
            f"--expert-gpus {layout.expert} cannot share the model's {model.experts.count} experts evenly; "
            f"{math.gcd(model.experts.count, layout.expert)} can"
        )
