"""What a rank holds of a weight's state, and who shares it: `distributed.py` without processes.

A mesh axis splits a weight's experts E, its contracted side S or its channels C. Beside these letters:

    R  the rank, which nothing splits
    P  the channels of moments: split like the weight's channels, and further among the ranks that share the side
    W  all dimensions of a weight
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ..core.shape import MatrixShape
from .layout import FIRST, Axis, Place, Split, part
from .models import Shape


@dataclass(frozen=True)
class Part:
    """One weight on a mesh, as its optimizer sees it."""

    shape: Shape
    matrix: MatrixShape | None
    """The whole weight as matrices; None for AdamW."""
    splits: tuple[Split, ...]
    """By dimension of the weight."""

    @cached_property
    def letters(self) -> dict[str, Split]:
        """Which axes split what, in the order in which they do."""
        everything = tuple(axis for split in self.splits for axis in split)
        if self.matrix is None:
            return {"W": everything, "E": (), "R": (), "S": (), "C": (), "P": ()}
        rows, columns = self.splits[-2:]
        channels, side = (rows, columns) if self.matrix.channels_are_rows else (columns, rows)
        batch = self.splits[0] if self.matrix.batch else ()
        return {"W": everything, "E": batch, "R": (), "S": side, "C": channels, "P": self._shared(channels, side)}

    def _shared(self, channels: Split, side: Split) -> Split:
        """Moments are split among all who share a matrix, unless their parts would be strided and uneven."""
        assert self.matrix is not None
        shared = (*channels, *side)
        order = [axis.index for axis in shared]
        even = self.matrix.channels % math.prod(axis.size for axis in shared) == 0
        return shared if even or sorted(order) == order else channels

    def axes(self, letters: str) -> tuple[Axis, ...]:
        """The axes that split what these letters stand for."""
        return tuple(dict.fromkeys(axis for letter in letters for axis in self.letters[letter]))

    @property
    def moments_are_shared_out(self) -> bool:
        """Whether ranks that share the side keep the moments of some channels each, not all those of all."""
        return len(self.letters["P"]) > len(self.letters["C"])

    def numbers(self, dims: str, place: Place = FIRST) -> int:
        """How many numbers the rank at `place` holds of a tensor whose dimensions these letters are."""
        if dims == "W":
            return math.prod(part(length, split, place) for length, split in zip(self.shape, self.splits, strict=True))
        return math.prod(part(self._length(letter), self.letters[letter], place) for letter in dims)

    def _length(self, letter: str) -> int:
        """Of a whole dimension."""
        assert self.matrix is not None
        if letter == "E":
            return math.prod(self.matrix.batch)
        return {"R": self.matrix.rank, "S": self.matrix.side}.get(letter, self.matrix.channels)
