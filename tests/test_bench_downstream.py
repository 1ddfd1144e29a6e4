"""The script of the downstream tables: what it runs, in which order, and what it does not run again."""

import csv
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import downstream
from downstream import BEFORE, METHODS, SWEEP, Run, Table, scores, shown, trained_result, training


def table(folder, **changes):
    args = {
        "table": "commonsense", "model": "m.gguf", "every": 10, "epochs": 1.0, "steps": None, "warmup": 40,
        "questions": 400, "methods": None, "rates": 2, "seeds": 1, "written": [], "jobs": 1, "minutes": 5.0,
        "options": [], "work": folder, "data": folder, "out": folder / "rows.csv", "device": "cpu",
    }  # fmt: skip
    return Table(Namespace(**args | changes))


def write_rows(of, rows):
    """Rows of the setting of a table."""
    names = [*of.setting(), *Run("").key, "average", "average_stderr", "validation_loss", "state_bytes", "peak_bytes"]
    with of.args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="1")
        writer.writeheader()
        writer.writerows([of.setting() | Run("").key | row for row in rows])


def test_every_method_has_its_first_learning_rate_before_any_has_its_second(tmp_path):
    runs = list(table(tmp_path).first_runs())
    every = [BEFORE, *METHODS, "apollo-mini-int8", "adamw-full"]
    assert [run.method for run in runs] == [*every, *every[1:]]
    assert [run.lr for run in runs if run.method == "adamw"] == ["5e-5", "1.5e-4"]
    assert runs[0].train == ()
    assert len({run.name for run in runs}) == len(runs)


def test_a_sweep_is_one_run_at_the_recipes_learning_rates(tmp_path):
    before, apollo = table(tmp_path, table="mmlu", rates=0, methods=[BEFORE, "apollo"]).first_runs()
    assert (before.lr, before.train) == ("", ())
    assert apollo.lr == SWEEP
    assert "--lr" not in apollo.train
    assert apollo.train[apollo.train.index("--recipe") + 1] == "mmlu"


def test_of_a_sweep_the_best_is_recorded_with_the_losses_of_all(tmp_path):
    runs = [{"lr": 5e-06, "validation_loss": 0.5}, {"lr": 7.5e-05, "validation_loss": 0.25, "steps": 7}, {"lr": 1.0}]
    (tmp_path / "sweep.json").write_text(json.dumps({"best": 7.5e-05, "runs": runs}))
    row = training(trained_result(tmp_path))
    assert (row["best_lr"], row["validation_loss"], row["trained_steps"]) == ("7.5e-5", 0.25, 7)
    assert row["losses"] == "5e-6:0.5000 7.5e-5:0.2500 1e0:inf"


def test_the_best_learning_rate_gets_other_seeds_and_writes_its_answers(tmp_path):
    of = table(tmp_path, seeds=2, written=["apollo", BEFORE, "lora"])
    losses = {"3e-4": "0.5", "1e-3": "0.4", "1e-4": "0.6"}
    write_rows(of, [{"method": "apollo", "lr": lr, "validation_loss": loss} for lr, loss in losses.items()])
    runs = [(run.method, run.lr, run.seed, run.by) for run in of.later_runs()]
    assert runs == [
        ("apollo", "1e-3", 1, "likelihood"),
        ("apollo", "1e-3", 0, "generation"),
        (BEFORE, "", 0, "generation"),
    ]
    assert shown(of.known()).splitlines()[2].startswith("| apollo | 1e-3 | 0 |")


def test_rows_that_are_there_are_not_repeated_and_none_is_begun_too_late(tmp_path, capsys):
    of = table(tmp_path, minutes=0.0)
    write_rows(of, [{"method": "lora", "lr": "3e-4"}])
    of.make(iter([Run("lora", "3e-4", train=("x",)), Run("lora", "3e-4", 1, ("x",)), Run("dora", "3e-4")]))
    assert capsys.readouterr().out.splitlines() == ["lora-3e-4-seed1: no time left", "dora-3e-4-seed0: no time left"]
    assert not table(tmp_path, questions=100).known()


def test_accuracies_are_in_percent_under_the_names_of_the_table():
    part = {"acc": 0.25, "acc_stderr": 0.1, "items": 4}
    tasks = {"commonsense_piqa": part, "commonsense_boolq": part | {"acc": 0.5, "unanswered": 2}}
    row = scores({"tasks": tasks, "averages": {"commonsense": part | {"acc": 0.375, "items": 8}}})
    assert row == {
        "piqa": 25.0, "boolq": 50.0, "average": 37.5, "average_stderr": 10.0, "asked": 8, "unanswered": 2,
    }  # fmt: skip


def test_the_commands_of_the_figures_have_the_settings_of_their_rows(tmp_path, monkeypatch):
    root = Path(__file__).parents[1]
    (tmp_path / "python").write_text('#!/bin/sh\nfor each in "$@"; do printf "%s\\037" "$each"; done\necho\n')
    (tmp_path / "python").chmod(0o755)
    names = {"MODEL": "SmolLM2-135M-Instruct.Q4_1.gguf", "DATA": "d", "TOKENS": "t", "TOKENIZER": "t5"}
    given = os.environ | names | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(root / "bench" / "runs" / "downstream-h200.sh")]
    done = subprocess.run(script, env=given, capture_output=True, text=True, check=True, cwd=tmp_path)
    commands = [line.rstrip("\037").split("\037") for line in done.stdout.splitlines()]
    settings: dict[Path, dict[str, str]] = {}

    class Asked(Table):
        def make(self, runs):
            settings[self.args.out] = self.setting()

    monkeypatch.setattr(downstream, "Table", Asked)
    monkeypatch.setattr(downstream, "write_examples", lambda args: None)
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands:
        if program == "bench/downstream.py":
            monkeypatch.setattr(sys, "argv", [program, *arguments])
            downstream.main()
    assert [setting["table"] for setting in settings.values()] == ["commonsense", "mmlu", "zeroshot"]
    for file, setting in settings.items():
        with (root / file).open(newline="") as rows:
            assert any(setting.items() <= row.items() for row in csv.DictReader(rows)), setting
