"""`apollo pretrain`: train a language model from the start."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.shape import matrix_shape
from ..flags import check_unused
from ..llama import PRESETS
from ..terminal import counted
from .adapters import without_adapters
from .config import TrainingOptions, with_values
from .data.batches import Windows, windows_in_order
from .data.config import Data
from .data.corpus import Corpus, check_data, prepared_corpus
from .data.shards import is_token_folder
from .display import Display
from .export import export_, model_card, sum_up
from .loop import Examples, Task
from .methods import Prepared, prepared_method
from .metrics import flops_per_token, perplexity, records, result_of
from .model import built_objective
from .model_files import check_positions, has_tokenizer, has_weights, model_key
from .ranks import Ranks
from .recipes import recipe_name
from .run import RunFolder, run

UNIGRAM_TOKENS = 1_000_000
"""Tokens of the training text to count for the unigram perplexity."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions):
    """Pre-train a language model: from a preset and the text that Python carries, or from your own of either."""

    data: Data = field(default_factory=Data)

    @property
    def tokens_read(self) -> int:
        """Tokens that training reads, including the last label of each row."""
        return self.steps * self.schedule.batch_rows * (self.schedule.sequence + 1)

    @property
    def has_tokens(self) -> bool:
        """True if the data is tokens already."""
        return is_token_folder(Path(self.data.data))

    def check(self, world: int) -> None:
        super().check(world)
        check_data(self.data)
        if self.data.tokenizer is not None and not self.goes_on:
            why = f"beside the tokenizer {self.data.tokenizer}: it is for one that is trained; leave one of them out"
            check_unused(self.data, why, ("vocabulary",))
        elif self.has_tokens and not self.goes_on:
            why = f"beside --data {self.data.data}, which is tokens already, with their tokenizer: leave it out"
            check_unused(self.data, why, ("vocabulary",))

    def resolved(self, resuming: bool) -> "PretrainOptions":
        """The same, and for a new run also with its tokenizer and recipe."""
        options = super().resolved(resuming)
        if resuming:
            return options
        self.schedule.check()
        self.model.check()  # before it is asked how long such a model is trained
        name = recipe_name(self.method.recipe, self.method.method, self.steps)
        return with_values(options, {"tokenizer": self._tokenizer(), "recipe": name})

    def _tokenizer(self) -> str | None:
        """The tokenizer that was named, or else that of the model. ValueError if a trained model comes without one."""
        folder = Path(self.model.model)
        if self.data.tokenizer is not None or self.model.model in PRESETS:
            return self.data.tokenizer
        if has_tokenizer(folder):
            return self.model.model
        if has_weights(folder) and not self.has_tokens:
            raise ValueError(
                f"--model {self.model.model} has weights and no tokenizer: name the one it was trained with by "
                "--tokenizer. With a new one, every token would have another meaning"
            )
        return None

    def execute(self) -> int:
        """Train; the exit status."""
        return run(self, pretraining)


def pretraining(options: PretrainOptions, folder: RunFolder, ranks: Ranks, screen: Display) -> Task:
    """Tokenise the corpus, and build the model on its device and its optimizer."""
    check_positions(options.model.known_positions, options.schedule.sequence)  # before hours of tokenising
    wanted = folder.fact("tokens_wanted", options.tokens_read)
    trusted, report = options.model.trust_remote_code, screen if ranks.first else None
    with ranks.first_alone():
        corpus = prepared_corpus(options.data, tokens_wanted=wanted, trust_remote_code=trusted, report=report)
        screen.close()
    name, sequence, seed = options.model.model, options.schedule.sequence, options.run.seed
    vocabulary, sharded = _vocabulary(name, corpus), options.run.shard == "fsdp"
    objective = built_objective(options.model, vocabulary, ranks, seed, sharded)
    config = objective.model.config
    corpus.check(sequence + 1, config.vocab_size)
    check_positions(getattr(config, "max_position_embeddings", None), sequence)
    prepared = prepared_method(options.method, objective.model, options.steps, seed, facts=folder.known())
    examples = Windows(corpus.train, sequence, seed)
    validation = windows_in_order(corpus.validation, sequence, options.run.eval_tokens)
    description = _described(options, prepared, corpus)

    def finish() -> None:
        lines = records(folder.metrics)
        result = result_of(lines, prepared.optimizer)
        card = model_card(options, folder, description, result)
        model: Any = without_adapters(prepared.model)
        for config in (model.config, model.generation_config):
            if config is not None:
                config.eos_token_id = corpus.tokenizer.eos_id
        export_(options, folder, model, corpus.tokenizer, card, screen)
        if result is not None:
            rows = min(UNIGRAM_TOKENS // sequence, corpus.train.sequences(sequence + 1))
            unigram = unigram_loss(examples, rows, validation, prepared.model.config.vocab_size)
            result["unigram_perplexity"] = perplexity(unigram)
        sum_up(folder, lines, result, screen)

    return Task(
        prepared=prepared,
        objective=objective,
        examples=examples,
        validation=validation,
        flops=flops_per_token(prepared.model, sequence),
        finish=finish,
        unchanging={"corpus": corpus.key, "model": name if name in PRESETS else model_key(Path(name))},
        facts={
            "training_tokens": len(corpus.train),
            "vocabulary": corpus.tokenizer.vocabulary,
            **prepared.facts,
            "tokens_wanted": wanted,
        },
        description=description,
        notes=list(_remarks(options, prepared)),
    )


def _vocabulary(name: str, corpus: Corpus) -> int:
    """The vocabulary of a new model: the tokenizer's, unless the paper's model has a smaller one that is enough."""
    if name not in PRESETS:
        return corpus.largest_id + 1
    known, size = PRESETS[name].vocabulary, corpus.tokenizer.vocabulary
    return known if corpus.largest_id < known < size else size


def _described(options: PretrainOptions, prepared: Prepared, corpus: Corpus) -> str:
    """The run in a few lines, shown before it begins."""
    schedule = options.schedule
    epochs = options.steps * schedule.batch_rows / corpus.train.sequences(schedule.sequence + 1)
    return (
        f"{options.model.model}: {counted(prepared.parameters)} parameters, {counted(prepared.trainable)} trained\n"
        f"{options.method.method}: {prepared.described}\n"
        f"{options.data.data}: {counted(len(corpus.train))} tokens, vocabulary {corpus.tokenizer.vocabulary}\n"
        f"{options.steps} steps of {schedule.batch_tokens} tokens, {epochs:.2g} epochs"
    )


def _remarks(options: PretrainOptions, prepared: Prepared) -> Iterator[str]:
    """Notes on options that are probably a mistake."""
    if prepared.options["lr"] == 0:
        frozen = prepared.options["embedding_lr"] == 0
        yield f"note: --lr 0 leaves {'every weight' if frozen else 'every weight but embedding and head'} as it is"
    shapes = [
        matrix_shape(weight.shape, group["rank"], group["flatten"])
        for group in prepared.optimizer.param_groups
        if options.method.rank is not None and group.get("rank") is not None
        for weight in group["params"]
    ]
    projected = [shape for shape in shapes if shape is not None]
    full = sum(shape.full_rank for shape in projected)
    if full:
        yield (
            f"note: --rank {options.method.rank} is no less than the smaller side of {full} of the {len(projected)} "
            "matrices it is for: those are not projected, which saves no memory"
        )


def unigram_loss(
    training: Examples, rows: int, validation: Mapping[str, tuple[Examples, int]], vocabulary: int
) -> float:
    """Mean validation loss of predicting every token by its frequency in `rows` rows of the training text."""
    counts = _counts(training, rows, vocabulary) + 1  # one more of each, so that none is impossible
    found = torch.stack([_counts(source, count, vocabulary) for source, count in validation.values()]).sum(0)
    return float(-(found * (counts / counts.sum()).log()).sum() / found.sum())


def _counts(source: Examples, rows: int, vocabulary: int) -> Tensor:
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for first in range(0, rows, 256):
        _, labels = source.batch(first, min(256, rows - first))
        counts += torch.bincount(labels.flatten(), minlength=vocabulary)
    return counts
