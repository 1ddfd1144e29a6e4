"""`apollo compare`: methods under the same conditions, one run after another, as often as it takes."""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from apollo_optim.cli import _command, main
from apollo_optim.evidence import compare as module
from apollo_optim.evidence.analyses import SWEEPS, _compared
from apollo_optim.evidence.compare import method_choices, planned_runs, run_apart
from apollo_optim.evidence.report import flags_for
from apollo_optim.train.config import flat, plain
from apollo_optim.train.run import DIVERGED, STOPPED
from pretraining import Ground, log

pytestmark = pytest.mark.usefixtures("no_picture")


def flags(ground: Ground, out: Path, methods: str, *more: str) -> list[str]:
    """A command line; flags in `more` come last and so count."""
    shared = ground.flags(out)[1:]
    return ["compare", *shared, "--methods", methods, *more]


@pytest.fixture
def begun(monkeypatch):
    """Names of the runs that were begun, which share this process to be quick."""
    names: list[str] = []

    def run_here(options):
        names.append(options.folder.name)
        return main(["pretrain", *flags_for({name: plain(value) for name, value in flat(options).items()})])

    monkeypatch.setattr(module, "run_apart", run_here)
    return names


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["adamw,apollo"], [("adamw", {}), ("apollo", {})]),
        (["sgd", "apollo:lr=1,rank=8", "fira"], [("sgd", {}), ("apollo", {"lr": "1", "rank": "8"}), ("fira", {})]),
        (["apollo:betas=0.9,0.95,rank=8,sgd"], [("apollo", {"betas": "0.9,0.95", "rank": "8"}), ("sgd", {})]),
        ([" adamw , apollo: lr = 1e-2"], [("adamw", {}), ("apollo", {"lr": "1e-2"})]),
    ],
)  # fmt: skip
def test_a_list_of_methods_is_read_as_it_is_typed(texts, expected):
    assert [(choice.method, choice.options) for choice in method_choices(texts)] == expected


def test_a_method_has_its_own_options_and_those_of_all():
    command = _command(
        ["compare", "--methods", "apollo:lr=1e-2,betas=0.8,0.9,adamw", "--seeds", "3,4", "--tokens", "2M"]
    )
    runs = planned_runs(command)
    assert [(run.options.method.method, run.options.run.seed) for run in runs] == [
        ("apollo", 3), ("adamw", 3), ("apollo", 4), ("adamw", 4),
    ]  # fmt: skip
    assert [run.options.method.lr for run in runs[:2]] == [1e-2, None]
    assert runs[0].options.method.betas == (0.8, 0.9)
    assert {run.options.schedule.tokens for run in runs} == {2_000_000}
    assert runs[0].options.folder == Path("runs/compare-1m/apollo-lr-1e-2-betas-0.8,0.9-seed-3")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods", "adamw,apolo"], "did you mean 'apollo'"),
        (["--methods", "rank=8,apollo"], "--methods must be methods with options"),
        (["--methods", "apollo:"], "--methods must be methods with options"),
        (["--methods", "apollo:rank"], "'rank' is no option with a value"),
        (["--methods", "apollo:rnk=8"], "--methods apollo: 'rnk' is unknown; did you mean 'rank'?"),
        (["--methods", "apollo:rank=many"], "--methods apollo: rank must be an integer or a number, got many"),
        (["--methods", "apollo:data=x"], "data is the same for every method"),
        (["--methods", "adamw:rank=8"], "adamw-rank-8: --rank has no effect on --method adamw"),
        (["--methods", "sgd,sgd"], "--methods has sgd more than once"),
        (["--seeds", "1,1"], "--seeds must differ, got 1,1"),
        (["--seeds", "one"], "--seeds must be one or more integers, got one"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--minutes", "nan"], "--minutes must be above 0 and finite, got nan"),
        (["--minutes", "1", "--steps", "5"], "give one of them"),
        (["--method", "apollo"], "did you mean --methods?"),
        (["--seed", "1"], "did you mean --seeds?"),
        (["--batch", "8"], "did you mean --batch-tokens?"),
        (["--data", "nothing/at/all.txt"], "no file matches"),
    ],
)
def test_what_cannot_be_compared_is_an_error_before_any_work(given, message, tmp_path, capsys, begun):
    out = tmp_path / "out"
    assert main(["compare", "--model", "1m", "--out", str(out), *given]) == 2
    assert message in capsys.readouterr().err
    assert begun == []
    assert not out.exists()


def test_methods_begin_with_the_same_weights_and_read_the_same_data(ground, tmp_path, begun, capsys):
    out = tmp_path / "out"
    still = "adamw:lr=0,embedding_lr=0,sgd:lr=0"
    assert main(flags(ground, out, still, "--steps", "2", "--log-every", "1", "--seeds", "1", "2")) == 0
    assert len(begun) == 4
    losses = {folder: [line["loss"] for line in log(out / folder) if line["kind"] == "train"] for folder in begun}
    first, second = (losses[f"adamw-lr-0-embedding_lr-0-seed-{seed}"] for seed in (1, 2))
    assert losses["sgd-lr-0-seed-1"] == first
    assert losses["sgd-lr-0-seed-2"] == second
    assert first != second
    assert "seeds 1, 2" in (out / "report.html").read_text()
    printed = capsys.readouterr().out
    assert re.search(r"adamw .* [\d.,]+ to [\d.,]+ ", printed)
    assert "cannot be told from" in printed
    assert "their seeds overlap" in printed


def test_a_comparison_goes_on_where_it_was_stopped(ground, tmp_path, begun, monkeypatch, capsys):
    out = tmp_path / "out"
    run_here = module.run_apart
    monkeypatch.setattr(module, "run_apart", lambda options: STOPPED if begun else run_here(options))
    assert main(flags(ground, out, "sgd,adamw")) == STOPPED
    assert "adamw, seed 0 ended with status 75; the same command goes on" in capsys.readouterr().err
    assert not (out / "report.html").exists()
    monkeypatch.setattr(module, "run_apart", run_here)
    assert main(flags(ground, out, "sgd,adamw")) == 0
    assert begun == ["sgd-seed-0", "adamw-seed-0"]
    assert (out / "report.html").exists()
    printed = capsys.readouterr()
    assert "sgd, seed 0: finished before, kept" in printed.err
    assert str(out / "report.html") in printed.out
    assert main(flags(ground, out, "sgd,adamw", "--steps", "6")) == 2  # shorter than what is there
    assert begun == ["sgd-seed-0", "adamw-seed-0"]


def test_a_method_that_diverges_does_not_end_the_others(ground, tmp_path, begun):
    out = tmp_path / "out"
    assert main(flags(ground, out, "sgd:lr=1e30,adamw", "--log-every", "1")) == DIVERGED
    assert len(begun) == 2
    assert "sgd-lr-1e30-seed-0 diverged: step" in (out / "report.html").read_text()
    assert main(flags(ground, out, "sgd:lr=1e30,adamw", "--log-every", "1")) == DIVERGED
    assert len(begun) == 2


def test_a_method_that_diverges_before_its_first_line_is_named_in_the_report(ground, tmp_path, begun, capsys):
    out = tmp_path / "out"
    assert main(flags(ground, out, "sgd:lr=1e30,adamw", "--log-every", "4")) == DIVERGED
    said = f"{out / 'sgd-lr-1e30-seed-0'} diverged before the first line of its log."
    assert said in (out / "report.html").read_text()
    assert said in capsys.readouterr().out
    assert main(flags(ground, tmp_path / "alone", "sgd:lr=1e30", "--log-every", "4")) == DIVERGED
    assert "no report: every run diverged before the first line of its log" in capsys.readouterr().err


def test_minutes_become_the_steps_that_fit(ground, tmp_path, begun):
    out = tmp_path / "out"
    timed = [*flags(ground, out, "sgd,adamw"), "--minutes", "0.003"]
    del timed[timed.index("--steps") : timed.index("--steps") + 2]
    assert main(timed) == 0
    assert len(begun) == 4  # two to time, two to keep
    steps = json.loads((out / "steps.json").read_text())["0.003"]
    assert {log(out / f"{label}-seed-0")[-1]["step"] for label in steps} == set(steps.values())
    assert main(timed) == 0
    assert len(begun) == 4


@pytest.mark.parametrize("words", [["compare"], ["analyze", "limiter"]], ids=" ".join)
def test_the_page_goes_to_the_home_folder_as_the_runs_do(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = _command([*words, "--model", "1m", "--out=~/out"])
    if words == ["compare"]:
        page, runs = options.folder, planned_runs(options)
    else:
        page, runs = options.out, _compared(options, SWEEPS["limiter"])
    assert page == tmp_path / "out"
    assert all(run.options.folder.is_relative_to(page) for run in runs)


def test_where_steps_cannot_be_kept_is_named_before_a_method_is_timed(tmp_path, capsys, begun):
    (tmp_path / "file").touch()
    assert main(["compare", "--model", "1m", "--minutes", "1", "--out", str(tmp_path / "file")]) == 2
    assert f"--out {tmp_path / 'file'} cannot be written to" in capsys.readouterr().err
    for damaged in ("[]", '{"1": {', '{"1": 3}'):
        (tmp_path / "steps.json").write_text(damaged)
        assert main(["compare", "--model", "1m", "--minutes", "1", "--out", str(tmp_path)]) == 2
        assert f"{tmp_path / 'steps.json'} is not as a comparison wrote it" in capsys.readouterr().err
    assert begun == []


def test_a_run_apart_is_asked_to_stop_with_the_comparison(ground, tmp_path):
    arguments = flags(ground, tmp_path / "out", "sgd", "--steps", "100000", "--log-every", "1")
    (run,) = planned_runs(_command(arguments))

    def interrupt() -> None:
        # Not before its first step: until training begins, nobody asks a run whether it may stop.
        metrics = run.options.folder / "metrics.jsonl"
        while not (metrics.exists() and '"loss"' in metrics.read_text()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt, daemon=True).start()
    assert run_apart(run.options) == STOPPED
    assert signal.getsignal(signal.SIGTERM) is before
    assert list((run.options.folder / "checkpoints").glob("step-*"))
    assert run.label == "sgd"
    assert run.end is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent is gone")
def test_a_run_apart_is_asked_to_stop_when_the_comparison_is_killed(ground, tmp_path, monkeypatch):
    (run,) = planned_runs(_command(flags(ground, tmp_path / "out", "sgd")))
    begun, stopped, script = (tmp_path / name for name in ("begun", "stopped", "script"))
    script.write_text(
        f"#!/bin/sh\ntrap 'touch {stopped}; exit' TERM\ntouch {begun}\nfor i in $(seq 600); do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    comparison = multiprocessing.get_context("fork").Process(target=run_apart, args=(run.options,))
    comparison.start()
    wait_for(begun)
    comparison.kill()
    wait_for(stopped)


def wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until, f"{file.name} never came"
        time.sleep(0.02)
