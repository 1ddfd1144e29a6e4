"""Rows cut into groups, each one scale and an int8 code per element: value = code * scale.

    largest = max |value| of the group
    scale   = largest / 127, at least 2^-100, in float32 but to 16 significant bits
    code    = value / scale, in -127 .. 127

A code has 7 bits and a scale 16, so their product is a float32 without rounding, and the largest element is 127 * scale
to the last bit: what was read and not changed gets the same scale and the same codes again.

Shapes: R rows, C columns, K groups to a row; the last group of a row is shorter where the size does not divide C.
"""

import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.random import ROUND_SCALE, ROUND_WEIGHT, Word, rounding_bits, rounding_key
from .rounding import DRAWS, Quantized

TRITON = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"

GROUP_SIZE = 128
"""Elements that share a scale, unless told otherwise."""

LARGEST_CODE = 127
LEAST_SCALE = 2.0**-100
"""Least scale, a group of zeros' too, so that nothing is divided by zero or too small to be exact."""

SCALE_BITS = 8
"""Bits of a float32 that a scale leaves zero."""

PIECE = 2**21
"""Elements that are quantized at a time: their temporaries take 30 times as many bytes."""

TO_INTEGER = 1.5 * 2.0**23
"""Added to a small float32, it leaves room for no fraction: the sum is rounded to an integer."""


class Draws(NamedTuple):
    """Random numbers that round a run of rows, keyed by an element's place in the whole weight."""

    seed: Word
    step: Word
    first_row: int

    def of_codes(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Uniform numbers below 2^16. [R, C]"""
        return self._bits(ROUND_WEIGHT, rows, columns, device)

    def of_scales(self, rows: int, groups: int, device: torch.device) -> Tensor:
        """Uniform numbers below 2^8. [R, K]"""
        return self._bits(ROUND_SCALE, rows, groups, device) >> (16 - SCALE_BITS)

    def _bits(self, stream: int, rows: int, columns: int, device: torch.device) -> Tensor:
        first = self.first_row * columns
        place = torch.arange(first, first + rows * columns, device=device).view(rows, columns)
        return rounding_bits(rounding_key(self.seed, self.step, stream), place)


def group_count(columns: int, group_size: int) -> int:
    """K, the groups of one row."""
    return -(-columns // group_size)


def stored_bytes(rows: int, columns: int, group_size: int = GROUP_SIZE) -> int:
    """Bytes of the codes and float32 scales of a matrix."""
    return rows * (columns + 4 * group_count(columns, group_size))


def row_pieces(rows: int, columns: int, most: int | None = None) -> list[slice]:
    """Runs of rows, of at most so many elements, that are worked on one by one: what is wide is never there whole."""
    height = max(1, (most or PIECE) // max(1, columns))
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def quantized(value_RC: Tensor, group_size: int, draws: Draws | None = None) -> Quantized:
    """Codes and scales of float32 values: at random, so that the expected result is the value, or to the nearest.

    An element within 2^-15 of the largest of its group may be off by 2^-10 of a code on average, because the
    scale of its group is rounded too.
    """
    rows, columns = value_RC.shape
    device = value_RC.device
    grouped_RKN = grouped(value_RC, group_size)
    size_RKN = grouped_RKN.abs()
    largest_RK = size_RKN.amax(dim=-1)
    scale_RK = _scale(largest_RK, None if draws is None else draws.of_scales(rows, largest_RK.shape[-1], device))
    inverse_RK1, scale_RK1 = (1 / scale_RK).unsqueeze(-1), scale_RK.unsqueeze(-1)
    # Either neighbour may be taken for the nearest code: the remainder is exact, and makes up for it.
    nearest_RKN = (grouped_RKN * inverse_RK1 + TO_INTEGER).sub_(TO_INTEGER)
    rest_RKN = (grouped_RKN - nearest_RKN * scale_RK1).mul_(inverse_RK1)
    if draws is not None:
        draw_RKN = grouped(draws.of_codes(rows, columns, device).to(value_RC.dtype), group_size)
        # Up to half a code up or down, before it is rounded.
        rest_RKN = rest_RKN + (draw_RKN - (DRAWS - 1) / 2) / DRAWS
    # The largest is 127 whatever is drawn, so that its scale can be told from it.
    top_RK1 = torch.where(scale_RK > LEAST_SCALE, largest_RK, torch.inf).unsqueeze(-1)
    rest_RKN = rest_RKN.masked_fill_(size_RKN >= top_RK1, 0.0)
    code_RKN = (nearest_RKN + TO_INTEGER + rest_RKN).sub_(TO_INTEGER).clamp_(-LARGEST_CODE, LARGEST_CODE)
    return Quantized(code_RKN.flatten(-2)[:, :columns].to(torch.int8), scale_RK)


def grouped(value_RC: Tensor, group_size: int) -> Tensor:
    """The rows cut into groups, the last one filled up with zeros. [R, K, N]"""
    columns = value_RC.shape[-1]
    groups = group_count(columns, group_size)
    group_size = min(group_size, max(columns, 1))
    return nn.functional.pad(value_RC, (0, groups * group_size - columns)).unflatten(-1, (groups, group_size))


def _scale(largest_RK: Tensor, draws_RK: Tensor | None) -> Tensor:
    """largest / 127, rounded to the bits that a scale has: by a draw, or to the nearest."""
    addend = 1 << (SCALE_BITS - 1) if draws_RK is None else draws_RK.to(torch.int32)
    # By a tensor: on a GPU torch would multiply with the inverse of a number instead, which rounds otherwise.
    raw = (largest_RK / torch.full_like(largest_RK, LARGEST_CODE)).view(torch.int32)
    scale_RK = ((raw + addend) & -(1 << SCALE_BITS)).view(torch.float32)
    return torch.where(scale_RK < LEAST_SCALE, LEAST_SCALE, scale_RK)


def dequantized(codes_RC: Tensor, scale_RK: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """code * scale, narrowed once. [R, C]"""
    columns = codes_RC.shape[-1]
    if torch.compiler.is_compiling() or type(codes_RC) is not Tensor:  # or one that only records what is done with it
        # One expression, for the compiler to fuse. Looked up, because torch 2.13 miscompiles a slice of
        # repeat_interleave() for the CPU.
        group_C = torch.arange(columns, device=codes_RC.device) // group_size
        return (codes_RC * scale_RK[:, group_C]).to(dtype)
    if _has_kernel(codes_RC, scale_RK, dtype):
        from .kernel import dequantized_by_kernel

        return dequantized_by_kernel(codes_RC, scale_RK, group_size, dtype)
    value_RC = torch.empty(codes_RC.shape, dtype=dtype, device=codes_RC.device)
    whole = columns // group_size
    if whole > 0:
        sizes = whole, group_size
        codes, value = (each[:, : whole * group_size].unflatten(1, sizes) for each in (codes_RC, value_RC))
        # Into the result, so that no wider copy of it is ever there.
        torch.mul(codes, scale_RK[:, :whole].unsqueeze(-1), out=value)
    if columns > whole * group_size:
        rest = slice(whole * group_size, columns)
        torch.mul(codes_RC[:, rest], scale_RK[:, whole:], out=value_RC[:, rest])
    return value_RC


def _has_kernel(codes_RC: Tensor, scale_RK: Tensor, dtype: torch.dtype) -> bool:
    fits = dtype != torch.float64 and codes_RC.is_contiguous() and scale_RK.is_contiguous()
    return fits and codes_RC.is_cuda and _compiles(codes_RC.device)


@cache
def _compiles(device: torch.device) -> bool:
    """True if Triton compiles for this GPU."""
    return TRITON and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
