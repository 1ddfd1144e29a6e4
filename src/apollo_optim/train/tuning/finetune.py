"""`apollo finetune`: train a language model further, at one learning rate or at several."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...terminal import counted
from ..adapters import save_adapters, without_adapters
from ..config import with_values
from ..data.files import content_hash
from ..display import Display
from ..export import export_, model_card, sum_up
from ..loop import Task, uncompiled
from ..methods import Prepared, prepared_method
from ..metrics import flops_per_token, records, result_of
from ..model import DTYPES, built_objective, dropouts, silence_libraries
from ..model_files import check_architecture, model_key, saved_config
from ..ranks import Ranks, is_first
from ..run import RunFolder, run
from ..troubles import troubles_named
from .base_model import base_folder
from .config import FinetuneOptions
from .examples import TuningExamples, row_layout, tuning_examples
from .sweep import check_sweep, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Finetune(FinetuneOptions):
    __doc__ = FinetuneOptions.__doc__

    def execute(self) -> int:
        """Run with these options, or once for each of several learning rates; the exit status."""
        silence_libraries()
        folder = RunFolder(self.folder)
        typed, here = folder.resolved(self)
        if not self.goes_on or typed.schedule.steps is not None:  # else its length depends on the examples
            check = check_sweep if len(typed.method.rates) > 1 else RunFolder.check
            check(folder, typed)
        with Display(quiet=self.run.quiet or not is_first()) as screen:
            base = base_folder(here.model.model, DTYPES[here.model.dtype or "fp32"], here.data.cache, screen)
            with troubles_named(f"--model {here.model.model}"):
                config = saved_config(base, here.model.trust_remote_code)
            check_architecture(f"--model {here.model.model}", config.to_dict())
            if typed.method.recipe == "mmlu" and config.model_type.startswith("gemma"):
                typed = with_values(typed, {"recipe": "mmlu-gemma"})
            positions = getattr(config.get_text_config(), "max_position_embeddings", None)
            examples = tuning_examples(here, base, positions, screen)
        # Saved with the run, so that it goes on with them whatever the recipe's are then.
        typed = with_values(typed.of_examples(len(examples.train), examples.longest), {"lr": typed.method.rates})
        prepare = partial(finetuning, base=base, examples=examples)
        if len(typed.method.rates) == 1:
            return run(typed, prepare)
        places = here.places()
        return sweep(typed, places, lambda one: run(one, prepare, places))


def finetuning(
    options: FinetuneOptions,
    folder: RunFolder,
    ranks: Ranks,
    screen: Display,
    *,
    base: Path,
    examples: TuningExamples,
) -> Task:
    """Build the model on its device and its optimizer, and arrange the examples in batches."""
    method, seed, path = options.method, options.run.seed, Path(options.model.model)
    (lr,) = method.rates
    dropout = 0.0 if method.adapts else method.dropout or 0.0
    wanted = replace(options.model, model=str(base))
    original = saved_config(base, wanted.trust_remote_code)
    vocabulary = 1 + max(int(each.tokens.max()) for each in (examples.train, *examples.validation.values()))
    objective = built_objective(wanted, vocabulary, ranks, seed, options.run.shard == "fsdp", dropout, tuning=True)
    prepared = prepared_method(method.at(lr), objective.model, options.steps, seed, options.targets, folder.known())
    with uncompiled():
        layout, note = row_layout(options.data, objective, ranks.device)
    packed = layout != "padded"
    description = _described(options, prepared, examples, packed)

    def finish() -> None:
        lines = records(folder.metrics)
        result = result_of(lines, prepared.optimizer)
        card = model_card(options, folder, description, result, options.model.model)
        adapters_alone = method.method in ("lora", "dora") and not method.merge
        model: Any = prepared.model if adapters_alone else without_adapters(prepared.model)
        for each in dropouts(original):  # that of fine-tuning is not part of the model
            setattr(model.config, each, getattr(original, each))
        save = partial(save_adapters, model, str(base.absolute())) if adapters_alone else None
        export_(options, folder, model, examples.tokenizer, card, screen, save)
        sum_up(folder, lines, result, screen)

    return Task(
        prepared=prepared,
        objective=objective,
        examples=examples.rows(options, layout),
        validation=examples.validation_rows(options.run.eval_tokens, layout),
        flops=flops_per_token(prepared.model, int(examples.train.lengths.mean())),
        finish=finish,
        unchanging={
            "examples": examples.train.key,
            "validation": content_hash(each.key for each in examples.validation.values()),
            "model": model_key(path if path.is_file() else base) if path.exists() else str(path),
        },
        facts={
            **prepared.facts,
            "training_examples": len(examples.train),
            "training_tokens": int(examples.train.lengths.sum()),
            "base": str(base),
            "packed": packed,
        },
        description=description,
        notes=[*examples.notes, *([note] if note else []), *_remarks(options, prepared.model)],
    )


def _described(options: FinetuneOptions, prepared: Prepared, examples: TuningExamples, packed: bool) -> str:
    """The run in a few lines, shown before it begins."""
    schedule, train = options.schedule, examples.train
    epochs = options.steps * schedule.batch_rows / len(train)
    validation = sum(map(len, examples.validation.values()))
    targets = f"on {' '.join(options.targets.names)}, others {options.targets.others}"
    return (
        f"{options.model.model}: {counted(prepared.parameters)} parameters, {counted(prepared.trainable)} trained\n"
        f"{options.method.method} {targets}: {prepared.described}\n"
        f"{options.data.data}: {len(train):,} examples, {counted(int(train.lengths.sum()))} tokens, of which "
        f"{counted(int(train.targets.sum()))} are answers; {validation:,} examples for validation\n"
        f"{options.steps} steps of {schedule.batch_rows} examples, {'packed' if packed else 'padded'}: {epochs:.3g} "
        f"epochs, warm-up {schedule.warmup}"
    )


def _remarks(options: FinetuneOptions, model: "PreTrainedModel") -> Iterator[str]:
    """Notes on options that are probably a mistake."""
    method, schedule = options.method, options.schedule
    if method.dropout and not method.adapts:
        there = dropouts(model.config)
        name = type(model).__name__
        if there:
            yield f"note: --dropout {method.dropout:g} sets {', '.join(there)}, all the dropout that {name} has"
        else:
            yield f"note: --dropout {method.dropout:g} has no effect: {name} has no dropout"
    if schedule.warmup and schedule.warmup >= options.steps:
        yield f"note: --warmup {schedule.warmup} is longer than the run: the learning rate never reaches its highest"
