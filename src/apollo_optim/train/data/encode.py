"""Tokenises records, in this process or in many, in order."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .config import Data
from .readers import RecordBatch, TooLong

Item = TypeVar("Item")
Result = TypeVar("Result")

Tokens = NDArray[np.unsignedinteger[Any]]

EXAMPLES = 5
"""Unreadable lines to show."""

ALL = 2**64
"""`held_out_below` that holds out every document."""


@dataclass(frozen=True)
class Encoding:
    """The way from records to tokens, as plain data that can be sent to a process.

    It fits into a pipe: to write more to a process that has died takes forever.
    """

    folder: str
    """The tokenizer's."""
    is_fast: bool
    """True if `tokenizers` can load it; False if only `transformers` can."""
    eos_id: int
    dtype: str
    data: Data
    held_out_below: int
    """Documents with a 64-bit hash below this are for validation."""
    trust_remote_code: bool = False
    """True if Python code that comes with the tokenizer may run."""


@dataclass
class Encoded:
    """The tokens of a batch, and its unreadable lines."""

    train: Tokens
    validation: dict[str, Tokens]
    position: Any
    read: int
    documents: int = 0
    lines: int = 0
    bad: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few unreadable lines: file, line and why."""


@dataclass(frozen=True)
class Document:
    """A text, or the reason why it cannot be read."""

    text: str
    source: str
    line: int
    trouble: str | None = None


def encoder_of(encoding: Encoding) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to ids, which does not treat names of special tokens in a text as such."""
    if not encoding.is_fast:
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(encoding.folder, trust_remote_code=encoding.trust_remote_code)
        return lambda texts: slow(texts, add_special_tokens=False)["input_ids"]
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(os.path.join(encoding.folder, "tokenizer.json"))
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return lambda texts: [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]


def encoded_batch(batch: RecordBatch, encoding: Encoding, encode: Callable[[list[str]], list[list[int]]]) -> Encoded:
    """The tokens of a batch, with the end-of-document token after each document."""
    documents = list(documents_of(batch, encoding.data))
    readable = [document for document in documents if document.trouble is None and document.text]
    train: list[Tokens] = []
    validation: dict[str, list[Tokens]] = {}
    for document, ids in zip(readable, encode([document.text for document in readable]), strict=True):
        if ids:
            held_out = document_hash(document.text) < encoding.held_out_below
            tokens = np.array([*ids, encoding.eos_id], dtype=encoding.dtype)
            (validation.setdefault(document.source, []) if held_out else train).append(tokens)
    troubles = [f"{batch.place}, line {d.line}: {d.trouble}" for d in documents if d.trouble is not None]
    return Encoded(
        np.concatenate(train) if train else np.empty(0, dtype=encoding.dtype),
        {source: np.concatenate(pieces) for source, pieces in validation.items()},
        batch.position,
        batch.read,
        documents=len(readable),
        lines=sum(d.text.count("\n") + 1 for d in documents) if batch.kind == "text" else len(documents),
        bad=len(troubles),
        examples=troubles[:EXAMPLES],
    )


def document_hash(text: str) -> int:
    """A 64-bit hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def documents_of(batch: RecordBatch, data: Data) -> Iterator[Document]:
    """The documents of a batch, and one with a `trouble` for each unreadable line; blank ones have an empty text."""
    if batch.kind == "text":
        yield from _decoded_texts(batch)
    elif batch.kind == "json":
        yield from _parsed_lines(batch, data.text_field, data.source_field)
    else:
        for line, (text, source) in enumerate(batch.records, batch.first_line):
            yield _document(text, source or batch.source, line)


def _decoded_texts(batch: RecordBatch) -> Iterator[Document]:
    line = batch.first_line
    for record in batch.records:
        try:
            text = record.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError:
            # Leave out only the unreadable lines, not the document.
            text = ""
            for number, content in enumerate(record.splitlines(keepends=True), line):
                try:
                    text += content.decode()
                except UnicodeDecodeError as error:
                    yield Document("", batch.source, number, f"not UTF-8 ({error.reason})")
        yield Document("" if text.isspace() else text, batch.source, line)
        line += record.count(b"\n")


def _parsed_lines(batch: RecordBatch, text_field: str, source_field: str | None) -> Iterator[Document]:
    seen: dict[str, None] = {}
    found = False
    for line, record in enumerate(batch.records, batch.first_line):
        if isinstance(record, TooLong):
            yield Document("", batch.source, line, str(record))
            continue
        if record.isspace():
            continue
        try:
            fields = json.loads(record)
        except (ValueError, RecursionError) as error:
            yield Document("", batch.source, line, f"not JSON ({error})")
            continue
        if not isinstance(fields, dict):
            yield Document("", batch.source, line, f"{type(fields).__name__}, not an object with fields")
            continue
        seen |= dict.fromkeys(fields)
        found |= text_field in fields
        source = fields.get(source_field) if source_field else None
        yield _document(fields.get(text_field), batch.source if source is None else str(source), line)
    if seen and not found:
        raise ValueError(f"{batch.place} has no field {text_field!r} (--text-field); it has: {', '.join(seen)}")
    if source_field and seen and source_field not in seen:
        raise ValueError(f"{batch.place} has no field {source_field!r} (--source-field); it has: {', '.join(seen)}")


def _document(text: Any, source: str, line: int) -> Document:
    if isinstance(text, TooLong):
        return Document("", source, line, str(text))
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            return Document("", source, line, f"not UTF-8 ({error.reason})")
    if not isinstance(text, str):
        return Document("", source, line, "no text" if text is None else f"{type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Document("", source, line, f"not text ({error.reason})")
    return Document("" if text.isspace() else text, source, line)


GUARD = "`if __name__ == '__main__':`"

AHEAD = 4
"""Batches under way per process: enough to keep it busy, few enough for memory."""


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], most: int
) -> Generator[Result, None, None]:
    """The results of `work` on each item, with at most so many items under way. Closing it shuts the pool down."""
    rest = iter(items)
    try:  # reading an item may fail as well as the work
        waiting = deque(pool.submit(work, item) for item in islice(rest, most))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(rest, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def encoded_batches(batches: Iterable[RecordBatch], encoding: Encoding, workers: int) -> Generator[Encoded, None, None]:
    """The tokens of each batch, made by this process if `workers` is 1, else by so many others."""
    if workers == 1:
        encode = encoder_of(encoding)
        for batch in batches:
            yield encoded_batch(batch, encoding, encode)
        return
    # Not forked, because threads of tokenizers, arrow and torch are running.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoding,))
    try:
        yield from in_order(pool, _work, batches, AHEAD * workers)
    except BrokenProcessPool as error:
        raise ValueError(
            f"--workers {workers}: a process that tokenises died: too little memory for so many, or a calling script "
            f"without {GUARD}. What is done is kept: run it again, with --workers 1 if need be"
        ) from error


# Set in each process of the pool.
_work_of_this_process: Callable[[RecordBatch], Encoded] | None = None


def _begin(encoding: Encoding) -> None:
    """Set up a new process for `_work`."""
    global _work_of_this_process
    # Ctrl-C reaches all processes of the terminal; leave it to the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work_of_this_process = partial(encoded_batch, encoding=encoding, encode=encoder_of(encoding))


def _work(batch: RecordBatch) -> Encoded:
    assert _work_of_this_process is not None
    return _work_of_this_process(batch)


def _die_with_parent() -> None:
    # The queue does not end when the parent is killed, because the other processes hold its writing end too.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
