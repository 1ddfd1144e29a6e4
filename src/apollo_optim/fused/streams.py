"""The launches of a step as one: a small model's take longer to queue than to run."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

WARM = 2
"""Steps before the recording: kernels are compiled at their first launch, which a recording cannot hold."""


@cache
def _recorder(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Recording:
    """A CUDA graph of launches that read everything that changes, addresses included, from tables on the device."""

    def __init__(self, launch: Callable[[Tensor], None], hypers: Tensor):
        """Record, and do not run, what `launch` queues given this table, in which other numbers may be at a replay."""
        self._hypers = hypers
        """Kept for as long as the graph reads it."""
        self._graph = torch.cuda.CUDAGraph()
        # On a stream of its own, because the usual one cannot be recorded, and of this thread's work only.
        with torch.cuda.stream(_recorder(hypers.device)):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch(hypers)
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        """Queue the launches."""
        self._graph.replay()


def gpu_number(device: torch.device) -> int | None:
    """Of a device with streams of CUDA."""
    return device.index if device.type == "cuda" else None


def raw_stream(gpu: int | None) -> int:
    """The current stream's address, as `torch.cuda.current_stream(gpu).cuda_stream` is, but sooner; 0 without one."""
    return 0 if gpu is None else torch._C._cuda_getCurrentRawStream(gpu)
