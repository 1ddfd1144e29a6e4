"""Processes that stay, each a rank of one gloo group, for tests that need several."""

import importlib
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NEEDED = "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"
"""Modules that tests use on ranks and are not imported before."""

TIMEOUT = 600
"""Seconds after which ranks that wait for each other are taken to wait forever: on a busy machine they take minutes."""
AFTER_AN_ERROR = 10
"""Seconds for which the others' answers are waited for when a rank has failed: they may wait for that one."""


@cache
def device_mesh(**sizes: int) -> DeviceMesh:
    """The mesh of all ranks with these axes, the same one every time.

    A thread of each of its process groups wakes a hundred times a second for as long as the rank lives: those of a mesh
    a test would soon take more time than the tests.
    """
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def of_the_first(work: Callable[[], Any]) -> Any:
    """What `work` returns on the first rank, on every rank: they share two cores, and need not all do the same."""
    result = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


class Ranks:
    """`size` ranks of one process group, which run a function of a test module as often as they are asked.

    They are started when they are first asked, if not by `start`, and again after `close`.
    """

    def __init__(self, size: int):
        self._size = size
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def start(self) -> None:
        """Have all ranks there. They are copies of this process, which need not import what it has imported."""
        if self._processes:
            return
        for module in NEEDED:
            with suppress(ImportError):  # tests that need it are skipped
                importlib.import_module(module)
        context = mp.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            process = context.Process(target=_serve, args=(rank, self._size, store, theirs, self._ends), daemon=True)
            process.start()
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)` returns on each rank."""
        self.start()
        for end in self._ends:
            end.send((function, arguments))
        silent = {end: rank for rank, end in enumerate(self._ends)}
        results, errors, dead = [None] * self._size, [""] * self._size, False
        while silent:
            answering = wait(silent, AFTER_AN_ERROR if any(errors) else TIMEOUT)
            for end in answering:
                rank = silent.pop(end)
                try:
                    error, results[rank] = end.recv()
                except EOFError:
                    dead, error = True, "has died"
                errors[rank] = "" if error is None else f"rank {rank}:\n{error}"
            if not answering:
                errors += [f"rank {rank} does not answer" for rank in silent.values()]
                break
        if dead or silent:
            # The next question goes to others, so that no answer to this one is taken for one to that.
            self._end()
        assert not any(errors), "\n".join(filter(None, errors))
        return results

    def close(self) -> None:
        """End all ranks, if there are any."""
        if not self._processes:
            return
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(10)
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self._ends, self._processes = [], []
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, end: Connection, not_ours: list[Connection]) -> None:
    for other in not_ours:  # else a rank would not learn that the tests have ended
        other.close()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    while (task := end.recv()) is not None:
        function, arguments = task
        try:
            end.send((None, function(*arguments)))
        except Exception:
            end.send((traceback.format_exc(), None))
    dist.destroy_process_group()
