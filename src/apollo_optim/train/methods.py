"""Methods of training by name, with the options that each takes and the optimizer that it builds."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ..choices import chosen
from ..core.rule import Granularity, Projection
from ..core.shape import FULL_RANK
from ..flags import flag_of
from ..optimizer import ProjectedOptimizer
from ..options import ACCEPTED, check_option, is_number
from ..param_groups import Vocabulary
from ..variants import (
    APOLLO,
    APOLLOMini,
    Artemis,
    ArtemisMini,
    FactoredAdamW,
    Fira,
    Flora,
    GaLore,
    StructuredAdamW,
)
from . import adapters, optimizers
from .adapters import Restarts, Targets
from .optimizers import ADAM, OWN_ADAM, RATES, Values, installed
from .recipes import RECIPES, Recipe, nearest_preset, recipe, recipe_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Builder = Callable[["PreTrainedModel", Values], torch.optim.Optimizer]

STATE_DTYPES: dict[str, Any] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "int8": torch.int8, "nf4": "nf4",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the model is trained. What is not given is the recipe's, or else the method's own default."""

    method: str = "apollo"
    """apollo, apollo-mini, factored-adamw, artemis, artemis-mini, apollo-svd, structured-adamw, galore, fira, flora; adamw (float32 moments, stochastic rounding), adamw-torch (fused), sgd, adam8bit, adam-mini, muon; lora, dora, relora, low-rank."""  # noqa: E501
    recipe: str = "auto"
    """Learning rate, rank, scale: paper, paper-tuned (Mini at 0.02), long-context (sequences of 1024), short-run; auto is short-run up to 2000 steps, else paper."""  # noqa: E501
    lr: float | None = None
    """Learning rate at its highest."""
    embedding_lr: float | None = None
    """The same for embedding and head; by default the recipe's, in proportion to --lr, or else --lr."""
    rank: int | float | None = None
    """Rank of projections or adapters: an integer, or a fraction of the smaller side."""
    scale: float | Literal["auto"] | None = None
    """Factor on projected updates, the paper's alpha; auto: sqrt(side / rank)."""
    refresh_every: int | None = None
    """Steps between new projections."""
    projection: Projection | None = None
    """Matrices that gradients are projected by."""
    granularity: Granularity | None = None
    """Elements that share a gain."""
    growth_limit: float | Literal["off"] | None = None
    """Largest ratio between the norms of a scaled gradient and the one before."""
    betas: tuple[float, float] | None = None
    """Adam's."""
    eps: float | None = None
    """Adam's."""
    momentum: float | None = None
    """Momentum of sgd and muon."""
    weight_decay: float | None = None
    """Decoupled, of matrices only; by default the recipe's, or else 0."""
    state_dtype: Literal["fp32", "bf16", "fp64", "int8", "nf4"] | None = None
    """Dtype of the moments: fp32 by default, but nf4 of factored-adamw and artemis, which only they take, and bf16 of artemis-mini."""  # noqa: E501
    state_device: Literal["cpu"] | None = None
    """Keep the moments of weights on a GPU in memory of the host, from where they visit it in every step."""
    vocabulary_state: Vocabulary | None = None
    """State of embedding and head: adamw; rowwise, one second moment for each row; factored, one for each row and column and no momentum (see --embedding-lr); factored-adamw, these and a momentum in 4 bits, with betas 0.9 and 0.98 whatever --betas are. By default, which is also what none means, the recipe's, or else adamw."""  # noqa: E501
    rounding: Literal["stochastic", "nearest"] | None = None
    """How bf16 weights are written."""
    alpha: float | None = None
    """LoRA's: its product is multiplied by alpha / rank."""
    dropout: float | None = None
    """Dropout of the inputs of LoRA's factors."""
    relora_every: int | None = None
    """Steps between restarts of ReLoRA; by default a quarter of the run."""
    relora_warmup: int | None = None
    """Steps over which ReLoRA's learning rate rises after a restart."""
    method_seed: int | None = None
    """Seed of projections, stochastic rounding and adapters; by default that of the run."""

    recipes: ClassVar[Mapping[str, tuple[Recipe, ...]]] = RECIPES  # what --recipe may be

    def check(self, total_steps: int | None = None) -> None:
        """Raise ValueError for the first field that is not possible, or that the method does not take."""
        row = METHODS[chosen("--method", self.method, METHODS)]
        chosen("--recipe", self.recipe, ("auto", *RECIPES) if self.recipes is RECIPES else self.recipes)
        name = recipe_name(self.recipe, self.method, total_steps)
        recipe(self.method, "60m", name=name, recipes=self.recipes)
        given = self.given()
        for name in given:
            if name not in row.takes:
                takers = [other for other, known in METHODS.items() if name in known.takes]
                raise ValueError(
                    f"{flag_of(name)} has no effect on --method {self.method}; it is for {', '.join(takers)}"
                )
        _check_values(given, self.method_seed or 0)
        if self.state_dtype == "nf4" and self.method not in FOUR_BITS:
            raise ValueError(
                f"--state-dtype nf4 is for --method {' and '.join(FOUR_BITS)}, got --method {self.method}, which takes "
                "fp32, bf16, fp64 or int8"
            )
        if row.restarts is not None and total_steps is not None:
            row.restarts(given, total_steps)
        if row.needs and not any(map(installed, row.needs)):
            raise ValueError(
                f"--method {self.method} needs {' or '.join(row.needs)}, which is not installed: "
                f"pip install {row.needs[0]}"
            )

    def given(self) -> dict[str, Any]:
        """The options that were given, in the types that optimizers take."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in EVERY_METHOD}
        given = {name: value for name, value in told.items() if value is not None}
        if "state_dtype" in given:
            given["state_dtype"] = STATE_DTYPES[chosen("--state-dtype", given["state_dtype"], STATE_DTYPES)]
        if given.get("growth_limit") == "off":
            given["growth_limit"] = None
        return given


EVERY_METHOD = "method", "recipe", "method_seed"
VOCABULARY_STATE = frozenset({"vocabulary_state"})
FOUR_BITS = "factored-adamw", "artemis"
"""Methods that can keep their momentum in 4 bits."""

BOUNDS: dict[str, tuple[float, float, str]] = {
    "embedding_lr": (0, math.inf, "a number >= 0"),
    "momentum": (0, 1, "a number in [0, 1)"),
    "alpha": (math.ulp(0.0), math.inf, "a number > 0"),
    "dropout": (0, 1, "a number in [0, 1)"),
    "relora_every": (1, math.inf, "an integer >= 1"),
    "relora_warmup": (0, math.inf, "an integer >= 0"),
}
"""Minimum, exclusive maximum, and both in words, for options that our own optimizers do not have."""


def _check_values(values: Mapping[str, Any], seed: int) -> None:
    for name, value in values.items():
        if name in ACCEPTED:
            check_option(flag_of(name), name, value)
    check_option("--method-seed", "seed", seed)
    for name, (least, above, expected) in BOUNDS.items():
        if name in values and not least <= values[name] < above:
            raise ValueError(f"{flag_of(name)} must be {expected}, got {values[name]!r}")


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """One method."""

    build: Builder
    takes: frozenset[str]
    """Options of `Method` that have an effect on it."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that it sets itself."""
    adapt: Callable[["PreTrainedModel", Values], None] | None = None
    """Changes the model before the optimizer is built."""
    restarts: Callable[[Values, int], Restarts] | None = None
    """Makes the restarts of a run of so many steps."""
    needs: tuple[str, ...] = ()
    """Packages, one of which it needs."""


def _own(optimizer: type[ProjectedOptimizer], **fixed: Any) -> MethodEntry:
    """The entry of one of our optimizers, which takes the options that its constructor has."""
    known = {f.name for f in fields(Method)} & set(inspect.signature(optimizer).parameters)
    takes = frozenset(known - set(EVERY_METHOD)) | RATES | VOCABULARY_STATE
    return MethodEntry(build=partial(optimizers.family, optimizer), takes=takes, fixed=fixed)


LORA = OWN_ADAM | {"rank", "alpha", "dropout"}
RELORA = LORA | {"relora_every", "relora_warmup"}

OWN: dict[str, MethodEntry] = {
    "apollo": _own(APOLLO),
    "apollo-mini": _own(APOLLOMini),
    "apollo-svd": _own(APOLLO, projection="svd"),
    "factored-adamw": _own(FactoredAdamW, rank=FULL_RANK),
    "artemis": _own(Artemis, rank=1),
    "artemis-mini": _own(ArtemisMini),
    "structured-adamw": _own(StructuredAdamW, rank=FULL_RANK),
    "galore": _own(GaLore),
    "fira": _own(Fira),
    "flora": _own(Flora),
    "adamw": MethodEntry(build=optimizers.adamw, takes=OWN_ADAM | VOCABULARY_STATE),
}
"""Methods that train the model's own weights by one of our optimizers alone."""

METHODS: dict[str, MethodEntry] = {
    **OWN,
    "adamw-torch": MethodEntry(build=optimizers.torch_adamw, takes=ADAM),
    "sgd": MethodEntry(build=optimizers.sgd, takes=RATES | {"momentum"}),
    "adam8bit": MethodEntry(build=optimizers.adam_8bit, takes=ADAM | {"rounding"}, needs=("torchao", "bitsandbytes")),
    "adam-mini": MethodEntry(build=optimizers.adam_mini, takes=ADAM, needs=("adam_mini",)),
    "muon": MethodEntry(build=optimizers.muon, takes=OWN_ADAM | {"momentum"}),
    "lora": MethodEntry(build=optimizers.adamw, takes=LORA, adapt=adapters.adapt_lora_, needs=("peft",)),
    "dora": MethodEntry(
        build=optimizers.adamw, takes=LORA, adapt=partial(adapters.adapt_lora_, dora=True), needs=("peft",)
    ),
    "relora": MethodEntry(
        build=optimizers.adamw,
        takes=RELORA,
        adapt=adapters.adapt_lora_,
        restarts=adapters.relora_restarts,
        needs=("peft",),
    ),
    "low-rank": MethodEntry(build=optimizers.adamw, takes=OWN_ADAM | {"rank"}, adapt=adapters.adapt_low_rank_),
}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and its optimizer."""

    model: "PreTrainedModel"
    """The given model, with adapters if the method has them."""
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    """The source of the options that were not given."""
    options: dict[str, Any]
    """All options that were set, by the recipe or by hand."""
    given: dict[str, Any]
    """The options that were set by hand."""
    restarts: Restarts | None
    """ReLoRA's restarts."""

    @property
    def parameters(self) -> int:
        """Numbers in the weights of the model, adapters and frozen weights included."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def trainable(self) -> int:
        """Numbers in the weights that are trained."""
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)

    def lr_factor(self, step: int) -> float:
        """Factor on the schedule's learning rate after `step` steps."""
        return 1.0 if self.restarts is None else self.restarts.lr_factor(step)

    def after_step(self, step: int) -> None:
        """Call this after every step, with the number of steps taken, before a checkpoint is saved."""
        if self.restarts is not None:
            self.restarts.after_step_(self.model, self.optimizer, step)

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes, options and parameter groups, for `run.json`."""
        groups = [
            {name: value for name, value in group.items() if name not in ("params", "param_names", "param_shapes")}
            for group in self.optimizer.param_groups
        ]
        return {
            "parameters": self.parameters,
            "trainable": self.trainable,
            "method": _as_json(self.options),
            "groups": [_as_json(group) for group in groups],
            "recipe": self.recipe.source,
            "recipe_options": self.recipe.options,
        }

    @property
    def described(self) -> str:
        """The options that were given, and those of the recipe with its source."""
        own, rates = self.recipe.options, self.recipe.lr_sweep
        given = {name: value for name, value in self.given.items() if name not in own or value != own[name]}
        if given.get("lr") in rates:
            own |= {"lr": given.pop("lr")}
        chosen = {name: value for name, value in own.items() if name not in given}
        parts = ((given, "as given"), (chosen, f"({self.recipe.source})"))
        return "; ".join(f"{_in_words(options)}  {source}" for options, source in parts if options)


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in types that JSON has; others become text."""
    known = int, float, list, tuple, str, type(None)
    return {name: value if isinstance(value, known) else str(value) for name, value in options.items()}


def _in_words(options: Mapping[str, Any]) -> str:
    return "  ".join(f"{name.replace('_', '-')} {_value_in_words(value)}" for name, value in options.items())


def _value_in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_value_in_words, value))
    return f"{value:g}" if is_number(value) else "off" if value is None else str(value).removeprefix("torch.")


def prepared_method(
    config: Method,
    model: "PreTrainedModel",
    total_steps: int,
    seed: int = 0,
    targets: Targets | None = None,
    facts: Values | None = None,
) -> Prepared:
    """Adapt the model to the method, in place, and build the optimizer. Checkpoints are loaded into what this returns.

    By default adapters and projections are for all linear layers but the head, and everything else is trained in full.
    `facts` are those of a run that goes on, with the recipe that it began with. The result is deterministic.
    """
    config.check(total_steps)
    row, chosen_recipe = METHODS[config.method], _recipe_for(config, model, total_steps).as_begun(facts or {})
    own_seed = seed if config.method_seed is None else config.method_seed
    given = config.given()
    values = {"weight_decay": 0.0, "seed": own_seed, **chosen_recipe.options, **row.fixed, **given}
    values.setdefault("embedding_lr", values["lr"])
    restarts = None if row.restarts is None else row.restarts(values, total_steps)
    more: dict[str, Any] = {}
    if row.adapt is not None:
        row.adapt(model, values | {"targets": targets})
    elif targets is not None:
        more = targets.chosen_(model)
    optimizer = row.build(model, values | more)
    return Prepared(
        model=model,
        optimizer=optimizer,
        recipe=chosen_recipe,
        options=values,
        given=given,
        restarts=restarts,
    )


def _recipe_for(config: Method, model: "PreTrainedModel", total_steps: int) -> Recipe:
    """The recipe of the preset nearest to the model in size."""
    vocabulary = optimizers.vocabulary_weights(model)
    body = sum(weight.numel() for weight in model.parameters() if weight not in vocabulary)
    name = recipe_name(config.recipe, config.method, total_steps)
    found = recipe(config.method, nearest_preset(body), config.rank, name, config.recipes)
    if config.lr is None or found.embedding_lr is None:
        return found
    # A recipe's own rate beside a much lower --lr would overrun the vocabulary of a model that is trained further.
    return replace(found, embedding_lr=found.embedding_lr * (config.lr / found.lr))
