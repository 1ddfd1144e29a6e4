"""The options of a fine-tuning run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...choices import chosen
from ...flags import Place, check_each
from ..adapters import Others, Targets
from ..config import TrainingOptions, with_values
from ..data.config import default_cache
from ..data.sources import check_place
from ..data.tokenizer import check_tokenizer
from ..methods import LORA, METHODS, Method
from ..model import Model
from ..recipes import Recipe, recipe
from ..schedule import LONGEST, check_micro_batch
from .base_model import ACCEPTED, check_base
from .conversations import PromptStyle
from .presets import TUNING_PRESETS, TUNING_RECIPES, Preset

LARGEST_BATCH = 2**24
"""Examples of a step, which are listed at once."""


@dataclass(frozen=True, kw_only=True)
class TuningModel(Model):
    """The model that is trained further, and how it computes."""

    model: Place = ""
    """Folder of a finished run, a Hugging Face model's folder, its org/name on the hub, or a .gguf file, which is converted once."""  # noqa: E501

    def _check_source(self) -> None:
        if not self.model:
            raise ValueError(f"--model is missing: {ACCEPTED}")
        check_base(self.model)


@dataclass(frozen=True, kw_only=True)
class TuningData:
    """The examples of a run, and how they become tokens."""

    data: Place = ""
    """Files, folders or patterns of .json, .jsonl, .parquet or .arrow, by commas; or a Hugging Face org/name:config:split."""  # noqa: E501
    validation: Place | None = None
    """Examples for validation, given like the data; by default some that are held out of the data."""
    held_out: int = 500
    """Examples that are held out when there are none for validation; at most a tenth."""
    tokenizer: Place | None = None
    """A folder, tokenizer.json, sentencepiece .model or Hugging Face org/name; by default the model's."""
    prompt: PromptStyle | None = None
    """chat: the tokenizer's chat template, the default where it has one; else alpaca: Alpaca's prompt; plain: none."""
    chat_template: Place | None = None
    """A file with a chat template (Jinja) in place of the tokenizer's; it is saved with the model."""
    packing: bool | None = None
    """Put examples side by side into rows, where none sees another; by default where the architecture can. Otherwise each is a row, padded to the longest."""  # noqa: E501
    group_by_length: bool = False
    """Without packing: make batches of examples that are about as long as each other, which need less padding."""
    bad_examples: float = 0.5
    """Largest share of examples that is left out with a warning: without an answer, too long, or of no known schema."""
    cache: Path = field(default_factory=default_cache)
    """Folder for the tokens of examples, and for models that were converted from GGUF."""

    def check(self) -> None:
        """Raise ValueError for the first option that is not possible; loads nothing."""
        if not self.data.strip():
            raise ValueError(
                "--data is missing: files or folders of .json, .jsonl, .parquet or .arrow, or a dataset's org/name"
            )
        check_place("--data", self.data)
        if self.validation is not None:
            check_place("--validation", self.validation)
        check_each(self, "at least 1 example", lambda count: count >= 1, "held_out")
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer)
        if self.chat_template is not None:
            _check_template(Path(self.chat_template))
        if self.packing and self.group_by_length:
            raise ValueError("--group-by-length has no effect with --packing: leave one of them out")
        check_each(self, "a share between 0 and 1", lambda share: 0 <= share <= 1, "bad_examples")


def _check_template(path: Path) -> None:
    """Raise ValueError if this is no file of text."""
    if not path.is_file():
        raise ValueError(f"--chat-template {path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {path} is not UTF-8 ({error.reason})") from error
    if not text.strip():
        raise ValueError(f"--chat-template {path} is empty: give a template, or leave it out for the tokenizer's own")


@dataclass(frozen=True, kw_only=True)
class TuningMethod(Method):
    """How the model is trained. What is not given is the recipe's, or else the method's own default."""

    method: str = "apollo"
    """apollo, apollo-mini, factored-adamw, artemis, artemis-mini, apollo-svd, structured-adamw, galore, fira, flora; adamw (float32 moments, stochastic rounding), adamw-torch (fused), sgd, adam8bit, adam-mini, muon; lora, dora, relora."""  # noqa: E501
    recipe: str = "commonsense"
    """The paper's settings of learning rate, rank, scale, targets, dropout, batch, length: commonsense, or mmlu."""
    lr: tuple[float, ...] | None = None  # pyrefly: ignore[bad-override]
    """Learning rate at its highest. Of several each is a run, in a folder of its own, and the best by validation loss is kept."""  # noqa: E501
    dropout: float | None = None
    """Of the inputs of LoRA's factors; of other methods the model's own, where its architecture has any."""
    targets: tuple[str, ...] | None = None
    """Layers that projections and adapters are for, by the last part of their names: q k v up down; all: every linear layer but the head."""  # noqa: E501
    others: Others | None = None
    """All other weights: frozen, or trained in full by adamw."""
    merge: bool = False
    """LoRA and DoRA: merge the adapters into the model that is saved; otherwise they are saved by themselves."""

    recipes: ClassVar[Mapping[str, tuple[Recipe, ...]]] = TUNING_RECIPES

    @property
    def preset(self) -> Preset:
        """The recipe's settings beside the optimizer's options."""
        return TUNING_PRESETS[self.recipe]

    @property
    def adapts(self) -> bool:
        """True if the method is LoRA or a variant of it."""
        return METHODS[self.method].takes >= LORA

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try: those given, or those of the recipe."""
        row = recipe(self.method, "60m", self.rank, self.recipe, self.recipes)
        return self.lr or row.lr_sweep or (row.lr,)

    def check(self, total_steps: int | None = None) -> None:
        chosen("--method", self.method, METHODS)
        self.at(None).check(total_steps)
        for lr in self.rates:
            self.at(lr).check(total_steps)
        if len(set(map(rate_name, self.rates))) < len(self.rates):
            given = " ".join(map(str, self.rates))
            raise ValueError(f"--lr {given}: one of them is there twice, or differs only after six digits")
        if self.merge and self.method not in ("lora", "dora"):
            raise ValueError(f"--merge has no effect on --method {self.method}, whose model is saved whole anyway")
        check_each(self, "a number in [0, 1)", lambda share: 0 <= share < 1, "dropout")

    def at(self, lr: float | None) -> "OneRate":
        """The method with a single learning rate."""
        values = {each.name: getattr(self, each.name) for each in fields(Method)}
        return OneRate(**values | {"lr": lr, "dropout": self.dropout if self.adapts else None})


def rate_name(lr: float) -> str:
    """The name of the folder of a run at one of several learning rates."""
    return f"lr-{lr:g}"


@dataclass(frozen=True, kw_only=True)
class OneRate(Method):
    """A method of fine-tuning with one learning rate."""

    recipes: ClassVar[Mapping[str, tuple[Recipe, ...]]] = TUNING_RECIPES


@dataclass(frozen=True, kw_only=True)
class TuningSchedule:
    """How long it trains, in what batches, and how the learning rate moves. What is not given is the recipe's."""

    epochs: float | None = None
    """How often it goes through the examples."""
    steps: int | None = None
    """Optimizer steps; in place of --epochs."""
    sequence: int | None = None
    """Tokens of the longest example that is taken; by default 1024, or as many as the model knows."""
    batch: int | None = None
    """Examples of an optimizer step over all ranks and micro-batches."""
    micro_batch: int | Literal["auto"] = "auto"
    """Examples of a forward pass on one device; auto: as many as fit."""
    warmup: int | None = None
    """Steps over which the learning rate rises from zero; it then falls in a straight line. By default the recipe's, or a tenth of a run that is less than twice as long."""  # noqa: E501
    final_lr: float = 0.0
    """Fraction of the learning rate that it falls to."""
    clip: float | None = None
    """Largest norm of the whole gradient; by default any: the projected optimizers limit each weight's growth."""
    clip_previous: float | None = None
    """The same with --step-in-backward, by the norm of the step before: the present one is not known in time."""

    def check(self) -> None:
        """Raise ValueError for the first number that is not possible."""
        check_each(self, "above 0", lambda number: number > 0, "clip", "clip_previous")
        check_each(self, f"above 0 and at most {LONGEST:,}", lambda number: 0 < number <= LONGEST, "epochs", "steps")
        check_each(self, f"from 1 to {LARGEST_BATCH:,}", lambda count: 1 <= count <= LARGEST_BATCH, "batch")
        check_each(self, "at least 2 tokens", lambda length: length >= 2, "sequence")
        check_each(self, "a number of steps", lambda steps: steps >= 0, "warmup")
        check_each(self, "a fraction from 0 to 1", lambda share: 0 <= share <= 1, "final_lr")
        check_each(self, '"auto" or at least 1 example', lambda rows: rows == "auto" or rows >= 1, "micro_batch")

    @property
    def batch_rows(self) -> int:
        """Examples per optimizer step."""
        assert self.batch is not None  # set from the recipe by `resolved`
        return self.batch

    def rows_of_a_rank(self, world: int) -> int:
        """Examples of an optimizer step on each of `world` ranks."""
        if self.batch_rows % world:
            raise ValueError(
                f"--batch {self.batch_rows} examples cannot be shared evenly by {world} ranks; choose a multiple: "
                f"{math.ceil(self.batch_rows / world) * world}"
            )
        rows = self.batch_rows // world
        check_micro_batch(self.micro_batch, rows)
        return rows

    def lr_factor(self, step: int, total: int) -> float:
        """Factor on learning rates after `step` of `total` steps: a linear warm-up, then a linear decay."""
        rise = self.warmup or 0
        if step < rise:
            return (step + 1) / rise
        return self.final_lr + (1 - self.final_lr) * (total - step) / max(total - rise, 1)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Fine-tune a language model on instructions and answers, or conversations; only answers are learned."""

    WITHOUT: ClassVar[tuple[str, ...]] = ("positions",)  # the model's own configuration has it

    model: TuningModel = field(default_factory=TuningModel)
    data: TuningData = field(default_factory=TuningData)
    method: TuningMethod = field(default_factory=TuningMethod)
    schedule: TuningSchedule = field(default_factory=TuningSchedule)  # pyrefly: ignore[bad-override]

    @classmethod
    def with_files(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same; ValueError if the length is given twice."""
        if given.get("steps") is not None and given.get("epochs") is not None:
            raise ValueError(
                f"--steps {given['steps']} and --epochs {given['epochs']} say the same thing; leave one out"
            )
        return super().with_files(given)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; 1 until `of_examples` has set them."""
        return self.schedule.steps or 1

    @property
    def targets(self) -> Targets:
        """The layers that are trained, and the treatment of all others."""
        preset = self.method.preset
        # With LoRA only the adapters are trained by default.
        others = self.method.others or ("frozen" if self.method.adapts else preset.others)
        return Targets(self.method.targets or preset.targets, others)

    def check(self, world: int) -> None:
        self.data.check()
        super().check(world)

    def resolved(self, resuming: bool) -> "FinetuneOptions":
        """The same, also with the defaults of the recipe."""
        options = super().resolved(resuming)
        self.method.check()
        preset, schedule = self.method.preset, self.schedule
        own: dict[str, Any] = {
            "batch": preset.batch if schedule.batch is None else schedule.batch,
            "targets": self.targets.names,
            "others": self.targets.others,
            "dropout": preset.dropout if self.method.dropout is None else self.method.dropout,
        }
        if schedule.steps is None and schedule.epochs is None:
            own["epochs"] = preset.epochs
        return with_values(options, own)

    def of_examples(self, count: int, longest: int) -> "FinetuneOptions":
        """The options with steps, warm-up and sequence for so many examples, of at most `longest` tokens."""
        schedule = self.schedule
        own: dict[str, Any] = {"sequence": schedule.sequence or longest}
        steps = schedule.steps
        if steps is None and schedule.epochs is not None:
            own["steps"] = steps = math.ceil(schedule.epochs * count / schedule.batch_rows)
        if steps is not None and schedule.warmup is None:
            usual = self.method.preset.warmup
            own["warmup"] = usual if steps >= 2 * usual else steps // 10
        return with_values(self, own)
