"""Tables of pre-training beside the paper's own, for bench/results.py to fill in."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from costs import picked, table
from machine import RESULTS, Row, recorded

NOT_RUN = "not run yet"
CLOSE = 0.03
"""Perplexities nearer to each other than this share need seeds to be told apart."""
LONGER_RUNS = RESULTS / "longer-h200.csv"
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
    told = {
        "APOLLO": ("31.55", "31.97"), "APOLLO-Mini": ("31.93", "33.05"), "GaLore": ("34.88", "34.88"),
        "FactoredAdamW": ("-", "-"), "Artemis": ("-", "-"), "ArtemisMini": ("-", "-"),
    }  # fmt: skip
    cells = []
    for name, (wide, narrow) in told.items():
        ours = runs.mean(name), runs.mean(f"Q-{name}")
        here = more(ours[1], ours[0]) if ours[0] and ours[1] else "-"
        paper = more(float(narrow), float(wide)) if wide != "-" else "-"
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


def context() -> str:
    runs = Runs(paper_rows(), "130m", 1024)
    names = (
        "AdamW, tuned", "APOLLO, an eighth of the width", "APOLLO-Mini",
        "FactoredAdamW", "Artemis", "ArtemisMini", "Muon of PyTorch",
    )  # fmt: skip
    if not runs.rows:
        return "Not run yet: `bench/runs/context-130m.json` has the runs.\n"
    return f"Ours: {budget(runs)}.\n\n" + table(
        ["130M, sequences of 1024", "ours"], [[name, runs.shown(name)] for name in names]
    )


PAPER_TABLES: dict[str, Callable[[], str]] = {
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
    "context": context,
}
"""By their names on the pages."""
