"""Fill in the tables of the docs from the files of bench/results, the paper's own numbers beside ours.

    python bench/results.py

A table is between <!-- NAME --> and <!-- end --> on a page of docs/; the text around it is written by hand. A test
compares the pages with the files, so run this whenever a file has changed. A table says what has not been measured.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, GaLore, optimizer_memory
from apollo_optim.llama import PRESETS, VOCABULARY
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.planner.models import llama_parameters
from costs import ARTEMIS_AT, COSTS, GROUPS_AT, MIB, STEPS_AT, decimal, picked, ratio, step_row, table
from machine import RESULTS, Row, recorded

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GIB = 2**30
NOT_RUN = "not run yet"
CLOSE = 0.03
"""Perplexities nearer to each other than this share need seeds to be told apart."""
LONGER_RUNS = RESULTS / "longer-h200.csv"
FACTORED = ", with a factored vocabulary"

PAPER_60M = {
    "AdamW, as the paper ran it": ("34.06", "0.36G"),
    "AdamW, tuned": ("-", "-"),
    "AdamW, factored vocabulary": ("-", "-"),
    "Muon of PyTorch": ("-", "-"),
    "Low-Rank": ("78.18", "0.26G"),
    "LoRA": ("34.99", "0.36G"),
    "ReLoRA": ("37.04", "0.36G"),
    "DoRA": ("-", "-"),
    "GaLore": ("34.88", "0.24G"),
    "Fira": ("31.06", "0.24G"),
    "Flora": ("-", "-"),
    "APOLLO with SVD": ("31.26", "0.24G"),
    "APOLLO": ("31.55", "0.24G"),
    "APOLLO, half the rank": ("31.26", "0.18G"),
    "APOLLO-Mini": ("31.93", "0.12G"),
    "APOLLO-Mini, twice the learning rate": ("30.95", "0.12G"),
    "FactoredAdamW": ("-", "-"),
    "Artemis": ("-", "-"),
    "ArtemisMini": ("-", "-"),
}
"""The paper's table of pre-training: perplexity, and memory of weights and state."""
PAPER_130M = {
    "AdamW, as the paper ran it": ("25.08", "0.76G"), "AdamW, tuned": ("-", "-"),
    "AdamW, factored vocabulary": ("-", "-"), "GaLore": ("25.36", "0.52G"), "Fira": ("22.73", "0.52G"),
    "APOLLO": ("22.94", "0.52G"), "APOLLO-Mini": ("23.53", "0.25G"), "FactoredAdamW": ("-", "-"),
    "Artemis": ("-", "-"), "Artemis, no decay": ("-", "-"), "ArtemisMini": ("-", "-"),
}  # fmt: skip
PAPER_350M = {
    "AdamW, tuned": ("18.80", "2.06G"), "AdamW, at the rates of 60M": ("-", "-"),
    "AdamW, factored vocabulary": ("-", "-"), "APOLLO": ("16.85", "1.22G"), "APOLLO-Mini": ("17.18", "0.69G"),
    "FactoredAdamW": ("-", "-"), "Artemis": ("-", "-"), "Artemis, no decay": ("-", "-"), "ArtemisMini": ("-", "-"),
    "ArtemisMini, no decay": ("-", "-"),
}  # fmt: skip
PAPER_1B = {"AdamW, tuned": ("15.56", "7.80G"), "APOLLO-Mini": ("14.17", "2.60G")}

BEFORE = {
    "AdamW, tuned": "adamw 1.25e-3, vocabulary adamw 5e-3",
    "AdamW, factored vocabulary": "adamw 1.25e-3, vocabulary factored 2e-3",
    "APOLLO, tuned": "apollo 5e-3, vocabulary adamw 5e-3",
    "Muon (a sketch)": "muon 5e-3, momentum .9, vocabulary factored 2e-3",
    "Artemis": "artemis 1e-2, vocabulary factored 4e-3",
    "ArtemisMini": "artemis-mini 1e-2, rank 1/64, vocabulary factored 4e-3",
}
"""Names of runs made for docs/quality.md, by their names here. Both Artemis have a weight decay only in those runs."""
TUNED_AT_350M = "adamw 6.25e-4, vocabulary adamw 1.25e-3"


def paper_rows() -> list[Row]:
    """All runs for the paper's tables, including those made for quality.md."""
    named = {before: name for name, before in BEFORE.items()} | {TUNED_AT_350M: "AdamW, tuned"}
    earlier = [
        {**row, "name": named[row["name"].removesuffix(", seed 43")]}
        for size in ("60m", "130m", "350m")
        for row in recorded(RESULTS / f"quality-{size}-h200.csv")
        if row["name"].removesuffix(", seed 43") in named
    ]
    return [*earlier, *recorded(RESULTS / "paper-h200.csv")]


class Runs:
    """Runs on one model, of one length: of `steps` steps, or if that is None as long as most of them."""

    def __init__(
        self,
        rows: Iterable[Row],
        model: str,
        sequence: int = 256,
        steps: int | None = None,
        batch: int | None = None,
    ):
        here = [row for row in rows if (row["model"], int(row["sequence"])) == (model, sequence)]
        here = [row for row in here if int(row["batch_tokens"]) == (batch or int(row["batch_tokens"]))]
        lengths = [int(row["steps"]) for row in here]
        self.steps = steps or max(set(lengths), key=lambda steps: (lengths.count(steps), steps), default=0)
        self.rows = [row for row in here if int(row["steps"]) == self.steps]
        self.tokens = self.steps * int(self.rows[0]["batch_tokens"]) if self.rows else 0

    def named(self, name: str) -> list[Row]:
        """The runs of this name, the last one of each seed."""
        return list({row["seed"]: row for row in self.rows if row["name"] == name}.values())

    def diverged(self, name: str) -> bool:
        """Whether a run of this name was given up before its end."""
        return any(int(row["ended_at"]) < self.steps for row in self.named(name))

    def mean(self, name: str, column: str = "perplexity") -> float | None:
        """The mean over the seeds; None if there is no run, or one diverged."""
        values = [float(row[column]) for row in self.named(name) if row.get(column)]
        return sum(values) / len(values) if values and not self.diverged(name) else None

    def shown(self, name: str, column: str = "perplexity") -> str:
        """The mean over the seeds, with the lowest and highest where there are several."""
        values = sorted(float(row[column]) for row in self.named(name) if row.get(column))
        if not values:
            return NOT_RUN
        spread = f" ({values[0]:.2f} to {values[-1]:.2f})" if len(values) > 1 else ""
        return "diverged" if self.diverged(name) else f"{sum(values) / len(values):.2f}{spread}"

    def curve(self, name: str) -> dict[int, float]:
        """Perplexities during the training by number of steps, as means over the seeds."""
        curves = [dict(point.split(":") for point in row["curve"].split()) for row in self.named(name)]
        shared = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
        return {int(step): sum(float(curve[step]) for curve in curves) / len(curves) for step in shared}

    def close(self, names: Sequence[str]) -> list[str]:
        """Pairs within `CLOSE` of each other, of which one has a single seed."""
        means = sorted((mean, name) for name in names if (mean := self.mean(name)) is not None)
        return [
            f"{one} and {other}"
            for (low, one), (high, other) in itertools.combinations(means, 2)
            if high < (1 + CLOSE) * low and min(len(self.named(one)), len(self.named(other))) < 2
        ]


def gigabytes(row: Row) -> str:
    if not row.get("weight_bytes"):
        return "-"
    return f"{(float(row['weight_bytes']) + float(row['state_bytes'])) / 1e9:.2f}G"


def budget(runs: Runs) -> str:
    """The length of the runs, in words."""
    batch = int(runs.rows[0]["batch_tokens"])
    return f"{runs.steps:,} steps of {batch:,} tokens, {runs.tokens / 1e6:.0f}M in all"


def pretraining(rows: list[Row], model: str, paper: dict[str, tuple[str, str]]) -> str:
    """The paper's table of pre-training on one model."""
    runs = Runs(rows, model)
    if not runs.rows:
        return f"Not run yet: `bench/runs/paper-{model}.json` has the runs.\n"
    line = runs.mean("AdamW, tuned")
    cells = []
    for name, (perplexity, memory) in paper.items():
        mean, found = runs.mean(name), runs.named(name)
        ratio = f"{mean / line:.3f}" if mean and line else "-"
        c4 = runs.shown(name, "perplexity_c4") if any(row.get("perplexity_c4") for row in found) else "-"
        cells.append([name, perplexity, runs.shown(name), ratio, c4, memory, gigabytes(found[-1]) if found else "-"])
    head = ["perplexity", "the paper", "ours", "of tuned AdamW", "ours, on C4", "the paper's memory", "ours"]
    close = "; ".join(runs.close(list(paper)))
    caution = f"\nWithin {CLOSE:.0%} of each other, one of the two with a single seed: {close}.\n" if close else ""
    return f"Ours: {budget(runs)}.\n\n{table(head, cells)}{caution}"


def first_steps(rows: list[Row], model: str, paper: dict[str, tuple[str, str]]) -> str:
    """The same table, and one of the perplexities during the training."""
    runs = Runs(rows, model)
    curves = {name: runs.curve(name) for name in paper if runs.named(name)}
    if not curves:
        return pretraining(rows, model, paper)
    return f"{pretraining(rows, model, paper)}\n{ways(curves)}"


def ways(curves: Mapping[str, Mapping[int, float]]) -> str:
    """A table with a row for each curve."""
    steps = sorted(set[int]().union(*curves.values()))
    cells = [
        [name, *(f"{curve[step]:.1f}" if step in curve else "-" for step in steps)] for name, curve in curves.items()
    ]
    return table(["ours, after", *(f"{step:,} steps" for step in steps)], cells)


VOCABULARY_FACTORED = {"second_moment": "factored"}
OVERVIEW: dict[str, tuple[type[ProjectedOptimizer], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "AdamW": (APOLLO, {"rank": None}, {}, ("AdamW, tuned",)),
    "AdamW with a factored vocabulary": (APOLLO, {"rank": None}, VOCABULARY_FACTORED, ("AdamW, factored vocabulary",)),
    "`FactoredAdamW`": (FactoredAdamW, {}, VOCABULARY_FACTORED, ("FactoredAdamW",)),
    "`Artemis`": (Artemis, {}, VOCABULARY_FACTORED, ("Artemis", "Artemis, no decay")),
    "`ArtemisMini`": (ArtemisMini, {}, VOCABULARY_FACTORED, ("ArtemisMini", "ArtemisMini, no decay")),
    "`APOLLO`": (APOLLO, {}, {}, ("APOLLO, tuned", "APOLLO")),
    "`APOLLOMini`": (APOLLOMini, {}, {}, ("APOLLO-Mini",)),
    "`GaLore`": (GaLore, {}, {}, ("GaLore",)),
    "`Fira`": (Fira, {}, {}, ("Fira",)),
}
"""Optimizers, their options and those of the vocabulary, and the names of their runs, of which the first counts."""
EARLIER_SETTING = "*"
"""Beside a perplexity of a run by the second of these names."""


def overview() -> str:
    """Each optimizer's state on LLaMA-7B, and its perplexity at every size and length, beside the tuned AdamW's."""
    lengths = ("60m", 1000), ("130m", 500), ("350m", 300), ("60m", 4000)
    every = [*paper_rows(), *recorded(LONGER_RUNS)]
    columns = [Runs(every, model, steps=steps, batch=BATCH) for model, steps in lengths]
    whole = state_of_7b(*OVERVIEW["AdamW"][:3])
    cells = []
    for label, (optimizer, options, vocabulary, names) in OVERVIEW.items():
        kept = state_of_7b(optimizer, options, vocabulary)
        cells.append([label, share(kept / whole), *(at_this_size(runs, names) for runs in columns)])
    told = [f"{model.upper()}, {steps:,} steps" for model, steps in lengths]
    return table(["", "state on 7B", *told], cells)


def state_of_7b(optimizer: type[ProjectedOptimizer], options: dict[str, Any], vocabulary: dict[str, Any]) -> int:
    """Bytes of state on LLaMA-7B, whose embedding and head are not projected."""
    parts: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, shape in llama_parameters(PRESETS["7b"]):
        parts[name in VOCABULARY].append(nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    groups = [{"params": parts[False]}, {"params": parts[True], "rank": None, **vocabulary}]
    return optimizer_memory(groups, optimizer, **options)


def at_this_size(runs: Runs, names: Sequence[str]) -> str:
    """The mean perplexity of the first of these that was run, and its share of the tuned AdamW's."""
    line = runs.mean("AdamW, tuned")
    for name in names:
        if line and (mean := runs.mean(name)):
            earlier = EARLIER_SETTING if name != names[0] else ""
            return f"{mean:.1f}{earlier}" + (f", {mean / line:.2f}" if mean != line else "")
    return NOT_RUN


LONGER = (
    "AdamW, tuned", "FactoredAdamW", "Muon (a sketch)", "Artemis", "Artemis, no decay", "ArtemisMini",
    "ArtemisMini, no decay", "APOLLO, tuned", "APOLLO-Mini",
)  # fmt: skip
BATCH = 320 * 256
LENGTHS = (
    ("60m", 1000, BATCH), ("60m", 4000, BATCH // 4), ("60m", 4000, BATCH), ("130m", 2000, BATCH), ("350m", 1000, BATCH),
)  # fmt: skip
"""Model, steps and tokens of a step: of the tables above, and of the runs of bench/runs/longer.json."""
PAPER_BUDGET = {
    "AdamW, as the paper ran it": "34.06", "AdamW, tuned": "-", "APOLLO": "31.55", "APOLLO-Mini": "31.93",
    "FactoredAdamW": "-", "Artemis": "-",
}  # fmt: skip


def longer() -> str:
    """Final perplexities of longer runs on both texts, beside the tuned AdamW's; at 60M also those during training."""
    long = recorded(LONGER_RUNS)
    every = [*paper_rows(), *long]
    lengths = [Runs(every, model, steps=steps, batch=batch) for model, steps, batch in LENGTHS]
    told = [f"{model.upper()}, {steps:,} steps of {batch / 1000:.0f}K tokens" for model, steps, batch in LENGTHS]
    ends = table(["held-out text", *told], [[name, *(beside_tuned(runs, name) for runs in lengths)] for name in LONGER])
    learned = [[name, *(on_training_text(runs, name) for runs in lengths)] for name in LONGER]
    way = Runs(long, "60m", steps=4000, batch=BATCH)
    curves = {name: way.curve(name) for name in LONGER if way.named(name)}
    return f"{ends}\n{table(['the last 20 batches of training', *told], learned)}\n{ways(curves)}"


def beside_tuned(runs: Runs, name: str) -> str:
    mean, line = runs.mean(name), runs.mean("AdamW, tuned")
    return runs.shown(name) + (f", {mean / line:.2f}" if mean and line and name != "AdamW, tuned" else "")


def on_training_text(runs: Runs, name: str) -> str:
    """The perplexity of the last batches of training, and its ratio to the tuned AdamW's."""
    loss, line = (runs.mean(each, "train_loss") for each in (name, "AdamW, tuned"))
    if loss is None or line is None:
        return NOT_RUN
    return f"{math.exp(loss):.2f}" + (f", {math.exp(loss - line):.2f}" if name != "AdamW, tuned" else "")


def whole_budget() -> str:
    """Runs of the paper's own budget at 60M, with its perplexities beside ours."""
    runs = Runs(recorded(LONGER_RUNS), "60m", steps=10_000)
    if not runs.rows:
        return "Not run yet: `bench/runs/budget-60m.json` has the runs.\n"
    cells = [[name, paper, beside_tuned(runs, name)] for name, paper in PAPER_BUDGET.items()]
    return table(["60M, 10,000 steps of 131,072 tokens", "the paper, on C4", "ours"], cells)


def choice() -> str:
    """State, time and perplexity of each optimizer, for docs/optimizers.md."""
    runs = Runs(paper_rows(), "60m")
    told = {
        "AdamW": (APOLLO, {"rank": None}, "torch AdamW fused", STEPS_AT, "AdamW, tuned", ""),
        "`FactoredAdamW`": (FactoredAdamW, {}, "Factored AdamW", GROUPS_AT, "FactoredAdamW", FACTORED),
        "`APOLLO`": (APOLLO, {}, "APOLLO rank 256", STEPS_AT, "APOLLO", ""),
        "`APOLLOMini`": (APOLLOMini, {}, "APOLLO-Mini", STEPS_AT, "APOLLO-Mini", ""),
        "`Artemis`": (Artemis, {}, "Artemis", ARTEMIS_AT, "Artemis", FACTORED),
        "`ArtemisMini`": (ArtemisMini, {}, "Artemis-Mini", ARTEMIS_AT, "ArtemisMini", FACTORED),
    }
    matrix = nn.Linear(11008, 4096, bias=False, device="meta")
    cells = []
    for name, (optimizer, options, step, commit, run, vocabulary) in told.items():
        state = optimizer_memory(matrix, optimizer, **options) / MIB
        time = ratio(*(step_row("7b", each, commit=commit) for each in (step, "torch AdamW fused")))
        cells.append([name, f"{state:.{0 if state >= 10 else 1}f} MiB", time, f"{runs.mean(run):.1f}{vocabulary}"])
    head = ["", "state of a 4096 x 11008 matrix", "step on LLaMA-7B, of fused AdamW's time"]
    return table([*head, f"perplexity of LLaMA-60M after {runs.steps:,} steps"], cells)


def granularity() -> str:
    runs = Runs(paper_rows(), "60m")
    told = {
        ("AdamW", ""): ("AdamW, as the paper ran it", "34.06"),
        ("GaLore", ""): ("GaLore", "34.88"),
        ("APOLLO with SVD", "channel"): ("APOLLO with SVD", "31.26"),
        ("APOLLO with SVD", "tensor"): ("APOLLO with SVD, one factor for the tensor", "31.77"),
        ("APOLLO", "channel"): ("APOLLO", "31.55"),
        ("APOLLO", "tensor"): ("APOLLO, one factor for the tensor", "32.10"),
    }
    cells = [[method, by, paper, runs.shown(name)] for (method, by), (name, paper) in told.items()]
    return table(["60M", "a factor for each", "the paper", "ours"], cells)


def ranks() -> str:
    runs = Runs(paper_rows(), "60m")
    told = {
        "APOLLO": {8: "APOLLO, rank 8", 32: "APOLLO, rank 32", 128: "APOLLO"},
        "one factor for the tensor": {
            1: "APOLLO-Mini",
            8: "one factor for the tensor, rank 8",
            32: "one factor for the tensor, rank 32",
            128: "APOLLO, one factor for the tensor",
        },
        "GaLore": {8: "GaLore, rank 8", 32: "GaLore, rank 32", 128: "GaLore"},
        "Fira": {8: "Fira, rank 8", 32: "Fira, rank 32", 128: "Fira"},
    }
    shown = (1, 8, 32, 128)
    cells = [
        [name, *(runs.shown(named[rank]) if rank in named else "-" for rank in shown)] for name, named in told.items()
    ]
    return table(["60M, ours", *(f"rank {rank}" for rank in shown)], cells)


def more(narrow: float, wide: float) -> str:
    return f"{100 * (narrow / wide - 1):+.1f}%"


def int8() -> str:
    runs = Runs(paper_rows(), "60m")
    told = {"APOLLO": ("31.55", "31.97"), "APOLLO-Mini": ("31.93", "33.05"), "GaLore": ("34.88", "34.88")}
    cells = []
    for name, (wide, narrow) in told.items():
        ours = runs.mean(name), runs.mean(f"Q-{name}")
        here = more(ours[1], ours[0]) if ours[0] and ours[1] else "-"
        paper = more(float(narrow), float(wide))
        cells.append([name, wide, narrow, paper, runs.shown(name), runs.shown(f"Q-{name}"), here])
    return table(["60M", "the paper, bf16", "int8", "", "ours, bf16", "int8", ""], cells)


def pretrained(run: str, commit: str = "e487840") -> float:
    """The validation perplexity that a run of `apollo pretrain` ended with; the first ones have no commit."""
    return float(picked("pretrain-60m-h200", run=run, commit=commit, kind="validation")["perplexity"])


def int8_before() -> str:
    """Pairs of runs of `apollo pretrain` from the same first weights."""
    pairs = [
        ("APOLLO, seed 1", "apollo-60m-seed1", "apollo-int8-layers-60m-seed1"),
        ("APOLLO, seed 2", "apollo-60m-seed2", "apollo-int8-layers-60m-seed2"),
        ("APOLLO-Mini, seed 1", "mini-60m-seed1", "mini-int8-layers-60m-seed1"),
    ]
    cells = []
    for name, wide, narrow in pairs:
        one, other = pretrained(wide), pretrained(narrow)
        cells.append([name, f"{one:.2f}", f"{other:.2f}", more(other, one)])
    return table(["60M, `apollo pretrain`", "bf16", "int8", ""], cells)


def first_seeds() -> str:
    """The first runs of `apollo pretrain` on LLaMA-60M."""
    found = {name: [pretrained(f"{name}-60m-seed{seed}", "") for seed in (0, 1)] for name in ("adamw", "apollo")}
    ratios = [f"{one / other:.3f}" for one, other in zip(*found.values(), strict=True)]
    adamw, apollo = ([f"{value:.2f}" for value in values] for values in found.values())
    head = ["", "lr", "seed 0", "seed 1", "an independent implementation, on similar text"]
    cells = [["AdamW", "2.5e-3", *adamw, "46.1"], ["APOLLO, rank 128", "5e-3", *apollo, "49.3"]]
    return table(head, [*cells, ["ratio", "", *ratios, "0.935"]])


def narrow_runs() -> str:
    """Runs with less memory, each after the wide run that it is compared with."""
    told = [
        ("APOLLO, bf16 weights, seed 1", "apollo-60m-seed1", "e487840"),
        ("APOLLO, `--int8 layers`, seed 1", "apollo-int8-layers-60m-seed1", "e487840"),
        ("APOLLO, `--int8 all`, seed 1", "apollo-int8-all-60m-seed1", "40358b7"),
        ("APOLLO, bf16 weights, seed 2", "apollo-60m-seed2", "e487840"),
        ("APOLLO, `--int8 layers`, seed 2", "apollo-int8-layers-60m-seed2", "e487840"),
        ("APOLLO-Mini, bf16 weights, seed 1", "mini-60m-seed1", "e487840"),
        ("APOLLO-Mini, `--int8 layers`, seed 1", "mini-int8-layers-60m-seed1", "e487840"),
        ("APOLLO-Mini, `--state-dtype int8`, seed 1", "mini-state8-60m-seed1", "e487840"),
        ("APOLLO-Mini, `--int8 all --state-dtype int8`, seed 1", "mini-int8-all-state8-60m-seed1", "40358b7"),
        ("before: APOLLO, bf16 weights, seed 1", "apollo-60m-seed1", ""),
        ("before: APOLLO, `--int8 all`, seed 1", "apollo-int8-60m-seed1", ""),
        ("before: APOLLO-Mini, bf16 weights, 500 steps", "mini-60m-500-steps", ""),
        ("before: APOLLO-Mini, `--int8 all`, 500 steps", "mini-int8-60m-500-steps", ""),
        ("before: APOLLO-Mini, `--vocabulary-state rowwise`, 500 steps", "mini-rowwise-60m-500-steps", ""),
    ]
    cells, wide = [], 0.0
    for label, run, commit in told:
        perplexity = pretrained(run, commit)
        wide = perplexity if "bf16 weights" in label else wide
        cells.append([label, f"{perplexity:.2f}", "" if perplexity == wide else more(perplexity, wide)])
    return table(["60M", "perplexity", "against the wide run"], cells)


ONE_BY_ONE = {
    "AdamW": "adamw 1.25e-3, vocabulary adamw 5e-3",
    "APOLLO": "apollo 5e-3, vocabulary adamw 5e-3",
    "APOLLO-Mini": "mini 5e-3, vocabulary adamw 5e-3",
}
CHANGES = "", ", beta2 .95", ", beta2 .999", ", no decay", ", eps 1e-6"
"""The changes of bench/runs/quality-60m-options.json, one at a time; the first is none."""


def one_by_one() -> str:
    """The effect of beta2, decay and eps on each rule."""
    rows = [row for row in recorded(RESULTS / "quality-60m-h200.csv") if row["steps"] == "500" and row["seed"] == "42"]
    found = {row["name"]: f"{float(row['perplexity']):.1f}" for row in rows}
    cells = [[rule, *(found.get(name + change, NOT_RUN) for change in CHANGES)] for rule, name in ONE_BY_ONE.items()]
    head = ["beta2 .98, decay .1, eps 1e-8", *(change.removeprefix(", ") for change in CHANGES[1:])]
    return table(["60M, 500 steps", *head], cells)


def vocabulary_on_1m() -> str:
    """The factored vocabulary and AdamW's with several rules, the best of each rule and seed in bold."""
    found: dict[str, dict[tuple[str, float, str], dict[str, float]]] = {}
    for row in recorded(RESULTS / "vocabulary-1m-cpu.csv"):
        parts = {part["on"]: part for part in json.loads(row["parts"])}
        ends = parts["vocabulary"]
        rules = found.setdefault(rule(parts["matrices"]), {})
        rules.setdefault((ends["by"], ends["lr"], rule(ends)), {})[row["seed"]] = float(row["perplexity"])
    cells = []
    for matrices, rules in found.items():
        best = {seed: min(each.get(seed, math.inf) for each in rules.values()) for seed in ("42", "43")}
        for (_, _, name), seeds in sorted(rules.items()):
            cells.append([matrices, name])
            for seed, lowest in best.items():
                text = f"{seeds[seed]:.1f}" if seed in seeds else ""
                cells[-1].append(f"**{text}**" if seeds.get(seed) == lowest else text)
    return table(["matrices, lr", "vocabulary, lr", "seed 42", "seed 43"], cells)


def context() -> str:
    runs = Runs(paper_rows(), "130m", 1024)
    names = ("AdamW, tuned", "APOLLO, an eighth of the width", "APOLLO-Mini")
    if not runs.rows:
        return "Not run yet: `bench/runs/context-130m.json` has the runs.\n"
    return f"Ours: {budget(runs)}.\n\n" + table(
        ["130M, sequences of 1024", "ours"], [[name, runs.shown(name)] for name in names]
    )


RULES = {
    "adamw": "AdamW", "apollo": "APOLLO", "apollo-mini": "APOLLO-Mini", "artemis": "`Artemis`",
    "artemis-mini": "`ArtemisMini`", "factored": "factored", "factored-adamw": "`FactoredAdamW`",
}  # fmt: skip
FORMER_WAYS = {
    "four rounds": "four rounds of orthogonalising",
    "along the smaller side": "basis along the smaller side",
}
"""Marks in the names of runs, of what the rules of the package had then or were tried with."""
USUAL_BETA1, USUAL_BETA2 = {"factored": (None, 0.0), "factored-adamw": (0.9,)}, 0.98
"""The betas of the rows of docs/quality.md that do not mention them."""
VOCABULARY_SIZES = {"rms": "RMS 0.2", "clip": "RMS at most 0.2"}


def sketched(part: dict[str, Any]) -> str:
    """A rule of bench/sketches.py in words."""
    if part["on"] == "vocabulary" and "size" in part:
        return VOCABULARY_SIZES[part["size"]]
    kept = {None: "in fp32", 4: "in NF4", 1: "in one bit"}[part.get("bits")] + ", rounded at random" * (
        "stochastic" in part
    )
    if part.get("normalize") == "apollo" and "momentum" in part:
        return f"gains of APOLLO, rank {part['rank']}, on momentum {part['momentum']} {kept}"
    if part.get("normalize") == "apollo":
        order = "before" if "limit_before_correction" in part else "after"
        return f"APOLLO, rank {part['rank']}, limited {order} the correction"
    if part.get("normalize") == "factored":
        return f"factored, momentum {part['momentum']} {kept}"
    if part["shape"] == "rows":
        return f"rows of momentum {part['momentum']} at unit length" + " in NF4" * ("bits" in part)
    if "momentum" not in part:
        return "orthogonalised gradient without momentum"
    if "momentum_rank" in part:
        return f"orthogonalised gradient with momentum {part['momentum']} of rank {part['momentum_rank']}"
    return f"Muon, momentum {part['momentum']} {kept}"


def rule(part: dict[str, Any]) -> str:
    """The rule of a part of a run, in words."""
    beta1, beta2 = part.get("betas", (None, USUAL_BETA2))
    if part["by"] == "sketch":
        name = sketched(part) + " (a sketch)" * (part["on"] == "matrices" or "momentum" in part)
    elif part["by"] == "artemis-mini" and "rank" not in part:  # as it was before it had a momentum
        name = "orthogonalised gradient without momentum"
    else:
        name = RULES[part["by"]] + (f", rank {part['rank']}" if part["by"] == "apollo" else "")
    name += ", no momentum" * (part["by"] == "adamw" and beta1 == 0)
    name += f", momentum {beta1}" if beta1 not in USUAL_BETA1.get(part["by"], (beta1,)) else ""
    name += f", state in {part['state_dtype'].replace('float32', 'fp32')}" if "state_dtype" in part else ""
    name += f", beta2 {beta2}".replace("0.", ".") if beta2 != USUAL_BETA2 else ""
    name += ", no decay" * (part.get("weight_decay") == 0)
    name += f", eps {decimal(part['eps'])}" if "eps" in part else ""
    return f"{name}, {decimal(part['lr'])}"


def share(part: float) -> str:
    """A fraction as a percentage of two digits."""
    return f"{100 * part:.{0 if part >= 0.1 else 1 if part >= 0.01 else 2}f}%"


def quality(model: str, steps: int) -> str:
    """The runs of docs/quality.md on one model with this number of steps, the best first."""
    rows = [row for row in recorded(RESULTS / f"quality-{model}-h200.csv") if int(row["steps"]) == steps]
    if not rows:
        return f"Not run yet: `bench/runs/quality-{model}.json` has the runs.\n"
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        parts = {part["on"]: part for part in json.loads(row["parts"])}
        inner, ends = parts.get("matrices", parts["rest"]), parts.get("vocabulary", parts["rest"])
        matrices = rule(inner) + "".join(f", {way}" for mark, way in FORMER_WAYS.items() if mark in row["name"])
        found.setdefault((matrices, rule(ends)), {})[row["seed"]] = row  # the last of a seed
    means = {
        place: sum(float(row["perplexity"]) for row in seeds.values()) / len(seeds) for place, seeds in found.items()
    }
    whole, line = min((mean, place) for place, mean in means.items() if all("AdamW" in each for each in place))[::-1]
    state = float(next(iter(found[whole].values()))["state_bytes"])
    cells = [
        [
            *place,
            share(float(next(iter(found[place].values()))["state_bytes"]) / state),
            ", ".join(f"{float(row['perplexity']):.1f}" for row in found[place].values()),
            f"{mean / line:.2f}",
        ]
        for place, mean in sorted(means.items(), key=lambda item: item[1])
    ]
    return table(["matrices, lr", "vocabulary, lr", "state", "perplexity", "to AdamW"], cells)


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


TABLES: dict[str, Callable[[], str]] = COSTS | {
    "choice": choice,
    "overview": overview,
    "60m": lambda: pretraining(paper_rows(), "60m", PAPER_60M),
    "130m": lambda: pretraining(paper_rows(), "130m", PAPER_130M),
    "350m": lambda: pretraining(paper_rows(), "350m", PAPER_350M),
    "1b": lambda: first_steps(paper_rows(), "1b", PAPER_1B),
    "granularity": granularity,
    "rank": ranks,
    "int8": int8,
    "int8 before": int8_before,
    "first seeds": first_seeds,
    "narrow runs": narrow_runs,
    "vocabulary 1m": vocabulary_on_1m,
    "context": context,
    "longer": longer,
    "whole budget": whole_budget,
    "one by one": one_by_one,
    "quality 60m 1000": lambda: quality("60m", 1000),
    "quality 60m 500": lambda: quality("60m", 500),
    "quality 130m 500": lambda: quality("130m", 500),
    "quality 350m 300": lambda: quality("350m", 300),
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
