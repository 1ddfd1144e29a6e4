"""Every figure that the README quotes is in a file of results, and a command to measure it again is written down."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "bench"))
CLAIMS = list(csv.DictReader((RESULTS / "claims.csv").open(newline="")))
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)

FIGURE = re.compile(r"(?<![\d.])\d+(?:\.\d+)?(?=%| GiB| ms)|(?<![\d.])\d+\.\d+(?= with )")
"""A number with a unit, or of a method."""


def measured(file: str, where: str, column: str) -> float:
    """The last row of a file of results that fits."""
    with (RESULTS / file).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    wanted = dict(condition.split("=") for condition in where.split(";"))
    fitting = [row for row in rows if all(str(row.get(name)) == value for name, value in wanted.items())]
    assert fitting, f"{file} has no row with {where}"
    return float(fitting[-1][column])


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_a_claim_is_what_was_measured(row):
    value = measured(row["file"], row["where"], row["column"])
    if row["unit"] == "GiB":
        value /= 2**30
    if row["unit"].startswith("%"):  # of the row that it is held against, or more than that
        value = 100 * value / measured(row["file"], row["against"], row["column"]) - 100 * (row["unit"] == "% more")
    (figure,) = re.findall(r"\d+(?:\.\d+)?", row["claim"])
    digits = len(figure.partition(".")[2])
    assert f"{value:.{digits}f}" == figure
    assert row["claim"] in re.sub(r"[\[\]]|\(docs/[^)]*\)", "", PROSE), "the README no longer says so"
    assert row["command"]


def test_every_figure_of_the_readme_is_a_claim():
    claimed = {re.findall(r"\d+(?:\.\d+)?", row["claim"])[0] for row in CLAIMS}
    quoted = set(FIGURE.findall(PROSE))
    assert len(quoted) >= 8
    assert quoted <= claimed


@pytest.mark.parametrize(("name", "tables"), [("results", 12), ("quality", 3), ("finetuning", 1)])
def test_tables_are_those_of_the_files(name, tables):
    import results

    (path,) = (page for page in results.PAGES if page.stem == name)
    page = path.read_text()
    assert page.count("<!-- end -->") == tables
    assert results.filled(page) == page, "run `make results`"


def test_every_perplexity_in_the_words_on_quality_was_measured():
    prose = re.sub(r"<!-- .*?<!-- end -->|```.*?```", "", (ROOT / "docs" / "quality.md").read_text(), flags=re.DOTALL)
    found = set()
    for name in ("quality-60m-h200", "quality-130m-h200", "pretrain-60m-h200"):
        with (RESULTS / f"{name}.csv").open(newline="") as lines:
            values = [float(row["perplexity"]) for row in csv.DictReader(lines) if row["perplexity"]]
        found |= {f"{value:.{digits}f}" for value in values for digits in (1, 2)}
    quoted = re.findall(r"(?<![\d.])\d{2,}\.\d+(?![\d%])", prose)
    assert len(quoted) > 30
    assert set(quoted) <= found


def test_every_run_of_the_papers_tables_has_a_place_on_the_page(tmp_path, monkeypatch):
    import results

    named = []
    with (tmp_path / "paper-h200.csv").open("w", newline="") as file:
        columns = ["name", "model", "steps", "sequence", "seed", "batch_tokens", "perplexity", "ended_at"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for what in ("paper", "granularity", "rank", "int8", "context"):
            for path in (ROOT / "bench" / "runs").glob(f"{what}-*.json"):
                described = json.loads(path.read_text())
                here = {name: described[name] for name in ("model", "steps", "sequence")}
                here |= {"ended_at": described["steps"], "batch_tokens": 81920, "seed": 42}
                for run in described["runs"]:
                    named.append(f"{1000 + len(named)}.25")
                    writer.writerow({"name": run, "perplexity": named[-1], **here})
    rows = results.recorded(tmp_path / "paper-h200.csv")
    monkeypatch.setattr(results, "paper_rows", lambda: rows)
    page = results.filled(results.PAGES[0].read_text())
    assert len(named) > 45
    assert [perplexity for perplexity in named if perplexity not in page] == []
