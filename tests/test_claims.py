"""Figures of the README and the docs are in a file of results, and a command to measure them again is written down."""

import csv
import inspect
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import apollo_optim
from apollo_optim import APOLLO
from apollo_optim.cli import _command
from apollo_optim.memory import state_bytes
from apollo_optim.train.methods import METHODS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "bench"))
CLAIMS = list(csv.DictReader((RESULTS / "claims.csv").open(newline="")))
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
VERSIONS = r"Python [\d.]+ to [\d.]+|PyTorch [\d.]+|version [\d.]+|Apache-[\d.]+|\(\S+\)"
"""And addresses, in brackets."""
FIGURE = re.compile(rf"(?<![\w.,-]){NUMBER}(?=%| GiB| ms| times| steps| tokens)|(?<![\w.,-])\d+\.\d+")
"""A number with a unit, or with decimals."""
SAID = " ".join(re.sub(r"[\[\]]|\(docs/[^)]*\)", "", PROSE).split())
"""The words alone, in one line."""


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
    figure, *_ = FIGURE.findall(row["claim"])
    digits = len(figure.partition(".")[2])
    assert f"{value:,.{digits}f}" == figure
    assert row["claim"] in SAID, "the README no longer says so"
    if row["command"].startswith("apollo "):
        _command(shlex.split(row["command"])[1:])  # whose options exist
    else:
        assert (ROOT / row["command"].split()[1]).is_file()


def test_every_figure_of_the_readme_is_a_claim():
    claimed = Counter(FIGURE.findall(row["claim"])[0] for row in CLAIMS)
    quoted = Counter(FIGURE.findall(re.sub(VERSIONS, "", SAID)))
    assert quoted.total() >= 20
    assert quoted == claimed
    assert f"{len(METHODS)} training methods" in SAID


def test_versions_in_the_readme_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    (torch,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]', project, re.MULTILINE)
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert f"Python {pythons[0]} to {pythons[-1]} and PyTorch {torch} or later" in SAID
    assert re.findall(r"Status of version ([\d.]+)", SAID) == [apollo_optim.__version__.rpartition(".")[0]]


def test_the_readme_tells_what_each_optimizer_keeps_to_the_number_and_its_defaults():
    """A cell is formulas by semicolons, one for each optimizer of its row, in float32 where no bits are named.

    What one optimizer keeps in several widths is joined by "and".
    """
    sizes = {"S": 320, "C": 512, "R": 5}
    rows = re.findall(r"^\| (`\w+`.*?|AdamW, .*?) \| (.*?) \| (.*?) \|$", PROSE, re.MULTILINE)
    found = {}
    for names, cell, _ in rows:
        optimizers = re.findall(r"`(\w+)`", names) or ["AdamW"]
        for optimizer, formula in zip(optimizers, cell.split("; "), strict=True):
            found[optimizer] = 0
            for kept in formula.removesuffix(", R = S/64").split(" and "):
                numbers, bits = re.fullmatch(r"([SCR2+() ]+?)(?: in (\d+) bits)?", kept).groups()
                product = re.sub(r"(?<=[\w)])(?=[A-Z(])", "*", numbers)
                found[optimizer] += eval(product, sizes) * int(bits or 32) // 8
    ranks = {name: {"rank": 5} for name in ("APOLLO", "GaLore", "Fira", "Flora")} | {"AdamW": {"rank": None}}
    small = ("step", "seed", "last_norm", "exp_avg_scale")
    for optimizer, told in found.items():
        kept = state_bytes([(320, 512)], getattr(apollo_optim, optimizer, APOLLO), **ranks.get(optimizer, {}))
        assert told == sum(size for kind, size in kept["parameter 0"].items() if kind not in small), optimizer
    assert len(found) == 10
    assert "with a warm-up: 1e-2 by default" in SAID
    assert inspect.signature(APOLLO).parameters["lr"].default == 1e-2
    assert "R = S/4 by default" in SAID
    assert state_bytes([(320, 512)], APOLLO) == state_bytes([(320, 512)], APOLLO, rank=80)


def test_tables_are_those_of_the_files():
    import results

    pages = {path.stem: path.read_text() for path in results.PAGES}
    assert sum(page.count("<!-- end -->") for page in pages.values()) == len(results.TABLES)
    assert [name for name, page in pages.items() if results.filled(page) != page] == [], "run `make results`"


@pytest.mark.parametrize(
    "name", ["memory-7b", "memory-h200", "step-h200", "quality-60m", "gap-60m", "gap-130m", "gap-350m"]
)
def test_pictures_are_those_of_the_files(name, tmp_path):
    import plot

    plot.main([name], tmp_path)
    drawn, picture = (folder / f"{name}.svg" for folder in (tmp_path, ROOT / "docs"))
    assert drawn.read_text() == picture.read_text(), "run `make results`"


def test_a_downstream_table_has_every_learning_rate_or_that_of_a_sweep_and_the_mean_of_its_seeds(tmp_path, monkeypatch):
    import results

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.NOT_RUN in results.downstream("mmlu", results.MMLU)
    runs = [
        ("before", "", 0, "", 25.0),
        ("adamw", "5e-5", 0, 2.5, 26.0),
        ("adamw", "2e-4", 0, 2.25, 27.0),
        ("adamw", "2e-4", 1, 2.25, 28.0),
        ("lora", "5e-5", 0, 1.0, 25.0),
        ("lora", "sweep", 0, 2.5, 25.0),
        ("lora", "sweep", 1, 2.5, 27.0),
        ("apollo", "5e-5", 0, 2.0, 29.0),
    ]
    with (tmp_path / "mmlu-h200.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [
            "method",
            "lr",
            "seed",
            "validation_loss",
            "average",
            "average_stderr",
            "by",
            "state_bytes",
            "peak_bytes",
            "best_lr",
        ]
        writer.writerow([*columns, *results.MMLU])
        for method, lr, seed, loss, average in runs:
            cost = ["", "", ""] if method == "before" else [3_000_000, 2**31, ("2e-4", "1e-4")[seed]]
            writer.writerow([method, lr, seed, loss, average, 0.5, "likelihood", *cost, *[average] * 4])
    scores = {average: " | ".join([f"{average}"] * 4) + f" | {average} ± 0.5" for average in (25.0, 26.0, 27.5, 29.0)}
    assert results.downstream("mmlu", results.MMLU).splitlines()[2:] == [
        f"| before | {scores[25.0]} |  |  |  |",
        f"| AdamW, 5e-5 | {scores[26.0]} | 2.5000 | 3 MB | 2.0 GiB |",
        f"| **AdamW, 2e-4** (2 seeds) | {scores[27.5]} | 2.2500 | 3 MB | 2.0 GiB |",
        f"| LoRA, 2e-4, 1e-4 (2 seeds) | {scores[26.0]} | 2.5000 | 3 MB | 2.0 GiB |",
        f"| APOLLO, 5e-5 | {scores[29.0]} | 2.0000 | 3 MB | 2.0 GiB |",
    ]


def words(page: str) -> str:
    """A page of the docs without code, addresses, and the tables that are filled in."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.sub(r"<!-- .*?<!-- end -->|```.*?```|\]\([^)]*\)", "", text, flags=re.DOTALL)


def rounded(files: Iterable[str], column: str | None = None) -> set[str]:
    """Every number of these files, of a column or of all, as words may have it: to a digit or more, bytes as GiB."""
    found = set()
    for name in files:
        with (RESULTS / f"{name}.csv").open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        cells = [cell for row in rows for cell in (row.values() if column is None else [row[column]])]
        values = [float(cell) for cell in cells if re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", cell)]
        found |= {f"{each:,.{digits}f}" for value in values for each in (value, value / 2**30) for digits in (1, 2, 3)}
    return found


@pytest.mark.parametrize(("page", "figures"), [("quality", 30), ("results", 2), ("faq", 5), ("optimizers", 4)])
def test_every_perplexity_in_the_words_was_measured(page, figures):
    files = ("quality-60m-h200", "quality-130m-h200", "quality-350m-h200", "paper-h200", "longer-h200")
    quoted = re.findall(r"(?<![\d.])\d{2,}\.\d+(?![\d%])", words(page))
    assert len(quoted) >= figures
    assert set(quoted) <= rounded(files, "perplexity")


READINGS = {"6.87", "7.13", "166.0", "3.85"}
"""Of the log, where it says that no file has them: of sources that were not kept, or by a count of tensors."""
COUNTED = {"0.749", "1.57"}
"""GiB of docs/memory.md by `apollo memory`, from shapes alone."""
TIMES_AND_SIZES = re.compile(rf"(?<![\w.,])((?:{NUMBER}(?:, |\sand |\sto ))*{NUMBER})\s(?:ms|GiB)\b")


@pytest.mark.parametrize("page", [path.stem for path in sorted((ROOT / "docs").glob("*.md"))])
def test_every_time_and_size_in_the_words_is_in_a_file_that_the_page_names(page):
    named = re.findall(r"bench/results/([\w-]+)\.csv", (ROOT / "docs" / f"{page}.md").read_text())
    quoted = re.findall(NUMBER, " ".join(TIMES_AND_SIZES.findall(words(page))))
    assert {figure for figure in quoted if "." in figure} - READINGS - COUNTED <= rounded(named)


def test_every_file_of_runs_is_in_a_command_of_the_docs():
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    runs = {path.name for path in (ROOT / "bench" / "runs").glob("*.json")} - {"smoke.json"}  # the script's own
    assert [name for name in sorted(runs) if f"runs/{name}" not in text] == []


def test_every_command_of_bench_in_the_docs_has_its_options():
    scripts = {path.stem: path.read_text() for path in (ROOT / "bench").glob("*.py")}
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    commands = re.findall(r"python (?:bench/)?(\w+)\.py([^`\n]*)", text)
    given = {(name, flag) for name, options in commands for flag in re.findall(r"--([a-z0-9-]+)", options)}
    assert len(given) > 30
    scripts["kernels"] += scripts["step"]  # some of whose options it has
    common = {name: text.partition("common_parser(__doc__")[2] for name, text in scripts.items()}
    known = {(name, "out") for name, rest in common.items() if rest}
    known |= {(name, "device") for name, rest in common.items() if rest and not rest.startswith(", device=None")}
    strange = [(name, flag) for name, flag in given - known if not re.search(f'"(--)?{flag}"', scripts[name])]
    assert strange == []


def test_every_run_of_the_papers_tables_has_a_place_on_the_page(tmp_path, monkeypatch):
    import paper_tables
    import results

    named = []
    with (tmp_path / "paper-h200.csv").open("w", newline="") as file:
        columns = ["name", "model", "steps", "sequence", "seed", "batch_tokens", "perplexity", "curve", "ended_at"]
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
    rows = paper_tables.recorded(tmp_path / "paper-h200.csv")
    monkeypatch.setattr(paper_tables, "paper_rows", lambda: rows)
    page = results.filled((ROOT / "docs" / "results.md").read_text())
    assert len(named) > 45
    assert [perplexity for perplexity in named if perplexity not in page] == []


PAPER_1B = {"AdamW, tuned": ("15.56", "7.80G"), "APOLLO": ("14.20", "4.38G"), "APOLLO-Mini": ("14.17", "2.60G")}


def run_of(name: str, seed: str, perplexity: float, ended_at: int = 1000) -> dict[str, str]:
    told = {"name": name, "seed": seed, "perplexity": str(perplexity), "ended_at": str(ended_at)}
    told |= {"model": "1b", "sequence": "256", "steps": "1000", "batch_tokens": "16384"}
    return told | {"curve": f"100:{3 * perplexity} 1000:{perplexity}"}


def test_a_diverged_run_is_compared_with_nothing_and_every_close_pair_is_named():
    import paper_tables

    rows = [run_of("AdamW, tuned", "42", 4.8e8, ended_at=251), run_of("APOLLO", "42", 30.0)]
    rows += [run_of("APOLLO-Mini", seed, 31.0) for seed in ("42", "43")]
    page = paper_tables.first_steps(rows, "1b", PAPER_1B)
    assert "| AdamW, tuned | 15.56 | diverged | - |" in page
    assert "| APOLLO | 14.20 | 30.00 | - |" in page
    four = [run_of(name, seed, 30.0 + at) for at, name in enumerate("abcd") for seed in ("42", "43")[: 1 + (at > 0)]]
    runs = paper_tables.Runs([row | {"perplexity": str(0.3 * float(row["perplexity"]) + 21)} for row in four], "1b")
    assert runs.close("abcd") == ["a and b", "a and c", "a and d"]


def test_the_first_steps_are_told_with_the_perplexities_on_the_way():
    import paper_tables

    rows = [run_of("APOLLO", seed, perplexity) for seed, perplexity in (("42", 30.0), ("43", 32.0))]
    assert paper_tables.first_steps(rows, "1b", PAPER_1B).splitlines()[-3:] == [
        "| ours, after | 100 steps | 1,000 steps |",
        "| --- | --- | --- |",
        "| APOLLO | 93.0 | 31.0 |",
    ]
    assert "Not run yet" in paper_tables.first_steps([], "1b", PAPER_1B)
