"""Reads files as batches of undecoded records: one process reads and decompresses, many decode and tokenise."""

import codecs
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, BinaryIO, Literal

from .config import Data
from .files import TextFile

BLOCK_BYTES = 2**18

WIDE = (
    (codecs.BOM_UTF32_LE, "UTF-32"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte-order marks of encodings that are not read."""


@contextmanager
def opened(file: TextFile) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """The decompressed content, and the raw file, whose position says how much was read."""
    with file.path.open("rb") as raw:
        stream: io.BufferedReader = raw
        if file.compression == ".zst":
            from pyarrow import input_stream

            # Reads frame after frame, and notices one that is cut short.
            stream = io.BufferedReader(input_stream(raw, compression="zstd"), BLOCK_BYTES)
        elif file.compression == ".gz":
            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK_BYTES)  # type: ignore[arg-type]
        # Most lines of UTF-16 are valid UTF-8, with zeros between the letters.
        begin = stream.peek(4)
        for mark, encoding in WIDE:
            if begin.startswith(mark):
                raise ValueError(
                    f"{file.path} is {encoding}, and text must be UTF-8: convert it with iconv -f {encoding} -t UTF-8"
                )
        yield stream, raw


@contextmanager
def seekable(file: TextFile) -> Iterator[IO[bytes]]:
    """The content for readers that seek, decompressed into a temporary file if necessary."""
    with opened(file) as (stream, raw):
        if stream is raw:
            yield raw
            return
        with tempfile.TemporaryFile() as unpacked:
            while block := stream.read(BLOCK_BYTES):
                unpacked.write(block)
            unpacked.seek(0)
            yield unpacked


@contextmanager
def breakage_named(file: TextFile) -> Iterator[None]:
    """Turn errors over a broken file, or one that is gone, into a ValueError that names it; also a missing package."""
    broken: tuple[type[Exception], ...] = EOFError, zlib.error, gzip.BadGzipFile
    if file.is_table or file.compression == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise ValueError(f"reading {file.path} needs pyarrow: pip install pyarrow") from error
        broken += pyarrow.ArrowException, OSError  # OSError if something cannot be decompressed
    signs: tuple[type[Exception], ...] = OSError, *broken
    try:
        yield
    except PermissionError:
        raise
    except signs as error:
        if not file.path.exists():
            advice = f"is gone since it was found ({error}): restore it, or leave it out"
        elif isinstance(error, broken):
            advice = f"is broken or cut short ({error}): fetch it again, or leave it out"
        else:
            raise
        raise ValueError(f"{file.path} {advice}") from error


BATCH_BYTES = 2**20

TEXT_FIELD = "--text-field"

PIECES = 64
SMALLEST_PIECE, LARGEST_PIECE = 2**11, 2**16
"""Number and size in bytes of the documents that a text file is cut into, to hold some out and tokenise in parallel."""


Row = tuple[Any, str | None]
"""A text, and its source if it names one."""


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records of a file or dataset."""

    place: str
    """The file or dataset, for messages."""
    source: str
    """The source of the records for validation, unless a record names its own."""
    kind: Literal["json", "text", "row"]
    """Type of the records: a line of JSON, the bytes of a document, or a `Row`."""
    records: list[Any]
    first_line: int
    """Line or row of the first record, from 1."""
    position: Any
    """The position of the next batch, as JSON values."""
    read: int
    """Bytes read so far."""


@dataclass(frozen=True)
class TooLong:
    """In place of a line or text of more than `most` bytes, which was dropped."""

    most: int

    def __len__(self) -> int:
        return 0

    def __str__(self) -> str:
        return f"longer than --max-document, {self.most:,} bytes"


def file_batches(file: TextFile, start: int, data: Data) -> Iterator[RecordBatch]:
    """The batches of a file from record `start` on; their position is the number of the next record."""
    with breakage_named(file):
        if file.is_table:
            batches = _row_batches(file, start, data)
        elif file.kind == "json":
            batches = _line_batches(file, start, data.max_document)
        else:
            batches = _piece_batches(file, start)
        empty = start == 0
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(f"{file.path} holds no text: remove it, or fetch it again")


def _line_batches(file: TextFile, start: int, most: int) -> Iterator[RecordBatch]:
    with opened(file) as (stream, raw):
        number = 0
        while lines := _lines(stream, most):
            number += len(lines)
            if number > start:
                lines = lines[start - number :] if number - len(lines) < start else lines
                first = number - len(lines) + 1
                yield RecordBatch(str(file.path), file.source, "json", lines, first, number, raw.tell())


def _lines(stream: BinaryIO, most: int) -> list[bytes | TooLong]:
    """The next batch of lines; those of more than `most` bytes are skipped in parts."""
    lines: list[bytes | TooLong] = []
    length = 0
    while length <= BATCH_BYTES and (line := stream.readline(most + 1)):
        length += len(line)
        cut = len(line) > most and not line.endswith(b"\n")
        lines.append(TooLong(most) if cut else line)
        while cut:
            rest = stream.readline(most + 1)
            cut = bool(rest) and not rest.endswith(b"\n")
    return lines


def _piece_batches(file: TextFile, start: int) -> Iterator[RecordBatch]:
    length = min(max(file.size // PIECES, SMALLEST_PIECE), LARGEST_PIECE)
    with opened(file) as (stream, raw):
        pieces = _pieces(stream, length)
        first_line = 1 + sum(piece.count(b"\n") for piece in islice(pieces, start))
        while records := list(islice(pieces, BATCH_BYTES // length)):
            start += len(records)
            yield RecordBatch(str(file.path), file.source, "text", records, first_line, start, raw.tell())
            first_line += sum(piece.count(b"\n") for piece in records)


def _pieces(stream: BinaryIO, length: int) -> Iterator[bytes]:
    """The stream in pieces, cut after the first blank line beyond `length` bytes, or else newline, or else space."""
    block = stream.read(2 * length)
    while block:
        end = _end_of_piece(block, length)
        yield block[:end]
        # The rest of the block begins the next piece.
        block = block[end:] + stream.read(2 * length - (len(block) - end))


def _end_of_piece(block: bytes, length: int) -> int:
    if len(block) <= length:
        return len(block)
    for separator in (b"\n\n", b"\n", b" "):
        found = block.find(separator, length)
        if found >= 0:
            return found + len(separator)
    end = length
    while end < len(block) and block[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end += 1
    return end


def table_batches(
    file: TextFile, fields: Mapping[str, str] | None = None, start: int = 0
) -> Iterator[tuple[int, Any, int]]:
    """Batches of rows of a table from that of row `start` on, each with the number of its first row and the bytes read.

    `fields` maps options to the columns that they name; only those are read.
    """
    from pyarrow import ipc, parquet

    columns = None if fields is None else list(fields.values())
    with seekable(file) as stream:
        row = 0
        if file.kind == "arrow":
            # The file format is a stream with 8 bytes before it and an index after it.
            stream.seek(8 if stream.read(6) == b"ARROW1" else 0)
            rows: Any = ipc.open_stream(stream)
            _check_columns(file, rows.schema, fields or {})
            for batch in rows:
                if row + len(batch) > start:
                    yield row, batch if columns is None else batch.select(columns), min(stream.tell(), file.size)
                row += len(batch)
            return
        table = parquet.ParquetFile(stream)
        _check_columns(file, table.schema_arrow, fields or {})
        for group in range(table.num_row_groups):
            in_group = table.metadata.row_group(group)
            if row + in_group.num_rows <= start:
                row += in_group.num_rows
                continue
            rows_a_batch = max(1, in_group.num_rows * BATCH_BYTES // max(1, in_group.total_byte_size))
            for batch in table.iter_batches(rows_a_batch, row_groups=[group], columns=columns):
                row += len(batch)
                if row > start:
                    yield row - len(batch), batch, file.size * row // table.metadata.num_rows


def _row_batches(file: TextFile, start: int, data: Data) -> Iterator[RecordBatch]:
    fields = {TEXT_FIELD: data.text_field}
    if data.source_field is not None:
        fields["--source-field"] = data.source_field
    for row, batch, read in table_batches(file, fields, start):
        records = _records(batch, data)[max(start - row, 0) :]
        end = row + len(batch)
        yield RecordBatch(str(file.path), file.source, "row", records, end - len(records) + 1, end, read)


def _records(batch: Any, data: Data) -> list[Row]:
    # As bytes, so that a row that is not UTF-8 does not make the batch unreadable.
    texts = batch.column(data.text_field).cast("large_binary").to_pylist()
    sources = [None] * len(texts) if data.source_field is None else batch.column(data.source_field).to_pylist()
    return [row_of(text, source, data) for text, source in zip(texts, sources, strict=True)]


def row_of(text: Any, source: Any, data: Data) -> Row:
    """A record of the kind "row"."""
    if isinstance(text, (str, bytes)) and len(text) > data.max_document:
        text = TooLong(data.max_document)
    return text, None if source is None else str(source)


def _check_columns(file: TextFile, schema: Any, fields: Mapping[str, str]) -> None:
    from pyarrow import types

    for option, name in fields.items():
        if name not in schema.names:
            raise ValueError(f"{file.path} has no field {name!r} ({option}); it has: {', '.join(schema.names)}")
    if text_field := fields.get(TEXT_FIELD):
        kind = schema.field(text_field).type
        if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_binary)):
            raise ValueError(f"{file.path}: {TEXT_FIELD} {text_field!r} holds {kind}, not text")
