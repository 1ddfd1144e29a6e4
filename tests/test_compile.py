"""The kernels compile for cards that are not here: nothing in them needs the newest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "adamw_groups_kernel",
    "adamw_kernel",
    "apply_int8_kernel",
    "apply_kernel",
    "clip_kernel",
    "combine_kernel",
    "decide_kernel",
    "dequantize_kernel",
    "factors_kernel",
    "finite_kernel",
    "inverse_factor_kernel",
    "keep_kernel",
    "kept_kernel",
    "means_kernel",
    "measure_kernel",
    "moments_kernel",
    "momentum_kernel",
    "normals_kernel",
    "pad_kernel",
    "prepare_kernel",
    "project_kernel",
    "reduce_columns_kernel",
    "reduce_rows_kernel",
    "round_kernel",
    "row_squares_kernel",
    "scaled_kernel",
    "settle_kernel",
    "share_kernel",
    "sizes_kernel",
    "squares_kernel",
    "stored_kernel",
    "symmetric_kernel",
    "unit_kernel",
}

# A thread's stack is memory: where a kernel keeps this much there, its tile is too large for the card. Moments in
# bfloat16 on rows that are not whole vectors come closest.
MOST_STACK = 1024


@pytest.mark.parametrize(
    "asked",
    [["90", "--few"], pytest.param(["80"], marks=pytest.mark.slow), pytest.param(["90"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_every_kernel_compiles_within_the_registers_of_a_card(asked: list[str]):
    pytest.importorskip("triton", reason="triton is made for Linux alone")
    script = Path(__file__).with_name("ahead_of_time.py")
    # The interpreter, in which the other tests run the kernels, compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, script, *asked], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    compiled = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in compiled} == KERNELS
    assert max(kernel["stack"] for kernel in compiled) <= MOST_STACK
    assert not any(kernel["overtaken"] for kernel in compiled)
