"""How a model is trained: every method by name, with the options it takes."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..choices import chosen
from ..core.rule import Granularity, Projection
from ..optimizer import ProjectedOptimizer
from ..options import ACCEPTED, check_options
from ..param_groups import Vocabulary
from ..variants import APOLLO, FULL_RANK, APOLLOMini, Artemis, ArtemisMini, Fira, Flora, GaLore, StructuredAdamW
from . import adapters, optimizers
from .adapters import Adaptation
from .optimizers import Builder, Values, family, installed
from .recipes import Recipe, nearest_preset, recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_DTYPES: dict[str, Any] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "int8": torch.int8, "nf4": "nf4",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the model is trained. What is not given is the recipe's, or else the method's own default."""

    method: str = "apollo"
    """apollo, apollo-mini, artemis, artemis-mini, apollo-svd, structured-adamw, galore, fira, flora; adamw (float32 moments, stochastic rounding), adamw-torch (fused), sgd, adam8bit, adam-mini, muon; lora, dora, relora, low-rank."""  # noqa: E501
    recipe: str = "paper"
    """Of learning rate, rank, scale: paper, paper-tuned (Mini at 0.02), long-context (sequences of 1024), short-run."""
    lr: float | None = None
    """Learning rate at its highest."""
    embedding_lr: float | None = None
    """The same for embedding and head; by default the recipe's, or else --lr."""
    rank: int | float | None = None
    """Of projections or adapters: an integer, or a fraction of the smaller side."""
    scale: float | Literal["auto"] | None = None
    """Factor on projected updates, the paper's alpha; auto: sqrt(side / rank)."""
    refresh_every: int | None = None
    """Steps between new projections."""
    projection: Projection | None = None
    """What gradients are projected by."""
    granularity: Granularity | None = None
    """What shares a gain."""
    growth_limit: float | Literal["off"] | None = None
    """Largest ratio between the norms of a scaled gradient and the one before."""
    betas: tuple[float, float] | None = None
    """Adam's."""
    eps: float | None = None
    """Adam's."""
    momentum: float | None = None
    """Of sgd and muon."""
    weight_decay: float = 0.0
    """Decoupled, of matrices only."""
    state_dtype: Literal["fp32", "bf16", "fp64", "int8", "nf4"] | None = None
    """Of the moments. fp32 by default, but nf4 of artemis, which only it takes, and bf16 of artemis-mini."""
    vocabulary_state: Vocabulary | None = None
    """Of embedding and head: adamw; rowwise, one second moment for each row; factored, one for each row and column and no momentum (see --embedding-lr)."""  # noqa: E501
    rounding: Literal["stochastic", "nearest"] | None = None
    """How bf16 weights are written."""
    alpha: float | None = None
    """LoRA's: its product is multiplied by alpha / rank."""
    dropout: float | None = None
    """Of the inputs of LoRA's factors."""
    relora_every: int | None = None
    """Steps between restarts of ReLoRA; by default a quarter of the run."""
    relora_warmup: int | None = None
    """Steps over which ReLoRA's learning rate rises after a restart."""
    method_seed: int | None = None
    """Of projections, stochastic rounding and adapters; by default that of the run."""

    def check(self, total_steps: int | None = None) -> None:
        """Raise ValueError for the first field that cannot be, or that the method does not take; nothing is loaded."""
        row = METHODS[chosen("--method", self.method, METHODS)]
        recipe(self.method, "60m", name=self.recipe)
        given = self.given()
        for name in given:
            if name not in row.takes:
                takers = [other for other, known in METHODS.items() if name in known.takes]
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect on --method {self.method}; it is for {', '.join(takers)}")
        _check_values(given | {"weight_decay": self.weight_decay, "seed": self.method_seed or 0})
        if row.adapt is adapters.adapt_relora_ and total_steps is not None:
            adapters.relora_restarts(given, total_steps)
        if row.needs and not any(map(installed, row.needs)):
            raise ValueError(
                f"--method {self.method} needs {' or '.join(row.needs)}, which is not installed: "
                f"pip install {row.needs[0]}"
            )

    def given(self) -> dict[str, Any]:
        """Options that were asked for, as optimizers take them."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in EVERY_METHOD}
        given = {name: value for name, value in told.items() if value is not None}
        if "state_dtype" in given:
            given["state_dtype"] = STATE_DTYPES[chosen("--state-dtype", given["state_dtype"], STATE_DTYPES)]
        if given.get("growth_limit") == "off":
            given["growth_limit"] = None
        return given


EVERY_METHOD = "method", "recipe", "weight_decay", "method_seed"
RATES = frozenset({"lr", "embedding_lr"})
VOCABULARY_STATE = frozenset({"vocabulary_state"})

BOUNDS: dict[str, tuple[float, float, str]] = {
    "embedding_lr": (0, math.inf, "a number >= 0"),
    "momentum": (0, 1, "a number in [0, 1)"),
    "alpha": (0, math.inf, "a number >= 0"),
    "dropout": (0, 1, "a number in [0, 1)"),
    "relora_every": (1, math.inf, "an integer >= 1"),
    "relora_warmup": (0, math.inf, "an integer >= 0"),
}
"""From, to below, and in words, for options that our own optimizers do not have."""


def _check_values(values: Mapping[str, Any]) -> None:
    check_options({name: value for name, value in values.items() if name in ACCEPTED})
    for name, (least, above, expected) in BOUNDS.items():
        if name in values and not least <= values[name] < above:
            raise ValueError(f"{name} must be {expected}, got {values[name]!r}")


Adapt = Callable[["PreTrainedModel", Values, int], Adaptation]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method."""

    build: Builder
    takes: frozenset[str]
    """Options of `Method` that mean something to it."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that make it what it is."""
    adapt: Adapt | None = None
    """What is done to the model first."""
    needs: tuple[str, ...] = ()
    """Packages of which it needs one."""


def _own(optimizer: type[ProjectedOptimizer], **fixed: Any) -> Row:
    """A row for one of our optimizers, which takes what its constructor does."""
    known = {f.name for f in fields(Method)} & set(inspect.signature(optimizer).parameters)
    return Row(
        build=family(optimizer), takes=frozenset(known - set(EVERY_METHOD)) | RATES | VOCABULARY_STATE, fixed=fixed
    )


ADAM = RATES | {"betas", "eps"}
OWN_ADAM = ADAM | {"state_dtype", "rounding"}
LORA = OWN_ADAM | {"rank", "alpha", "dropout"}
RELORA = LORA | {"relora_every", "relora_warmup"}

METHODS: dict[str, Row] = {
    "apollo": _own(APOLLO),
    "apollo-mini": _own(APOLLOMini),
    "apollo-svd": _own(APOLLO, projection="svd"),
    "artemis": _own(Artemis, rank=1),
    "artemis-mini": _own(ArtemisMini),
    "structured-adamw": _own(StructuredAdamW, rank=FULL_RANK),
    "galore": _own(GaLore),
    "fira": _own(Fira),
    "flora": _own(Flora),
    "adamw": Row(build=optimizers.adamw, takes=OWN_ADAM | VOCABULARY_STATE),
    "adamw-torch": Row(build=optimizers.torch_adamw, takes=ADAM),
    "sgd": Row(build=optimizers.sgd, takes=RATES | {"momentum"}),
    "adam8bit": Row(build=optimizers.adam_8bit, takes=ADAM | {"rounding"}, needs=("torchao", "bitsandbytes")),
    "adam-mini": Row(build=optimizers.adam_mini, takes=ADAM, needs=("adam_mini",)),
    "muon": Row(build=optimizers.muon, takes=OWN_ADAM | {"momentum"}),
    "lora": Row(build=optimizers.adamw, takes=LORA, adapt=adapters.adapt_lora_, needs=("peft",)),
    "dora": Row(build=optimizers.adamw, takes=LORA, adapt=adapters.adapt_dora_, needs=("peft",)),
    "relora": Row(build=optimizers.adamw, takes=RELORA, adapt=adapters.adapt_relora_, needs=("peft",)),
    "low-rank": Row(build=optimizers.adamw, takes=OWN_ADAM | {"rank"}, adapt=adapters.adapt_low_rank_),
}

OWN = (
    "apollo", "apollo-mini", "artemis", "artemis-mini", "apollo-svd", "structured-adamw", "galore", "fira", "flora",
    "adamw",
)  # fmt: skip
"""Methods whose one optimizer is this library's, and which train the model's own weights."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and everything that trains it."""

    model: "PreTrainedModel"
    """The one that was given, with adapters where the method has them."""
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    """Where options that were not given came from."""
    options: dict[str, Any]
    """Every option that was set, by the recipe or by hand."""
    parameters: int
    """Of the model as it is trained, adapters and frozen weights included."""
    trainable: int
    """Of those, the ones that are trained."""
    lr_factor: Callable[[int], float]
    """What the schedule's learning rate is multiplied by in the step after so many others."""
    after_step: Callable[[int], None]
    """To be called after every step with the number of steps taken, and before a checkpoint is saved."""
    exported: Callable[["PreTrainedModel"], "PreTrainedModel"]
    """From the trained model one of ordinary layers, to be saved; the trained one stays as it is."""


def prepared_method(config: Method, model: "PreTrainedModel", total_steps: int, seed: int = 0) -> Prepared:
    """The model made ready for the method, and its optimizer. The model is changed in place.

    Two models with the same weights, prepared with the same options, are the same; a checkpoint of weights and
    optimizer is loaded into what this returns.
    """
    config.check(total_steps)
    row, chosen_recipe = METHODS[config.method], _recipe_for(config, model)
    own_seed = seed if config.method_seed is None else config.method_seed
    values = {"weight_decay": config.weight_decay, "seed": own_seed}
    values |= {**chosen_recipe.options, **row.fixed, **config.given()}
    values.setdefault("embedding_lr", values["lr"])
    adaptation = Adaptation(lambda trained: trained)
    if row.adapt is not None:
        adaptation = row.adapt(model, values, total_steps)
    optimizer = row.build(model, values)
    restarts = adaptation.restarts
    return Prepared(
        model=model,
        optimizer=optimizer,
        recipe=chosen_recipe,
        options=values,
        parameters=sum(weight.numel() for weight in model.parameters()),
        trainable=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        lr_factor=(lambda step: 1.0) if restarts is None else restarts.lr_factor,
        after_step=(lambda step: None) if restarts is None else partial(restarts.after_step_, model, optimizer),
        exported=adaptation.exported,
    )


def _recipe_for(config: Method, model: "PreTrainedModel") -> Recipe:
    """The recipe of the preset nearest to the model in size."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {end.weight for end in ends if end is not None}
    body = sum(weight.numel() for weight in model.parameters() if weight not in vocabulary)
    return recipe(config.method, nearest_preset(body), config.rank, config.recipe)
