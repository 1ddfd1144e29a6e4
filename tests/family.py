"""The optimizers under test: one row each, shared by every test that speaks of all of them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore, StructuredAdamW
from apollo_optim.optimizer import ProjectedOptimizer


@dataclass(frozen=True)
class Member:
    """One optimizer with the options that make it small enough for a test."""

    name: str
    optimizer: type[ProjectedOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    """Options that are a group's only."""

    def build(self, params: Any, **overrides: Any) -> ProjectedOptimizer:
        """The optimizer over `params`; `overrides` win over the row's own options."""
        return self.optimizer(self.grouped(params, **overrides), **(self.options | overrides))

    def grouped(self, params: Any, **overrides: Any) -> Any:
        """`params` in groups that have the row's options, where those are a group's."""
        if self.group and isinstance(params, nn.Module):
            params = [(name, weight) for name, weight in params.named_parameters() if weight.requires_grad]
        if not self.group or isinstance(params, Tensor) or not isinstance(params, Iterable):
            return params
        params = list(params)
        groups = params if not params or isinstance(params[0], dict) else [{"params": params}]
        own = {name: overrides.get(name, value) for name, value in self.group.items()}
        return [{**own, **group} for group in groups]

    @property
    def uses_svd(self) -> bool:
        """Whether its basis is computed from the gradient, by the host."""
        default = "svd" if self.optimizer in (GaLore, Fira) else "gaussian"
        return self.options.get("projection", default).startswith("svd")

    @property
    def limits_growth(self) -> bool:
        """Whether it has a limiter to switch off."""
        projected = self.options.get("rank", 1) is not None
        unlimited = GaLore, Flora, FactoredAdamW, Artemis, ArtemisMini
        return projected and self.optimizer not in unlimited and self.options.get("granularity") != "element"

    @property
    def in_4_bits(self) -> bool:
        """Whether it keeps codes that the smallest difference in a gradient can change."""
        return self.optimizer in (FactoredAdamW, Artemis) and "state_dtype" not in self.options

    @property
    def is_spectral(self) -> bool:
        """Whether its updates are orthogonalised: all of one length, and without a second moment."""
        return self.optimizer in (Artemis, ArtemisMini)

    @property
    def takes_scale(self) -> bool:
        """Whether its update can be given another size than the rule's own."""
        return self.optimizer is not FactoredAdamW

    @property
    def refreshes(self) -> bool:
        """Whether it renews a basis every so many steps."""
        return self.optimizer not in (StructuredAdamW, FactoredAdamW, Artemis, ArtemisMini)

    @property
    def takes_rank(self) -> bool:
        """Whether it projects to a rank that it can be told."""
        return (
            self.optimizer not in (StructuredAdamW, FactoredAdamW, Artemis) and self.options.get("rank", 1) is not None
        )

    @property
    def capturable(self) -> bool:
        """Whether it takes capturable=True."""
        return not self.uses_svd and self.optimizer not in (Flora, ArtemisMini)

    def __str__(self) -> str:
        return self.name


FAMILY = [
    Member("apollo", APOLLO, {"rank": 4}),
    Member("apollo-svd", APOLLO, {"rank": 4, "projection": "svd"}),
    Member("apollo-svd-lowrank", APOLLO, {"rank": 4, "projection": "svd_lowrank"}),
    Member("apollo-tensor", APOLLO, {"rank": 4, "granularity": "tensor"}),
    Member("mini", APOLLOMini),
    Member("mini-svd", APOLLOMini, {"projection": "svd"}),
    Member("structured-channel", StructuredAdamW),
    Member("structured-tensor", StructuredAdamW, {"granularity": "tensor"}),
    Member("structured-element", StructuredAdamW, {"granularity": "element"}),
    Member("galore", GaLore, {"rank": 4}),
    Member("galore-gaussian", GaLore, {"rank": 4, "projection": "gaussian"}),
    Member("fira", Fira, {"rank": 4}),
    Member("fira-gaussian", Fira, {"rank": 4, "projection": "gaussian"}),
    Member("flora", Flora, {"rank": 4}),
    Member("flora-svd", Flora, {"rank": 4, "projection": "svd"}),
    Member("factored-adamw", FactoredAdamW),
    Member("artemis", Artemis),
    Member("artemis-wide", Artemis, {"state_dtype": torch.float32}),
    Member("artemis-mini", ArtemisMini, {"rank": 4, "state_dtype": torch.float32}),
    Member("adamw", APOLLO, {"rank": None}),
    Member("adafactor", APOLLO, {"rank": None}, {"second_moment": "factored", "betas": (0.9, 0.999)}),
]

WITHOUT_MOMENTUM = Member("adafactor-without-momentum", APOLLO, {"rank": None}, {"second_moment": "factored"})
"""As it is meant for vocabularies; beside the others, because most tests of all of them speak of momentum."""

ROWWISE = Member("rowwise", APOLLO, {"rank": None}, {"second_moment": "rowwise"})

BY_NAME = {member.name: member for member in FAMILY}

DISTINCT = [
    BY_NAME[name]
    for name in (
        "apollo",
        "mini",
        "structured-channel",
        "galore",
        "fira",
        "flora",
        "artemis",
        "factored-adamw",
        "adamw",
        "adafactor",
    )
]
"""One member for each set of tensors that a weight may have as its state, and one that has a single gain."""


def partly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values, or tuples of them, for a parametrised test; those that are not `quick` are marked as slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]
