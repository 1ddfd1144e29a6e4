"""Every optimizer that can be planned, by name."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..core.shape import Rank
from .collectives import Traffic
from .family import Family
from .layout import FIRST, Layout, Place
from .models import Weight
from .paper_figures import CANDIDATES
from .whole_matrices import Muon, Shampoo


class Planned(Protocol):
    """An optimizer of a whole model, on weights of given dtypes."""

    def state_bytes(self, weights: Sequence[Weight], layout: Layout, place: Place = FIRST) -> int:
        """State that the rank at `place` keeps once every weight has had a gradient."""
        ...

    def traffic(self, weights: Sequence[Weight], layout: Layout, refresh: bool = False) -> list[Traffic]:
        """Collectives of its step; `refresh` for one that begins new bases."""
        ...

    def step_bytes(self, weights: Sequence[Weight], layout: Layout) -> int:
        """What its step holds besides, at the most."""
        ...


CONTENDERS = {
    "adamw": CANDIDATES["adamw"].label,
    "muon": "Muon",
    "muon-dealt": "Muon, dealt out",
    "shampoo": "Shampoo",
    **{name: candidate.label for name, candidate in CANDIDATES.items() if name != "adamw"},
}
"""Their names, and how they are called in tables."""


def planned(name: str, rank: Rank, weight_dtype: torch.dtype, state_dtype: torch.dtype) -> Planned:
    """The optimizer of this name, at `rank` or else at its paper's."""
    if name in ("muon", "muon-dealt"):
        return Muon(weight_dtype, state_dtype, dealt=name == "muon-dealt")
    if name == "shampoo":
        return Shampoo(weight_dtype, state_dtype)
    return Family(CANDIDATES[name].optimizer, rank_of(name, rank), weight_dtype, state_dtype)


def takes_rank(name: str) -> bool:
    return name in CANDIDATES and CANDIDATES[name].takes_rank


def rank_of(name: str, rank: Rank) -> Rank:
    """What an optimizer makes of the rank that is asked for: its paper's where none is, or none can be."""
    if name not in CANDIDATES:
        return None
    return rank if rank is not None and takes_rank(name) else CANDIDATES[name].ranks[0]
