"""The examples of a run: read, encoded, and split for training and validation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..atomic import damage_of, remove_folder_, replace_folder_
from ..attention import reads_starts
from ..data.batches import shuffled
from ..data.files import content_hash, file_hashes, found_files
from ..data.prepare import cache_lock, cache_trouble_named
from ..data.sources import is_local
from ..data.tokenizer import Tokenizer, loaded_tokenizer
from ..display import Display
from ..losses import Objective
from ..model_files import check_positions
from ..run import tokenizer_folder
from .answers import AnswerEncoder, AnswerSet, BadExamples, answer_set
from .batches import AnswerRows, Layout, by_length, grouped_order, sees_others, shuffled_order
from .config import FinetuneOptions, TuningData
from .conversations import SCHEMAS, Located, located_records, prompt_style

SPLIT_SEED = 0
"""Independent of the run's seed, so that all runs hold out the same examples and their losses can be compared."""

LONGEST = 1024
"""Tokens of the longest example, by default."""

TOLD_EVERY = 50_000
"""Examples read between two lines of progress."""

SHORTEST_PACK, PACK_MULTIPLE, PACK_QUANTILE = 256, 64, 0.99
"""Tokens of a row of packed examples: at least so many, a multiple of this, and enough for this share of examples. With
a mask attention costs more in longer rows, so the few longest examples do not decide; without one, rows are long enough
for all.
"""


@dataclass(frozen=True)
class TuningExamples:
    """The tokens of all examples."""

    tokenizer: Tokenizer
    train: AnswerSet
    validation: Mapping[str, AnswerSet]
    """By source."""
    notes: tuple[str, ...]
    """Remarks on examples that were left out."""

    @property
    def longest(self) -> int:
        """Tokens of the longest example, of all."""
        return max(int(each.lengths.max()) for each in (self.train, *self.validation.values()))

    def rows(self, options: FinetuneOptions, layout: Layout) -> AnswerRows:
        """The examples to train on, in the order of the run."""
        lengths, seed = self.train.lengths, options.run.seed
        order = (
            grouped_order(lengths, options.schedule.batch_rows, seed)
            if options.data.group_by_length and layout == "padded"
            else shuffled_order(len(lengths), seed)
        )
        return AnswerRows(self.train, order, self._capacity(layout), layout == "marked")

    def validation_rows(self, tokens_at_most: int, layout: Layout) -> dict[str, tuple[AnswerRows, int]]:
        """The examples for validation by source, the shortest first, and how many of them to read."""
        return {name: self._in_order(each, tokens_at_most, layout) for name, each in self.validation.items()}

    def _in_order(self, answers: AnswerSet, tokens_at_most: int, layout: Layout) -> tuple[AnswerRows, int]:
        # Choose independently of length, and then sort by length.
        chosen = shuffled(np.arange(len(answers)), len(answers), SPLIT_SEED)
        within = np.cumsum(answers.lengths[chosen]) <= tokens_at_most
        some = answers.chosen(np.sort(chosen[: max(int(within.sum()), 1)]))
        return AnswerRows(some, by_length(some.lengths), self._capacity(layout), layout == "marked"), len(some)

    def _capacity(self, layout: Layout) -> int | None:
        """Tokens of a row of packed examples; None if each example has its own row."""
        if layout == "padded":
            return None
        wanted = self.longest if layout == "marked" else int(np.quantile(self.train.lengths, PACK_QUANTILE))
        return -(-max(wanted, SHORTEST_PACK) // PACK_MULTIPLE) * PACK_MULTIPLE


def row_layout(options: TuningData, objective: Objective, device: torch.device) -> tuple[Layout, str]:
    """The layout of rows, and a note on it. ValueError for --packing if the model cannot keep examples apart."""
    if options.packing is False or options.group_by_length:
        return "padded", ""
    marked = reads_starts(objective.model, device)
    if not sees_others(objective, device, marked):
        return "marked" if marked else "packed", ""
    lets = "its attention does not tell examples of one row from each other"
    if options.packing:
        raise ValueError(f"--packing: {lets}; use --no-packing, which gives each a row of its own")
    return "padded", f"note: no packing: {lets}, so that each has a row of its own"


def tuning_examples(options: FinetuneOptions, base: Path, positions: int | None, screen: Display) -> TuningExamples:
    """The examples that the options name, tokenised for the model in the folder `base`."""
    data = options.data
    option = "the tokenizer of --model" if data.tokenizer is None else "--tokenizer"
    tokenizer = loaded_tokenizer(
        data.tokenizer or tokenizer_folder("--model", str(base)), options.model.trust_remote_code, option
    )
    if data.chat_template is not None:
        tokenizer.pretrained.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    longest = options.schedule.sequence or min(LONGEST, positions or LONGEST)
    check_positions(positions, longest)
    encoder = AnswerEncoder(tokenizer, prompt_style(data.prompt, tokenizer.pretrained), longest)
    train, notes = _encoded("--data", data.data, encoder, data, screen)
    if data.validation is not None:
        found, more = _encoded("--validation", data.validation, encoder, data, screen)
        notes += more
    else:
        train, found = _parted(train, data)
    by_source = {
        source: found.chosen(np.array([n for n, each in enumerate(found.sources) if each == source]))
        for source in dict.fromkeys(found.sources)
    }
    return TuningExamples(tokenizer, train, by_source, notes)


def _encoded(
    option: str, value: str, encoder: AnswerEncoder, data: TuningData, screen: Display
) -> tuple[AnswerSet, tuple[str, ...]]:
    """The good examples of files or a dataset, and notes. ValueError if too many are bad, or none is good."""
    answers, bad = encoded_once(option, value, encoder, data.cache, screen)
    read, most = len(answers) + bad.total, data.bad_examples
    if not read:
        raise ValueError(f"{option} {value} holds no examples: expected {SCHEMAS}")
    if bad.total > most * read or not len(answers):
        raise ValueError(
            f"{option} {value}: {bad.total:,} of {read:,} examples cannot be learned from: {bad}\n"
            f"--bad-examples {most:g} is the largest share that may be left out"
        )
    if not bad.total:
        return answers, ()
    return answers, (f"{option}: {bad.total:,} of {read:,} examples are left out: {bad}",)


def encoded_once(
    option: str, value: str, encoder: AnswerEncoder, cache: Path, screen: Display
) -> tuple[AnswerSet, BadExamples]:
    """The good and the bad examples of files or a dataset.

    Those of files are cached by a hash of everything that decides them; those of the hub, where they may change, are
    encoded each time.
    """
    if not is_local(value):
        return _encoded_now(option, value, encoder, screen)
    files = found_files(option, value)
    hashes = file_hashes([file.path for file in files], cache)
    places = [f"{file.path.resolve()} {file.source}" for file in files]  # shown with bad examples
    folder = cache / "examples" / content_hash([encoder.key, *places, *hashes])
    with cache_lock(cache, folder, screen):
        if folder.exists() and damage_of(folder) is None:
            return AnswerSet.load(folder), BadExamples.load(folder)
        answers, bad = _encoded_now(option, value, encoder, screen)

        def write(unfinished: Path) -> None:
            answers.save(unfinished)
            bad.save(unfinished)

        remove_folder_(folder)  # if it is damaged
        with cache_trouble_named(cache):
            replace_folder_(folder, write)
    return answers, bad


def _encoded_now(option: str, value: str, encoder: AnswerEncoder, screen: Display) -> tuple[AnswerSet, BadExamples]:
    bad = BadExamples()

    def counted() -> Iterator[Located]:
        for read, located in enumerate(located_records(option, value), 1):
            if read % TOLD_EVERY == 0:
                screen(f"{option} {value}: {read:,} examples read")
            yield located

    return answer_set(encoder.encoded(counted(), bad)), bad


def _parted(answers: AnswerSet, data: TuningData) -> tuple[AnswerSet, AnswerSet]:
    """Examples to train on, and held-out examples."""
    count = len(answers)
    if count < 2:
        raise ValueError(f"--data {data.data} has one example: one more is needed to validate with, or --validation")
    held_out = min(data.held_out, max(count // 10, 1))
    order = shuffled(np.arange(count), count, SPLIT_SEED)
    return answers.chosen(np.sort(order[held_out:])), answers.chosen(np.sort(order[:held_out]))
