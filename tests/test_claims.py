"""Every figure that the README quotes is in a file of results, and a command to measure it again is written down."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
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
