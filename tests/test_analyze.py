"""`apollo analyze`: what it measures is what it says, and every set of runs can be run."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from apollo_optim.cli import _command, main
from apollo_optim.core.direction import Adam
from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.shape import matrix_shape
from apollo_optim.evidence.analyses import SWEEPS, VERDICTS, _cautions, _compared, _one, _points
from apollo_optim.evidence.runs import Measured, RecordedRun, RunGroup
from apollo_optim.evidence.watched import (
    SEERS,
    Matrix2D,
    Moment,
    _gain_C,
    _log_axis,
    _seen,
    directional_sharpness,
    seen_steps,
    training,
)
from apollo_optim.train.run import DIVERGED
from pretraining import EVAL_TOKENS, Ground

pytestmark = pytest.mark.usefixtures("no_picture")


def flags(ground: Ground, what: str, out: Path, *more: str) -> list[str]:
    shared = {"model": ground.model, "data": ground.data, "cache": ground.cache, "vocabulary": 300, "workers": 1}
    shared |= {"sequence": 24, "batch-tokens": 96, "eval-tokens": EVAL_TOKENS, "device": "cpu", "out": out}
    return ["analyze", what, *(text for name, value in shared.items() for text in (f"--{name}", str(value))), *more]


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def test_a_training_that_is_looked_into_clips_its_gradients(ground, tmp_path):
    def weights(*more):
        options = _one(_command(flags(ground, "ratio", tmp_path, "--steps", "2", *more)), "sgd")
        *_, last = training(options)
        return [weight.detach().clone() for weight in last.model.parameters()]

    plain, clipped, loosely = weights(), weights("--clip", "1e-3"), weights("--clip", "1e6")
    begun = weights("--clip", "1e-30")
    moved, less = (
        sum(float((now - then).square().sum()) for now, then in zip(each, begun, strict=True)) ** 0.5
        for each in (plain, clipped)
    )
    assert less < 0.1 * moved
    assert all(map(torch.equal, plain, loosely))


@pytest.mark.parametrize("what", SWEEPS)
def test_every_run_of_a_set_is_one_that_can_be(what, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    given = {"model": "1m", "out": tmp_path, "device": "cpu", "data": tmp_path / "text.txt"}
    command = _command(["analyze", what, *(text for name in given for text in (f"--{name}", str(given[name])))])
    runs = _compared(command, SWEEPS[what])
    assert len({run.options.folder for run in runs}) == len(runs) == len(SWEEPS[what].methods())
    for run in runs:
        run.options.check(1)


def test_a_set_of_runs_becomes_a_page_and_numbers(ground, tmp_path, capsys):
    arguments = flags(ground, "limiter", tmp_path / "out", "--steps", "4", "--seeds", "1")
    assert main(arguments) == 0
    rows = rows_of(tmp_path / "out" / "limiter.csv")
    series = ["adamw", "with the limiter", "with clipping", "with neither"]
    assert list(dict.fromkeys(row["series"] for row in rows)) == series
    assert all(float(row["perplexity"]) > 1 and row["seed"] == "1" for row in rows)
    page = (tmp_path / "out" / "limiter.html").read_text()
    content = json.loads(page.partition('id="content">')[2].partition("</script>")[0])
    drawn = {trace["name"]: trace["y"] for trace in content["figures"]["plot-0"]["data"]}
    for name in series:  # a spike lasts a step or two: each step is told
        told = [float(row["loss"]) for row in rows if (row["series"], row["kind"]) == (name, "train")]
        assert len(told) == 4
        assert told == drawn[name]
    assert "Training loss against tokens" in page
    assert "384 tokens are fewer than the model has parameters" in page
    assert "within 3% of each other: with one seed that says little" in page
    verdict, *paths = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Measured here: the training loss rises above its lowest so far by at most adamw 0.")
    assert paths == [str(tmp_path / "out" / f"limiter.{kind}") for kind in ("html", "csv")]
    assert main(arguments) == 0
    assert "[4/4] structured-adamw-growth_limit-off, seed 1: finished before, kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "series", "method", "verdict"),
    [
        ("limiter", "with neither", "structured-adamw:growth_limit=off,lr=1e30", "with the limiter 0."),
        ("crossover", "fira", "fira:lr=1e30", "by tokens: (not known: runs diverged)."),
    ],
)
def test_a_run_that_diverges_before_its_first_line_is_named_on_the_page(
    ground, tmp_path, monkeypatch, capsys, what, series, method, verdict
):
    sweep = SWEEPS[what]
    monkeypatch.setitem(SWEEPS, what, replace(sweep, series={**sweep.series, series: {"": method}}))
    assert main(flags(ground, what, tmp_path / "out", "--steps", "4", "--log-every", "4")) == DIVERGED
    assert verdict in capsys.readouterr().out
    assert (
        "-lr-1e30-seed-0 diverged before the first line of its log." in (tmp_path / "out" / f"{what}.html").read_text()
    )
    assert series not in {row["series"] for row in rows_of(tmp_path / "out" / f"{what}.csv")}


def test_a_set_whose_runs_all_diverge_at_once_has_no_page(ground, tmp_path, monkeypatch, capsys):
    alone = replace(SWEEPS["limiter"], series={"one": {"": "sgd:lr=1e30"}}, reference={})
    monkeypatch.setitem(SWEEPS, "limiter", alone)
    assert main(flags(ground, "limiter", tmp_path / "out", "--steps", "4", "--log-every", "4")) == DIVERGED
    assert "no report: every run diverged before the first line of its log" in capsys.readouterr().err
    assert not (tmp_path / "out" / "limiter.html").exists()


def test_perplexities_that_differ_little_are_points_beside_each_other_and_no_bars_cut_off():
    sweep = SWEEPS["projection"]
    found = {place: Measured([400.0 + number, 410.0]) for number, place in enumerate(sweep.methods())}
    svd, gaussian, adamw = _points(sweep, ["svd", "gaussian", "adamw"], found).data
    assert [trace.type for trace in (svd, gaussian, adamw)] == ["scatter"] * 3
    assert [round(x) for x in svd.x] == [round(x) for x in gaussian.x] == [0, 1, 2, 3]
    assert all(one < other for one, other in zip(svd.x, gaussian.x, strict=True))
    assert svd.y[0] == found["svd", "galore"].mean
    assert (adamw.mode, list(adamw.y)) == ("lines", [405.0] * 2)


def measured_run(tmp_path: Path, name: str, perplexities: list[float], losses: list[float]) -> RunGroup:
    settings, facts = {"seed": 0, "batch_tokens": 1000, "method": name}, {"parameters": 1}
    lines = [
        {
            "kind": kind,
            "step": step,
            "tokens": 1000 * step,
            "seconds": 1.0 * step,
            "loss": loss,
            "perplexity": perplexity,
        }
        for step, (loss, perplexity) in enumerate(zip(losses, perplexities, strict=True), start=1)
        for kind in ("train", "validation")
    ]
    return RunGroup(name, [RecordedRun(tmp_path / name, settings, facts, lines)])


@pytest.mark.parametrize(
    ("what", "ends", "verdict"),
    [
        (
            "rank",
            {("apollo", "1"): 150.0, ("galore", "1"): 101.0, ("fira", "1"): 104.0},
            "from rank S/4 down to 1 the perplexity changes by apollo +50.0%, fira +4.0%; too little to tell it from "
            "none: one factor for the tensor +0.0%, galore +1.0%.",
        ),
        (
            "granularity",
            {("tensor", "APOLLO"): 90.0},
            "with tensor in place of channel the perplexity changes by APOLLO -10.0%; too little to tell it from none: "
            "APOLLO with SVD +0.0%.",
        ),
    ],
)
def test_a_verdict_on_a_set_tells_changes_from_none(what, ends, verdict, tmp_path):
    sweep = SWEEPS[what]
    groups = {place: measured_run(tmp_path, place[0], [ends.get(place, 100.0)], [1.0]) for place in sweep.methods()}
    assert VERDICTS[sweep.drawn](sweep, groups) == verdict


def test_methods_whose_seeds_overlap_are_not_said_to_be_near_each_other(tmp_path):
    command = _command(["analyze", "limiter", "--seeds", "0,1"])
    ends = {"adamw": (100.0, 150.0), "with neither": (140.0, 190.0)}
    groups = {
        (name, ""): RunGroup(name, [*(run for end in both for run in measured_run(tmp_path, name, [end], [1.0]).runs)])
        for name, both in ends.items()
    }
    assert _cautions(command, groups) == ["Some of these cannot be told apart: their seeds overlap."]


def test_a_seed_that_is_given_twice_is_refused(tmp_path, capsys):
    assert main(["analyze", "limiter", "--seeds", "1,1", "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert "--seeds must differ, got 1,1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_spike_is_the_rise_of_a_loss_above_its_lowest(tmp_path):
    losses = {"with neither": [5.0, 3.0, 4.5, 2.0], "with the limiter": [5.0, 4.0, 3.0, 3.25]}
    groups = {
        place: measured_run(tmp_path, place[0], [1.0] * 4, losses.get(place[0], [4.0, 3.0, 2.0, 1.0]))
        for place in SWEEPS["limiter"].methods()
    }
    verdict = VERDICTS["loss"](SWEEPS["limiter"], groups)
    assert "at most adamw 0.00, with the limiter 0.25, with clipping 0.00, with neither 1.50." in verdict


def test_a_lead_is_told_at_every_evaluation(tmp_path):
    curves = {"apollo": [120.0, 90.0], "fira": [100.0, 100.0], "adamw": [1.0, 1.0]}
    groups = {(name, ""): measured_run(tmp_path, name, curve, [1.0, 1.0]) for name, curve in curves.items()}
    verdict = VERDICTS["perplexity"](SWEEPS["crossover"], groups)
    assert verdict == "the perplexity of apollo, against that of fira, by tokens: +20.0% at 1K, -10.0% at 2K."


def matrix_of(gradient: torch.Tensor) -> Matrix2D:
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    shape = matrix_shape(weight.shape, 1)
    assert shape is not None
    return Matrix2D("model.layers.3.self_attn.q_proj.weight", weight, shape)


@pytest.mark.parametrize("sides", [(64, 96), (96, 64)])
@pytest.mark.parametrize(("share", "rank"), [(1.0, 64), (1 / 4, 16), (1 / 8, 8)])
def test_the_factor_of_a_first_step_is_by_the_norm_that_is_seen(sides, share, rank):
    """With one gradient every element of Adam's step has length 1, so a channel's factor is sqrt(R) / |low|."""
    torch.manual_seed(0)
    matrix = matrix_of(torch.randn(sides))
    grad_SC = matrix.gradient_SC()
    assert grad_SC.shape == (64, 96)
    found_C = _gain_C(grad_SC, matrix, share, {}, "", Adam(betas=(0.9, 0.999), eps=1e-8, step=1))
    shape = matrix_shape(sides, share if share < 1 else 64)
    basis_RS = torch.eye(64) if share == 1 else gaussian_basis(shape, 0, 0, torch.float32, torch.device("cpu"))
    expected_C = math.sqrt(rank) / (basis_RS @ grad_SC).norm(dim=0)
    torch.testing.assert_close(found_C, expected_C, rtol=1e-4, atol=0)  # eps is 1e-8 of an element, the rest rounding


def test_the_ratios_of_factors_are_told_by_weight_layer_and_step(ground, tmp_path):
    configuration = json.loads((ground.model / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    assert main(flags(ground._replace(model=tmp_path), "ratio", tmp_path, "--steps", "2")) == 0
    rows = rows_of(tmp_path / "ratio.csv")
    assert {(row["weight"], row["layer"]) for row in rows} >= {("q_proj", "0"), ("down_proj", "1")}
    assert len(rows) == 14 * 2 * 2  # weights, steps, ranks
    assert {(row["rank"], float(row["theory"])) for row in rows} == {("S/8", math.sqrt(1 / 8)), ("S/4", 0.5)}
    furthest = max(rows, key=lambda row: abs(float(row["ratio"]) / float(row["theory"]) - 1))
    found = f"Furthest from it is {furthest['weight']} of layer {furthest['layer']} at step {furthest['step']}, with "
    assert f"{found}{float(furthest['ratio']):.3f} in place of" in (tmp_path / "ratio.html").read_text()
    assert all(float(row["low_10%"]) < float(row["ratio"]) < float(row["high_90%"]) for row in rows)
    assert "at the 2 steps looked at" in (tmp_path / "ratio.html").read_text()
    assert main(flags(ground._replace(model=tmp_path), "ratio", tmp_path / "once", "--steps", "1")) == 0
    assert "at the step looked at" in (tmp_path / "once" / "ratio.html").read_text()


def test_a_projection_on_singular_directions_sees_all_of_a_gradient_of_few():
    torch.manual_seed(0)
    matrix = matrix_of(torch.randn(64, 2) @ torch.randn(2, 96))
    kept: dict[str, torch.Tensor] = {}
    first, again = list(_seen(matrix, 0, kept)), list(_seen(matrix, 1, kept))
    assert (matrix.kind, matrix.depth) == ("q_proj", 3)
    by = {(row["directions"], row["rank"]): row["seen"] for row in again}
    assert SEERS[1] not in {row["directions"] for row in first}  # nothing was looked at earlier
    for rank in (2, 4, 8, 16, 32):
        assert by[SEERS[0], rank] == pytest.approx(1, abs=1e-5)
        assert by[SEERS[1], rank] == pytest.approx(1, abs=1e-5)
    for rank in (16, 32):
        # What R random directions of 64 see of one is Beta(R/2, 32 - R/2): its root is sqrt(R/64) up to 15% at R = 16,
        # and 75% are five times that.
        assert by[SEERS[2], rank] == pytest.approx(math.sqrt(rank / 64), rel=0.75)


def test_sharpness_is_the_curvature_along_the_update():
    torch.manual_seed(0)
    curvature = torch.randn(6, 6, dtype=torch.float64)
    curvature = curvature @ curvature.T
    before = torch.randn(6, dtype=torch.float64)
    update = torch.randn(6, dtype=torch.float64)
    weight = nn.Parameter(before + update)

    class Quadratic(nn.Module):
        def forward(self, scale, shift):
            return 0.5 * scale * weight @ curvature @ weight + shift

    moment = Moment(3, 1.0, (torch.tensor(2.0), torch.tensor(5.0)), Quadratic(), Quadratic(), [])
    found = directional_sharpness(moment, [weight], [before])
    assert found == pytest.approx((2 * update @ curvature @ update / (update @ update)).item(), rel=1e-12)
    assert torch.equal(weight.detach(), before + update)  # as it was


def test_sharpness_of_a_training_is_measured_for_each_optimizer(ground, tmp_path):
    assert main(flags(ground, "sharpness", tmp_path, "--steps", "3")) == 0
    rows = rows_of(tmp_path / "sharpness.csv")
    assert [(row["method"], row["step"]) for row in rows] == [
        (method, step) for method in ("sgd", "adamw", "apollo", "apollo-mini") for step in ("0", "1", "2")
    ]
    assert all(math.isfinite(float(row["sharpness"])) for row in rows)
    # The first batch and the first weights are the same.
    assert len({row["loss"] for row in rows if row["step"] == "0"}) == 1


def test_an_axis_of_few_powers_of_ten_has_more_ticks_than_those():
    assert [_log_axis(values)["dtick"] for values in ([-1.0, 0.5, 4.0], [1e-3, 4.0], [-1.0])] == ["D2", 1, "D2"]


def test_steps_are_looked_at_from_the_first_to_the_last():
    assert seen_steps(100) == [0, 25, 50, 74, 99]
    assert seen_steps(3) == [0, 1, 2]
    assert seen_steps(1) == [0]
    assert seen_steps(9, 12) == list(range(9))


def test_an_analysis_that_does_not_exist_is_an_error_that_names_one(capsys):
    assert main(["analyze", "rnk"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'rank'" in said
    assert f"One of: ratio, spectrum, sharpness, {', '.join(SWEEPS)}" in said


def test_options_of_a_method_are_the_analysis_own(capsys):
    assert main(["analyze", "rank", "--lr", "1"]) == 2
    assert "--lr is unknown" in capsys.readouterr().err
    command = _command(["analyze", "rank", "--tokens", "2M"])
    assert replace(command, seeds=(1,)).schedule.tokens == 2_000_000
    assert command.schedule.steps is None
