"""Fill in the tables of the docs from the files of bench/results, the paper's own numbers beside ours.

    python bench/results.py

A table is between <!-- NAME --> and <!-- end --> on a page of docs/; the text around it is written by hand. A test
compares the pages with the files, so run this whenever a file has changed. A table says what has not been measured.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from costs import COSTS, GIB, table
from machine import RESULTS, Row, recorded
from paper_tables import NOT_RUN, PAPER_TABLES
from quality import QUALITY_TABLES

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMONSENSE = {
    "winogrande": "WinoGrande", "piqa": "PIQA", "siqa": "SIQA", "openbookqa": "OBQA", "hellaswag": "HellaSwag",
    "boolq": "BoolQ", "arc_easy": "ARC-e", "arc_challenge": "ARC-c",
}  # fmt: skip
FINETUNED = {
    "before": "before", "adamw": "AdamW", "adamw-full": "AdamW, all weights", "lora": "LoRA", "dora": "DoRA",
    "galore": "GaLore", "fira": "Fira", "apollo-svd": "APOLLO with SVD", "apollo": "APOLLO",
    "apollo-mini": "APOLLO-Mini", "apollo-mini-int8": "APOLLO-Mini on int8 weights", "artemis": "`Artemis`",
}  # fmt: skip
"""The methods of bench/downstream.py, in the paper's order and then ours."""
MMLU = {"STEM": "STEM", "social sciences": "social sciences", "humanities": "humanities", "other": "other"}
ZEROSHOT = {
    "boolq": "BoolQ", "rte": "RTE", "hellaswag": "HellaSwag", "winogrande": "WinoGrande", "openbookqa": "OBQA",
    "arc_easy": "ARC-e", "arc_challenge": "ARC-c", "piqa": "PIQA", "sciq": "SciQ", "mathqa": "MathQA",
}  # fmt: skip


def downstream(name: str, tasks: dict[str, str]) -> str:
    """A table of bench/downstream.py: a row for each method and learning rate, with means over its seeds.

    If a method has several learning rates, the one with the lowest validation loss is in bold. A sweep over the
    recipe's replaces single ones. Tokens a second are those of bench/finetune.py, from the slowest run to the fastest.
    """
    methods: dict[str, dict[str, dict[str, Row]]] = {}
    for row in recorded(RESULTS / f"{name}-h200.csv"):
        if row["by"] == "likelihood":
            rates = methods.setdefault(row["method"], {})
            rates.setdefault(row["lr"], {})[row["seed"]] = row  # the last of a seed
    from_scratch = name == "zeroshot"
    head = ["", *tasks.values(), "average", "perplexity" if from_scratch else "validation loss", "state"]
    head += [] if from_scratch else ["peak"]
    timed: dict[str, list[int]] = {}
    for row in recorded(RESULTS / "finetune-h200.csv"):
        timed.setdefault(row["name"], []).append(int(row["tokens_per_s"]))
    speeds = {method: timed[key] for method in methods if (key := f"{name}, {method}") in timed}
    head += ["tokens/s"] if speeds else []
    cells = []
    for method in sorted(methods, key=list(FINETUNED).index):
        rates = methods[method]
        if swept := rates.get("sweep"):
            rates = {", ".join(dict.fromkeys(row["best_lr"] for row in swept.values())): swept}
        best = min(rates, key=lambda lr: mean(rates[lr], "validation_loss"))
        for lr, seeds in rates.items():
            label = ", ".join(filter(None, (FINETUNED[method], lr)))
            label = f"**{label}**" if len(rates) > 1 and lr == best else label
            label += f" ({len(seeds)} seeds)" if len(seeds) > 1 else ""
            average = f"{mean(seeds, 'average'):.1f} ± {mean(seeds, 'average_stderr'):.1f}"
            trained = [""] * (len(head) - len(tasks) - 2)
            if mean(seeds, "state_bytes"):
                loss = mean(seeds, "validation_loss")
                trained = [f"{math.exp(loss):.1f}" if from_scratch else f"{loss:.4f}"]
                trained += [f"{mean(seeds, 'state_bytes') / 1e6:.0f} MB"]
                trained += [] if from_scratch else [f"{mean(seeds, 'peak_bytes') / GIB:.1f} GiB"]
                ends = dict.fromkeys((min(speeds[method]), max(speeds[method]))) if method in speeds else ()
                trained += [" to ".join(f"{end:,}" for end in ends) or NOT_RUN] if speeds else []
            cells.append([label, *(f"{mean(seeds, task):.1f}" for task in tasks), average, *trained])
    return table(head, cells or [[NOT_RUN, *[""] * (len(head) - 1)]])


def mean(seeds: Mapping[str, Row], column: str) -> float:
    """The mean over the seeds of a run; 0 if nothing was trained."""
    return sum(float(row[column] or 0) for row in seeds.values()) / len(seeds)


TABLES: dict[str, Callable[[], str]] = {
    **COSTS,
    **PAPER_TABLES,
    **QUALITY_TABLES,
    "commonsense": lambda: downstream("commonsense", COMMONSENSE),
    "mmlu": lambda: downstream("mmlu", MMLU),
    "zeroshot": lambda: downstream("zeroshot", ZEROSHOT),
}
"""Every table of the docs, by its name on the page."""


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return re.sub(
        r"<!-- ([^>]+) -->\n.*?<!-- end -->",
        lambda place: f"<!-- {place[1]} -->\n\n{TABLES[place[1]]()}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text()
        if (after := filled(before)) != before:
            page.write_text(after)
            print(page)
