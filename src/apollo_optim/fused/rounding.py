"""Rounding at random by a kernel, for weights that are otherwise stepped in plain PyTorch."""

import torch
from torch import Tensor

from ..core.random import RoundingKey
from ..kernels.rounding import round_kernel
from ..quant import rounding

BLOCK = 1024


def write_rounded_(target: Tensor, value: Tensor, key: RoundingKey, position: Tensor | None = None) -> None:
    """As `quant.rounding.write_rounded_`, in one pass over memory where that takes dozens."""
    key0, key1 = key
    if isinstance(key0, Tensor) or isinstance(key1, Tensor) or not target.is_contiguous():
        rounding.write_rounded_(target, value, key, position)
        return
    size = target.numel()
    if size == 0:  # a rank that holds nothing of this weight
        return
    wide = value.float().contiguous()
    place = wide if position is None else position.expand(target.shape).contiguous()
    placed = position is not None
    with torch.cuda.device_of(target):
        blocks = -(-size // BLOCK)
        round_kernel[(blocks,)](target, wide, place, _int32(key0), _int32(key1), size, PLACED=placed, BLOCK=BLOCK)


def _int32(word: int) -> int:
    """The integer of the same 32 bits, with a sign."""
    return word - (word >> 31 << 32)
