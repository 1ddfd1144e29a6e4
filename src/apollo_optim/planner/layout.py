"""How a model lies on GPUs: the axes of a mesh, which of them split which weight, and what a rank then holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..choices import chosen
from ..core.shape import matrix_shape
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
"""By default, ranks of tensor parallelism, and ranks that share a copy of the model under hsdp."""
EXPERT_GPUS = 64
"""By default, over how many GPUs experts are dealt out: DeepSeek-V3's own number."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, of more than one rank."""

    name: str
    size: int
    index: int
    """Its place in the mesh."""


Split = tuple[Axis, ...]
"""The axes that split one dimension, in the order in which they do."""
Place = Mapping[str, int]
"""A rank, by its place on each axis; on those that are not named it is the first, which never has less than others."""
FIRST: Place = {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and what its axes split."""

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
    """What FSDP2 splits of a matrix: its rows, or its channels where they divide evenly."""

    @property
    def readers(self) -> int:
        """Ranks, or groups of tensor parallelism, that read different text."""
        return self.gpus // self.tensor

    def axes_of(self, experts: bool) -> dict[str, Axis]:
        """The axes of the mesh that experts, or other weights, live on: those of more than one rank."""
        if experts and self.expert > 1:
            sizes = {"expert_shard": self.shard // self.expert, "expert": self.expert}
        else:
            sizes = {"replicate": self.replicas, "shard": self.shard, "tensor": self.tensor}
        return {name: Axis(name, size, number) for number, (name, size) in enumerate(sizes.items()) if size > 1}

    def splits(self, weight: Weight) -> tuple[Split, ...]:
        """The axes that split each dimension of a weight."""
        return _splits(self, weight.shape, weight.cut)

    def sharding_of(self, weight: Weight) -> Axis | None:
        """The axis by which FSDP2 splits a weight."""
        return _sharding(self.axes_of(weight.is_experts))

    def local_shape(self, weight: Weight, place: Place = FIRST) -> tuple[int, ...]:
        """What the rank at `place` holds of a weight."""
        pairs = zip(weight.shape, self.splits(weight), strict=True)
        return tuple(part(length, split, place) for length, split in pairs)

    def local_numbers(self, weights: Iterable[Weight], place: Place = FIRST) -> int:
        """How many numbers of these weights the rank at `place` holds."""
        return sum(math.prod(self.local_shape(weight, place)) for weight in weights)

    def gathered_numbers(self, weight: Weight) -> int:
        """Numbers that a rank has of a weight once FSDP2 has gathered it, with what evens out the ranks' parts."""
        axis = self.sharding_of(weight)
        return math.prod(self.local_shape(weight)) * (1 if axis is None else axis.size)


def _sharding(axes: Mapping[str, Axis]) -> Axis | None:
    return axes.get("shard") or axes.get("expert_shard")


@lru_cache(maxsize=1024)
def _splits(layout: Layout, shape: Shape, cut: Cut) -> tuple[Split, ...]:
    """The axes that split each dimension. FSDP2 splits what the others have left."""
    axes = layout.axes_of(experts=len(shape) == 3)
    splits: list[Split] = [()] * len(shape)
    if "expert" in axes:
        splits[0] += (axes["expert"],)
    if "tensor" in axes and cut != "none":
        splits[-2 if cut == "rows" else -1] += (axes["tensor"],)
    if (axis := _sharding(axes)) is not None:
        splits[_sharded_dim(layout, shape, splits, axis)] += (axis,)
    return tuple(splits)


def _sharded_dim(layout: Layout, shape: Shape, splits: Sequence[Split], axis: Axis) -> int:
    """The dimension that FSDP2 splits. Beside the first, it takes only those that divide evenly."""
    matrix = matrix_shape(shape, 1)
    if layout.split == "channels" and matrix is not None:
        dim = len(shape) - (2 if matrix.channels_are_rows else 1)
    elif axis.name == "expert_shard" and part(shape[0], splits[0]) < axis.size:
        dim = 1  # fewer experts than ranks that are to share them
    else:
        return 0
    return dim if part(shape[dim], splits[dim]) % axis.size == 0 else 0


def part(length: int, split: Split, place: Place = FIRST) -> int:
    """What is left of `length` at `place` once each axis has split it as torch.chunk does."""
    for axis in split:
        chunk = -(-length // axis.size)
        length = min(max(length - place.get(axis.name, 0) * chunk, 0), chunk)
    return length


def layout_of(
    model: Transformer,
    gpus: int,
    shard: str = "fsdp",
    replicas: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
    split: str = "rows",
) -> Layout:
    """The layout of this name, or a ValueError that says what does not fit."""
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
    sizes = {"tensor": 1, "replicas": 1, "expert": 1}
    if "tp" in kinds:
        sizes["tensor"] = gpus if shard == "tp" else tensor or min(NODE, gpus)
    rest = _shared(gpus, sizes["tensor"], "--tensor-gpus")
    if shard == "ddp":
        sizes["replicas"] = gpus
    if "hsdp" in kinds:
        sizes["replicas"] = replicas or max(rest // NODE, 1)
    if "ep" in kinds:
        sizes["expert"] = expert or min(EXPERT_GPUS, gpus)
        _shared(gpus, sizes["expert"], "--expert-gpus")
    layout = Layout(gpus=gpus, shard=_shared(rest, sizes["replicas"], "--replicas"), split=split, **sizes)
    _check_heads(model, layout)
    _check_experts(model, layout)
    return layout


def _shared(ranks: int, size: int, flag: str) -> int:
    """How many groups of `size` there are in so many ranks."""
    if size < 1 or ranks % size:
        fitting = [each for each in range(1, ranks + 1) if ranks % each == 0]
        nearest = min(fitting, key=lambda each: abs(each - size))
        raise ValueError(f"{flag} {size} does not divide {ranks} GPUs; {nearest} does")
    return ranks // size


def _check_heads(model: Transformer, layout: Layout) -> None:
    heads = model.attention.key_heads
    if heads % layout.tensor:
        raise ValueError(
            f"tensor parallelism over {layout.tensor} GPUs cannot share the model's {heads} heads of keys and values; "
            f"{math.gcd(heads, layout.tensor)} GPUs can"
        )


def _check_experts(model: Transformer, layout: Layout) -> None:
    if layout.expert == 1:
        return
    if model.experts is None:
        raise ValueError("--shard fsdp+ep needs a model with experts; fsdp and hsdp are for this one")
    if model.experts.count % layout.expert:
        raise ValueError(
            f"--expert-gpus {layout.expert} cannot share the model's {model.experts.count} experts evenly; "
            f"{math.gcd(model.experts.count, layout.expert)} can"
        )
