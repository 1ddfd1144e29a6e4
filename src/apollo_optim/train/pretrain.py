"""Pre-training: a corpus, a model and a method, put together and trained."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.shape import matrix_shape
from ..llama import PRESETS
from ..options import is_number
from .checkpoint import Checkpoints, finish_exchange_, replace_folder_
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
    folder = RunFolder(options.folder)
    begun = options.run.resumes and folder.settings.exists()
    typed = options.resolved() if begun else options.resolved().with_own_tokenizer()
    options = typed.located(folder.fact("places", dict[str, str]())) if begun else typed
    options.check(world_size())
    with joined(options.run.place()) as ranks, ExitStack() as stack:
        screen = stack.enter_context(Display(quiet=options.run.quiet or not ranks.first))
        folder.check(typed)
        if ranks.first:
            with folder.written():
                stack.enter_context(folder.locked())
                finish_exchange_(folder.model)
            folder.check(typed)
        _set_up(options)
        wanted = folder.fact("tokens_wanted", options.tokens_read)
        corpus = _corpus(options, wanted, ranks, screen)
        subject = _subject(options, corpus, ranks)
        folder.check_facts({"corpus": corpus.key})
        ranks.barrier()
        if ranks.first:
            with folder.written():
                folder.write_settings(flat(typed))
                folder.add_facts({**_facts(subject.prepared, corpus), "tokens_wanted": wanted})
                folder.add_facts({"places": options.places()})
                folder.add_session(provenance(ranks.device, ranks.world))
        # Last, so that it does not matter what loading and building drew. Ranks draw numbers of their own.
        seed_generators(options.run.seed + ranks.rank)
        with folder.written():
            runner = Runner(options, folder, subject, ranks, screen)
        screen(_described(options, subject.prepared, corpus))
        for remark in _remarks(options, subject.prepared):
            runner.say(remark)

        def finish(lines: Sequence[Record]) -> None:
            _finish(options, folder, corpus, subject, lines, runner.say)

        status = runner.exit_status(flat(options), finish)
        ranks.barrier()
        return status


def _set_up(options: PretrainOptions) -> None:
    """Choose algorithms, and keep libraries quiet."""
    if options.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
    silence_libraries()


def _corpus(options: PretrainOptions, tokens: int, ranks: Ranks, screen: Display) -> Corpus:
    trusted = options.model.trust_remote_code
    with ranks.first_alone():
        if not ranks.first:
            return prepared_corpus(options.data, tokens_wanted=tokens, trust_remote_code=trusted)
        corpus = prepared_corpus(options.data, tokens_wanted=tokens, trust_remote_code=trusted, report=screen)
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


def _remarks(options: PretrainOptions, prepared: Prepared) -> Iterator[str]:
    """What is allowed, and hardly meant."""
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
    options: PretrainOptions,
    folder: RunFolder,
    corpus: Corpus,
    subject: Subject,
    lines: Sequence[Record],
    say: Callable[[str], None],
) -> None:
    """Export the model, draw the curves, and say how it went."""
    prepared = subject.prepared
    exported = prepared.exported(prepared.model)
    # What is split among ranks, this one cannot bring together alone; the last checkpoint holds it whole.
    last = Checkpoints(folder.checkpoints, options.run.keep).path(options.steps)
    state = saved_weights(last) if options.run.shard == "fsdp" else wide_state(exported)
    aside = export_(folder.model, exported, corpus.tokenizer, state)
    if aside is not None:
        say(f"{folder.model} had files that this run did not write: all that it held is now in {aside}")
    if not any(line["kind"] == "train" for line in lines):
        say(f"{folder.metrics} has lost the lines of this run: the model is exported, and there is nothing to sum up")
        return
    draw_curves({folder.path.name: lines}, folder.curves)
    counted_rows = min(
        UNIGRAM_TOKENS // options.schedule.sequence, corpus.train.sequences(options.schedule.sequence + 1)
    )
    unigram = unigram_loss(subject.examples, counted_rows, subject.validation, prepared.model.config.vocab_size)
    result = result_of(lines, unigram, prepared.optimizer)
    folder.add_facts({"result": result})
    print_summary(result, {"model": folder.model, "curves": folder.curves, "log": folder.metrics})


def export_(
    folder: Path, model: "PreTrainedModel", tokenizer: Tokenizer, state: dict[str, Tensor] | None
) -> Path | None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; `state`, if given, holds the weights.

    Where the files of one that was there before are now, if somebody else had a hand in them.
    """

    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if config is not None:
            config.eos_token_id = tokenizer.eos_id

    def write(unfinished: Path) -> None:
        model.save_pretrained(unfinished, state_dict=state)
        tokenizer.save_pretrained(unfinished)

    return replace_folder_(folder, write)
