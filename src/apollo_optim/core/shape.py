"""The view of a weight of any shape as matrices of a smaller side S and channels C.

Every decision is made from the global shape, so that a shard decides as the whole weight would.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Rank = int | float | None
FULL_RANK = 2**31 - 1
"""A rank that no side reaches, so that the identity is always the basis."""
Range = tuple[int, int]
"""Half-open: first and one past the last."""

# What is taken for a vocabulary (docs/numerics.md): layers this wide have many weights of that width, and so do
# adapters, which are long and narrow.
LARGE_VOCABULARY = 30_000
SMALL_VOCABULARY, VOCABULARY_RATIO, LEAST_WIDTH = 8192, 8, 64
MOST_VOCABULARIES = 2
"""Matrices of one vocabulary: embedding and head."""


@dataclass(frozen=True)
class MatrixShape:
    """One weight, or a rank's part of it, as `experts` matrices, each projected from S to R rows along C channels."""

    weight: tuple[int, ...]
    experts: int | None
    rows: int
    columns: int
    rank: int
    """Rows R of the auxiliary space: the requested rank, at most S."""
    whole: "MatrixShape | None" = None
    """The weight that this is a part of; None where it is all of it."""
    first_expert: int = 0
    """The place of a part's first expert in the whole."""
    first_side: int = 0
    """The place of its first entry of side S."""

    @property
    def global_shape(self) -> "MatrixShape":
        return self.whole or self

    @property
    def channels_are_rows(self) -> bool:
        """The larger side carries the channels; of a square weight, the rows do."""
        return self.global_shape.rows >= self.global_shape.columns

    @property
    def side(self) -> int:
        """S, the contracted side."""
        return self.columns if self.channels_are_rows else self.rows

    @property
    def channels(self) -> int:
        """C, the side that keeps its length."""
        return self.rows if self.channels_are_rows else self.columns

    @property
    def full_rank(self) -> bool:
        """A random square basis would only add noise, so from this rank on the basis is the identity."""
        return self.rank == self.global_shape.side

    @property
    def batch(self) -> tuple[int, ...]:
        return () if self.experts is None else (self.experts,)

    @property
    def low(self) -> tuple[int, ...]:
        """The shape of the projected gradient and of its moments."""
        return (*self.batch, self.rank, self.channels)

    def part(self, ranges: Sequence[Range]) -> "MatrixShape":
        """The shape of the part that lies in these ranges of the weight's dimensions."""
        lengths = tuple(stop - first for first, stop in ranges)
        matrix = len(self.batch)
        rows, columns = lengths[matrix], math.prod(lengths[matrix + 1 :])
        # Only the first of the dimensions that make up the columns may be split, so a part's columns lie together.
        first_column = ranges[matrix + 1][0] * math.prod(self.weight[matrix + 2 :])
        return replace(
            self,
            weight=lengths,
            experts=lengths[0] if self.batch else None,
            rows=rows,
            columns=columns,
            whole=self,
            first_expert=ranges[0][0] if self.batch else 0,
            first_side=first_column if self.channels_are_rows else ranges[matrix][0],
        )

    def matrix(self, tensor: Tensor) -> Tensor:
        """`tensor` of the weight's shape as [(E,) S, C]: a view where its strides allow one."""
        matrix = tensor.reshape(*self.batch, self.rows, self.columns)
        return matrix.mT if self.channels_are_rows else matrix

    def restored(self, matrix_SC: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return (matrix_SC.mT if self.channels_are_rows else matrix_SC).reshape(self.weight)

    def spread(self, gain_C: Tensor) -> Tensor:
        """A gain per channel [(E,) C] or per matrix [(E,) 1], broadcast over the weight's own shape."""
        if gain_C.shape[-1] == 1:
            trailing = (1,) * (len(self.weight) - len(self.batch))
        elif self.channels_are_rows:
            trailing = (self.rows,) + (1,) * (len(self.weight) - len(self.batch) - 1)
        else:
            trailing = (1, *self.weight[len(self.batch) + 1 :])
        return gain_C.reshape(*self.batch, *trailing)


def resolved_rank(rank: int | float, side: int) -> int:
    """The number of rows R that `rank` asks for on a smaller side S."""
    wanted = max(1, round(rank * side)) if isinstance(rank, float) else rank
    return min(wanted, side)


def matrix_shape(shape: Sequence[int], rank: Rank, flatten: bool = False) -> MatrixShape | None:
    """The shape by which such a weight is projected, or None where it is not (no rank, below two dimensions, or empty).

    Three dimensions are experts [E, out, in]; four and more, or `flatten`, are a convolution [out, rest].
    """
    if rank is None or len(shape) < 2 or math.prod(shape) == 0:
        return None
    experts = shape[0] if len(shape) == 3 and not flatten else None
    rows, *rest = shape[1:] if experts is not None else shape
    columns = math.prod(rest)
    return MatrixShape(tuple(shape), experts, rows, columns, resolved_rank(rank, min(rows, columns)))


def vocabulary_sizes(shapes: Iterable[Sequence[int]]) -> frozenset[int]:
    """Larger sides that, among all these weights, only embeddings and heads are likely to have."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    alike = Counter(max(shape) for shape in matrices)
    return frozenset(max(shape) for shape in matrices if _is_long(shape) and alike[max(shape)] <= MOST_VOCABULARIES)


def _is_long(shape: Sequence[int]) -> bool:
    width, size = sorted(shape)
    is_small_one = size >= max(SMALL_VOCABULARY, VOCABULARY_RATIO * width) and width >= LEAST_WIDTH
    return size >= LARGE_VOCABULARY or is_small_one


def has_size(shape: Sequence[int], sizes: Collection[int]) -> bool:
    """True if this is a matrix of a vocabulary of one of these sizes."""
    return len(shape) == 2 and max(shape) in sizes


def positions(shape: Sequence[int], ranges: Sequence[Range], device: torch.device) -> Tensor:
    """The place of each element of a part in the whole tensor of this shape, flattened."""
    position = torch.zeros((), dtype=torch.int64, device=device)
    for length, (first, stop) in zip(shape, ranges, strict=True):
        position = position.unsqueeze(-1) * length + torch.arange(first, stop, device=device)
    return position
