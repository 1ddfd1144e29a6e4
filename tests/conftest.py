"""Settings of every test."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ranks import Ranks

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


@pytest.fixture
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels on `device`; in the interpreter as quick as it can be."""
    pytest.importorskip("triton")
    if device != "cpu":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the CPU kernels run in Triton's interpreter only: set TRITON_INTERPRET=1")
    from interpreted import hasten

    hasten(monkeypatch)


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """Four processes of one group."""
    from ranks import Ranks

    four = Ranks(4)
    yield four
    four.close()
