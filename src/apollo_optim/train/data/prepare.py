"""Tokenises text to files in a cache: once per content, resumably, and by one process at a time."""

import multiprocessing
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..atomic import os_errors
from ..display import Progress
from .config import LARGEST_DOCUMENT, Data
from .encode import EXAMPLES, GUARD, Encoded, Encoding, Tokens, encoded_batches, usable_cores
from .files import content_hash
from .shards import TOKENIZER, Index, TokenPart, is_token_folder, read_index, write_index, written_shard
from .sources import Source
from .tokenizer import Tokenizer

SMALLEST_PART, LARGEST_PART = 2**18, 2**25
"""Tokens. Parts double in size, so that a run that wants some tokens of a dataset reads at most twice as many."""

PARALLEL_FROM_BYTES = 2**24
"""Bytes of text from which on it pays to start processes."""

LINES_TO_JUDGE = 10_000
"""Lines after which a too large share of unreadable ones is an error at once."""

MOST_VALIDATION_SOURCES = 256
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Wanted:
    """Numbers of tokens that are enough, for a source without a known size."""

    train: int
    validation: int


@dataclass(frozen=True)
class Job:
    """A source to be tokenised, with its tokenizer and options."""

    source: Source
    tokenizer: Tokenizer
    data: Data
    held_out_below: int
    wanted: Wanted | None = None
    """None for all tokens."""

    @property
    def folder(self) -> Path:
        """The folder of its tokens, named by a hash of everything that decides them."""
        options = [self.data.text_field, str(self.data.source_field), str(self.held_out_below)]
        if self.data.max_document != LARGEST_DOCUMENT:
            options.append(str(self.data.max_document))
        return self.data.cache / "tokens" / content_hash([self.source.identity, self.tokenizer.fingerprint, *options])

    def enough(self, index: Index) -> bool:
        if self.wanted is None:
            return index.complete
        done = index.train_tokens >= self.wanted.train and index.validation_tokens >= self.wanted.validation
        return index.complete or done

    def encoding(self) -> Encoding:
        return Encoding(
            str(self.folder / TOKENIZER),
            self.tokenizer.backend is not None,
            self.tokenizer.eos_id,
            self.tokenizer.dtype,
            self.data,
            self.held_out_below,
            self.tokenizer.trust_remote_code,
        )

    def workers(self) -> int:
        expected = self.source.text_bytes
        if expected is None and self.wanted is not None:
            expected = BYTES_PER_TOKEN * (self.wanted.train + self.wanted.validation)
        small = expected is not None and expected < PARALLEL_FROM_BYTES
        return 1 if small else self.data.workers or usable_cores()


def prepared_index(job: Job, progress: Progress) -> Index:
    """The parts to use of the tokens in `job.folder`, which are made if necessary."""
    index = _found_index(job, progress)
    if not job.enough(index):
        with cache_lock(job.data.cache, job.folder, progress):
            index = _found_index(job, progress)
            if not job.enough(index):
                index = _continued(job, index, progress)
    _check_bad_lines(job, index, final=True)
    bad, lines, examples = _bad_lines(index)
    if bad:
        progress.show(f"left out {bad:,} unreadable of {lines:,} lines: {examples}")
    # The fewest parts that are enough, so that a run does not depend on what earlier runs wanted.
    shortest = (replace(index, parts=index.parts[:count]) for count in range(1, len(index.parts) + 1))
    return next((each for each in shortest if job.enough(replace(each, complete=False))), index)


def _found_index(job: Job, progress: Progress) -> Index:
    if is_token_folder(job.folder):
        try:
            return read_index(job.folder, job.data.cache)
        except ValueError as error:
            progress.show(f"tokenising anew what was damaged: {error}")
    return Index(job.tokenizer.dtype, tokenizer=job.tokenizer.fingerprint)


@contextmanager
def cache_lock(cache: Path, path: Path, progress: Progress) -> Iterator[None]:
    """Lock `path` in the cache; says so if another process has locked it, and waits."""
    from filelock import FileLock, Timeout  # comes with torch

    with cache_trouble_named(cache):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            # Before a process begins its work it runs the script that has started it. Its parent, too, waits for it.
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise RuntimeError(f"a script that prepares data must do so under {GUARD}") from None
            progress("waiting for another process that prepares the same data")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def cache_trouble_named(cache: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that names --cache."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--cache {str(cache)!r} cannot be written ({error}): make room, or name another folder by --cache, where "
            "the command has it, or by XDG_CACHE_HOME in the environment"
        ) from error


def _continued(job: Job, index: Index, progress: Progress) -> Index:
    """Tokenise from the end of `index` until it has enough; returns the new index."""
    with cache_trouble_named(job.data.cache):
        job.folder.mkdir(parents=True, exist_ok=True)
        for leftover in job.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        with os_errors(TOKENIZER):
            job.tokenizer.save_pretrained(job.folder / TOKENIZER)
    progress(f"tokenising {job.source.name}" + (f", from {index.train_tokens:,} tokens on" if index.parts else ""))
    writer = ShardWriter(job, index)
    batches = job.source.batches(index.position)
    with closing(encoded_batches(batches, job.encoding(), job.workers())) as stream:
        for encoded in stream:
            writer.add(encoded)
            progress.advance(_share(job, writer, encoded), f"tokenising: {writer.tokens:,} tokens")
            if job.enough(writer.index):
                return writer.index
    writer.write(complete=True)
    return writer.index


def _share(job: Job, writer: "ShardWriter", encoded: Encoded) -> float:
    if job.source.text_bytes is not None:
        return encoded.read / job.source.read_bytes
    return min(1.0, writer.tokens / max(1, job.wanted.train + job.wanted.validation)) if job.wanted else 0.0


class ShardWriter:
    """Collects tokens, and writes them as a part when there are enough."""

    def __init__(self, job: Job, index: Index):
        self.job = job
        self.index = index
        self.pending: list[Encoded] = []
        self.count = 0

    @property
    def tokens(self) -> int:
        return self.index.tokens + self.count

    def add(self, encoded: Encoded) -> None:
        """Add the tokens of a batch, and write a part if it is large enough."""
        self.pending.append(encoded)
        self.count += len(encoded.train) + sum(len(tokens) for tokens in encoded.validation.values())
        if self.count >= min(max(self.index.tokens, SMALLEST_PART), LARGEST_PART):
            self.write(complete=False)

    def write(self, complete: bool) -> None:
        """Write a part of what was added; the last one if the source is `complete`."""
        index = replace(self.index, complete=complete)
        if self.pending:
            with cache_trouble_named(self.job.data.cache):
                index = replace(index, parts=(*index.parts, self._part()))
        _check_bad_lines(self.job, index, final=complete)
        with cache_trouble_named(self.job.data.cache):
            write_index(self.job.folder, index)
        self.index, self.count = index, 0
        self.pending.clear()

    def _part(self) -> TokenPart:
        number = len(self.index.parts)
        train = [encoded.train for encoded in self.pending if len(encoded.train)]
        validation: dict[str, list[Tokens]] = {}
        for encoded in self.pending:
            for source, tokens in encoded.validation.items():
                validation.setdefault(source, []).append(tokens)
        known = {source for part in self.index.parts for source in part.validation} | validation.keys()
        if len(known) > MOST_VALIDATION_SOURCES:
            raise ValueError(
                f"--source-field {self.job.data.source_field!r} names more than {MOST_VALIDATION_SOURCES} sources "
                f"({', '.join(sorted(known)[:3])}, ...): name a field with few values, or none"
            )
        folder = self.job.folder
        return TokenPart(
            written_shard(folder, f"{number:05}-train.bin", train) if train else None,
            {
                source: written_shard(folder, f"{number:05}-validation-{place:03}.bin", validation[source])
                for place, source in enumerate(sorted(validation))
            },
            self.pending[-1].position,
            documents=sum(encoded.documents for encoded in self.pending),
            lines=sum(encoded.lines for encoded in self.pending),
            bad=sum(encoded.bad for encoded in self.pending),
            examples=tuple(example for encoded in self.pending for example in encoded.examples)[:EXAMPLES],
        )


def _bad_lines(index: Index) -> tuple[int, int, str]:
    """The unreadable lines, all lines, and the first few of the unreadable."""
    examples = [example for part in index.parts for example in part.examples][:EXAMPLES]
    return sum(part.bad for part in index.parts), sum(part.lines for part in index.parts), "; ".join(examples)


def _check_bad_lines(job: Job, index: Index, final: bool) -> None:
    bad, lines, examples = _bad_lines(index)
    if bad > job.data.bad_lines * lines and (final or lines >= LINES_TO_JUDGE):
        raise ValueError(
            f"{job.source.name}: {bad:,} of {lines:,} lines cannot be read, more than --bad-lines "
            f"{job.data.bad_lines}: {examples}"
        )
