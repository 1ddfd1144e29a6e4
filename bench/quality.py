"""Tables of quality per byte, of runs by rules and learning rates, for bench/results.py to fill in."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from apollo_optim import APOLLO, APOLLOMini, Artemis, ArtemisMini, FactoredAdamW, Fira, GaLore, optimizer_memory
from apollo_optim.llama import PRESETS, VOCABULARY
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.planner.models import llama_parameters
from costs import ARTEMIS_AT, GROUPS_AT, MIB, STEPS_AT, decimal, ratio, step_row, table
from machine import RESULTS, Row, recorded
from paper_tables import LONGER_RUNS, NOT_RUN, Runs, paper_rows, ways

FACTORED = ", with a factored vocabulary"
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
    lengths = ("60m", 1000), ("130m", 500), ("350m", 300), ("60m", 4000), ("130m", 2000)
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
    if loss is None:
        return NOT_RUN
    ratio = None if line is None or name == "AdamW, tuned" else math.exp(loss - line)
    return f"{math.exp(loss):.2f}" + (f", {ratio:.2f}" if ratio else "")


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


RULES = {
    "adamw": "AdamW", "apollo": "APOLLO", "apollo-mini": "APOLLO-Mini", "artemis": "`Artemis`",
    "artemis-mini": "`ArtemisMini`", "factored": "factored", "factored-adamw": "`FactoredAdamW`",
}  # fmt: skip
FORMER_WAYS = {
    "four rounds": "four rounds of orthogonalising",
    "along the smaller side": "basis along the smaller side",
}
"""Marks in the names of runs, of what the rules of the package had then or were tried with."""
USUAL_NORMS = 2.5e-3
"""The learning rate of norms beside both Artemis, in the rows that do not mention it."""
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
        if inner["by"].startswith("artemis") and parts["rest"]["lr"] != USUAL_NORMS:
            matrices += f", norms {decimal(parts['rest']['lr'])}"
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


QUALITY_TABLES: dict[str, Callable[[], str]] = {
    "choice": choice,
    "overview": overview,
    "vocabulary 1m": vocabulary_on_1m,
    "longer": longer,
    "whole budget": whole_budget,
    "one by one": one_by_one,
    "quality 60m 1000": lambda: quality("60m", 1000),
    "quality 60m 500": lambda: quality("60m", 500),
    "quality 130m 500": lambda: quality("130m", 500),
    "quality 350m 300": lambda: quality("350m", 300),
}
"""By their names on the pages."""
