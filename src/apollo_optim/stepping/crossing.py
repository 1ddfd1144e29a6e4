"""8-bit moments of which blocks cross from one rank to another, for the time of a step.

A rank keeps the codes of its own columns. Scales are dealt out evenly, and so a rank may keep some that others need.
Before the step, ranks tell each other all of them; after it, what each of them has found for every block, of which
the largest is its scale. Codes and scales are then those of the whole moment, on any number of ranks.

Shapes: K all blocks of a row, k those of which this rank has elements.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.random import RoundingKey
from ..core.shape import positions
from ..distributed import Part
from ..quant.blocks import BLOCK, is_signed, narrowed, scales_of, widened
from .collectives import Step, largest


class CrossingMoments:
    """The 8-bit moments of one weight, all of one shape and split in one way."""

    def __init__(self, part: Part, state: Mapping[str, Tensor], names: Iterable[str]):
        self._part, self._state, self._names = part, state, list(names)
        first, stop = part.state_ranges(self._names[0])[-1]
        self._before = first % BLOCK
        """Elements of this rank's first block that come before its own."""
        self._touched = slice(first // BLOCK, -(-stop // BLOCK))
        self._scales: dict[str, Tensor] = {}
        self._unkept: dict[str, tuple[Tensor, Tensor, RoundingKey]] = {}
        """Moments that wait for their scales, whether they are finite, and what rounds them."""

    @classmethod
    def of(cls, part: Part, state: Mapping[str, Tensor]) -> "CrossingMoments | None":
        """Those of a weight that is spread over ranks; None where no block has elements on several of them."""
        names = [name for name in ("exp_avg", "exp_avg_sq") if f"{name}_scale" in state]
        if not names:
            return None
        ranks = math.prod(axis.size for axis in part.axes_of_columns(names[0]))
        crosses = ranks > 1 and part.entries[names[0]].shape[-1] % (ranks * BLOCK) != 0
        return cls(part, state, names) if crosses else None

    def read(self) -> Step[None]:
        """Get the scales of all blocks that this rank has elements of."""
        kept = {name: self._state[f"{name}_scale"] for name in self._names}
        own = [self._among_all(scale, self._own(name)) for name, scale in kept.items()]
        for name, scale_K in zip(kept, (yield from self._largest(own, waiting=0)), strict=True):
            self._scales[name] = scale_K[..., self._touched].clone()

    def widened(self, name: str, dtype: torch.dtype) -> Tensor:
        """A moment to compute with."""
        codes = pad(self._state[name], (self._before, 0))
        return widened(codes, self._scales[name], dtype)[..., self._before :]

    def keep_later(self, name: str, value: Tensor, finite: Tensor, key: RoundingKey) -> None:
        """Leave a moment to `keep_`: other ranks may not have theirs yet."""
        self._unkept[name] = value, finite, key

    def keep_(self) -> Step[None]:
        """Write what was left, by scales that all ranks agree on."""
        if not self._unkept:  # refused, on all ranks
            return
        names = list(self._unkept)
        own = [self._among_all(self._found(name), self._touched) for name in names]
        # Counted, so that not all moments of a model wait to be narrowed at once.
        waiting = 4 * sum(math.prod(self._part.entries[name].shape) // self._part.ranks_of(name) for name in names)
        for name, scale_K in zip(names, (yield from self._largest(own, waiting)), strict=True):
            self._write_(name, scale_K)

    def _write_(self, name: str, scale_K: Tensor) -> None:
        value, finite, key = self._unkept.pop(name)
        codes, part = self._state[name], self._part
        position = positions(part.entries[name].shape, part.state_ranges(name), value.device)
        padded, places = (pad(each, (self._before, 0)) for each in (value, position))
        new = narrowed(padded, is_signed(codes), key, places, scale_K[..., self._touched]).codes
        codes.copy_(torch.where(finite, new[..., self._before :], codes))
        scale = self._state[f"{name}_scale"]
        scale.copy_(torch.where(finite, scale_K[..., self._own(name)], scale))

    def _found(self, name: str) -> Tensor:
        """The scales that this rank's own elements ask for. [..., k]"""
        return scales_of(pad(self._unkept[name][0], (self._before, 0)), is_signed(self._state[name]))

    def _own(self, name: str) -> slice:
        """The blocks whose scales this rank keeps."""
        return slice(*self._part.state_ranges(f"{name}_scale")[-1])

    def _among_all(self, scale: Tensor, blocks: slice) -> Tensor:
        """These scales of some blocks, and zeros for all others. [..., K]"""
        everything = scale.new_zeros(*scale.shape[:-1], self._part.entries[f"{self._names[0]}_scale"].shape[-1])
        everything[..., blocks] = scale
        return everything

    def _largest(self, values: list[Tensor], waiting: int) -> Step[list[Tensor]]:
        part, name = self._part, self._names[0]
        axes = part.axes_of_columns(name)
        # Every rank has all blocks of its rows.
        rows = math.prod(part.entries[name].shape[:-1]) * math.prod(axis.size for axis in axes) // part.ranks_of(name)
        cost = len(values) * rows * values[0].shape[-1] * values[0].itemsize
        return (yield from largest(axes, cost + waiting, *values))
