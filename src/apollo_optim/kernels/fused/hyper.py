"""The numbers of a step that change while training, where the kernels can read them without asking the host."""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.direction import Adam
from ...core.scaling import first_step_size
from .layout import (
    BETA2,
    CORRECTION1,
    CORRECTION2_ROOT,
    EPS,
    FIRST_SIZE,
    HYPER_WIDTH,
    KEEP,
    LIMIT,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    REFRESH_BITS,
    SIGN,
    STEP_BITS,
)
from .numbers import pointer

ROW = struct.Struct("<11f2i12x")
"""The columns LR .. SIGN, STEP_BITS and REFRESH_BITS of `layout`, in that order, filled up to a whole row."""
assert (LR.value, SIGN.value, STEP_BITS.value, REFRESH_BITS.value) == (0, 10, 11, 12)
assert ROW.size == 4 * HYPER_WIDTH.value

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


def hyper_rows(groups: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> Tensor:
    """One float32 row for each group at its step, on the host."""
    packed = bytearray()
    for group, step in zip(groups, steps, strict=True):
        lr, betas = float(group["lr"]), group["betas"]
        correction1, correction2 = Adam(betas, group["eps"], step).corrections
        packed += ROW.pack(
            lr,
            1 - lr * group["weight_decay"],
            1 - betas[0],
            betas[1],
            1 - betas[1],
            group["eps"],
            correction1,
            correction2**0.5,
            group["growth_limit"] or 0.0,
            min(1.0, first_step_size(step, betas)),
            -1.0 if group["maximize"] else 1.0,
            step,
            (step - 1) // group["refresh_every"],
        )
    return torch.frombuffer(packed, dtype=torch.float32).view(len(groups), HYPER_WIDTH.value)


def templates(groups: Sequence[Mapping[str, Any]]) -> Tensor:
    """One float64 row for each group, on the host: what `hyper_kernel` needs beside the step count."""
    rows = torch.zeros(len(groups), TEMPLATE_WIDTH.value, dtype=torch.float64, device="cpu")
    for row, group in zip(rows, groups, strict=True):
        lr, (beta1, beta2) = group["lr"], group["betas"]
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
        row[T_LR.value] = 0.0 if on_device else float(lr)
        row.view(torch.int64)[T_LR_ADDRESS.value] = lr.data_ptr() if on_device else 0
        row[T_LR_IS_DOUBLE.value] = on_device and lr.dtype == torch.float64
        row[T_DECAY.value] = group["weight_decay"]
        row[T_BETA1.value], row[T_BETA2.value] = beta1, beta2
        row[T_LOG_BETA1.value] = math.log(beta1) if beta1 > 0 else -math.inf
        row[T_LOG_BETA2.value] = math.log(beta2) if beta2 > 0 else -math.inf
        row[T_EPS.value] = group["eps"]
        row[T_LIMIT.value] = group["growth_limit"] or 0.0
        row[T_SIGN.value] = -1.0 if group["maximize"] else 1.0
        row[T_REFRESH.value] = group["refresh_every"]
    return rows


@triton.jit
def hyper_kernel(weights, template_rows, hypers):
    """One program per weight: its row of numbers from its step count and the learning rate, both on the device.

    `weights` holds two int64 each: the address of the step count, and the row of the template.
    """
    number = tl.program_id(0).to(tl.int64)
    template = template_rows + tl.load(weights + 2 * number + 1) * TEMPLATE_WIDTH
    out = hypers + number * HYPER_WIDTH
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
    tl.store(out + LR, lr.to(tl.float32))
    tl.store(out + KEEP, (1 - lr * tl.load(template + T_DECAY)).to(tl.float32))
    tl.store(out + ONE_MINUS_BETA1, (1 - beta1).to(tl.float32))
    tl.store(out + BETA2, beta2.to(tl.float32))
    tl.store(out + ONE_MINUS_BETA2, (1 - beta2).to(tl.float32))
    tl.store(out + EPS, tl.load(template + T_EPS).to(tl.float32))
    tl.store(out + CORRECTION1, correction1.to(tl.float32))
    tl.store(out + CORRECTION2_ROOT, tl.sqrt(correction2).to(tl.float32))
    tl.store(out + LIMIT, tl.load(template + T_LIMIT).to(tl.float32))
    tl.store(out + FIRST_SIZE, tl.minimum(first_size, 1.0).to(tl.float32))
    tl.store(out + SIGN, tl.load(template + T_SIGN).to(tl.float32))
    tl.store(out + STEP_BITS, step.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(out + REFRESH_BITS, refresh.to(tl.int32).to(tl.float32, bitcast=True))
