"""Moments whose rows are kept further apart than they are long, so that a GPU reads them by whole vectors."""

import copy
import io

import pytest
import torch

from apollo_optim import APOLLO
from family import Member
from runs import bits, snapshot
from twins import Run, assert_same_run, cuda, started, twins

SHAPES = {"wide": (12, 37), "tall": (45, 20), "experts": (2, 12, 21), "even": (12, 48)}
RANK_4 = Member("", APOLLO, {"rank": 4})
ON_CPU = pytest.mark.parametrize("device", ["cpu"])
DTYPES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def pitched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, where kernels are interpreted."""
    monkeypatch.setattr("apollo_optim.state.PITCHED", frozenset({"cpu", "cuda"}))


def pitches(run: Run) -> dict[str, tuple[int, ...]]:
    return {name: run.state(name)["exp_avg"].stride() for name in SHAPES}


@pytest.mark.usefixtures("pitched")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@DTYPES
def test_kernels_step_pitched_moments_as_plain_pytorch_does(device: str, state_dtype: torch.dtype):
    fused, plain = twins(RANK_4, device, shapes=SHAPES, state_dtype=state_dtype)
    assert_same_run(fused.steps(3), plain.steps(3))
    assert pitches(fused) == {"wide": (48, 1), "tall": (48, 1), "experts": (128, 32, 1), "even": (48, 1)}
    for name in ("wide", "tall"):
        moment = fused.state(name)["exp_avg_sq"]
        between = moment.as_strided((4, 48), (48, 1))[:, moment.shape[1] :]
        assert between.numel() > 0
        assert not between.any()  # zeros stay zeros


@ON_CPU
def test_the_pitch_changes_no_bit(device: str, monkeypatch: pytest.MonkeyPatch):
    ends = []
    for kinds in ({"cuda"}, {"cpu"}):
        monkeypatch.setattr("apollo_optim.state.PITCHED", frozenset(kinds))
        ends.append(snapshot(started(RANK_4, device, shapes=SHAPES, state_dtype=torch.bfloat16).steps(3).optimizer))
    assert ends[0] == ends[1]


@ON_CPU
@pytest.mark.usefixtures("pitched")
def test_a_checkpoint_from_anywhere_is_laid_out_for_the_device(device: str):
    run, again = (started(RANK_4, device, shapes=SHAPES) for _ in range(2))
    run.steps(3)
    saved = io.BytesIO()
    torch.save(run.optimizer.state_dict(), saved)
    saved.seek(0)
    for loaded in (torch.load(saved, weights_only=True), copy.deepcopy(run.optimizer.state_dict())):
        again.optimizer.load_state_dict(loaded)
        for name, weight in again.named.items():
            weight.data.copy_(run.named[name])
        ends = []
        for each in (copy.deepcopy(run), again):
            each.step(3)
            ends.append([bits(weight) for weight in each.named.values()])
        assert ends[0] == ends[1]
        assert pitches(again) == pitches(run)
