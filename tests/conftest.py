"""Settings of every test."""

import os

import pytest
import torch

# The tensors of these tests are tiny: threads would only wait for each other, and for those of a parallel run.
torch.set_num_threads(1)

# Triton decides at its import whether kernels are compiled or interpreted. Where there is nothing to compile for, they
# are interpreted, as `make test` asks for anywhere.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs compiled kernels: unset TRITON_INTERPRET")
