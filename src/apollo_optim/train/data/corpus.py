"""The tokens of a run, for training and for validation by source, with their tokenizer."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..atomic import replace_folder_
from ..display import Progress
from .config import LARGEST_DOCUMENT, Data
from .encode import ALL, document_hash, documents_of
from .files import content_hash
from .prepare import Job, Wanted, cache_lock, cache_trouble_named, prepared_index
from .shards import TOKENIZER, Index, TokenSet, is_token_folder, read_index, token_set
from .sources import PYTHON, Source, check_place, source_of
from .tokenizer import Tokenizer, check_tokenizer, loaded_tokenizer, trained_tokenizer

HELD_OUT_BYTES = 2_000_000
LEAST_HELD_OUT, MOST_HELD_OUT = 0.001, 0.1
HELD_OUT_OF_STREAM = 0.005
"""Share of a dataset of unknown size."""

COUNTED_BYTES = 2**26
"""Up to so much text the held-out share is nearly exact; beyond it, it is left to the hashes."""

LEAST_VALIDATION = 2**14
MOST_VALIDATION = 10_000_000
"""Validation tokens of a Hugging Face dataset. The paper evaluates on the larger number."""

SAMPLE_BYTES = 2**25
"""Bytes of text to train a tokenizer on."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and to validate on by source."""

    train: TokenSet
    validation: dict[str, TokenSet]
    tokenizer: Tokenizer

    @property
    def key(self) -> str:
        """A hash of the content; with equal keys all windows are equal."""
        validation = [part for name in self.validation for part in (name, *self.validation[name].hashes)]
        return content_hash([*self.train.hashes, "validation", *validation])

    @property
    def largest_id(self) -> int:
        """The largest token id that occurs; the model's vocabulary must be above it."""
        return max(tokens.largest_id for tokens in (self.train, *self.validation.values()))

    def check(self, length: int, vocabulary: int) -> None:
        """Raise ValueError if there is no sequence of `length`, or a token that the model's vocabulary lacks."""
        if self.largest_id >= vocabulary:
            raise ValueError(
                f"the data has token id {self.largest_id}, the model's vocabulary ends at {vocabulary - 1}: give the "
                f"model a vocabulary of {self.tokenizer.vocabulary}, the tokenizer's, or the data another tokenizer"
            )
        if self.train.sequences(length) == 0:
            raise ValueError(
                f"too little text: {len(self.train):,} tokens are less than one sequence of {length}; give more "
                "--data or a shorter --sequence"
            )
        if not any(tokens.sequences(length) for tokens in self.validation.values()):
            held = sum(len(tokens) for tokens in self.validation.values())
            raise ValueError(
                f"too little text for validation: {held:,} tokens, less than one sequence of {length}; give "
                "--validation text of its own, a larger --held-out or a shorter --sequence"
            )


def check_data(data: Data) -> None:
    """Raise ValueError for options that are not possible, before anything is read."""
    data.check()
    for option, value in (("--data", data.data), ("--validation", data.validation)):
        if value is not None and value != PYTHON and not is_token_folder(Path(value)):
            check_place(option, value)
    if data.tokenizer is not None:
        check_tokenizer(data.tokenizer)


def prepared_corpus(
    data: Data,
    *,
    tokens_wanted: int | None = None,
    report: Progress | None = None,
    trust_remote_code: bool = False,
) -> Corpus:
    """The corpus that `data` describes, tokenised now or before.

    Files are read as a whole, a Hugging Face dataset until there are `tokens_wanted` tokens for training. If several
    processes ask for a corpus at once, one makes it and the others wait.
    """
    check_data(data)
    progress = report or Progress()
    if is_token_folder(Path(data.data)):
        return _corpus_of_folder(data, Path(data.data), progress, trust_remote_code)
    # Only validation needs sources.
    text = data if data.validation is None else replace(data, source_field=None)
    source = source_of("--data", data.data, text)
    threshold = _held_out_below(source, text) if data.validation is None else 0
    if data.tokenizer is None:
        tokenizer = _own_tokenizer(source, text, threshold, progress)
    else:
        tokenizer = loaded_tokenizer(data.tokenizer, trust_remote_code)
    wanted = None
    if source.text_bytes is None and tokens_wanted is not None:
        wanted = Wanted(tokens_wanted, LEAST_VALIDATION if threshold else 0)
    job = Job(source, tokenizer, text, threshold, wanted)
    index = prepared_index(job, progress)
    validation = _validation_sets(job.folder, index)
    if data.validation is not None:
        validation = _given_validation("--validation", data.validation, data, tokenizer, progress)
    return Corpus(_train_set(job.folder, index), validation, tokenizer)


def validation_text(data: Data, tokenizer: Tokenizer, *, report: Progress | None = None) -> dict[str, TokenSet]:
    """All tokens of the text that `data` names, by source, for validation alone."""
    check_data(data)
    return _given_validation("--data", data.data, data, tokenizer, report or Progress())


def _held_out_below(source: Source, data: Data) -> int:
    """The number below which documents' hashes hold them out."""
    if source.text_bytes is None:
        return int((data.held_out or HELD_OUT_OF_STREAM) * 2**64)
    share = data.held_out or min(max(HELD_OUT_BYTES / source.text_bytes, LEAST_HELD_OUT), MOST_HELD_OUT)
    if source.text_bytes > COUNTED_BYTES:
        return int(share * 2**64)
    lengths: dict[int, int] = {}
    troubles: list[str] = []
    for batch in source.batches():
        for document in documents_of(batch, data):
            if document.text:
                lengths[document_hash(document.text)] = len(document.text)
            if document.trouble is not None:
                troubles.append(f"{batch.place}, line {document.line}: {document.trouble}")
    hashes = sorted(lengths)
    if len(hashes) < 2:
        unread = f"; {len(troubles)} cannot be read, the first at {troubles[0]}" if troubles else ""
        raise ValueError(
            f"too little text: --data {source.name!r} has {len(hashes)} different documents, so that none can be held "
            f"out{unread}; give more, or --validation text of its own"
        )
    held, total = 0, sum(lengths.values())
    for number, each in enumerate(hashes[:-1]):
        held += lengths[each]
        if held >= share * total:
            return hashes[number] + 1
    return hashes[-1]


def _own_tokenizer(source: Source, data: Data, held_out_below: int, progress: Progress) -> Tokenizer:
    """A tokenizer trained on the data's text, now or before."""
    options = [data.text_field, str(held_out_below), str(data.vocabulary)]
    if data.max_document != LARGEST_DOCUMENT:
        options.append(str(data.max_document))
    folder = data.cache / "tokenizers" / content_hash([source.identity, *options])
    if not folder.exists():
        with cache_lock(data.cache, folder, progress):
            if not folder.exists():
                _train_tokenizer_in(folder, source, data, held_out_below, progress)
    return loaded_tokenizer(str(folder))


def _train_tokenizer_in(folder: Path, source: Source, data: Data, held_out_below: int, progress: Progress) -> None:
    progress(f"training a tokenizer of {data.vocabulary:,} entries on {source.name}")
    texts = (
        document.text
        for batch in source.sample(SAMPLE_BYTES)
        for document in documents_of(batch, data)
        if document.text and document_hash(document.text) >= held_out_below
    )
    tokenizer = trained_tokenizer(texts, data.vocabulary)
    with cache_trouble_named(data.cache):
        replace_folder_(folder, tokenizer.save_pretrained)


def _train_set(folder: Path, index: Index) -> TokenSet:
    return token_set(folder, index.dtype, [part.train for part in index.parts if part.train])


def _validation_sets(folder: Path, index: Index) -> dict[str, TokenSet]:
    sources = sorted({source for part in index.parts for source in part.validation})
    return {
        source: token_set(
            folder, index.dtype, [part.validation[source] for part in index.parts if source in part.validation]
        )
        for source in sources
    }


def _given_validation(
    option: str, value: str, data: Data, tokenizer: Tokenizer, progress: Progress
) -> dict[str, TokenSet]:
    """The tokens of text that is all for validation, by source."""
    path = Path(value)
    if is_token_folder(path):
        index = _checked_index(path, tokenizer, data)
        return _validation_sets(path, index) or {path.name: _train_set(path, index)}
    source = source_of(option, value, data)
    wanted = Wanted(0, MOST_VALIDATION) if source.text_bytes is None else None
    job = Job(source, tokenizer, data, ALL, wanted)
    return _validation_sets(job.folder, prepared_index(job, progress))


def _corpus_of_folder(data: Data, folder: Path, progress: Progress, trust_remote_code: bool) -> Corpus:
    """The corpus in a folder of token shards."""
    named = data.tokenizer or (str(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None)
    if named is None:
        raise ValueError(
            f"--data {data.data!r} has tokens and no tokenizer: put it in {folder / TOKENIZER}, or name it "
            "by --tokenizer"
        )
    tokenizer = loaded_tokenizer(named, trust_remote_code)
    index = _checked_index(folder, tokenizer, data)
    train = _train_set(folder, index)
    if data.validation is not None:
        return Corpus(train, _given_validation("--validation", data.validation, data, tokenizer, progress), tokenizer)
    validation = _validation_sets(folder, index)
    if not validation:
        share = data.held_out or min(max(HELD_OUT_BYTES / 4 / max(1, len(train)), LEAST_HELD_OUT), MOST_HELD_OUT)
        train, rest = train.parted(len(train) - int(share * len(train)))
        validation = {folder.name: rest}
    return Corpus(train, validation, tokenizer)


def _checked_index(folder: Path, tokenizer: Tokenizer, data: Data) -> Index:
    index = read_index(folder, data.cache)
    if index.tokenizer is not None and index.tokenizer != tokenizer.fingerprint:
        raise ValueError(
            f"the tokens in {folder} are not of --tokenizer {data.tokenizer!r}: name the one they were made with"
        )
    return index
