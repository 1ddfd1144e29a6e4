"""bench/sweep.py, as its runs are written down: every rule that a file of runs names takes a step."""

import csv
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
RUNS = sorted((BENCH / "runs").glob("quality-*.json"))
sys.path.insert(0, str(BENCH))


def test_a_sweep_records_each_run_once(tmp_path, monkeypatch):
    import sweep

    out = tmp_path / "rows.csv"
    arguments = ["--device", "cpu", "--model", "1m", "--data", "python", "--runs", str(BENCH / "runs" / "smoke.json")]
    arguments += ["--steps", "2", "--batch", "2", "--sequence", "16", "--validation-rows", "4", "--out", str(out)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
        sweep.main()
    rows = list(csv.DictReader(out.open()))
    assert [row["name"] for row in rows] == list(json.loads((BENCH / "runs" / "smoke.json").read_text())["runs"])
    assert all(100 < float(row["perplexity"]) < 5000 for row in rows)
    assert len({row["state_bytes"] for row in rows}) == len(rows)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_is_one_that_can_be_built(path):
    import torch
    from torch import nn

    import sweep

    described = json.loads(path.read_text())
    weights = {
        "matrices": [nn.Parameter(torch.ones(8, 16))], "vectors": [nn.Parameter(torch.ones(8))],
        "embedding": [nn.Parameter(torch.ones(32, 8))], "head": [nn.Parameter(torch.ones(32, 8))],
    }  # fmt: skip
    for name, run in described["runs"].items():
        parts = run["parts"] if isinstance(run, dict) else run
        parts = [{**described["defaults"].get(part["by"], {}), **part} for part in parts]
        made = sweep.optimizers_of(weights, parts)
        stepped = [weight for optimizer in made for group in optimizer.param_groups for weight in group["params"]]
        assert sorted(map(id, stepped)) == sorted(id(weight) for kind in weights.values() for weight in kind), name
