"""A linear layer with int8 weights: make the weight whole for cuBLAS, or a product that reads the codes.

    python bench/int8_matmul.py --out bench/results/int8-matmul-h200.csv

For every shape of LLaMA-7B's matrices, forward (y = x W^T) and backward (dx = dy W) in bf16, three ways: weights that
are bf16 to begin with; int8 weights made whole and then multiplied, as `apollo_optim.quant` does; and a Triton kernel
that makes them whole tile by tile, in registers. All are first checked against float32. The gradient of the weight
needs no weight, and is the same in all.

Shapes: T tokens, I inputs and O outputs of the layer, K groups to a row of its weight.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from apollo_optim.evidence.timing import summary, times_ms
from apollo_optim.llama import MODELS
from apollo_optim.planner.models import llama_parameters
from apollo_optim.quant import Int8Weight
from machine import common_parser, facts, record_rows

GROUP = 128
SHORT = 64
"""Rows of a tile where there are few tokens."""
LONG = 128
DEEP = 64
"""Depth of a tile in backward, along the contracted side; in forward a tile is as deep as a group."""
TALL = 8
"""Tiles of rows that go through the columns together, so that weights are found in the cache."""


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr):
    """Row and column of this program's tile."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (TALL * across) * TALL
    height = tl.minimum(down - first, TALL)
    inside = tl.program_id(0) % (TALL * across)
    return first + inside % height, inside // height


@triton.jit
def forward_kernel(
    x_TI, codes_OI, scale_OK, y_TO, tokens, inner, outer, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """y[t, o] <- sum over groups k of scale[o, k] * (sum over i of group k of x[t, i] * codes[o, i])"""
    row, column = _tile(tokens, outer, ROWS, COLUMNS, TALL)
    t = (row * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o = (column * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    i = tl.arange(0, GROUP)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(groups):
        at = k * GROUP + i
        x = tl.load(
            x_TI + t[:, None] * inner + at[None, :], mask=(t < tokens)[:, None] & (at < inner)[None, :], other=0.0
        )
        code = tl.load(
            codes_OI + o[None, :] * inner + at[:, None], mask=(o < outer)[None, :] & (at < inner)[:, None], other=0
        )
        scale = tl.load(scale_OK + o * groups + k, mask=o < outer, other=0.0)
        # A code has 7 bits, so that it is exact in bf16; the scale is applied in float32.
        total += tl.dot(x, code.to(x.dtype), input_precision="ieee") * scale[None, :]
    inside = (t < tokens)[:, None] & (o < outer)[None, :]
    tl.store(y_TO + t[:, None] * outer + o[None, :], total.to(y_TO.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy_TO, codes_OI, scale_OK, dx_TI, tokens, inner, outer, groups,
    ROWS: tl.constexpr, GROUP: tl.constexpr, DEEP: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """dx[t, i] <- sum over o of dy[t, o] * (codes[o, i] * scale[o, group of i])"""
    row, k = _tile(tokens, inner, ROWS, GROUP, TALL)
    t = (row * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = k * GROUP + tl.arange(0, GROUP)
    total = tl.zeros((ROWS, GROUP), tl.float32)
    for start in range(0, outer, DEEP):
        o = (start + tl.arange(0, DEEP)).to(tl.int64)
        dy = tl.load(
            dy_TO + t[:, None] * outer + o[None, :], mask=(t < tokens)[:, None] & (o < outer)[None, :], other=0.0
        )
        code = tl.load(
            codes_OI + o[:, None] * inner + i[None, :], mask=(o < outer)[:, None] & (i < inner)[None, :], other=0
        )
        scale = tl.load(scale_OK + o * groups + k, mask=o < outer, other=0.0)
        total += tl.dot(dy, (code.to(tl.float32) * scale[:, None]).to(dy.dtype), input_precision="ieee")
    inside = (t < tokens)[:, None] & (i < inner)[None, :]
    tl.store(dx_TI + t[:, None] * inner + i[None, :], total.to(dx_TI.dtype.element_ty), mask=inside)


def forward(x_TI: Tensor, weight_OI: Int8Weight) -> Tensor:
    """x @ weight.T, of contiguous tensors."""
    (tokens, inner), outer = x_TI.shape, len(weight_OI)
    y_TO = x_TI.new_empty(tokens, outer)
    rows = SHORT if tokens <= 4 * SHORT else LONG
    grid = (triton.cdiv(tokens, rows) * triton.cdiv(outer, LONG),)
    forward_kernel[grid](
        x_TI, weight_OI.codes, weight_OI.scale, y_TO, tokens, inner, outer, weight_OI.scale.shape[1],
        ROWS=rows, COLUMNS=LONG, GROUP=weight_OI.group_size, TALL=TALL, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y_TO


def backward(dy_TO: Tensor, weight_OI: Int8Weight) -> Tensor:
    """dy @ weight, of contiguous tensors."""
    (tokens, outer), inner = dy_TO.shape, weight_OI.shape[1]
    dx_TI = dy_TO.new_empty(tokens, inner)
    rows = SHORT if tokens <= 4 * SHORT else LONG
    grid = (triton.cdiv(tokens, rows) * weight_OI.scale.shape[1],)
    backward_kernel[grid](
        dy_TO, weight_OI.codes, weight_OI.scale, dx_TI, tokens, inner, outer, weight_OI.scale.shape[1],
        ROWS=rows, GROUP=weight_OI.group_size, DEEP=DEEP, TALL=TALL, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx_TI


def ways(direction: str, weight: Int8Weight) -> dict[str, Callable[[Tensor], Tensor]]:
    """The ways that are compared, as functions of the layer's input or of its output's gradient."""
    wide = weight.dequantize()
    if direction == "forward":
        return {
            "bf16": lambda x: x @ wide.T,
            "made whole": lambda x: x @ weight.dequantize().T,
            "by tiles": lambda x: forward(x, weight),
        }
    return {
        "bf16": lambda dy: dy @ wide,
        "made whole": lambda dy: dy @ weight.dequantize(),
        "by tiles": lambda dy: backward(dy, weight),
    }


def check(direction: str, name: str, found: Tensor, given: Tensor, weight: Int8Weight) -> None:
    """Compare with float32: weights and results are rounded to bf16, each by 2^-9 of itself."""
    whole = weight.dequantize(torch.float32)
    expected = given.float() @ (whole.T if direction == "forward" else whole)
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < 2**-7, f"{direction}, {name}: off by {error:.2e} of the largest"


def shapes() -> list[tuple[int, int]]:
    """Outputs and inputs of LLaMA-7B's matrices."""
    return list(dict.fromkeys(shape for _, shape in llama_parameters(MODELS["7b"]) if len(shape) == 2))[::-1]


def rows_of(outer: int, inner: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    weight = Int8Weight.of(torch.randn(outer, inner, dtype=torch.bfloat16, device="cuda") * 0.02, GROUP)
    rows = []
    for direction, side in (("forward", inner), ("backward", outer)):
        given = torch.randn(tokens, side, dtype=torch.bfloat16, device="cuda")
        plain = None
        for name, compute in ways(direction, weight).items():
            check(direction, name, compute(given), given, weight)
            timed = summary(times_ms(lambda run=compute, given=given: run(given), "cuda", 5, repeats))
            plain = plain or timed["median_ms"]
            row = {"outputs": outer, "inputs": inner, "tokens": tokens, "direction": direction, "way": name, **timed}
            rows.append(row | {"vs_bf16": round(timed["median_ms"] / plain, 3)})
            print(
                f"{outer:6} x {inner:5} {tokens:5} tokens {direction:8} {name:10} {timed['median_ms']:8.4f} ms "
                f"[{timed['low_ms']:.4f}, {timed['high_ms']:.4f}]  {rows[-1]['vs_bf16']:6.2f} x bf16",
                flush=True,
            )
    return rows


def main() -> None:
    parser = common_parser(__doc__, device=None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 8192])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    rows = [row for shape in shapes() for tokens in args.tokens for row in rows_of(*shape, tokens, args.repeats)]
    found_on = facts("cuda")
    record_rows(args.out, [row | found_on for row in rows])


if __name__ == "__main__":
    main()
