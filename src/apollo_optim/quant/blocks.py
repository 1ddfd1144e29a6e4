"""Optimizer state in 8 or 4 bits: rows cut into blocks of 128, each one scale and a code per element.

    first moment          sign(code) * code^2 * scale           127 codes on either side, scale = largest / 127^2
    root of the second    code^2 * scale                        255 codes, scale = largest / 255^2
    first in 4 bits       NF4[code] * scale                     16 codes, two to a byte, scale = largest

Squares, because moments of one block differ in size by far more than weights do: the smallest number that a first
moment can be is 2^-14 of the largest, the smallest second moment 2^-32. Values are rounded at random, so that the
expected moment is the moment itself, but a positive second moment never to zero: a step would be divided by nothing.
In 4 bits they are rounded to the nearest code: random rounding is no better there (docs/quality.md).

Shapes: R rows (all dimensions but the last), C columns, K blocks to a row, N elements of a block.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from ..core.random import RoundingKey, rounding_bits
from .groups import grouped
from .rounding import DRAWS, Quantized

BLOCK = 128
"""Elements that share a scale; the last block of a row is shorter where it does not divide the row."""

SIGNED_CODES, UNSIGNED_CODES = 127, 255
LEAST_UNIT, LEAST_ROOT = 2.0**-100, 2.0**-60
"""Least scales, so that neither an inverse nor the square of a root leaves float32."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution with a zero among them (Dettmers et al., 2023, QLoRA, appendix E)."""
ZERO_CODE = NF4.index(0.0)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales for a tensor of this shape."""
    *leading, columns = shape or (1,)
    return (*leading, -(-columns // BLOCK))


def is_signed(codes: Tensor) -> bool:
    """True if these are codes of a first moment."""
    return codes.dtype == torch.int8


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The moments that codes and scales stand for."""
    code_RKN = _blocked(codes.to(torch.float32))
    root_RKN = code_RKN * code_RKN.abs() * scale.reshape(*code_RKN.shape[:2], 1)
    value_RKN = root_RKN if is_signed(codes) else root_RKN * root_RKN
    return _joined(value_RKN, codes.shape).to(dtype)


def scales_of(value: Tensor, signed: bool) -> Tensor:
    """The scales of a first moment or of a second one (not `signed`): of elements of several ranks, the largest."""
    size_RKN = _sizes(_blocked(value.float()), signed)
    most, least = (SIGNED_CODES, LEAST_UNIT) if signed else (UNSIGNED_CODES, LEAST_ROOT)
    return (size_RKN.amax(dim=-1) * (1 / most**2)).clamp_min(least).reshape(scale_shape(value.shape))


def narrowed(
    value: Tensor, signed: bool, key: RoundingKey, position: Tensor | None = None, scale: Tensor | None = None
) -> Quantized:
    """Codes and scales of a first moment or of a second one (not `signed`), rounded at random.

    `position` is where each element lies in the whole moment, of which this is a part that begins with whole blocks;
    `scale` is theirs where other ranks have elements of them, too.
    """
    value_RKN = _blocked(value.float())
    if position is None:
        position = torch.arange(value.numel(), device=value.device).view(value.shape)
    if scale is None:
        scale = scales_of(value, signed)
    draw_RKN = _blocked(rounding_bits(key, position).to(torch.float32))
    threshold_RKN = (draw_RKN + 0.5) / DRAWS
    most = SIGNED_CODES if signed else UNSIGNED_CODES
    scale_RK1 = scale.reshape(*value_RKN.shape[:2], 1)
    code_RKN = (_sizes(value_RKN, signed) * (1 / scale_RK1)).sqrt_().floor_().clamp_(max=most - 1)
    low_RKN, high_RKN = code_RKN.square() * scale_RK1, (code_RKN + 1).square() * scale_RK1
    if not signed:
        low_RKN, high_RKN = low_RKN.square(), high_RKN.square()
    up_RKN = value_RKN.abs() - low_RKN >= threshold_RKN * (high_RKN - low_RKN)
    code_RKN = code_RKN + up_RKN
    code_RKN = code_RKN.copysign(value_RKN) if signed else code_RKN.maximum((value_RKN > 0).float())
    codes = _joined(code_RKN, value.shape).to(torch.int8 if signed else torch.uint8)
    return Quantized(codes, scale)


def _sizes(value_RKN: Tensor, signed: bool) -> Tensor:
    """The size of each value; the largest of a block is its scale."""
    return value_RKN.abs() if signed else value_RKN.sqrt()


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the bytes that hold the 4-bit codes of a tensor of this shape."""
    *leading, columns = shape
    return (*leading, -(-columns // 2))


@cache
def code_levels(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of the 4-bit codes, and the middles between them."""
    level = torch.tensor(NF4, dtype=torch.float64, device="cpu")
    return level.to(device, dtype), ((level[1:] + level[:-1]) / 2).to(device, dtype)


def unpacked(blocks: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """The moments, in rows this long, that 4-bit codes and scales stand for."""
    pairs, scale = blocks
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)[..., :columns]
    value = code_levels(dtype, pairs.device)[0][codes.int()]
    value_RKN = _blocked(value) * scale.to(dtype).reshape(-1, scale.shape[-1], 1)
    return _joined(value_RKN, value.shape)


def packed(value: Tensor) -> Quantized:
    """4-bit codes, two to a byte with the even column in its low half, and scales; rounded to the nearest."""
    value_RKN = _blocked(value)
    scale_RK1 = value_RKN.abs().amax(dim=-1, keepdim=True).float()
    share_RKN = torch.where(scale_RK1 > 0, value_RKN / scale_RK1, 0.0)
    code_RKN = torch.bucketize(share_RKN, code_levels(share_RKN.dtype, value.device)[1], out_int32=True)
    codes = _joined(code_RKN.to(torch.uint8), value.shape)
    # Behind an odd row lies the code of a zero, so that equal moments are equal bytes.
    codes = nn.functional.pad(codes, (0, value.shape[-1] % 2), value=ZERO_CODE)
    return Quantized(codes[..., ::2] | codes[..., 1::2] << 4, scale_RK1.reshape(scale_shape(value.shape)))


def _blocked(value: Tensor) -> Tensor:
    """The rows cut into blocks, the last one filled up with zeros. [R, K, N]"""
    columns = value.shape[-1] if value.dim() > 0 else 1
    return grouped(value.reshape(math.prod(value.shape[:-1]), columns), BLOCK)


def _joined(value_RKN: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `_blocked`."""
    columns = shape[-1] if shape else 1
    return value_RKN.flatten(-2)[:, :columns].reshape(shape)
