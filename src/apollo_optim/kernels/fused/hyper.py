"""The numbers of a step that change while training, where the kernels can read them without asking the host."""

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.direction import Adam, least_eps
from ...core.scaling import first_step_size
from ...streams import gpu_number, raw_stream
from . import layout as at
from .numbers import pointer
from .slots import Slots

ROW = struct.Struct("<11f2i12x")
"""The columns LR .. SIGN, STEP_BITS and REFRESH_BITS of `layout`, in that order, filled up to a whole row."""
assert (at.LR.value, at.SIGN.value, at.STEP_BITS.value, at.REFRESH_BITS.value) == (0, 10, 11, 12)
assert ROW.size == 4 * at.HYPER_WIDTH.value

RECENT = 16
"""How many of the last rows are remembered."""

# Columns of the float64 table from which the device works out its rows itself (capturable).
T_LR = tl.constexpr(0)
T_LR_ADDRESS = tl.constexpr(1)  # int64 bits: of a tensor on the device, or 0
T_LR_IS_DOUBLE = tl.constexpr(2)
T_DECAY = tl.constexpr(3)
T_BETA1 = tl.constexpr(4)
T_BETA2 = tl.constexpr(5)
T_LOG_BETA1 = tl.constexpr(6)
T_LOG_BETA2 = tl.constexpr(7)
T_EPS = tl.constexpr(8)
T_LIMIT = tl.constexpr(9)
T_SIGN = tl.constexpr(10)
T_REFRESH = tl.constexpr(11)
TEMPLATE_WIDTH = tl.constexpr(12)

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


@triton.jit
def hyper_kernel(weights, template_rows, hypers):
    """One program per weight: its row of numbers from its step count and the learning rate, both on the device.

    `weights` holds two int64 each: the address of the step count, and the row of the template.
    """
    number = tl.program_id(0).to(tl.int64)
    template = template_rows + tl.load(weights + 2 * number + 1) * TEMPLATE_WIDTH
    out = hypers + number * at.HYPER_WIDTH
    step = tl.load(pointer(tl.load(weights + 2 * number), tl.float32, False)).to(tl.float64) + 1
    lr = tl.load(template + T_LR)
    address = tl.load(template + T_LR_ADDRESS).to(tl.int64, bitcast=True)
    if address != 0:
        if tl.load(template + T_LR_IS_DOUBLE) != 0:
            lr = tl.load(pointer(address, tl.float64, False))
        else:
            lr = tl.load(pointer(address, tl.float32, False)).to(tl.float64)
    beta1, beta2 = tl.load(template + T_BETA1), tl.load(template + T_BETA2)
    correction1 = 1 - tl.exp(step * tl.load(template + T_LOG_BETA1))
    correction2 = 1 - tl.exp(step * tl.load(template + T_LOG_BETA2))
    first_size = (1 - beta1) / correction1 * tl.sqrt(correction2 / (1 - beta2))
    refresh = tl.floor((step - 1) / tl.load(template + T_REFRESH))
    tl.store(out + at.LR, lr.to(tl.float32))
    tl.store(out + at.KEEP, (1 - lr * tl.load(template + T_DECAY)).to(tl.float32))
    tl.store(out + at.ONE_MINUS_BETA1, (1 - beta1).to(tl.float32))
    tl.store(out + at.BETA2, beta2.to(tl.float32))
    tl.store(out + at.ONE_MINUS_BETA2, (1 - beta2).to(tl.float32))
    tl.store(out + at.EPS, tl.load(template + T_EPS).to(tl.float32))
    tl.store(out + at.CORRECTION1, correction1.to(tl.float32))
    tl.store(out + at.CORRECTION2_ROOT, tl.sqrt(correction2).to(tl.float32))
    tl.store(out + at.LIMIT, tl.load(template + T_LIMIT).to(tl.float32))
    tl.store(out + at.FIRST_SIZE, tl.minimum(first_size, 1.0).to(tl.float32))
    tl.store(out + at.SIGN, tl.load(template + T_SIGN).to(tl.float32))
    tl.store(out + at.STEP_BITS, step.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(out + at.REFRESH_BITS, refresh.to(tl.int32).to(tl.float32, bitcast=True))
