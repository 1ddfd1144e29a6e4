"""bench/sweep.py, as its runs are written down: every rule and method that a file of runs names can be built."""

import csv
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
RUNS = sorted((BENCH / "runs").glob("*.json"))
sys.path.insert(0, str(BENCH))


def test_a_sweep_records_each_run_once(tmp_path, monkeypatch):
    import sweep

    out = tmp_path / "rows.csv"
    arguments = ["--device", "cpu", "--model", "1m", "--data", "python", "--runs", str(BENCH / "runs" / "smoke.json")]
    arguments += ["--steps", "2", "--batch", "2", "--sequence", "16", "--validation-rows", "4", "--out", str(out)]
    for batch in ([], [], ["--batch", "1", "--only", "adamw"]):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments, *batch])
        sweep.main()
    *rows, other = csv.DictReader(out.open())
    assert [row["name"] for row in rows] == list(json.loads((BENCH / "runs" / "smoke.json").read_text())["runs"])
    assert all(100 < float(row["perplexity"]) < 5000 for row in rows)
    assert len({row["state_bytes"] for row in rows}) == len(rows)
    assert (other["name"], other["batch_tokens"], rows[0]["batch_tokens"]) == ("adamw", "16", "32")


def test_settings_of_a_file_are_gone_through_in_turn_and_what_the_command_says_holds_in_all(tmp_path):
    from argparse import Namespace

    import sweep

    settings = [{"model": "130m", "steps": 2000}, {"seed": 43}, {"batch": 80}]
    described = {"model": "60m", "steps": 4000, "settings": settings, "runs": {"one": {}, "two": {"seed": 44}}}
    (tmp_path / "runs.json").write_text(json.dumps(described))

    def places(**given: int) -> list[tuple[str, str, int, int, int]]:
        args = Namespace(**{"only": None, **dict.fromkeys(sweep.SETTING), **given})
        found = [place for place, _ in sweep.described_runs(tmp_path / "runs.json", args)]
        return [(each["name"], each["model"], each["steps"], each["batch"], each["seed"]) for each in found]

    assert places() == [
        ("one", "130m", 2000, 320, 42), ("two", "130m", 2000, 320, 44), ("one", "60m", 4000, 320, 43),
        ("two", "60m", 4000, 320, 44), ("one", "60m", 4000, 80, 42), ("two", "60m", 4000, 80, 44),
    ]  # fmt: skip
    assert places(batch=8, steps=10, seed=1, only=["one"]) == [("one", "130m", 10, 8, 1), ("one", "60m", 10, 8, 1)]
    # A run with a seed of its own is made once, whatever seeds the others are made with.
    assert places(model="60m", steps=10, batch=8) == [
        ("one", "60m", 10, 8, 42), ("two", "60m", 10, 8, 44), ("one", "60m", 10, 8, 43),
    ]  # fmt: skip


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_is_one_that_can_be_built(path):
    from argparse import Namespace

    import torch
    from torch import nn

    import sweep

    weights = {
        "matrices": [nn.Parameter(torch.ones(8, 16))], "vectors": [nn.Parameter(torch.ones(8))],
        "embedding": [nn.Parameter(torch.ones(32, 8))], "head": [nn.Parameter(torch.ones(32, 8))],
    }  # fmt: skip
    as_the_file_says = Namespace(only=None, **dict.fromkeys(sweep.SETTING))
    for place, run in sweep.described_runs(path, as_the_file_says):
        if "method" in run:
            sweep.method_of(run).check(place["steps"])
            continue
        made = sweep.optimizers_of(weights, run["parts"])
        stepped = [weight for optimizer in made for group in optimizer.param_groups for weight in group["params"]]
        assert sorted(map(id, stepped)) == sorted(id(weight) for kind in weights.values() for weight in kind), place


@pytest.mark.parametrize("method", ["artemis", "artemis-mini", "factored-adamw"])
def test_recipes_are_what_the_sweep_found(method):
    from apollo_optim.integrations.transformers import VARIANTS
    from apollo_optim.train.recipes import recipe

    described = json.loads((BENCH / "runs" / "quality-60m-tuning.json").read_text())
    found = {
        "artemis": "artemis 1e-2, vocabulary factored 4e-3",
        "artemis-mini": "artemis-mini 1e-2, rank 1/64, vocabulary factored 4e-3",
        "factored-adamw": "adamw 1.25e-3, vocabulary factored 2e-3",
    }
    parts = {part["on"]: described["defaults"].get(part["by"], {}) | part for part in described["runs"][found[method]]}
    matrices, vocabulary, told = parts.get("matrices", parts["rest"]), parts["vocabulary"], recipe(method, "60m")
    assert (told.lr, told.weight_decay) == (matrices["lr"], matrices["weight_decay"])
    assert (told.embedding_lr, told.vocabulary_state) == (vocabulary["lr"], vocabulary["by"])
    by_model = VARIANTS[method]  # given a model in a script
    assert (told.lr * by_model.vocabulary_lr_ratio, by_model.own_vocabulary) == (told.embedding_lr, vocabulary["by"])
