"""Sharded tensors: saved by torch.distributed.checkpoint while training goes on, read by any number of ranks."""

import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
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
"""The file in which torch.distributed.checkpoint lists where each tensor is."""

PICKLED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip
"""Classes that this file may name, beside dtypes."""


class ShardedSave(threading.Thread):
    """Saves in a thread: each rank writes its part of the tensors, then the first rank completes the checkpoint.

    The constructor copies the tensors to the host, so that training may go on.
    """

    def __init__(self, step: int, contents: dict[str, Tensor], folder: Path, group: Any, finish: Callable[..., Path]):
        super().__init__(daemon=True)
        self.step, self.folder, self.group, self.finish = step, folder, group, finish
        self.contents = BlockingAsyncStager().stage(contents)
        self.error: BaseException | None = None
        """The exception that ended the thread, if one did."""

    def run(self) -> None:
        try:
            with _plain_errors():
                dcp.save(self.contents, storage_writer=ShardFiles(self.folder), process_group=self.group)
            rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
            found: list[Any] = [None] * world
            dist.all_gather_object(found, self._own_files(rank), group=self.group)
            if rank == 0:
                for error in (each for each in found if isinstance(each, OSError)):
                    raise error
                self.finish(written={name: facts for files in found for name, facts in files.items()})
        except BaseException as error:
            self.error = error
            if dist.get_rank(self.group) == 0:
                shutil.rmtree(self.folder.parent, ignore_errors=True)
        finally:
            self.contents = {}

    def _own_files(self, rank: int) -> dict[str, atomic.Fingerprint] | OSError:
        """Size and hash of the files that this rank wrote; an error is returned, for the first rank to raise."""
        try:
            own = self.folder.glob(f"__{rank}_*")
            return {f"{self.folder.name}/{path.name}": atomic.fingerprint(path) for path in own}
        except OSError as error:
            return error


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the cause of a CheckpointException, on whichever rank it was."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


class ShardFiles(FileSystemWriter):
    """Writes a rank's file; a full disk is an OSError, whatever torch.save raises."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with atomic.os_errors(str(self.path)):
            return super().write_data(plan, planner)


def load_shards_(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors from a folder of shards, without communicating with other ranks."""
    with _plain_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose: no_dist
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)


def saved_shapes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in a folder of shards."""
    found: dict[str, Any] = ShardReader(folder).read_metadata().state_dict_metadata
    return found


def saved_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """The unsharded tensors in a folder of shards whose names begin with `prefix`."""
    saved = {name: entry for name, entry in saved_shapes(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    load_shards_(tensors, folder)
    return tensors


class ShardReader(FileSystemReader):
    """Reads tensors without running code from the file: only a few classes may be unpickled."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{METADATA} holds {type(metadata).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # anything else would be unpickled
                raise ValueError(f"{name} is no tensor")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of tensors, and no other classes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in PICKLED:
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which metadata of tensors does not")
        return super().find_class(module, name)
