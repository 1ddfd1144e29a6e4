"""Our step is the papers' step: every optimizer against tests/papers.py, in float64, across two refreshes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import papers
from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, Flora, GaLore, StructuredAdamW
from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.shape import matrix_shape
from apollo_optim.optimizer import ProjectedOptimizer
from family import BY_NAME, FAMILY, WITHOUT_MOMENTUM, Member, partly_slow

SHAPES = {"tall": (37, 13), "wide": (11, 31), "square": (13, 13), "experts": (3, 9, 14), "conv": (10, 3, 2, 3)}
RANKS = 1, 4, 0.25
STEPS, REFRESH = 450, 200
LR = 1e-2

# Across two refreshes and two spikes, and with as many steps between them as the papers take.
LENGTHS = pytest.mark.parametrize(
    ("steps", "refresh_every"), [(22, 10), pytest.param(STEPS, REFRESH, marks=pytest.mark.slow)]
)


def transcription(member: Member, tall: bool = False) -> Callable[[papers.Settings], object]:
    """The oracle's rule for a row of the family; blocks of a `tall` weight's rows go along columns of its G."""

    def kept(M: Tensor) -> Tensor:
        if not member.in_4_bits:
            return M
        codes = torch.stack([papers.nf4(row) for row in (M.T if tall else M)])
        return codes.T if tall else codes

    if member.optimizer is FactoredAdamW or member.group.get("second_moment") == "factored":
        return partial(papers.Adafactor, kept=kept)
    if member.options.get("rank", 1) is None or member.options.get("granularity") == "element":
        return papers.AdamW
    return {
        APOLLO: partial(papers.APOLLO, granularity=member.options.get("granularity", "channel")),
        APOLLOMini: papers.APOLLOMini,
        StructuredAdamW: partial(papers.StructuredAdamW, granularity=member.options.get("granularity", "channel")),
        GaLore: papers.GaLore,
        Fira: papers.Fira,
        Flora: papers.Flora,
        Artemis: partial(papers.Artemis, kept=kept),
        ArtemisMini: papers.ArtemisMini,
    }[member.optimizer]


# A fraction of the side is a rank like any other once it is taken, which is the same for every member.
EVERY_RANK = [
    pytest.param(
        member,
        rank,
        id=f"{member}-{rank}" if rank else member.name,
        marks=pytest.mark.slow if rank == 0.25 and member.name != "apollo" else (),
    )
    for member in (*FAMILY, WITHOUT_MOMENTUM)
    for rank in (RANKS if member.takes_rank else (None,))
]


@cache
def ordinary(steps: int) -> dict[str, Tensor]:
    """A stream of gradients for each shape."""
    return {name: gradients(shape)[:steps] for name, shape in SHAPES.items()}


@cache
def gradients(shape: tuple[int, ...]) -> Tensor:
    """A stream like a training run's: a slow drift under noise, singular values falling off, and now and then a spike.

    The fall by halves also makes the leading singular vectors well conditioned, and lets the randomized SVD reach
    them to rounding: nine powers of at most 2**-8 are left of what it has not sampled.
    """
    generator = torch.Generator().manual_seed(20)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    stream = torch.empty(STEPS, *shape, dtype=torch.float64)
    sizes = 1e-2 * torch.exp(0.3 * normal(STEPS))
    sizes[::17] *= 30
    for matrices in zip(*(papers.Weight.matrices(gradient) for gradient in stream), strict=True):
        side, channels = matrices[0].shape
        directions = torch.linalg.qr(normal(side, side)).Q * 0.5 ** torch.arange(side)
        drift = normal(side, channels)
        for matrix, size in zip(matrices, sizes, strict=True):
            matrix.copy_(size * directions @ (drift + 2 * normal(side, channels)))
    return stream


class Twins:
    """Weights of several shapes under one of our optimizers, and the same under transcriptions of its paper."""

    def __init__(
        self,
        member: Member,
        streams: dict[str, Tensor],
        *deviations: papers.Deviations,
        weight_size: float = 1.0,
        weight_decay: float = 0.1,
        refresh_every: int = REFRESH,
        **options: object,
    ):
        generator = torch.Generator().manual_seed(3)
        self.member, self.streams, self.refresh_every = member, streams, refresh_every
        self.weights = [
            torch.nn.Parameter(weight_size * torch.randn(stream.shape[1:], generator=generator, dtype=torch.float64))
            for stream in streams.values()
        ]
        if member.refreshes:
            options["refresh_every"] = refresh_every
        self.optimizer = member.build(self.weights, lr=LR, weight_decay=weight_decay, **options)
        self.theirs = [[self.twin(weight, each, weight_decay) for each in deviations] for weight in self.weights]

    def twin(self, weight: Tensor, deviations: papers.Deviations, weight_decay: float) -> papers.Weight:
        awaits = self.member.uses_svd and deviations.needs_directions
        return papers.Weight(weight.detach(), partial(self.rule, weight, deviations), LR, weight_decay, awaits)

    def rule(self, weight: Tensor, deviations: papers.Deviations, expert: int) -> object:
        """The transcription for one matrix, with the settings of our optimizer."""
        group = self.optimizer.param_groups[0]
        shape = matrix_shape(weight.shape, group["rank"])

        def gaussian(refresh: int, _: Tensor) -> Tensor:
            seed = int(self.optimizer.state[weight]["seed"])
            basis = gaussian_basis(shape, seed, refresh, torch.float64, weight.device)
            return basis if shape.experts is None else basis[expert]

        def svd(_: int, gradient: Tensor) -> Tensor:
            # As many roundings as there are in a sum over the channels.
            least = 4 * torch.finfo(torch.float64).eps * max(gradient.shape) ** 0.5
            return papers.leading_singular_vectors(gradient, shape.rank, least if deviations.needs_directions else 0.0)

        make = transcription(self.member, tall=shape is not None and shape.channels_are_rows)
        return make(
            papers.Settings(
                rank=shape.rank if shape else 1,
                basis=svd if self.member.uses_svd else gaussian,
                of_gradient=self.member.uses_svd,
                refresh_every=self.refresh_every,
                scale=group["scale"],
                betas=group["betas"],
                eps=group["eps"],
                growth_limit=group["growth_limit"],
                deviations=deviations,
            )
        )

    def steps(self, rates: Callable[[int], float]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each weight our steps and a paper's, all of them; our learning rate is times `rates(t)`."""
        ours = [[weight.detach().clone()] for weight in self.weights]
        theirs = [[[other.value.clone()] for other in others] for others in self.theirs]
        for t, gradients_now in enumerate(zip(*self.streams.values(), strict=True), start=1):
            self.optimizer.param_groups[0]["lr"] = LR * rates(t)
            for weight, gradient in zip(self.weights, gradients_now, strict=True):
                weight.grad = gradient
            self.optimizer.step()
            for i, gradient in enumerate(gradients_now):
                ours[i].append(self.weights[i].detach().clone())
                for other, values in zip(self.theirs[i], theirs[i], strict=True):
                    other.step(gradient)
                    values.append(other.value.clone())
        for own, others in zip(ours, theirs, strict=True):
            for values in others:
                yield torch.stack(own).diff(dim=0), torch.stack(values).diff(dim=0)

    def largest_difference(self, rates: Callable[[int], float] = lambda t: 1.0) -> float:
        """Over steps and matrices: the norm of our step less the paper's, relative to the latter.

        Steps of 1e-2 are read off weights of size 1, so 1e-10 leaves room for 1e4 roundings; seen are 1e-13.
        """
        largest = 0.0
        for ours, theirs in self.steps(rates):
            matrices = (len(ours), ours.shape[1] if ours.dim() == 4 else 1, -1)
            difference, size = (ours - theirs).reshape(matrices).norm(dim=-1), theirs.reshape(matrices).norm(dim=-1)
            assert (difference[size == 0] == 0).all()
            assert (size > 0).any()
            largest = max(largest, float((difference / size)[size > 0].max()))
        return largest


DO_NOT_APPLY = replace(papers.PAPER, bias_correction=True)
"""Gradients are never zero nor below eps, ranks are below every side; and Mini's scale must be below its cap."""


@LENGTHS
@pytest.mark.parametrize(("member", "rank"), EVERY_RANK)
def test_every_step_is_the_papers(member: Member, rank: float | None, steps: int, refresh_every: int):
    """With our deviations, and without those that do not apply."""
    options = {} if rank is None else {"rank": rank}
    deviations = [papers.OURS] if member.optimizer is APOLLOMini else [papers.OURS, DO_NOT_APPLY]
    twins = Twins(member, ordinary(steps), *deviations, refresh_every=refresh_every, **options)
    assert twins.largest_difference() < 1e-10


@LENGTHS
@pytest.mark.parametrize(("member", "rank"), [row for row in EVERY_RANK if row.values[0].optimizer is APOLLOMini])
def test_a_cap_above_the_scale_of_mini_changes_nothing(member: Member, rank: float, steps: int, refresh_every: int):
    deviations = papers.OURS, DO_NOT_APPLY
    twins = Twins(member, ordinary(steps), *deviations, refresh_every=refresh_every, rank=rank, scale=1.0)
    assert twins.largest_difference() < 1e-10


BIAS_CORRECTED = [
    member
    for member in FAMILY
    if not member.is_spectral
    and transcription(member) not in (papers.AdamW, papers.GaLore, papers.Fira)
    and not (member.optimizer is FactoredAdamW or member.group)
]


@pytest.mark.parametrize("member", BIAS_CORRECTED, ids=str)
def test_bias_correction_is_a_schedule_of_the_learning_rate(member: Member):
    """The papers to the letter: a learning rate undoes what bias correction adds, where no limiter remembers it."""
    options = {} if member.optimizer is Flora else {"growth_limit": None, "eps": 0.0}
    if member.optimizer is APOLLOMini:
        options["scale"] = 1.5

    def undone(t: int) -> float:
        return (1 - 0.9**t) / (1.0 if member.optimizer is Flora else math.sqrt(1 - 0.999**t))

    twins = Twins(member, ordinary(40), papers.PAPER, refresh_every=15, weight_decay=0.0, **options)
    assert twins.largest_difference(undone) < 1e-10


# Of others' parts: the basis is one member's, and what shares a gain another's.
COMBINED = [BY_NAME[name] for name in ("apollo-tensor", "fira-gaussian", "galore-gaussian", "mini-svd")]


@pytest.mark.parametrize(
    "member", partly_slow(FAMILY, quick=[member for member in FAMILY if member not in COMBINED]), ids=str
)
def test_deviations_are_as_stated_where_they_apply(member: Member):
    """Weights first reached late or below eps, and gradients that vanish on the way."""
    streams = {name: stream.clone() for name, stream in ordinary(52).items()}
    for stream in streams.values():
        stream[:6] *= 1e-10  # below eps, then above it
        stream[[12, 13, 48]] = 0
    streams["tall"][:9] = 0
    streams["experts"][:26, 1] = 0
    streams["experts"][32:35, 2] = 0
    if member.uses_svd:
        for name, stream in streams.items():
            stream[40] = 0  # where a basis is due
            if name not in ("tall", "experts"):
                stream[20] = stream[20].flatten(1)[:, :1].expand_as(stream[20].flatten(1)).view_as(stream[20])
        streams["experts"][0, 1] = 1e-10 * ordinary(52)["experts"][0, 1]  # ours has a random basis otherwise
    # Weights start at zero, so that steps of 1e-10 are not lost in them.
    twins = Twins(member, streams, papers.OURS, weight_size=0.0, weight_decay=0.0, refresh_every=20)
    assert twins.largest_difference() < 1e-10


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["structured-element", "adamw"])
def test_element_granularity_and_no_rank_are_adamw(name: str, weight_decay: float, maximize: bool):
    streams = {**ordinary(60), "bias": gradients((1, 29))[:60].squeeze(1)}
    weights = [torch.nn.Parameter(torch.ones(stream.shape[1:], dtype=torch.float64)) for stream in streams.values()]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = BY_NAME[name].build(weights, lr=LR, weight_decay=weight_decay, maximize=maximize)
    reference = torch.optim.AdamW(twins, lr=LR, weight_decay=weight_decay, maximize=maximize)
    for gradients_now in zip(*streams.values(), strict=True):
        for weight, twin, gradient in zip(weights, twins, gradients_now, strict=True):
            weight.grad, twin.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for weight, twin in zip(weights, twins, strict=True):
        # Each step rounds weights below 4 twice (half an ulp is 2.2e-16), and an update of 1e-2 a dozen times.
        torch.testing.assert_close(weight, twin, rtol=0, atol=60 * 2 * 2.3e-16)


@pytest.mark.parametrize("projection", ["gaussian", "svd", "svd_lowrank"])
@pytest.mark.parametrize(
    ("at_full_rank", "without"),
    [
        (partial(APOLLO, rank=13), partial(StructuredAdamW, granularity="channel")),
        (partial(APOLLO, rank=99, granularity="tensor"), partial(StructuredAdamW, granularity="tensor")),
        (partial(GaLore, rank=13, scale=1.0), partial(APOLLO, rank=None)),
        (partial(Fira, rank=14), partial(APOLLO, rank=None)),
    ],
    ids=["channel", "tensor", "galore", "fira"],
)
def test_a_rank_that_reaches_the_smaller_side_projects_nothing(
    at_full_rank: Callable[..., ProjectedOptimizer], without: Callable[..., ProjectedOptimizer], projection: str
):
    """Bit for bit: a square random basis would only add noise."""
    weights = [torch.nn.Parameter(torch.ones(37, 13)) for _ in range(2)]
    optimizers = at_full_rank([weights[0]], lr=0.01, projection=projection), without([weights[1]], lr=0.01)
    for gradient in gradients((37, 13))[:20].float():
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize(("rank", "ratio"), [(1, 13.0), (4, 13 / 4), (0.25, 13 / 3), (50, 1.0)])
@pytest.mark.parametrize(
    "member", [m for m in FAMILY if m.takes_rank and m.optimizer is not APOLLOMini and not m.is_spectral], ids=str
)
def test_auto_scale_is_the_root_of_side_over_rank(member: Member, rank: float, ratio: float):
    weights = [torch.nn.Parameter(torch.ones(37, 13)) for _ in range(2)]
    scales = "auto", math.sqrt(ratio)
    for weight, scale in zip(weights, scales, strict=True):
        weight.grad = gradients((37, 13))[0].float()
        member.build([weight], rank=rank, scale=scale).step()
    assert torch.equal(*weights)


def test_mini_takes_the_published_scale_from_side_128_on():
    """The cap leaves sqrt(128) alone where the paper uses it."""
    for side, scale in [(127, math.sqrt(127)), (128, math.sqrt(128)), (300, math.sqrt(128))]:
        weights = [torch.nn.Parameter(torch.zeros(side, 301)) for _ in range(2)]
        generator = torch.Generator().manual_seed(side)
        gradient = torch.randn(side, 301, generator=generator)
        built = APOLLOMini([weights[0]], lr=0.01), APOLLO([weights[1]], 0.01, rank=1, granularity="tensor", scale=scale)
        for weight, optimizer in zip(weights, built, strict=True):
            weight.grad = gradient
            optimizer.step()
        assert torch.equal(*weights)
