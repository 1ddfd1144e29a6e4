"""How weights lie on meshes of four processes, and runs of sharded weights beside whole ones."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import Int8Weight
from family import Member
from ranks import device_mesh, of_the_first
from runs import gradient, weights

# Nothing divides by four: of 9 rows the last of four ranks has none, of 3 experts neither. Rank 4 stays far below.
# Only "even" divides, as it must for moments to be placed in strides.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (9, 41),
    "tall": (41, 9),
    "square": (11, 11),
    "experts": (3, 9, 14),
    "vector": (5,),
    "even": (12, 32),
    "conv": (8, 4, 3, 3),
}

ROWS, COLUMNS, INNER, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()
# FSDP, on the first axis of a mesh, splits what tensor parallelism has split before it on the second.
FSDP_OF_ROWS = _StridedShard(0, split_factor=2)

MATRICES = "wide", "tall", "square", "experts"

# Mesh, placements, and the weights that show what is special about them.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[str, ...]]] = {
    "rows": ((4,), (ROWS,), (*MATRICES, "vector", "conv")),
    "columns": ((4,), (COLUMNS,), MATRICES),
    "inner": ((4,), (INNER,), ("experts",)),
    "rows of two": ((2,), (ROWS,), ("wide", "tall", "experts")),
    "columns of two": ((2,), (COLUMNS,), ("wide", "tall", "square")),
    "whole": ((4,), (WHOLE,), ("wide", "vector")),
    "hybrid": ((2, 2), (WHOLE, ROWS), ("wide", "tall", "vector")),
    "fsdp and rows": ((2, 2), (FSDP_OF_ROWS, ROWS), ("wide", "tall", "experts", "vector", "even")),
    "fsdp and columns": ((2, 2), (ROWS, COLUMNS), (*MATRICES, "even", "conv")),
    "columns and rows": ((2, 2), (COLUMNS, ROWS), ("wide", "tall", "even")),
    "rows twice": ((2, 2), (ROWS, ROWS), ("wide", "tall")),
    "experts and inner": ((2, 2), (ROWS, INNER), ("experts",)),
    "rows and inner": ((2, 2), (COLUMNS, INNER), ("experts",)),
}
SOME_LAYOUTS = ("rows", "columns", "fsdp and columns", "experts and inner")
"""Each way to split a matrix: channels, contracted side, both, and experts; uneven and empty parts are among them."""


@cache
def mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of this shape on the group's four ranks; one of two ranks exists twice. torch takes 7 ms to cut it out."""
    if shape == (2,):
        return device_mesh(copies=2, shard=2)["shard"]
    return device_mesh(**dict(zip(("shard", "tensor"), shape, strict=False)))


def part(tensor: Tensor, on: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this rank holds of a tensor, by torch.chunk and nothing of ours."""
    order = sorted(range(on.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard))
    coordinate = on.get_coordinate()
    assert coordinate is not None
    for axis in order:
        placement: Any = placements[axis]
        if not isinstance(placement, Replicate):
            chunks = tensor.chunk(on.size(axis), dim=placement.dim)
            number = coordinate[axis]
            tensor = chunks[number] if number < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor.contiguous()


def shard(tensor: Tensor, on: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A whole tensor as a DTensor."""
    local = part(tensor.detach(), on, placements).clone()
    return DTensor.from_local(
        local, on, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


class Case(NamedTuple):
    """One weight of a run."""

    layout: str | None
    """None for an ordinary tensor."""
    name: str
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES[self.name]

    @property
    def mesh(self) -> DeviceMesh | None:
        return None if self.layout is None else mesh(LAYOUTS[self.layout][0])

    @property
    def placements(self) -> tuple[Placement, ...]:
        return () if self.layout is None else LAYOUTS[self.layout][1]

    def placed(self, tensor: Tensor) -> Tensor:
        """This rank's view of a whole tensor."""
        tensor = tensor.to(self.dtype)
        return tensor.clone() if self.mesh is None else shard(tensor, self.mesh, self.placements)


class End(NamedTuple):
    """Where a weight has come to."""

    weight: Tensor
    last_norm: Tensor | None
    """None without a limiter."""


class Run:
    """Weights of many layouts under one optimizer, so that what they say to other ranks travels together."""

    def __init__(
        self,
        member: Member,
        cases: Iterable[Case],
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        refresh_every: int = 10,
        group_size: int | None = None,
        **options: Any,
    ):
        """`group_size` makes int8 weights of matrices."""
        self.member, self.shapes = member, shapes
        starts: dict[str, Tensor] = weights(shapes, torch.float64)
        if group_size is not None:
            starts |= {name: Int8Weight.of(each, group_size) for name, each in starts.items() if each.dim() == 2}
        self.weights = {case: nn.Parameter(case.placed(starts[case.name].detach())) for case in cases}
        # Prefixes of wrappers do not count: weights of one name draw the same numbers, whatever their layout.
        named = [("module." * number + case.name, weight) for number, (case, weight) in enumerate(self.weights.items())]
        group = {"params": named, "refresh_every": refresh_every}
        self.optimizer: ProjectedOptimizer = member.build([group], **({"lr": 0.01, "weight_decay": 0.1} | options))

    def step(self, number: int, spoilt: Iterable[str] = ()) -> None:
        """The step of this number, by the same gradients in every layout; those of `spoilt` have one NaN in them."""
        grads = {}
        for name, shape in self.shapes.items():
            grads[name] = gradient(name, number, torch.empty(shape, dtype=torch.float64))
            if name in spoilt:
                grads[name].view(-1)[-1] = torch.nan
        for case, weight in self.weights.items():
            if weight.grad is None or case.mesh is None:
                weight.grad = case.placed(grads[case.name])
            else:
                weight.grad.to_local().copy_(part(grads[case.name], case.mesh, case.placements))
        self.optimizer.step()

    def ends(self) -> dict[Case, End]:
        states = self.optimizer.state
        return {case: End(each.detach(), states[each].get("last_norm")) for case, each in self.weights.items()}

    def errors(self, whole: Mapping[Case, End]) -> dict[Case, float]:
        """How far this rank's parts, or the norms that limit them, are from those of the ordinary weights."""
        whole_ends = {case: whole[case._replace(layout=None)] for case in self.weights}
        return {
            case: max(_error(*pair) for pair in zip(ours, whole_ends[case], strict=True) if pair[0] is not None)
            for case, ours in self.ends().items()
        }


def _error(ours: Any, whole: Tensor) -> float:
    """How far what this rank holds is from that part of a whole tensor, relative to the largest."""
    held, expected = ours, whole
    if isinstance(ours, DTensor):
        held, expected = ours.to_local(), part(whole, ours.device_mesh, ours.placements)
    return float((held - expected).abs().max() / whole.abs().max().clamp_min(1e-300)) if held.numel() else 0.0


def cases(dtypes: Iterable[torch.dtype], layouts: Iterable[str] = LAYOUTS) -> list[Case]:
    """Every weight in every layout that fits it."""
    return [Case(layout, name, dtype) for dtype in dtypes for layout in layouts for name in LAYOUTS[layout][2]]


def whole_after(steps: int, member: Member, dtypes: Iterable[torch.dtype], **options: Any) -> dict[Case, End]:
    """Every weight as an ordinary tensor, stepped by the first rank alone."""

    def train() -> dict[Case, End]:
        run = Run(member, [Case(None, name, dtype) for dtype in dtypes for name in SHAPES], **options)
        for step in range(steps):
            run.step(step)
        return run.ends()

    return of_the_first(train)
