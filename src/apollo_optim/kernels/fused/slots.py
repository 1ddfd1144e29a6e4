"""Small tables on their way from the host to the device, without either waiting for the other."""

import ctypes
import math

import torch
from torch import Tensor

COUNT = 1024
"""Each table that is sent is used by at least one launch, and the driver lets the host run about a thousand of those
ahead, so the device has read a slot long before its turn comes again."""


class Slots:
    """Host memory for tables of one shape, used in turn."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        pinned = device.type == "cuda"
        slots = torch.zeros(COUNT, *shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self._size = math.prod(shape) * dtype.itemsize
        self._slots = slots.unbind()
        self._start = slots.data_ptr()
        self._turn = 0

    def filled(self, packed: bytes) -> Tensor:
        """A table of these bytes, to be sent at once."""
        assert len(packed) == self._size
        self._turn = (self._turn + 1) % COUNT
        ctypes.memmove(self._start + self._turn * self._size, packed, self._size)
        return self._slots[self._turn]
