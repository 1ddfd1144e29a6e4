"""Tensors of which each rank holds a part: saved by torch.distributed.checkpoint beside training, read by any ranks."""

import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import atomic

METADATA = ".metadata"
"""Name that torch.distributed.checkpoint gives the file that says where each tensor is."""

PICKLED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip
"""Classes that the file is made of, beside dtypes."""


class ShardedSave(threading.Thread):
    """A save under way: each rank writes its part of the tensors, then the first makes a checkpoint of all parts.

    The tensors are copied to the host before the thread begins: they are those of the moment it was made.
    """

    def __init__(
        self,
        step: int,
        contents: dict[str, Tensor],
        folder: Path,
        group: Any,
        finish: Callable[..., Path],
    ):
        super().__init__(daemon=True)
        self.step, self.folder, self.group, self.finish = step, folder, group, finish
        self.contents = BlockingAsyncStager().stage(contents)
        self.error: BaseException | None = None
        """The exception that ended it before its time."""

    def run(self) -> None:
        try:
            with _plain_errors():
                dcp.save(self.contents, storage_writer=ShardFiles(self.folder), process_group=self.group)
            rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
            found: list[Any] = [None] * world
            dist.all_gather_object(found, self._own_files(rank), group=self.group)
            if rank == 0:
                self.finish(written=self._all_files(found))
        except BaseException as error:
            self.error = error
            if dist.get_rank(self.group) == 0:
                shutil.rmtree(self.folder.parent, ignore_errors=True)
        finally:
            self.contents = {}

    def _own_files(self, rank: int) -> dict[str, atomic.Fingerprint] | OSError:
        """Size and hash of the files that this rank wrote; an error is one for the first rank to meet."""
        try:
            own = self.folder.glob(f"__{rank}_*")
            return {f"{self.folder.name}/{path.name}": atomic.fingerprint(path) for path in own}
        except OSError as error:
            return error

    def _all_files(self, found: Sequence[dict[str, atomic.Fingerprint] | OSError]) -> dict[str, atomic.Fingerprint]:
        listed: dict[str, atomic.Fingerprint] = {}
        for each in found:
            if isinstance(each, OSError):
                raise each
            listed |= each
        return listed


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turns a failure in torch.distributed.checkpoint, on whichever rank, into an ordinary exception."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


class ShardFiles(FileSystemWriter):
    """Writes the file of a rank. A full disk is an OSError, whatever torch.save makes of it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with atomic.os_errors(str(self.path)):
            return super().write_data(plan, planner)


def load_shards_(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors from the files that hold them, without the other ranks."""
    with _plain_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that it is not asked is meant
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)


def saved_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in a folder of shards."""
    found = ShardReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def saved_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors in a folder of shards whose names begin so, whole."""
    saved = {name: entry for name, entry in saved_shapes(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    load_shards_(tensors, folder)
    return tensors


class ShardReader(FileSystemReader):
    """Reads tensors, and runs no code that a file brings: what torch.distributed.checkpoint pickles is restricted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{METADATA} holds {type(metadata).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # else it would be unpickled, whatever it is
                raise ValueError(f"{name} is no tensor")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Makes what the metadata of shards consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which metadata of tensors does not")
        return super().find_class(module, name)
