"""The numbers of a step where the device counts it (capturable), worked out by the device."""

import triton
import triton.language as tl

from . import columns as at
from .device import pointer

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
