"""CUDA streams, launches, and the launches of a step as one graph: a small model's take longer to queue than to run."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM = 2
"""Steps before the recording: kernels are compiled at their first launch, which a recording cannot hold."""


class CompiledLaunch:
    """A kernel with its grid and compile-time facts.

    Triton looks at every argument and every global of a kernel at each launch. Here none of that changes once it is
    compiled, so later launches go straight to the compiled kernel: a tenth of the host's time on a small model.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], **options: Any):
        """`constants` are the kernel's last arguments, by name."""
        self.kernel, self.grid, self.options = kernel, (programs, 1, 1), options
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self._values = tuple(self.constants.values())
        self._compiled: Callable[..., object] | None = None
        if programs == 0:  # a rank that holds nothing of these weights
            self._compiled = _nothing

    def __call__(self, *arguments: Any) -> None:
        if self._compiled is not None:
            self._compiled(*arguments, *self._values)
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = None if compiled is None else compiled[self.grid]


def _nothing(*arguments: Any) -> None:
    """The launch of no programs: does nothing."""


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
    """Index of a CUDA device; None for others."""
    return device.index if device.type == "cuda" else None


def raw_stream(gpu: int | None) -> int:
    """The current stream's address, as `torch.cuda.current_stream(gpu).cuda_stream` is, but sooner; 0 without one."""
    return 0 if gpu is None else torch._C._cuda_getCurrentRawStream(gpu)
