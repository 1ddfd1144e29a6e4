"""Learning rates, ranks and scales by method and model, with their sources."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..choices import chosen
from ..core.shape import Rank, resolved_rank
from ..llama import PRESETS, VOCABULARY
from ..planner.models import llama_parameters

PAPER_STEPS: dict[str, int] = {"60m": 10_000, "130m": 20_000, "350m": 60_000, "1b": 100_000, "7b": 150_000}
"""Steps of 131K tokens, from the paper's appendix "Detailed Pre-Training Setting"."""

DEFAULT_STEPS: dict[str, int] = {"1m": 500, "9m": 2000} | PAPER_STEPS
"""Steps by default."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The default options of some methods on some models; None leaves an option to the optimizer."""

    methods: tuple[str, ...]
    models: tuple[str, ...] = tuple(PRESETS)
    source: str
    """The source of the numbers."""
    lr: float
    embedding_lr: float | None = None
    vocabulary_state: str | None = None
    rank: Rank = None
    scale: float | None = None
    refresh_every: int | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    alpha: float | None = None
    dropout: float | None = None
    at_this_rank: bool = False
    """True if the numbers are for this rank only."""
    lr_sweep: tuple[float, ...] = ()
    """Learning rates that the source tried, if it does not say which was best."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that it sets, by name."""
        told = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in told.items() if value is not None}

    def as_begun(self, facts: Mapping[str, Any]) -> "Recipe":
        """The same; or for a run that goes on, by the facts in its `run.json`, the recipe that it began with."""
        begun = facts.get("recipe_options")
        if not isinstance(begun, dict):
            return self
        read = {name: tuple(value) if isinstance(value, list) else value for name, value in begun.items()}
        return replace(self, source=facts.get("recipe", self.source), **{name: read.get(name) for name in OPTIONS})


ABOUT = "methods", "models", "source", "at_this_rank", "lr_sweep"
"""Fields that are no options."""
OPTIONS = tuple(field.name for field in fields(Recipe) if field.name not in ABOUT)
"""Fields that are."""

SETTING = 'the APOLLO paper, appendix "Detailed Pre-Training Setting"'
QUARTER = "a quarter of the width as the rank (Table 2)"
GALORE = "GaLore, appendix C.1 and Table 2"
ADVISED = "AdamW's learning rate, as its authors advise"
LOW_RANK = "GaLore, appendix C.1: alpha 32, dropout 0.05, learning rates tried from 1e-4 to 1e-2; ranks of its Table 2"

APOLLOS = "apollo", "apollo-svd"
ADAMWS = "adamw", "adamw-torch"
DROP_IN = "adam8bit", "adam-mini"
LORAS = "lora", "dora", "relora"
BIG = "7b", "13b"

# The first that fits is taken, so exceptions come before the rule.
PAPER: tuple[Recipe, ...] = (
    Recipe(
        methods=("apollo",), models=("1b",), lr=0.01, rank=0.25, scale=0.5**0.5, refresh_every=200, at_this_rank=True,
        source=f"{SETTING}: sqrt(1/2) for high rank at 1B",
    ),
    Recipe(
        methods=("apollo-svd",), models=("1b",), lr=0.01, rank=0.25, scale=0.4, refresh_every=200, at_this_rank=True,
        source=f"{SETTING}: 0.4 for high rank at 1B",
    ),
    Recipe(
        methods=APOLLOS, models=BIG, lr=0.01, rank=256, scale=1.0, refresh_every=200,
        source=f"{SETTING}; the rank of its Table 3",
    ),
    Recipe(methods=APOLLOS, lr=0.01, rank=0.25, scale=1.0, refresh_every=200, source=f"{SETTING}; {QUARTER}"),
    Recipe(
        methods=("apollo-mini",), models=("1m", "9m"), lr=0.005, rank=1, scale=128**0.5, refresh_every=200,
        source="docs/log.md, the demo: at such widths sqrt(128) moves twice as far, and 0.01 fails",
    ),
    Recipe(methods=("apollo-mini",), lr=0.01, rank=1, scale=128**0.5, refresh_every=200, source=SETTING),
    Recipe(
        methods=("factored-adamw",), models=BIG, lr=3e-4, vocabulary_state="factored", weight_decay=0.1,
        source="LLaMA, Table 2, of AdamW",
    ),
    Recipe(
        methods=("factored-adamw",), lr=1.25e-3, embedding_lr=2e-3, vocabulary_state="factored", weight_decay=0.1,
        source="docs/quality.md, LLaMA-60M at 500 and 1000 steps",
    ),
    Recipe(
        methods=("artemis",), lr=0.01, embedding_lr=4e-3, vocabulary_state="factored", weight_decay=0.1,
        source="docs/quality.md, LLaMA-60M at 1000 steps",
    ),
    Recipe(
        methods=("artemis-mini",), lr=0.01, rank=1 / 64, embedding_lr=4e-3, vocabulary_state="factored",
        weight_decay=0.1, source="docs/quality.md, LLaMA-60M at 1000 steps",
    ),
    Recipe(
        methods=("structured-adamw",), lr=0.005, scale=1.0,
        source="APOLLO's theorem: the gain is twice that of a quarter of the rank, so half its learning rate",
    ),
    Recipe(
        methods=("fira",), lr=0.01, rank=0.25, scale=0.25, refresh_every=200,
        source=f"GaLore's settings, as APOLLO's Table 2 says; {QUARTER}",
    ),
    # A third of the width, where the APOLLO paper speaks of a quarter for every model.
    Recipe(methods=("galore",), models=("130m",), lr=0.01, rank=256, scale=0.25, refresh_every=200, source=GALORE),
    Recipe(methods=("galore",), lr=0.01, rank=0.25, scale=0.25, refresh_every=200, source=GALORE),
    Recipe(methods=("flora",), lr=1e-3, rank=0.25, scale=1.0, refresh_every=1000,
           source="our choice: its steps are as long as AdamW's; refreshed as in its paper"),
    Recipe(methods=ADAMWS, models=BIG, lr=3e-4, source="LLaMA, Table 2"),
    Recipe(methods=ADAMWS, lr=1e-3, source=f"{GALORE}: full-rank training usually stays at or below 0.001"),
    Recipe(methods=DROP_IN, models=BIG, lr=3e-4, source=ADVISED),
    Recipe(methods=DROP_IN, lr=1e-3, source=ADVISED),
    Recipe(methods=("muon",), models=BIG, lr=3e-4, momentum=0.95, source=ADVISED),
    Recipe(methods=("muon",), lr=1e-3, momentum=0.95, source=ADVISED),
    Recipe(methods=("sgd",), lr=0.1, momentum=0.9, source="our choice: the paper only says that SGD fails here"),
    Recipe(methods=LORAS, models=("130m",), lr=1e-3, rank=256, alpha=32, dropout=0.05, source=LOW_RANK),
    Recipe(methods=LORAS, lr=1e-3, rank=0.25, alpha=32, dropout=0.05, source=LOW_RANK),
    Recipe(methods=("low-rank",), models=("130m",), lr=1e-3, rank=256, source=LOW_RANK),
    Recipe(methods=("low-rank",), lr=1e-3, rank=0.25, source=LOW_RANK),
)  # fmt: skip

TUNED: tuple[Recipe, ...] = (
    Recipe(
        methods=("apollo-mini",), lr=0.02, rank=1, scale=128**0.5, refresh_every=200,
        source="the APOLLO paper, Table 2, the rows marked with a double dagger",
    ),
)  # fmt: skip

LONG = 'the APOLLO paper, "A5" of its ablations: LLaMA-350M at a sequence of 1024'

LONG_CONTEXT: tuple[Recipe, ...] = (
    Recipe(methods=ADAMWS, lr=1e-3, lr_sweep=(1e-3, 2.5e-3, 5e-3, 7.5e-3, 1e-2), source=LONG),
    Recipe(
        methods=("apollo",), lr=0.01, rank=0.125, scale=1.0, refresh_every=200,
        source=f"{LONG}, with an eighth of AdamW's state; scales 1, sqrt(2) and sqrt(3) were tried",
    ),
    Recipe(
        methods=("apollo-mini",), lr=0.01, rank=1, scale=128**0.5, refresh_every=200,
        source=f"{LONG}; scales sqrt(128), sqrt(256) and sqrt(384) were tried",
    ),
)  # fmt: skip

SHORT = "LLaMA-60M, 1000 steps of 82K tokens"
SHORT_STEPS = 2000
"""Largest number of steps of a short run."""

SHORT_RUN: tuple[Recipe, ...] = (
    Recipe(methods=ADAMWS, models=BIG, lr=3e-4, source="LLaMA, Table 2"),
    Recipe(
        methods=("adamw",), models=("350m",), lr=6.25e-4, embedding_lr=1.25e-3, betas=(0.9, 0.98), weight_decay=0.1,
        source="docs/quality.md, LLaMA-350M, 300 steps of 82K tokens: perplexity 86.9",
    ),
    Recipe(
        methods=("adamw",), lr=1.25e-3, embedding_lr=5e-3, betas=(0.9, 0.98), weight_decay=0.1,
        source=f"docs/quality.md, {SHORT}: perplexity 41.3",
    ),
    Recipe(
        methods=("adamw-torch",), lr=1e-3, source=f"docs/results.md, {SHORT}: perplexity 49.2",
    ),
    Recipe(methods=("muon",), models=BIG, lr=3e-4, momentum=0.95, source=ADVISED),
    Recipe(
        methods=("muon",), lr=5e-3, embedding_lr=5e-3, momentum=0.9, betas=(0.9, 0.98), weight_decay=0.1,
        source=f"docs/results.md, {SHORT}: perplexity 35.9",
    ),
    Recipe(
        methods=("apollo",), models=BIG, lr=5e-3, rank=256, scale=1.0, refresh_every=200,
        source=f"docs/results.md, {SHORT}; the rank of the paper's Table 3",
    ),
    Recipe(
        methods=("apollo",), lr=5e-3, rank=0.25, scale=1.0, refresh_every=200, betas=(0.9, 0.98), weight_decay=0.1,
        source=f"docs/quality.md, {SHORT}: perplexity 47.8",
    ),
    Recipe(
        methods=("apollo-mini",), lr=5e-3, rank=1, scale=128**0.5, refresh_every=200,
        source=f"docs/results.md, {SHORT}: perplexity 53.4",
    ),
)  # fmt: skip

RECIPES: dict[str, tuple[Recipe, ...]] = {
    "paper": PAPER,
    "paper-tuned": TUNED,
    "long-context": LONG_CONTEXT,
    "short-run": SHORT_RUN,
}


def recipe_name(name: str, method: str, steps: int | None) -> str:
    """`name`; for "auto" that of short runs if the run is short and the recipe has the method, else the paper's."""
    if name != "auto":
        return name
    is_short = steps is not None and steps <= SHORT_STEPS
    return "short-run" if is_short and any(method in row.methods for row in SHORT_RUN) else "paper"


def recipe(
    method: str,
    model: str,
    rank: Rank = None,
    name: str = "paper",
    recipes: Mapping[str, tuple[Recipe, ...]] = RECIPES,
) -> Recipe:
    """The first of the recipes called `name` that fits this method, model (one of `PRESETS`) and rank."""
    chosen("--model", model, PRESETS)
    rows = recipes[chosen("--recipe", name, recipes)]
    methods = [known for row in rows for known in row.methods]
    if method not in methods:
        raise ValueError(f"--recipe {name} has nothing for {method}; it is for {', '.join(dict.fromkeys(methods))}")
    return next(row for row in rows if method in row.methods and model in row.models and _fits(row, model, rank))


def _fits(row: Recipe, model: str, rank: Rank) -> bool:
    if rank is None or row.rank is None or not row.at_this_rank:
        return True
    width = PRESETS[model].hidden
    return resolved_rank(rank, width) == resolved_rank(row.rank, width)


def nearest_preset(parameters: int) -> str:
    """The preset nearest in size to a model with so many parameters, without embedding and head."""
    sizes = {
        name: sum(math.prod(shape) for weight, shape in llama_parameters(preset) if weight not in VOCABULARY)
        for name, preset in PRESETS.items()
    }
    return min(sizes, key=lambda name: abs(math.log(max(parameters, 1) / sizes[name])))
