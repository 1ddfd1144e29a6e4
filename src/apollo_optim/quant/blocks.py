"""Optimizer state in 8 bits: rows cut into blocks of 128, each one scale and a code per element.

    first moment          sign(code) * code^2 * scale           127 codes on either side, scale = largest / 127^2
    root of the second    code^2 * scale                        255 codes, scale = largest / 255^2

Squares, because moments of one block differ in size by far more than weights do: the smallest number that a first
moment can be is 2^-14 of the largest, the smallest second moment 2^-32. Values are rounded at random, so that the
expected moment is the moment itself, but a positive second moment never to zero: a step would be divided by nothing.

Shapes: R rows (all dimensions but the last), C columns, K blocks to a row, N elements of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.random import Word, rounding_bits, rounding_key

BLOCK = 128
"""Elements that share a scale; the last block of a row is shorter where it does not divide the row."""

SIGNED_CODES, UNSIGNED_CODES = 127, 255
LEAST_UNIT, LEAST_ROOT = 2.0**-100, 2.0**-60
"""Least scales, so that neither an inverse nor the square of a root leaves float32."""

DRAWS = 2**16


class BlockCodes(NamedTuple):
    codes: Tensor
    scale: Tensor


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales for a tensor of this shape."""
    *leading, columns = shape or (1,)
    return (*leading, -(-columns // BLOCK))


def is_signed(codes: Tensor) -> bool:
    """Whether these are codes of a first moment."""
    return codes.dtype == torch.int8


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The moments that codes and scales stand for."""
    code_RKN = _blocked(codes.to(torch.float32))
    root_RKN = code_RKN * code_RKN.abs() * scale.reshape(-1, scale.shape[-1], 1)
    value_RKN = root_RKN if is_signed(codes) else root_RKN * root_RKN
    return _joined(value_RKN, codes.shape).to(dtype)


def narrowed(value: Tensor, signed: bool, seed: Word, step: Word, stream: int) -> BlockCodes:
    """Codes and scales of a first moment or of a second one (not `signed`), rounded at random."""
    value_RKN = _blocked(value.float())
    position = torch.arange(value.numel(), device=value.device).view(value.shape)
    draw_RKN = _blocked(rounding_bits(rounding_key(seed, step, stream), position).to(torch.float32))
    threshold_RKN = (draw_RKN + 0.5) / DRAWS
    size_RKN = value_RKN.abs() if signed else value_RKN.sqrt()
    most, least = (SIGNED_CODES, LEAST_UNIT) if signed else (UNSIGNED_CODES, LEAST_ROOT)
    scale_RK1 = (size_RKN.amax(dim=-1, keepdim=True) * (1 / most**2)).clamp_min(least)
    code_RKN = (size_RKN * (1 / scale_RK1)).sqrt_().floor_().clamp_(max=most - 1)
    low_RKN, high_RKN = code_RKN.square() * scale_RK1, (code_RKN + 1).square() * scale_RK1
    if not signed:
        low_RKN, high_RKN = low_RKN.square(), high_RKN.square()
    up_RKN = value_RKN.abs() - low_RKN >= threshold_RKN * (high_RKN - low_RKN)
    code_RKN = code_RKN + up_RKN
    code_RKN = code_RKN.copysign(value_RKN) if signed else code_RKN.maximum((value_RKN > 0).float())
    codes = _joined(code_RKN, value.shape).to(torch.int8 if signed else torch.uint8)
    return BlockCodes(codes, scale_RK1.reshape(scale_shape(value.shape)))


def _blocked(value: Tensor) -> Tensor:
    """The rows cut into blocks, the last one filled up with zeros. [R, K, N]"""
    columns = value.shape[-1] if value.dim() > 0 else 1
    blocks = -(-columns // BLOCK)
    padded = nn.functional.pad(value.reshape(-1, columns), (0, blocks * BLOCK - columns))
    return padded.unflatten(-1, (blocks, BLOCK))


def _joined(value_RKN: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_blocked`."""
    columns = shape[-1] if shape else 1
    return value_RKN.flatten(-2)[:, :columns].reshape(shape)
