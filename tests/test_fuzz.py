"""Random configurations against tests/papers.py, in float64. Each is told by its seed, which a failure prints."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import papers
from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore, StructuredAdamW
from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.shape import matrix_shape
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant.blocks import widened

MEMBERS = APOLLO, APOLLOMini, StructuredAdamW, GaLore, Fira, Flora, Artemis, ArtemisMini
IN_4_BITS = FactoredAdamW, Artemis
"""Those that keep a momentum of the weight's own shape, in 4 bits if they are asked to."""
SHORT, LONG = 60, 2000


@dataclass
class Configuration:
    """An optimizer with options of its own, a weight, and the gradients that it meets."""

    member: type[ProjectedOptimizer]
    options: dict[str, Any]
    group: dict[str, Any]
    """Options that are a group's own."""
    shape: tuple[int, ...]
    gradients: list[Tensor]
    start: Tensor

    @property
    def uses_svd(self) -> bool:
        return self.options.get("projection", "svd" if self.member in (GaLore, Fira) else "gaussian") == "svd"

    @property
    def is_narrow(self) -> bool:
        """Whether state is rounded at random when it is kept."""
        return self.options["state_dtype"] in (torch.bfloat16, torch.int8)


def configuration(seed: int) -> Configuration:
    """The configuration of this number."""
    pick = random.Random(seed)
    member = pick.choice(MEMBERS)
    if member is Artemis and seed % 2 == 1:
        member = FactoredAdamW  # so that all other seeds tell what they told before it was there
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
        "state_dtype": pick.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int8]),
    }
    group: dict[str, Any] = {}
    if member is FactoredAdamW:
        del options["scale"]
    if member not in (GaLore, Flora, *IN_4_BITS, ArtemisMini):
        options["growth_limit"] = pick.choice([None, 1.01, 1.5])
    if member not in (StructuredAdamW, *IN_4_BITS):
        options["rank"] = pick.choice([1, 2, 4, 0.25, 0.5, 100])
    if member not in (StructuredAdamW, *IN_4_BITS, ArtemisMini):
        options["refresh_every"] = pick.choice([1, 3, 200])
        options["projection"] = pick.choice(["gaussian", "svd"])
    if member in (APOLLO, StructuredAdamW):
        options["granularity"] = pick.choice(["channel", "tensor"])
    if member in IN_4_BITS and pick.random() < 0.5:
        options["state_dtype"] = "nf4"
    if pick.random() < 0.4 and member is APOLLO:
        options["rank"] = None
        # With betas of its own, or the second of these and no momentum.
        group["second_moment"] = pick.choice(["elementwise", "factored", "rowwise"])
        group |= {"betas": options["betas"]} if pick.random() < 0.5 else {}
        shape = shape[-2:] if len(shape) == 3 and group["second_moment"] == "rowwise" else shape
    generator = torch.Generator().manual_seed(seed)
    gradients = stream(pick, shape, generator)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Configuration(member, options, group, shape, gradients, start)


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

    def basis(expert: int, refresh: int, gradient: Tensor) -> Tensor:
        if config.uses_svd:
            least = 4 * torch.finfo(torch.float64).eps * max(gradient.shape) ** 0.5
            found = papers.leading_singular_vectors(gradient, shape.rank, least)
            return found.bfloat16().double() if config.is_narrow else found  # narrowed before it is used
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
        return rule_of(config)(settings)

    awaits = config.uses_svd and shape is not None and not shape.full_rank
    return papers.Weight(weight.detach(), rule, float(group["lr"]), group["weight_decay"], awaits)


def rule_of(config: Configuration) -> Callable[[papers.Settings], Any]:
    """Its transcription."""
    rows, columns = config.start.shape[-2:] if len(config.shape) == 3 else config.start.flatten(1).shape
    tall = rows >= columns  # the rows of the weight are the columns of its G
    if config.options.get("rank", 1) is None:
        rules = {"elementwise": papers.AdamW, "factored": papers.Adafactor, "rowwise": partial(Rowwise, tall=tall)}
        return rules[config.group["second_moment"]]
    if config.member in IN_4_BITS:
        in_4_bits = config.options["state_dtype"] == "nf4"
        made = papers.Artemis if config.member is Artemis else papers.Adafactor
        return partial(made, kept=partial(nf4_rows, tall=tall) if in_4_bits else lambda M: M)
    made = getattr(papers, config.member.__name__)
    return partial(made, granularity=config.options["granularity"]) if "granularity" in config.options else made


class Rowwise(papers.RowwiseAdamW):
    """The transcription, with the smaller side of the weight first as the others have it."""

    def __init__(self, settings: papers.Settings, tall: bool):
        super().__init__(settings)
        self.tall = tall

    def update(self, G: Tensor) -> Tensor:
        return super().update(G.T).T if self.tall else super().update(G)


def nf4_rows(M: Tensor, tall: bool) -> Tensor:
    """In blocks along the rows of the weight."""
    kept = torch.stack([papers.nf4(row) for row in (M.T if tall else M)])
    return kept.T if tall else kept


def error(seed: int) -> float:
    """How far our steps are from the paper's, relative to the largest of these or, where it is more, to the weights."""
    config = configuration(seed)
    weight = nn.Parameter(config.start.clone())
    optimizer = config.member([{"params": [weight], **config.group}], **config.options)
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
        if config.is_narrow:
            far = take_over_(theirs, optimizer.state[weight], config)
            # Two codes of 8 bits are at most 1.6% of the largest apart, and numbers of bfloat16 half of that.
            assert far <= 0.02, f"seed {seed}: what is kept is off by {far:.1%} of the largest"
    return largest


def take_over_(theirs: papers.Weight, state: dict[str, Tensor], config: Configuration) -> float:
    """Have the transcription go on from what was kept of its moments. How far that is from them, of the largest."""
    # A second moment of rows is a vector, and not rounded.
    names = [name for name in ("exp_avg", "exp_avg_sq", "basis") if name in state and state[name].dim() > 1]
    kept = {name: matrices(state, name, config) for name in names}
    pairs = []
    for number, rule in enumerate(theirs.rules):
        mine = {name: each[number] for name, each in kept.items()}
        if config.member is ArtemisMini and mine:
            wide, rule.Q, rule.L = rule.Q @ rule.L, mine["basis"].T, mine["exp_avg"]
            pairs.append((rule.Q @ rule.L, wide))
            continue
        owner = getattr(rule, "adam", rule)
        for name, symbol in (("exp_avg", "M"), ("exp_avg_sq", "V")):
            if name in mine:
                pairs.append((mine[name], getattr(owner, symbol)))
                setattr(owner, symbol, mine[name])
    return max(
        (float((ours - wide).abs().max() / wide.abs().max().clamp_min(1e-30)) for ours, wide in pairs), default=0
    )


def matrices(state: dict[str, Tensor], name: str, config: Configuration) -> list[Tensor]:
    """What is kept by this name for each matrix of the weight, as a transcription has it."""
    value = state[name].double()
    if f"{name}_scale" in state:
        value = widened(state[name], state[f"{name}_scale"], torch.float64)
    if config.group.get("second_moment") == "rowwise":
        return [value.flatten(1)]
    as_weight = config.options.get("rank", 1) is None or config.member in IN_4_BITS
    return papers.Weight.matrices(value) if as_weight else list(value.view(-1, *value.shape[-2:]))


def wrong(seeds: range) -> dict[int, float]:
    """Those that differ by more than roundings: 1e-16 of weights of size 1, where 1e-5 of those is a step."""
    errors = {seed: error(seed) for seed in seeds}
    return {seed: each for seed, each in errors.items() if not each < 1e-10}


def test_configurations_step_as_their_papers():
    assert wrong(range(SHORT)) == {}


@pytest.mark.slow
def test_many_configurations_step_as_their_papers():
    print(f"seeds {SHORT} to {LONG - 1}")
    assert wrong(range(SHORT, LONG)) == {}
