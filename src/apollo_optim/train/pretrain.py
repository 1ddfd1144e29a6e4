"""Pre-training: a corpus, a model and a method, put together and trained."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..llama import PRESETS
from ..options import is_number
from .checkpoint import Checkpoints, replace_folder_
from .config import PretrainOptions
from .curves import draw_curves
from .data import Corpus, Tokenizer, prepared_corpus
from .display import Display, counted
from .evaluation import unigram_loss
from .flops import flops_per_token, peak_flops
from .folder import RunFolder
from .losses import Objective
from .methods import Prepared, prepared_method
from .metrics import Record
from .model import built_model, check_positions, objective, silence_libraries
from .narrow import wide_state
from .provenance import provenance
from .ranks import Ranks, joined, world_size
from .runner import Runner
from .session import Subject
from .settings import flat
from .sharding import Splitting
from .snapshot import saved_weights, seed_generators
from .summary import print_summary, result_of
from .windows import shuffled_windows, windows_in_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNIGRAM_TOKENS = 1_000_000
"""Of the training text, to count how often tokens occur."""


def pretrain(options: PretrainOptions) -> int:
    """The exit status of a run with these options."""
    options = options.resolved()
    options.check(world_size())
    folder = RunFolder(options.folder)
    with joined(options.run.place()) as ranks, ExitStack() as stack:
        folder.check(flat(options), options.run.resume)
        screen = stack.enter_context(Display(quiet=options.run.quiet or not ranks.first))
        _set_up(options)
        corpus = _corpus(options, ranks, screen)
        subject = _subject(options, corpus, ranks)
        folder.check_facts({"corpus": corpus.key})
        ranks.barrier()
        if ranks.first:
            with folder.written():
                stack.enter_context(folder.locked())
                folder.write_settings(flat(options))
                folder.add_facts(_facts(subject.prepared, corpus))
                folder.add_session(provenance(ranks.device, ranks.world))
        # Last, so that it does not matter what loading and building drew. Ranks draw numbers of their own.
        seed_generators(options.run.seed + ranks.rank)
        with folder.written():
            runner = Runner(options, folder, subject, ranks, screen)
        screen(_described(options, subject.prepared, corpus))
        status = runner.exit_status(flat(options), lambda lines: _finish(options, folder, corpus, subject, lines))
        ranks.barrier()
        return status


def _set_up(options: PretrainOptions) -> None:
    """Choose algorithms, and keep libraries quiet."""
    if options.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
    silence_libraries()


def _corpus(options: PretrainOptions, ranks: Ranks, screen: Display) -> Corpus:
    with ranks.first_alone():
        corpus = prepared_corpus(options.data, tokens_wanted=options.tokens_read, report=screen)
        screen.close()
        return corpus


def _subject(options: PretrainOptions, corpus: Corpus, ranks: Ranks) -> Subject:
    sequence, seed = options.schedule.sequence, options.run.seed
    splitting = _splitting(options, ranks) if options.run.shard == "fsdp" else None
    vocabulary = _vocabulary(options.model.model, corpus)
    split_layer_ = splitting.split_layer_ if splitting else None
    model = built_model(options.model, vocabulary, ranks.device, seed, split_layer_)
    corpus.check(sequence + 1, model.config.vocab_size)
    check_positions(model.config, sequence)
    split = _split_objective(options, model, ranks, splitting) if splitting else None
    prepared = prepared_method(options.method, model, options.steps, seed)
    peak = peak_flops(ranks.device)
    return Subject(
        prepared=prepared,
        objective=split or objective(options.model, prepared.model, ranks.device),
        plain=split or objective(replace(options.model, compile=False), prepared.model, ranks.device),
        examples=shuffled_windows(corpus.train, sequence, seed),
        validation=windows_in_order(corpus.validation, sequence, options.run.eval_tokens),
        flops=flops_per_token(prepared.model, sequence) / peak if peak else 0.0,
        in_backward=options.run.step_in_backward,
    )


def _splitting(options: PretrainOptions, ranks: Ranks) -> Splitting:
    compiled = ranks.device.type == "cuda" if options.model.compile is None else options.model.compile
    return Splitting(ranks, compiled)


def _split_objective(
    options: PretrainOptions, model: "PreTrainedModel", ranks: Ranks, splitting: Splitting
) -> Objective:
    """A model whose layers are split, with its loss, and all of it split among the ranks."""
    plain = objective(replace(options.model, compile=False), model, ranks.device)
    splitting.split_rest_(plain)
    return plain


def _vocabulary(name: str, corpus: Corpus) -> int:
    """How many tokens the model knows: the tokenizer's, unless a model of the paper has fewer and they are enough."""
    if name not in PRESETS:
        return corpus.largest_id + 1
    known, size = PRESETS[name].vocabulary, corpus.tokenizer.vocabulary
    return known if corpus.largest_id < known < size else size


def _described(options: PretrainOptions, prepared: Prepared, corpus: Corpus) -> str:
    """The run in a few lines, before it begins."""
    schedule, values = options.schedule, prepared.options
    numbers = "  ".join(f"{name} {values[name]:g}" for name in ("lr", "rank", "scale") if is_number(values.get(name)))
    epochs = options.steps * schedule.batch_rows / corpus.train.sequences(schedule.sequence + 1)
    return (
        f"{options.model.model}: {counted(prepared.parameters)} parameters, {counted(prepared.trainable)} trained\n"
        f"{options.method.method}: {numbers}  ({prepared.recipe.source})\n"
        f"{options.data.data}: {counted(len(corpus.train))} tokens, vocabulary {corpus.tokenizer.vocabulary}\n"
        f"{options.steps} steps of {schedule.batch_tokens} tokens, {epochs:.2g} times through the text\n"
        f"kept in {options.folder}"
    )


def _facts(prepared: Prepared, corpus: Corpus) -> dict[str, Any]:
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "param_names", "param_shapes")}
        for group in prepared.optimizer.param_groups
    ]
    return {
        "corpus": corpus.key,
        "training_tokens": len(corpus.train),
        "vocabulary": corpus.tokenizer.vocabulary,
        "parameters": prepared.parameters,
        "trainable": prepared.trainable,
        "method": _plain(prepared.options),
        "groups": [_plain(group) for group in groups],
        "recipe": prepared.recipe.source,
    }


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them; what it has not, in words."""
    known = int, float, list, tuple, str, type(None)
    return {name: value if isinstance(value, known) else str(value) for name, value in options.items()}


def _finish(
    options: PretrainOptions, folder: RunFolder, corpus: Corpus, subject: Subject, lines: Sequence[Record]
) -> None:
    """Export the model, draw the curves, and say how it went."""
    prepared = subject.prepared
    exported = prepared.exported(prepared.model)
    # What is split among ranks, this one cannot bring together alone; the last checkpoint holds it whole.
    last = Checkpoints(folder.checkpoints, options.run.keep).path(options.steps)
    state = saved_weights(last) if options.run.shard == "fsdp" else wide_state(exported)
    export_(folder.model, exported, corpus.tokenizer, state)
    draw_curves({folder.path.name: lines}, folder.curves)
    counted_rows = min(
        UNIGRAM_TOKENS // options.schedule.sequence, corpus.train.sequences(options.schedule.sequence + 1)
    )
    unigram = unigram_loss(subject.examples, counted_rows, subject.validation, prepared.model.config.vocab_size)
    result = result_of(lines, unigram, prepared.optimizer)
    folder.add_facts({"result": result})
    print_summary(result, {"model": folder.model, "curves": folder.curves, "log": folder.metrics})


def export_(folder: Path, model: "PreTrainedModel", tokenizer: Tokenizer, state: dict[str, Tensor] | None) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; `state`, if given, holds the weights."""

    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if config is not None:
            config.eos_token_id = tokenizer.eos_id

    def write(unfinished: Path) -> None:
        model.save_pretrained(unfinished, state_dict=state)
        tokenizer.save_pretrained(unfinished)

    replace_folder_(folder, write)
