"""Bytes of a file, decompressed as they are read."""

import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from .files import TextFile

BLOCK_BYTES = 2**18

MORSEL_BYTES = 2**10
"""Of a .zst file, decompressed at once: 4 bytes may stand for a block of 128 KiB, so that these are 32 MiB at most."""


class Blocks(io.RawIOBase):
    """An iterator of bytes as a stream."""

    def __init__(self, blocks: Iterator[bytes]):
        self.blocks = blocks
        self.rest = memoryview(b"")  # of which parts can be taken without a copy of what remains

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]", /) -> int:  # type: ignore[override]
        while not self.rest:
            self.rest = memoryview(next(self.blocks, b""))
            if not self.rest:
                return 0
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count


def zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """What the frames of a .zst file hold, one after another; raises EOFError where the last is cut short."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("reading .zst files needs zstandard: pip install zstandard") from error
    frame = None
    while block := raw.read(BLOCK_BYTES):
        while block:
            # A stream reader would take the end of a file inside a frame for the end of the frame.
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            morsel, block = block[:MORSEL_BYTES], block[MORSEL_BYTES:]
            if output := frame.decompress(morsel):
                yield output
            block = frame.unused_data + block if frame.eof else block
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends inside a zstd frame")


@contextmanager
def opened(file: TextFile) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """The file's bytes, decompressed, and the file as it lies on the disk, whose position tells how much is read."""
    with file.path.open("rb") as raw:
        if file.compression == ".zst":
            yield io.BufferedReader(Blocks(zstd_blocks(raw)), BLOCK_BYTES), raw
        elif file.compression == ".gz":
            with gzip.GzipFile(fileobj=raw) as unzipped:
                yield io.BufferedReader(unzipped, BLOCK_BYTES), raw  # type: ignore[arg-type]
        else:
            yield raw, raw


@contextmanager
def seekable(file: TextFile) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed into a temporary file where they need be, for readers that begin at the end."""
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
    """Turns what a broken file raises into a ValueError that names it."""
    broken: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    if file.compression == ".zst":
        try:
            import zstandard
        except ImportError:
            pass
        else:
            broken.append(zstandard.ZstdError)
    if file.kind == "parquet":
        try:
            import pyarrow
        except ImportError:
            pass
        else:
            # Arrow raises plain OSError where a page cannot be decompressed.
            broken += [pyarrow.ArrowException, OSError]
    try:
        yield
    except tuple(broken) as error:
        raise ValueError(f"{file.path} is broken or cut short ({error}): fetch it again, or leave it out") from error
