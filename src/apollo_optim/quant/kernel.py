"""A kernel that makes an int8 matrix whole: one pass, with nothing wide beside the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TRITON_TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}  # fmt: skip
BLOCK = 2048
"""Columns of a row that one program makes."""


@triton.jit
def dequantize_kernel(codes, scales, value, columns, groups, N: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    """value[row, column] <- codes[row, column] * scales[row, column // N]"""
    across = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    code = tl.load(codes + row * columns + column, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + row * groups + column // N, mask=inside, other=0.0)
    tl.store(value + row * columns + column, (code * scale).to(T), mask=inside)


def dequantized_by_kernel(codes_RC: Tensor, scale_RK: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """As `groups.dequantized`, of contiguous tensors."""
    rows, columns = codes_RC.shape
    value_RC = torch.empty(codes_RC.shape, dtype=dtype, device=codes_RC.device)
    if value_RC.numel() > 0:
        grid = (rows * triton.cdiv(columns, BLOCK),)
        with torch.cuda.device_of(codes_RC):
            dequantize_kernel[grid](
                codes_RC, scale_RK, value_RC, columns, scale_RK.shape[1], group_size, TRITON_TYPES[dtype], BLOCK
            )
    return value_RC
