"""`apollo report`: what it makes of the folders of runs, and the page in a browser."""

import csv
import io
import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from apollo_optim.cli import _command, main
from apollo_optim.evidence.figures import figure
from apollo_optim.evidence.page import Finding, publish
from apollo_optim.evidence.report import flags_for, repeat_command, write_report
from apollo_optim.evidence.runs import (
    PERPLEXITY,
    STATE,
    STEP_TIME,
    Measured,
    found_runs,
    grouped_runs,
    log_csv,
    memory_kinds,
    recorded_run,
    result_csv,
)
from apollo_optim.train.config import TrainingOptions, flat, plain
from apollo_optim.train.pretrain import PretrainOptions
from apollo_optim.train.tuning.config import FinetuneOptions

STEPS = 40


def made_run(
    folder: Path,
    *,
    loss: float = 3.0,
    reached: int = STEPS,
    finished: bool = True,
    speed: float = 4096.0,
    command: type[TrainingOptions] = PretrainOptions,
    **settings: Any,
) -> Path:
    """The folder of a run that never was: its loss falls to `loss`, a line every ten steps."""
    folder.mkdir(parents=True)
    options = {name: plain(value) for name, value in flat(command()).items()}
    options |= {"batch": 32} if command is FinetuneOptions else {"batch_tokens": 4096}
    options |= {"model": "1m", "data": "stories.txt", "method": "apollo", "steps": STEPS, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    lines = []
    for step in range(10, reached + 1, 10):
        own = loss + 3.0 * (1 - step / STEPS)
        trained = {"tokens": 4096 * step, "lr": 0.01, "tokens_per_second": speed, "memory": 500_000_000}
        trained |= {"mfu": None, "seconds": float(step), "grad_norm": 1.0, "loss": own, "perplexity": 2.718281828**own}
        lines.append({"kind": "train", "step": step, **trained})
        if step % 20 == 0:
            validated = {"loss": own, "perplexity": 2.718281828**own, "perplexity_by_source": {"all": 1.0}}
            lines.append({"kind": "validation", "step": step, **validated})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held, result = {"weight_bytes": 4_000_000, "gradient_bytes": 4_000_000}, {"steps": STEPS, "state_bytes": 8_000_000}
    session = {"device": "a machine", "threads": 2, "python": "3.12", "versions": {"torch": "2.9"}, "began": "today"}
    facts = {
        "corpus": "c",
        "parameters": 1_000_000,
        "sessions": [session],
        **held,
        **({"result": result} if finished else {}),
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def groups_in(folder: Path):
    return grouped_runs(found_runs([folder])[0])


def page_of(*runs: Path) -> str:
    out = runs[0].parent / "page" / "report.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


def test_a_page_is_named_after_the_end_of_a_long_path(tmp_path):
    page = page_of(made_run(tmp_path / "a", model="9m", data="/home/somebody/corpus/stories.txt"))
    assert "<h1>9m on corpus/stories.txt</h1>" in page


def test_runs_that_differ_only_in_their_seed_are_one_group(tmp_path):
    for seed in (2, 1):
        made_run(tmp_path / f"a{seed}", method="adamw", seed=seed, method_seed=seed)
        made_run(tmp_path / f"b{seed}", seed=seed, lr=0.01, keep=seed, cache=str(seed))
    made_run(tmp_path / "c", seed=1, lr=0.005)
    found = {group.name: group.seeds for group in groups_in(tmp_path)}
    assert found == {"adamw": [1, 2], "apollo lr 0.01": [1, 2], "apollo lr 0.005": [1]}


def test_a_curve_is_the_mean_over_seeds_with_their_spread(tmp_path):
    made_run(tmp_path / "1", seed=1, loss=3.0)
    made_run(tmp_path / "2", seed=2, loss=3.5, reached=20)
    (group,) = groups_in(tmp_path)
    points = group.curve("train", "loss")
    assert [point.step for point in points] == [10, 20]  # where both have been
    assert [point.tokens for point in points] == [40960, 81920]
    assert (points[1].value.low, points[1].value.mean, points[1].value.high) == (4.5, 4.75, 5.0)
    assert [point.seconds for point in group.curve("validation", "perplexity")] == [20.0]


@pytest.mark.parametrize(
    ("other", "best", "behind"),
    [
        ([10.2], [10.0], False),  # one seed each, and 2% between them
        ([10.4], [10.0], True),
        ([10.4, 9.9], [10.0, 9.8], False),  # they overlap
        ([10.2, 10.1], [10.0, 9.9], True),  # nearer than 3%, and yet apart
    ],
)
def test_methods_within_the_spread_of_seeds_are_not_told_apart(other, best, behind):
    assert PERPLEXITY.is_behind(Measured(other), Measured(best)) is behind


def test_bytes_that_are_counted_are_told_apart_by_any_difference():
    assert STATE.is_behind(Measured([1001.0]), Measured([1000.0]))
    assert not STATE.is_behind(Measured([1000.0]), Measured([1000.0]))


def test_the_best_of_each_column_is_marked_and_ties_are_said(tmp_path):
    one = made_run(tmp_path / "one", method="adamw", loss=3.0)
    two = made_run(tmp_path / "two", loss=3.01)
    three = made_run(tmp_path / "three", method="galore", loss=3.5)
    page = page_of(one, two, three)
    assert "adamw has a validation perplexity of 20.09, the lowest; apollo +1.0%, galore +64.9%." in page
    assert "apollo cannot be told from adamw here: with one seed, differences below 3% say little." in page
    cells = [line for line in page.split("<td ") if line.startswith('data-label="validation perplexity"')]
    assert [cell.split('class="')[1].split('"')[0] for cell in cells] == ["best", "tied", ""]


def test_seeds_that_overlap_are_said_to_though_another_method_has_one(tmp_path):
    runs = [made_run(tmp_path / f"adamw-{seed}", method="adamw", seed=seed, loss=2.9 + 0.2 * seed) for seed in (0, 1)]
    runs += [made_run(tmp_path / f"apollo-{seed}", seed=seed, loss=3.0 + 0.2 * seed) for seed in (0, 1)]
    runs += [
        made_run(tmp_path / "galore", method="galore", loss=3.01),
        made_run(tmp_path / "sgd", method="sgd", loss=4),
    ]
    page = page_of(*runs)
    assert "apollo cannot be told from adamw here: their seeds overlap." in page
    assert "galore cannot be told from adamw here: with one seed, differences below 3% say little." in page


def test_a_perplexity_beyond_all_numbers_is_told_as_such(tmp_path):
    one, two = made_run(tmp_path / "one", method="adamw"), made_run(tmp_path / "two", method="sgd")
    log = two / "metrics.jsonl"
    *lines, last = log.read_text().splitlines()
    worse = json.loads(last) | {"loss": 800.0, "perplexity": math.inf}
    log.write_text("\n".join([*lines, json.dumps(worse)]) + "\n")
    assert "adamw has a validation perplexity of 20.09, the lowest; sgd +inf%." in page_of(one, two)


def test_on_a_cpu_what_is_counted_is_not_lost_in_the_memory_of_libraries(tmp_path):
    made_run(tmp_path / "run")
    facts = tmp_path / "run" / "run.json"
    (on_cpu,) = groups_in(tmp_path)
    known = json.loads(facts.read_text())
    known["sessions"][0]["cuda"] = "12.8"
    facts.write_text(json.dumps(known))
    (on_gpu,) = groups_in(tmp_path)
    counted = {"weights": 4e6, "gradients": 4e6, "optimizer state": 8e6}
    assert memory_kinds(on_cpu) == counted
    assert memory_kinds(on_gpu) == counted | {"activations and the rest": 500e6 - 16e6}


def test_the_machine_is_told_once_where_it_is_the_same(tmp_path):
    one, two = made_run(tmp_path / "one", method="adamw"), made_run(tmp_path / "two")
    assert page_of(one, two).count("<dt>versions</dt><dd>Python 3.12 · torch 2.9</dd>") == 1
    facts = json.loads((two / "run.json").read_text())
    facts["sessions"][0]["versions"]["torch"] = "2.10"
    (two / "run.json").write_text(json.dumps(facts))
    assert page_of(one, two).count("<dt>versions</dt>") == 2


def test_a_run_that_diverged_early_is_the_best_at_nothing(tmp_path):
    one = made_run(tmp_path / "one", method="adamw")
    two = made_run(tmp_path / "two", reached=20, finished=False)
    facts = two / "run.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"diverged": True}))
    cells = [line for line in page_of(one, two).split("<td ") if line.startswith('data-label="training time"')]
    assert [cell.split('class="')[1].split('"')[0] for cell in cells] == ["best", ""]


def test_a_run_that_was_stopped_is_the_best_at_nothing_beside_one_that_ended(tmp_path):
    one = made_run(tmp_path / "one", method="adamw")
    two = made_run(tmp_path / "two", reached=20, finished=False)
    assert page_of(one, two).split('data-label="training time"')[2].startswith(' class=""')
    three = made_run(tmp_path / "three", method="sgd", reached=10, finished=False)
    assert page_of(three, two).split('data-label="training time"')[1].startswith(' class="best"')


def test_a_run_that_diverged_has_not_the_lowest_perplexity(tmp_path):
    one = made_run(tmp_path / "one", method="adamw", loss=3.0)
    two = made_run(tmp_path / "two", reached=20, finished=False, loss=2.0)
    facts = two / "run.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"diverged": True}))
    assert "adamw has a validation perplexity of 20.09. apollo diverged." in page_of(one, two)
    assert "No run to compare has been evaluated yet. apollo diverged." in page_of(two)


def test_what_makes_a_comparison_unfair_is_said(tmp_path):
    one = made_run(tmp_path / "one", method="adamw", batch_tokens=8192)
    two = made_run(tmp_path / "two", reached=20, finished=False)
    page = page_of(one, two)
    assert "The runs differ in more than how they train: batch_tokens (8192, 4096).</p>" in page
    assert f"{two} has not come to its end: step 20 is its last." in page
    assert "several machines" not in page


def test_perplexities_of_other_text_are_said_not_to_compare(tmp_path):
    one, two = made_run(tmp_path / "one", data="other.txt"), made_run(tmp_path / "two", method="adamw")
    assert "data (other.txt, stories.txt). Perplexities of other text or tokens do not compare." in page_of(one, two)


def test_time_does_not_run_backwards_from_one_evaluation_to_the_next(tmp_path):
    """Where evaluations are between lines of the log, of which the first had a slow step."""
    run = recorded_run(made_run(tmp_path / "run"))
    seconds, steps = {10: 50.0, 20: 60.0, 30: 70.0}, (5, 10, 18, 24, 36)
    trained = [line | {"seconds": seconds[line["step"]]} for line in run.trained if line["step"] in seconds]
    evaluated = [line | {"step": step} for step, line in zip(steps, 5 * run.validated[:1], strict=True)]
    moved = replace(run, lines=[*trained, *evaluated])
    assert [line["seconds"] for line in moved.validated] == [25.0, 50.0, 58.0, 64.0, 84.0]


def test_a_seed_that_has_not_ended_bends_no_mean_of_those_that_have(tmp_path):
    made_run(tmp_path / "1", seed=1)
    stopped = made_run(tmp_path / "2", seed=2, reached=20, finished=False)
    (group,) = groups_in(tmp_path)
    perplexity = group.measured(PERPLEXITY)
    assert perplexity is not None
    assert (group.seeds, len(perplexity.values)) == ([1], 1)
    assert [point.step for point in group.curve("validation", "perplexity")] == [20, 40]
    assert f"{stopped} has not come to its end: step 20 is its last. It is in no mean, and no curve." in page_of(
        tmp_path
    )
    assert "It is in no mean" not in page_of(stopped)


def test_a_run_that_is_made_longer_has_not_come_to_its_end(tmp_path):
    run = made_run(tmp_path / "run", steps=2 * STEPS)
    assert f"{run} has not come to its end: step {STEPS} is its last." in page_of(run)


def test_a_command_to_repeat_gives_the_same_options(tmp_path):
    odd = {
        "method": "galore", "lr": 2.00000001e-3, "betas": [0.8, 0.95], "rank": 8, "growth_limit": "off", "keep": 5,
        "step_in_backward": True,
        "tokens": 10_000, "steps": None, "dtype": "bf16", "compile": False, "seed": 7, "data": "a b/it's.txt",
    }  # fmt: skip
    run = recorded_run(made_run(tmp_path / "odd", **odd))
    command = shlex.split(shlex.join(repeat_command(run)))
    assert command[:2] == ["apollo", "pretrain"]
    again = {name: plain(value) for name, value in flat(_command(command[1:])).items()}
    assert {**again, "out": None, "config": None} == {**run.settings, "config": None}
    assert "--eps" not in flags_for(run.settings)


def test_a_run_of_another_command_is_repeated_as_it_was_typed(tmp_path):
    folder = made_run(tmp_path / "tuned", command=FinetuneOptions)
    facts = json.loads((folder / "run.json").read_text())
    facts["sessions"][0]["command"] = ["/usr/bin/apollo", "finetune", "--data", "chats.jsonl"]
    (folder / "run.json").write_text(json.dumps(facts))
    assert repeat_command(recorded_run(folder)) == ["apollo", "finetune", "--data", "chats.jsonl"]


def test_learning_rates_of_a_fine_tuning_are_compared(tmp_path):
    """Each is a run, whose option is a list of one; the tokens of a batch are no option."""
    for lr, loss in ((1e-4, 3.0), (3e-4, 2.0)):
        made_run(tmp_path / f"lr-{lr:g}", command=FinetuneOptions, loss=loss, lr=[lr])
    first, second = groups_in(tmp_path)
    assert (first.name, second.name) == ("apollo lr 0.0001", "apollo lr 0.0003")
    assert STEP_TIME.of(first.runs[0]) == 1000.0
    assert [line["tokens"] for line in first.runs[0].validated] == [81920, 163840]
    page = page_of(tmp_path)
    assert "apollo lr 0.0003 has a validation perplexity of 7.389, the lowest" in page
    assert "differ in more than how they train" not in page


def test_the_csv_has_every_line_of_every_log(tmp_path):
    made_run(tmp_path / "1", seed=1)
    made_run(tmp_path / "2", seed=2)
    rows = list(csv.DictReader(io.StringIO(log_csv(groups_in(tmp_path)))))
    assert len(rows) == 2 * (4 + 2)
    assert {(row["seed"], row["kind"], row["step"]) for row in rows} >= {
        ("2", "validation", "20"),
        ("1", "train", "10"),
    }
    assert [row["tokens"] for row in rows if row["kind"] == "validation"][:2] == ["81920", "163840"]


def test_the_csv_of_results_has_the_options_of_every_kind_of_run(tmp_path):
    made_run(tmp_path / "a", vocabulary=512)
    made_run(tmp_path / "b", command=FinetuneOptions, lr=[1e-4], epochs=2.0, steps=None)
    rows = list(csv.DictReader(io.StringIO(result_csv(groups_in(tmp_path)))))
    assert [(row["vocabulary"], row["epochs"]) for row in rows] == [("512", ""), ("", "2.0")]


def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    page = page_of(made_run(tmp_path / "one", data=evil, tokenizer=evil))
    assert evil not in page
    assert "&lt;/script&gt;&lt;img" in page


def test_a_folder_that_is_no_run_is_refused_before_anything_is_written(tmp_path, capsys):
    run = made_run(tmp_path / "run")
    assert main(["report", str(run), str(tmp_path / "nothing"), "--out", str(tmp_path / "report.html")]) == 2
    assert f"{tmp_path / 'nothing'} is no run with a log" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert main(["report", str(run)]) == 2
    assert "config.yaml is missing" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_a_line_does_not_keep_the_others_from_a_report(tmp_path, capsys):
    one = made_run(tmp_path / "runs" / "one")
    begun = made_run(tmp_path / "runs" / "begun", method="sgd", reached=0, finished=False)
    evaluated = made_run(tmp_path / "runs" / "evaluated", method="fira", finished=False)
    log = (evaluated / "metrics.jsonl").read_text().splitlines(keepends=True)
    (evaluated / "metrics.jsonl").write_text("".join(line for line in log if '"validation"' in line))
    diverged = made_run(tmp_path / "runs" / "diverged", method="muon", reached=0, finished=False)
    (diverged / "run.json").write_text('{"diverged": true}')
    said = [f"{begun} has no line in its log.", f"{evaluated} has no line in its log."]
    said.append(f"{diverged} diverged before the first line of its log.")
    for page in (page_of(tmp_path / "runs"), page_of(one, begun, evaluated, diverged)):
        assert all(sentence in page for sentence in said)
        assert "1 method · 1 run " in page
    assert main(["report", str(begun), str(evaluated), str(diverged), "--out", str(tmp_path / "none.html")]) == 2
    assert f"there is nothing to report: {' '.join(said)}" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_a_damaged_run_does_not_keep_the_others_from_a_report(tmp_path, capsys):
    made_run(tmp_path / "runs" / "one")
    for name, damage in {"cut": "", "begun": "lr: [", "moved": None}.items():
        settings = made_run(tmp_path / "runs" / name, method="sgd") / "config.yaml"
        settings.unlink() if damage is None else settings.write_text(damage)
    (made_run(tmp_path / "runs" / "facts", method="muon") / "run.json").write_text("{")
    page = page_of(*sorted((tmp_path / "runs").iterdir()))
    said = capsys.readouterr().err
    for name in ("cut", "begun", "moved", "facts"):
        assert f"{tmp_path / 'runs' / name} is left out: " in said
        assert f"{tmp_path / 'runs' / name} is left out: " in page
    assert "1 method · 1 run " in page


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    run = made_run(tmp_path / "run")
    assert main(["report", str(run), "--out", str(tmp_path / "report.pdf")]) == 2
    assert f"--out must be a page (.html), got {tmp_path / 'report.pdf'}" in capsys.readouterr().err
    assert not (tmp_path / "report.pdf").exists()
    assert main(["report", str(run), "--out", str(run / "run.json" / "report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PLOTS = "loss-tokens", "loss-seconds", "perplexity-tokens", "perplexity-seconds", "memory", "step", "speed"


class Opened(NamedTuple):
    """A page in a browser, and what came of it."""

    page: Any
    problems: list[str]
    """Errors on the console, and what was asked of the network."""

    def shown(self, plot: str) -> set[int]:
        """The groups that a plot shows."""
        script = (
            "name => [...new Set(document.getElementById(name).data.filter(t => t.visible).map(t => t.meta.group))]"
        )
        return set(self.page.evaluate(script, plot))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs a browser: chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    folder = tmp_path_factory.mktemp("report")
    for seed in (1, 2):
        speed = 4096.0 * seed
        made_run(folder / f"adamw-{seed}", method="adamw", seed=seed, loss=3.0 + 0.1 * seed, speed=speed)
        made_run(folder / f"apollo-{seed}", seed=seed, loss=2.9 + 0.1 * seed, speed=speed)
    made_run(folder / "mini", method="apollo-mini", seed=1, loss=3.4)
    write_report(found_runs([folder])[0], folder / "report.html")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        page.goto((folder / "report.html").as_uri())
        yield Opened(page, problems)
        browser.close()


def test_every_part_of_the_page_is_there(opened):
    page = opened.page
    assert page.locator("tbody tr").count() == 3
    assert page.locator("td.best").count() >= 5
    for name in PLOTS:
        assert page.locator(f"#{name} svg.main-svg").first.bounding_box()["width"] > 300
        assert opened.shown(name) == {0, 1, 2}
    assert page.locator("#loss-tokens .scatterlayer .trace").count() == 5  # three lines, two bands
    assert "apollo pretrain --model 1m" in page.locator("pre code").first.inner_text()


def test_no_line_of_a_spread_crosses_out_a_value(opened):
    boxes = "what => [...document.querySelectorAll(what)].map(each => each.getBoundingClientRect().toJSON())"
    for plot in ("step", "speed"):
        labels, spreads, (place,) = (
            opened.page.evaluate(boxes, f"#{plot}{what}") for what in (" .textpoint", " .errorbar", "")
        )
        assert (len(labels), len(spreads)) == (3, 2)
        rows = [
            (label, spread) for label in labels for spread in spreads if label["top"] < spread["y"] < label["bottom"]
        ]
        assert len(rows) == 2
        assert all(label["left"] >= spread["right"] for label, spread in rows)
        assert all(label["right"] <= place["right"] for label in labels)


def test_a_method_is_hidden_everywhere_and_comes_back(opened):
    chip = opened.page.locator(".chips button", has_text="adamw")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert all(opened.shown(name) == {1, 2} for name in PLOTS)
    assert opened.page.locator("#loss-tokens .scatterlayer .trace").count() == 3
    chip.click()
    assert all(opened.shown(name) == {0, 1, 2} for name in PLOTS)


def test_a_point_tells_its_values_and_a_plot_can_be_zoomed(opened):
    page = opened.page
    plot = page.locator("#loss-tokens .nsewdrag")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#loss-tokens .hoverlayer text").first.wait_for(timeout=5000)
    assert " to " in page.locator("#loss-tokens .hoverlayer").text_content()
    before = page.evaluate("document.getElementById('loss-tokens').layout.xaxis.range")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.8, steps=4)
    page.mouse.up()
    after = page.evaluate("document.getElementById('loss-tokens').layout.xaxis.range")
    assert after[1] - after[0] < 0.5 * (before[1] - before[0])


def test_a_phone_needs_no_scrolling_to_the_side_and_night_is_dark(opened):
    page = opened.page
    wide = "document.documentElement.scrollWidth"
    colour = "getComputedStyle(document.body).backgroundColor + document.getElementById('step').layout.font.color"
    day = page.evaluate(colour)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.getElementById('memory')._fullLayout.width < 390")
    assert page.evaluate(wide) == 390
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("day => " + colour + " !== day", arg=day)
    assert "rgb(20, 23, 27)" in page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_print_is_of_paper_whatever_the_hour(opened):
    page = opened.page
    page.emulate_media(color_scheme="dark", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".downloads").is_visible()
    assert not page.get_by_role("heading", name="Data").is_visible()
    assert not page.get_by_text("All options").first.is_visible()  # of which paper would show no more than the name
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 without its margins
    assert page.evaluate("document.querySelector('table').scrollWidth") <= 718
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light", media="screen")
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_numbers_can_be_taken_away(opened):
    with opened.page.expect_download() as waited:
        opened.page.get_by_text("Curves as CSV").click()
    rows = list(csv.DictReader(io.StringIO(waited.value.path().read_text())))
    assert waited.value.suggested_filename == "curves.csv"
    assert {row["name"] for row in rows} == {"adamw", "apollo", "apollo-mini"}


def test_the_page_asks_nothing_of_the_network_and_reports_no_error(opened):
    opened.page.reload()
    opened.page.locator("#speed svg.main-svg").first.wait_for()
    assert opened.problems == []


def test_numbers_that_cannot_be_written_are_named(tmp_path):
    told = dict.fromkeys(("title", "paper", "setting", "verdict"), "told")
    (tmp_path / "found.csv").mkdir()
    with pytest.raises(ValueError, match=rf"--out {tmp_path}/found\.csv cannot be written to: Is a directory"):
        publish(Finding(**told, names=["one"], figures={}, table=[], rows=[{"at": 1}]), tmp_path, "found")


def test_what_an_analysis_found_is_a_page_too(opened, tmp_path, capsys):
    made = figure(hovermode="closest")
    made.add_scatter(x=[1, 2], y=[3.0, 4.0], meta={"group": 0, "paint": "line"})
    made.add_scatter(x=[1, 2], y=[3.5, 3.5], mode="lines", meta={"group": 1, "paint": "theory"})
    rows = [{"at": "one", "value": 3.0}, {"at": "two", "value": 4.0}]
    told = {"title": "A finding", "paper": "otherwise", "setting": "here", "names": ["measured", "in theory"]}
    told |= {"verdict": "three & four.", "kinds": ["weights"]}
    publish(Finding(**told, figures={"Both": made, "Again": made}, table=rows, rows=rows), tmp_path, "found")
    page, numbers = tmp_path / "found.html", tmp_path / "found.csv"
    assert capsys.readouterr().out == f"Measured here: three & four.\n{page}\n{numbers}\n"
    assert numbers.read_text() == "at,value\none,3.0\ntwo,4.0\n"
    opened.page.goto(page.as_uri())
    said = opened.page.locator(".verdict").all_inner_texts()
    assert said == ["Measured here: three & four.", "The paper: otherwise"]
    assert opened.page.locator(".key").first.inner_text() == "weights"
    opened.page.locator(".chips button", has_text="in theory").click()
    assert opened.shown("plot-0") == opened.shown("plot-1") == {0}
    assert opened.page.locator("tbody tr").count() == 2
    assert opened.problems == []
