"""A run that is saved, loaded in a new process and continued is the run that was never interrupted."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from family import BY_NAME, DISTINCT, FAMILY, partly_slow
from runs import SHAPES, built, run, snapshot, weights

# Bases are renewed at the first, fourth and seventh step: one renewal before the save, one after it.
SAVED_AFTER, LENGTH = 5, 7
KINDS = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 weights and state": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
}
# Narrow writes draw from the generator, so those are the kinds where resuming could go astray beyond float32.
CONTINUED = [kind for kind in KINDS if kind != "float64"]
FEW = {name: SHAPES[name] for name in ("wide", "experts", "conv", "norm")}


def begin(member: str, kind: str, **options):
    """Fresh weights and an optimizer over them."""
    dtype, own = KINDS[kind]
    named = weights(FEW, dtype)
    return named, built(BY_NAME[member], named, **own, **options)


def continue_runs(folder: Path) -> None:
    """What the new process does: load every checkpoint, take the remaining steps, save where that led."""
    torch.set_num_threads(1)
    ends = {}
    for key, saved in torch.load(folder / "saved.pt", weights_only=True).items():
        # Options given here give way to those of the checkpoint.
        named, optimizer = begin(*key, seed=99, lr=1.0, weight_decay=0.0)
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(saved["weights"][name])
        optimizer.load_state_dict(saved["optimizer"])
        run(optimizer, named, range(SAVED_AFTER, LENGTH))
        ends[key] = tuple(snapshot(optimizer)[:2])
    torch.save(ends, folder / "ends.pt")


@pytest.mark.parametrize(
    "members", [DISTINCT, pytest.param(FAMILY, marks=pytest.mark.slow)], ids=["each state", "every member"]
)
def test_a_new_process_continues_bit_for_bit_across_a_refresh(tmp_path, members):
    saved, uninterrupted = {}, {}
    for key in ((member.name, kind) for member in members for kind in CONTINUED):
        named, optimizer = begin(*key)
        run(optimizer, named, range(SAVED_AFTER))
        saved[key] = copy.deepcopy(
            {"weights": nn.ParameterDict(named).state_dict(), "optimizer": optimizer.state_dict()}
        )
        run(optimizer, named, range(SAVED_AFTER, LENGTH))
        uninterrupted[key] = tuple(snapshot(optimizer)[:2])
    torch.save(saved, tmp_path / "saved.pt")
    # One process for all, because starting it takes longer than the runs.
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True)
    resumed = torch.load(tmp_path / "ends.pt", weights_only=True)
    assert resumed.keys() == uninterrupted.keys()
    assert [key for key in resumed if resumed[key] != uninterrupted[key]] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)
def test_state_keeps_its_own_dtypes_through_a_checkpoint(member, kind):
    # torch.optim would cast every floating-point tensor to the dtype of the weight, the seed's neighbours included.
    named, optimizer = begin(member.name, kind)
    run(optimizer, named, [0])
    _, fresh = begin(member.name, kind)
    fresh.load_state_dict(optimizer.state_dict())
    dtype, options = KINDS[kind]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = {
        "step": torch.float32,
        "seed": torch.int64,
        "exp_avg": options.get("state_dtype", wide),
        "exp_avg_sq": options.get("state_dtype", wide),
        "exp_avg_sq_side": wide,
        "exp_avg_sq_channel": wide,
        "last_norm": wide,
        "basis": options.get("state_dtype", wide),
    }
    for state in fresh.state.values():
        if "exp_avg_scale" in state:  # 4 bits
            expected |= {"exp_avg": torch.uint8, "exp_avg_scale": torch.float32}
        assert {name: value.dtype for name, value in state.items()} == {name: expected[name] for name in state}
        expected["exp_avg"] = expected["exp_avg_sq"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_a_checkpoint_loads_on_another_device(member):
    named, optimizer = begin(member.name, "bfloat16")
    run(optimizer, named, range(SAVED_AFTER))
    moved = {name: nn.Parameter(weight.detach().cuda()) for name, weight in named.items()}
    there = built(member, moved)
    there.load_state_dict(optimizer.state_dict())
    assert snapshot(there).state == snapshot(optimizer).state
    for weight, state in there.state.items():
        assert {name for name, value in state.items() if value.device != weight.device} == {"step", "seed"}
    run(there, moved, [SAVED_AFTER])
    assert all(weight.isfinite().all() for weight in moved.values())


if __name__ == "__main__":
    continue_runs(Path(sys.argv[1]))
