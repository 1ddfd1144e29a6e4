"""The numbers of a step that change while training, where the kernels can read them without asking the host."""

import ctypes
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.direction import Adam, least_eps
from ..core.scaling import first_step_size
from ..kernels import columns as at
from ..kernels.hyper import TEMPLATE_WIDTH
from .streams import gpu_number, raw_stream

ROW = struct.Struct("<11f2i12x")
"""The columns LR .. SIGN, STEP_BITS and REFRESH_BITS of `layout`, in that order, filled up to a whole row."""
assert (at.LR.value, at.SIGN.value, at.STEP_BITS.value, at.REFRESH_BITS.value) == (0, 10, 11, 12)
assert ROW.size == 4 * at.HYPER_WIDTH.value

RECENT = 16
"""How many of the last rows are remembered."""


TEMPLATE = struct.Struct("<dq10d")
"""The columns T_LR .. T_REFRESH, in that order."""
assert TEMPLATE.size == 8 * TEMPLATE_WIDTH.value


OPTIONS = operator.itemgetter("weight_decay", "eps", "growth_limit", "maximize", "refresh_every")


def hyper_rows(groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> bytes:
    """One float32 row for each group at its step."""
    rows = [
        _row(float(group["lr"]), tuple(group["betas"]), step, OPTIONS(group))
        for group, step in zip(groups, steps, strict=True)
    ]
    return b"".join(rows)


@lru_cache(RECENT)  # where weights are stepped a few at a time, all of them ask for the same
def _row(lr: float, betas: tuple[float, float], step: int, options: tuple[Any, ...]) -> bytes:
    weight_decay, eps, growth_limit, maximize, refresh_every = options
    correction1, correction2 = Adam(betas, eps, step).corrections
    return ROW.pack(
        lr,
        1 - lr * weight_decay,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        least_eps(eps),
        correction1,
        correction2**0.5,
        growth_limit or 0.0,
        min(1.0, first_step_size(step, betas)),
        -1.0 if maximize else 1.0,
        step,
        (step - 1) // refresh_every,
    )


class SentRows:
    """Rows of hyper-parameters on the device, sent once for all steps on a stream that ask for the same."""

    def __init__(self, device: torch.device, count: int):
        self.device, self._gpu = device, gpu_number(device)
        self._shape = count, at.HYPER_WIDTH.value
        self._slots = Slots(self._shape, torch.float32, device)
        self._recent: dict[tuple[bytes, int], Tensor] = {}
        self._resident: dict[int | None, tuple[Tensor, bytes]] = {}

    def _new(self) -> Tensor:
        return torch.empty(self._shape, dtype=torch.float32, device=self.device)

    def on_device(self, packed: bytes) -> Tensor:
        """The rows that `hyper_rows` packed."""
        stream = raw_stream(self._gpu)
        rows = self._recent.get((packed, stream))
        if rows is None:
            rows = self._new()
            self._slots.send(packed, rows)
            if len(self._recent) == RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[packed, stream] = rows
        return rows

    def resident(self, packed: bytes, stream: int | None) -> Tensor:
        """These rows at an address that stays: what is recorded for this stream, the current one, reads them there."""
        rows, known = self._resident.get(stream) or (self._new(), b"")
        if packed != known:
            self._slots.send(packed, rows)
            self._resident[stream] = rows, packed
        return rows


def templates(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """One float64 row for each group: what `hyper_kernel` needs beside the step count."""
    packed = bytearray()
    for group in groups:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        packed += TEMPLATE.pack(
            0.0 if on_device else float(lr),
            lr.data_ptr() if on_device else 0,
            on_device and lr.dtype == torch.float64,
            group["weight_decay"],
            beta1,
            beta2,
            math.log(beta1) if beta1 > 0 else -math.inf,
            math.log(beta2) if beta2 > 0 else -math.inf,
            least_eps(group["eps"]),
            group["growth_limit"] or 0.0,
            -1.0 if group["maximize"] else 1.0,
            group["refresh_every"],
        )
    return bytes(packed)


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
