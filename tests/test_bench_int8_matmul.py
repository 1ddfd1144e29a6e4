"""The products of bench/int8_matmul.py, which read codes tile by tile."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

# Triton's interpreter gets bf16 wrong.
DEVICES = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda)],
    ids=["cpu", "cuda"],
)


@DEVICES
@pytest.mark.parametrize("shape", [(5, 37, 131), (70, 150, 40)])
@pytest.mark.usefixtures("kernels")
def test_a_product_with_codes_is_the_product_with_the_whole_weight(device, dtype, shape):
    import int8_matmul

    tokens, outer, inner = shape
    torch.manual_seed(0)
    weight = int8_matmul.Int8Weight.of(torch.randn(outer, inner, device=device).to(dtype), 32)
    whole = weight.dequantize(torch.float32)
    x, dy = (torch.randn(tokens, side, device=device).to(dtype) for side in (inner, outer))
    # Sums of at most 150 terms in another order; in bf16, weights and results are rounded besides.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for found, expected in (
        (int8_matmul.forward(x, weight), x.float() @ whole.T),
        (int8_matmul.backward(dy, weight), dy.float() @ whole),
    ):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance * expected.abs().max().item())
