"""What steps an optimizer's weights is kept from step to step, for as long as it fits them."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .distributed import ORDINARY, is_sharded, local
from .kernels.stepper import Stepper
from .options import planned

Layouts = list[torch.layout | None]

FACTS = operator.attrgetter("shape", "dtype")
LAYOUT = operator.attrgetter("grad.layout")
"""Of a weight."""


@dataclass
class Kept:
    """What steps a set of weights, and what it was made for: these very objects, these facts and options."""

    groups: list[Any] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    plan: tuple[Any, ...] = ()
    layouts: Layouts = field(default_factory=list)
    """Of the gradients."""
    stepper: Stepper | None = None

    def takes(self, weights: list[Tensor], layouts: Layouts) -> bool:
        """Whether it was made for these weights, with such gradients."""
        return self.is_of(weights) and layouts == self.layouts

    def is_of(self, weights: list[Tensor]) -> bool:
        """Whether it was made for these weights."""
        return _same(weights, self.weights)

    def is_for(self, groups: list[Any], states: list[Any]) -> bool:
        """Whether it was made for its weights as they are now, in these groups and with these states."""
        return _same(groups, self.groups) and _same(states, self.states) and self.plan == plan_of(groups, self.weights)


def _same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def plan_of(groups: list[Any], weights: list[Tensor]) -> tuple[Any, ...]:
    """What decides how weights are stepped, beside their gradients. Asked at every step."""
    # A sharding framework may swap what a rank holds of a parameter.
    ordinary = ORDINARY.issuperset(map(type, weights))
    held = None if ordinary else [local(weight).data_ptr() if is_sharded(weight) else None for weight in weights]
    counts = [len(group["params"]) for group in groups]
    return list(map(FACTS, weights)), held, counts, list(map(planned, groups))


def layouts_of(weights: list[Tensor]) -> Layouts:
    """Of the gradients; None where there is none."""
    try:
        return list(map(LAYOUT, weights))
    except AttributeError:
        return [None if (grad := weight.grad) is None else grad.layout for weight in weights]


class Steppers:
    """What an optimizer steps by: one stepper for all of its weights, or one for each of several parts."""

    def __init__(self):
        self.whole = Kept()
        self._parts: dict[Tensor, Kept] = {}
        """By their first weights."""
        self.pool: dict[Any, Any] = {}
        """What the steppers of parts share."""
        self.last: list[Stepper] = []
        """Those that took the last step."""
        self._captured: list[Stepper] = []

    def part_of(self, first: Tensor) -> Kept:
        """What steps the part that begins with this weight."""
        if first not in self._parts:
            self._parts[first] = Kept()
        return self._parts[first]

    def replace_(self, kept: Kept, stepper: Stepper | None) -> None:
        """Step by another one; a CUDA graph that holds launches of the old keeps it alive."""
        if kept.stepper is not None and kept.stepper.was_captured:
            self._captured.append(kept.stepper)
        kept.stepper = stepper

    def forget(self) -> None:
        """Begin anew: a stepper of all weights and those of parts each count the steps for themselves."""
        self.replace_(self.whole, None)
        self.whole = Kept()
        self.forget_parts()
        self.last.clear()

    def forget_parts(self) -> None:
        """Let the weights be parted in another way."""
        for kept in self._parts.values():
            self.replace_(kept, None)
        self._parts.clear()
        self.pool.clear()
