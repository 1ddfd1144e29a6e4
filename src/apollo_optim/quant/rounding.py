"""Writing a wide value into a narrow tensor without bias."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.random import RoundingKey, rounding_bits

DRAWS = 2**16
"""Values of the random number that rounds an element."""

# Smallest exponent of a normal float16, and the bits of its fraction.
FLOAT16_MIN_EXPONENT, FLOAT16_FRACTION_BITS = -14, 10


class Quantized(NamedTuple):
    """Numbers as codes of 8 or 4 bits, and the scales that many of them share."""

    codes: Tensor
    scale: Tensor


def write_rounded_(target: Tensor, value: Tensor, key: RoundingKey, position: Tensor | None = None) -> None:
    """target <- value, rounded up or down at random so that the expected result is `value` itself.

    `position` is where each element lies in the whole tensor, flattened; without it, `target` is the whole. A value
    that `target` can hold exactly is written as it is.
    """
    if position is None:
        position = torch.arange(value.numel(), device=value.device).view(value.shape)
    target.copy_(rounded(value.float(), rounding_bits(key, position), target.dtype))


def rounded(value: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        # The 16 dropped bits carry into the kept ones exactly when they exceed the draw. Infinities and NaNs would
        # carry into the exponent, so they pass through.
        carried = (value.view(torch.int32) + bits.to(torch.int32)) & ~0xFFFF
        return torch.where(value.isfinite(), carried.view(torch.float32), value).to(dtype)
    if dtype == torch.float16:
        exponent = torch.frexp(value).exponent - 1
        quantum = torch.ldexp(torch.ones_like(value), exponent.clamp_min(FLOAT16_MIN_EXPONENT) - FLOAT16_FRACTION_BITS)
        # Compared apart from the whole part, beside which float32 would round the draw itself.
        whole = (value / quantum).floor()
        up = value / quantum - whole >= 1 - bits.to(value.dtype) / DRAWS
        # Not whole + up, which would take the sign off a negative zero.
        return (torch.where(up, whole + 1, whole) * quantum).to(dtype)
    raise ValueError(f"stochastic rounding writes torch.bfloat16 or torch.float16, not {dtype}")


def rounds(dtype: torch.dtype) -> bool:
    """True if a tensor of this dtype is narrower than the arithmetic, so that a write to it rounds."""
    return dtype in (torch.bfloat16, torch.float16)
