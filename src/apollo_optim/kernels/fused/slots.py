"""Small tables on their way from the host to the device, without either waiting for the other."""

import ctypes
import math

import torch
from torch import Tensor

COUNT = 64
"""Tables that may be on their way before the host waits for the oldest."""


class Slots:
    """Host memory for tables of one shape, used in turn."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._on_gpu = device.type == "cuda"
        slots = torch.zeros(COUNT, *shape, dtype=dtype, device="cpu", pin_memory=self._on_gpu)
        self._size = math.prod(shape) * dtype.itemsize
        self._slots = slots.unbind()
        self._start = slots.data_ptr()
        self._arrived: list[torch.cuda.Event | None] = [None] * COUNT
        """Of each slot, when the device has read it."""
        self.sent = 0

    def send(self, packed: bytes, target: Tensor) -> None:
        """target <- a table of these bytes, in its turn on the current stream."""
        assert len(packed) == self._size
        turn = self.sent % COUNT
        arrived = self._arrived[turn]
        if arrived is not None and not arrived.query():
            arrived.synchronize()
        ctypes.memmove(self._start + turn * self._size, packed, self._size)
        target.copy_(self._slots[turn], non_blocking=True)
        if self._on_gpu:
            arrived = self._arrived[turn] = arrived or torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(target.device))
        self.sent += 1
