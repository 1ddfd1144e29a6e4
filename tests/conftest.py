"""Settings of every test."""

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ranks import Ranks

if TYPE_CHECKING:
    from data_texts import Prepared
    from pretraining import Ground

# The tensors of these tests are tiny: threads would only wait for each other, and for those of a parallel run.
torch.set_num_threads(1)


def fsync(file: int) -> None:
    """`os.fsync`, but for the disk: it takes milliseconds, thousands of times, and no test cuts the power."""
    os.fstat(file)


os.fsync = fsync

# Triton decides at its import whether kernels are compiled or interpreted. Where there is nothing to compile for, they
# are interpreted, as `make test` asks for anywhere.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


FOUR = Ranks(4)


def on_ranks(item: pytest.Function) -> bool:
    """Whether a test is for the four processes of `ranks`, and not for a number of that name."""
    return "ranks" in item.fixturenames and not (hasattr(item, "callspec") and "ranks" in item.callspec.params)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests on four processes first: they take longest, and a parallel run is to end with short ones."""
    items.sort(key=lambda item: not on_ranks(item))


# What is imported stays: collecting garbage need not look through it, while more is imported or later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Skip what needs a GPU where there is none; start ranks before fixtures change the process they are copies of."""
    if item.get_closest_marker("cuda") is not None:
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        if os.environ.get("TRITON_INTERPRET") == "1":
            pytest.skip("needs compiled kernels: unset TRITON_INTERPRET")
    if on_ranks(item):
        FOUR.start()


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
def ground(tmp_path_factory: pytest.TempPathFactory) -> "Ground":
    """A model and a corpus that runs may share."""
    from pretraining import make_ground

    # Imported here, and not by each of a run's processes, which are copies of this one.
    for module in ("peft", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tokenizer whose tokens are bytes."""
    from data_texts import byte_tokenizer

    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: str) -> "Prepared":
    """Text made into tokens by that tokenizer."""
    from data_texts import Prepared

    return Prepared(tmp_path, tokenizer)


@pytest.fixture(scope="module")
def no_picture() -> Iterator[None]:
    """For modules with runs whose curves nobody looks at, its fixtures' too: drawing takes longer than training."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("apollo_optim.train.export.draw_curves", lambda lines, path: None)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes of one group."""
    yield FOUR
    FOUR.close()


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """The four processes end with the last test that needs them: waiting, their threads take a core."""
    if on_ranks(item) and nextitem is not None and not on_ranks(nextitem):
        FOUR.close()
