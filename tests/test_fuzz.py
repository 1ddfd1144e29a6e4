"""Random configurations against tests/papers.py, in float64. Each is told by its seed, which a failure prints."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import papers
from apollo_optim import APOLLO, APOLLOMini, Fira, Flora, GaLore, StructuredAdamW
from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.shape import matrix_shape
from apollo_optim.optimizer import ProjectedOptimizer

MEMBERS = APOLLO, APOLLOMini, StructuredAdamW, GaLore, Fira, Flora
SHORT, LONG = 60, 2000


@dataclass
class Configuration:
    """An optimizer with options of its own, a weight, and the gradients that it meets."""

    member: type[ProjectedOptimizer]
    options: dict[str, Any]
    shape: tuple[int, ...]
    gradients: list[Tensor]
    start: Tensor

    @property
    def uses_svd(self) -> bool:
        return self.options.get("projection", "svd" if self.member in (GaLore, Fira) else "gaussian") == "svd"


def configuration(seed: int) -> Configuration:
    """The configuration of this number."""
    pick = random.Random(seed)
    member = pick.choice(MEMBERS)
    shape = pick.choice(
        [(pick.randint(1, 24), pick.randint(1, 24)), (pick.randint(1, 3), pick.randint(2, 9), pick.randint(2, 9))]
    )
    if pick.random() < 0.1:
        shape = (pick.randint(2, 6), pick.randint(1, 3), 2, 3)
    lr = pick.choice([1e-2, 3e-4, 0.1])
    options: dict[str, Any] = {
        "lr": pick.choice([lr, torch.tensor(lr), torch.tensor(lr, dtype=torch.float64)]),
        "betas": pick.choice([(0.9, 0.999), (0.0, 0.9), (0.95, 0.95), (0.5, 0.0)]),
        "eps": pick.choice([1e-8, 1e-3, 1e-15]),
        "weight_decay": pick.choice([0.0, 0.1, 2.0]),
        "maximize": pick.random() < 0.3,
        "scale": pick.choice([1.0, 0.25, 3.0]),
    }
    if member not in (GaLore, Flora):
        options["growth_limit"] = pick.choice([None, 1.01, 1.5])
    if member is not StructuredAdamW:
        options["rank"] = pick.choice([1, 2, 4, 0.25, 0.5, 100])
        options["refresh_every"] = pick.choice([1, 3, 200])
        options["projection"] = pick.choice(["gaussian", "svd"])
    if member in (APOLLO, StructuredAdamW):
        options["granularity"] = pick.choice(["channel", "tensor"])
    if pick.random() < 0.1 and member is APOLLO:
        options["rank"] = None
    generator = torch.Generator().manual_seed(seed)
    gradients = stream(pick, shape, generator)
    return Configuration(
        member, options, shape, gradients, torch.randn(shape, generator=generator, dtype=torch.float64)
    )


def stream(pick: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """Gradients whose singular values fall off by halves, for vectors that are well conditioned; some are zeros."""
    found = []
    for _ in range(7):
        gradient = torch.empty(shape, dtype=torch.float64)
        for matrix in papers.Weight.matrices(gradient):
            side = matrix.shape[0]
            directions = torch.linalg.qr(torch.randn(side, side, generator=generator, dtype=torch.float64)).Q
            noise = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
            rows = torch.linalg.qr(noise.T).Q.T  # orthonormal, so that singular values are as they are asked for
            matrix.copy_(directions * 0.5 ** torch.arange(side) @ rows)
        gradient *= 10.0 ** pick.randint(-3, 2)
        found.append(gradient * float(pick.random() > 0.1))
    return found


def transcribed(config: Configuration, optimizer: ProjectedOptimizer, weight: Tensor) -> papers.Weight:
    """The same configuration by its paper."""
    group = optimizer.param_groups[0]
    shape = matrix_shape(weight.shape, group["rank"])
    granularity = config.options.get("granularity")

    def basis(expert: int, refresh: int, gradient: Tensor) -> Tensor:
        if config.uses_svd:
            least = 4 * torch.finfo(torch.float64).eps * max(gradient.shape) ** 0.5
            return papers.leading_singular_vectors(gradient, shape.rank, least)
        made = gaussian_basis(shape, int(optimizer.state[weight]["seed"]), refresh, torch.float64, weight.device)
        return made if shape.experts is None else made[expert]

    def rule(expert: int) -> object:
        settings = papers.Settings(
            rank=shape.rank if shape else 1,
            basis=partial(basis, expert),
            of_gradient=config.uses_svd,
            refresh_every=group["refresh_every"],
            scale=group["scale"],
            betas=group["betas"],
            eps=group["eps"],
            growth_limit=group["growth_limit"],
        )
        if group["rank"] is None:
            return papers.AdamW(settings)
        if config.member in (APOLLO, StructuredAdamW):
            return getattr(papers, config.member.__name__)(settings, granularity=granularity)
        return getattr(papers, config.member.__name__)(settings)

    awaits = config.uses_svd and shape is not None and not shape.full_rank
    return papers.Weight(weight.detach(), rule, float(group["lr"]), group["weight_decay"], awaits)


def error(seed: int) -> float:
    """How far our steps are from the paper's, relative to the largest of these or, where it is more, to the weights."""
    config = configuration(seed)
    weight = nn.Parameter(config.start.clone())
    optimizer = config.member([weight], **config.options)
    theirs = transcribed(config, optimizer, weight)
    largest = 0.0
    for gradient in config.gradients:
        before, theirs_before = weight.detach().clone(), theirs.value.clone()
        weight.grad = gradient
        optimizer.step()
        theirs.step(-gradient if config.options["maximize"] else gradient)
        ours, expected = weight.detach() - before, theirs.value - theirs_before
        size = max(float(expected.abs().max()), 1e-5 * float(theirs.value.abs().max()))
        largest = max(largest, float((ours - expected).abs().max()) / size)
    return largest


def wrong(seeds: range) -> dict[int, float]:
    """Those that differ by more than roundings, which are 1e-16 of the weights, and magnified where a norm is small."""
    errors = {seed: error(seed) for seed in seeds}
    return {seed: each for seed, each in errors.items() if not each < 1e-9}


def test_configurations_step_as_their_papers():
    assert wrong(range(SHORT)) == {}


@pytest.mark.slow
def test_many_configurations_step_as_their_papers():
    print(f"seeds {SHORT} to {LONG - 1}")
    assert wrong(range(SHORT, LONG)) == {}
