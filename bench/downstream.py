r"""The paper's three downstream tables for one model: trained by every method, and scored.

    python bench/downstream.py commonsense --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --work runs/commonsense \
        --every 10 --epochs 1 --questions 400 --out bench/results/commonsense-h200.csv
    python bench/downstream.py mmlu --model SmolLM2-135M-Instruct.Q4_1.gguf --data DATA --work runs/mmlu \
        --warmup 15 --questions 50 --rates 0 --out bench/results/mmlu-h200.csv
    python bench/downstream.py zeroshot --model 60m --tokens TOKENS --data DATA --work runs/zeroshot --steps 1000 \
        --out bench/results/zeroshot-h200.csv

A run is `apollo finetune` (of the zero-shot table: `apollo pretrain`) and `apollo eval`, each a process of its own,
`--jobs` runs at a time. Every method has its first learning rate before any has its second; then the best of each, by
validation loss, gets the other seeds; then the methods of --written write their answers, too. A run is a row of the
CSV, appended when it ends. Rows that are there are not repeated, and none is begun that would end after --minutes.

DATA has commonsense/train and commonsense/test, mmlu/{validation,dev,test}, or zeroshot, as `apollo eval` reads them.
"""

import argparse
import json
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apollo_optim.evaluation.documents import documents, found_file
from apollo_optim.evaluation.tasks import mmlu_question
from costs import decimal, table
from machine import Row, common_parser, facts, record_rows, recorded

PROJECTED, ADAMW, ARTEMIS = ("3e-4", "1e-3", "1e-4"), ("5e-5", "1.5e-4", "2e-5"), ("1e-4", "3e-4", "3e-5")
"""Learning rates, the paper's first, then three times, then a third; Artemis is not the paper's."""
MMLU_RATES = "5e-5", "2e-4", "1e-5"
"""Three of the paper's nine learning rates: the middle, the highest, and a low one."""
METHODS = ("adamw", "lora", "dora", "galore", "fira", "apollo-svd", "apollo", "apollo-mini", "artemis")
TUNED = (*METHODS, "apollo-mini-int8")
ZERO_SHOT_METHODS = "adamw", "apollo", "apollo-mini", "artemis"
BEFORE = "before"
"""A row of the model as it came."""
SWEEP = "sweep"
"""In place of a learning rate: all of the recipe's are tried, and the best by validation loss is scored."""


@dataclass(frozen=True)
class Run:
    """A row of a table."""

    method: str
    lr: str = ""
    seed: int = 0
    train: tuple[str, ...] = ()
    """Arguments of `apollo`; empty if nothing is trained."""
    by: str = "likelihood"

    @property
    def key(self) -> dict[str, str]:
        return {"method": self.method, "lr": self.lr, "seed": str(self.seed), "by": self.by}

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.method, self.lr, f"seed{self.seed}") if part)


@dataclass
class Table:
    """Makes the runs of one of the tables."""

    args: argparse.Namespace
    lock: threading.Lock = field(default_factory=threading.Lock)
    began: float = field(default_factory=time.perf_counter)
    longest: float = 0.0

    def setting(self) -> dict[str, str]:
        """What the rows of one table have in common."""
        args = self.args
        return {
            "table": args.table,
            "model": Path(args.model).name,
            "every": str(args.every),
            "steps": str(args.steps or f"{args.epochs:g} epochs"),
            "questions": str(args.questions),
        }

    def first_runs(self) -> Iterator[Run]:
        """Every method at each of its learning rates, with the first seed."""
        args = self.args
        if args.table == "zeroshot":
            for method in args.methods or ZERO_SHOT_METHODS:
                tokenizer = ("--tokenizer", args.tokenizer) if args.tokenizer else ()
                length = ("--steps", str(args.steps), "--data", str(args.tokens), *tokenizer, *args.options)
                yield Run(method, train=("pretrain", "--method", method, *length))
            return
        for number in range(args.rates or 1):
            for method in args.methods or (BEFORE, *TUNED, "adamw-full"):
                if method == BEFORE:
                    if not number:
                        yield Run(BEFORE)
                    continue
                rates = {"adamw": ADAMW, "adamw-full": ADAMW, "artemis": ARTEMIS}.get(method, PROJECTED)
                rates = MMLU_RATES if args.table == "mmlu" else rates
                lr = rates[number] if args.rates else SWEEP
                yield Run(method, lr, train=self._finetune(method, lr))

    def _finetune(self, method: str, lr: str) -> tuple[str, ...]:
        args = self.args
        length = ("--steps", str(args.steps)) if args.steps else ("--epochs", f"{args.epochs:g}")
        warmup = () if args.warmup is None else ("--warmup", str(args.warmup))
        prompt = ("--prompt", "plain") if args.table == "mmlu" else ()
        recipe = ("--recipe", args.table, "--data", str(args.work / "train.jsonl"), "--cache", str(args.work / "cache"))
        rates = () if lr == SWEEP else ("--lr", lr)
        return ("finetune", *of_method(method), *rates, *recipe, *length, *warmup, *prompt, *args.options)

    def later_runs(self) -> Iterator[Run]:
        """The best learning rate of each method with the other seeds, and with written answers."""
        first = {(row["method"], row["lr"]): row for row in self.known() if row["seed"] == "0" and row["lr"]}
        best: dict[str, str] = {}
        for (method, lr), row in first.items():
            known = first.get((method, best.get(method, "")))
            if known is None or float(row["validation_loss"]) < float(known["validation_loss"]):
                best[method] = lr
        for seed in range(1, self.args.seeds):
            for method in self.args.methods or best:
                if lr := best.get(method):
                    yield Run(method, lr, seed, self._finetune(method, lr))
        for method in self.args.written:
            if method in best or method == BEFORE:
                yield Run(method, best.get(method, ""), by="generation")

    def known(self) -> list[Row]:
        """The rows of this setting that are in the file."""
        return [
            row
            for row in recorded(self.args.out)
            if all(str(row.get(name)) == value for name, value in self.setting().items())
        ]

    def make(self, runs: Iterator[Run]) -> None:
        """Make the runs that are not in the file yet, as long as there is time."""
        done = [{name: str(row[name]) for name in Run("").key} for row in self.known()]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            for _ in pool.map(self._made, [run for run in runs if run.key not in done]):
                pass

    def _made(self, run: Run) -> None:
        started = time.perf_counter()
        if started - self.began + self.longest > 60 * self.args.minutes:
            print(f"{run.name}: no time left", flush=True)
            return
        folder = self.args.work / run.name
        log = self.args.work / f"{run.name}.log"
        target, result = self.args.model, dict[str, Any]()
        if run.train:
            place = ("--model", self.args.model, "--out", str(folder), "--seed", str(run.seed))
            said = self._apollo(log, *run.train, *place, "--auto-resume", "--quiet", "--keep", "1")
            if said is None:
                return
        if run.train or (run.by == "generation" and run.method != BEFORE):
            target, result = str(folder), trained_result(folder)
        asked = ("--tasks", self.args.table, "--task-data", str(self.args.data))
        asked += ("--limit", str(self.args.questions)) if self.args.questions else ()
        asked += ("--by", run.by) if self.args.table == "commonsense" else ()
        found = self._apollo(log, "eval", target, *asked, "--json", "--out", str(self.args.work / f"{run.name}-eval"))
        if found is None:
            return
        for each in folder.glob("**/checkpoints"):
            shutil.rmtree(each)
        seconds = time.perf_counter() - started
        row = {**self.setting(), **run.key, **scores(json.loads(found)), **training(result), "jobs": self.args.jobs}
        with self.lock:
            self.longest = max(self.longest, seconds)
            record_rows(self.args.out, [row | {"all_seconds": round(seconds, 1)} | facts(self.args.device)])
        print(
            f"{run.name}, by {run.by}: average {row['average']} ± {row['average_stderr']}, {seconds:.0f} s", flush=True
        )

    def _apollo(self, log: Path, *arguments: str) -> str | None:
        """What the command prints; None if it fails, of which a line is printed."""
        command = [sys.executable, "-m", "apollo_optim", *arguments, "--device", self.args.device]
        with log.open("a") as errors:
            errors.write(f"$ {' '.join(command)}\n")
            errors.flush()
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            errors.write(ran.stdout)
        if ran.returncode:
            last = log.read_text().strip().rpartition("\n")[2]
            print(f"{' '.join(arguments[:4])} failed with {ran.returncode}: {last} (see {log})", flush=True)
            return None
        return ran.stdout


def of_method(name: str) -> tuple[str, ...]:
    """Options of `apollo finetune` for a row's method."""
    return {
        "apollo-mini-int8": ("--method", "apollo-mini", "--int8", "layers"),
        "adamw-full": ("--method", "adamw", "--targets", "all", "--others", "adamw"),
    }.get(name, ("--method", name))


def shown(rows: list[Row]) -> str:
    """A Markdown table of each method at its best learning rate by validation loss, with all seeds."""
    best: dict[str, Row] = {}
    for row in rows:
        known = best.get(row["method"])
        if known is None or float(row["validation_loss"] or 0) < float(known["validation_loss"] or 0):
            best[row["method"]] = row
    kept = [row for row in rows if row["lr"] == best[row["method"]]["lr"]]
    first, last = list(rows[0]).index("by") + 1, list(rows[0]).index("average")
    sets = [name for name in list(rows[0])[first:last] if not name.endswith("_norm")]
    names = ["method", "lr", "seed", "by", *sets, "average", "state MB", "peak GiB"]
    cells = []
    for row in kept:
        state = f"{int(row['state_bytes']) / 1e6:.1f}" if row["state_bytes"] else ""
        peak = f"{int(row['peak_bytes']) / 2**30:.2f}" if row["peak_bytes"] else ""
        average = f"{row['average']} ± {row['average_stderr']}"
        cells.append([*(row[name] for name in ("method", "lr", "seed", "by", *sets)), average, state, peak])
    return table(names, cells)


def trained_result(folder: Path) -> dict[str, Any]:
    """The result of a training; of several learning rates that of the best, with the validation losses of all."""
    if not (folder / "sweep.json").exists():
        return json.loads((folder / "run.json").read_text())["result"]
    swept = json.loads((folder / "sweep.json").read_text())
    (best,) = (run for run in swept["runs"] if run["lr"] == swept["best"])
    losses = [f"{decimal(run['lr'])}:{run.get('validation_loss', math.inf):.4f}" for run in swept["runs"]]
    return best | {"best_lr": decimal(swept["best"]), "losses": " ".join(losses)}


def percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


def scores(found: dict[str, Any]) -> Row:
    """Accuracies in percent: by task, or by category of MMLU, and their average with its standard error."""
    if "mmlu" in found["tasks"]:
        whole = found["tasks"]["mmlu"]
        parts, average = whole["parts"], whole
    else:
        parts = {name.removeprefix("commonsense_"): each for name, each in found["tasks"].items()}
        (average,) = found["averages"].values()
    row: Row = {name: percent(each["acc"]) for name, each in parts.items()}
    row |= {f"{name}_norm": percent(each["acc_norm"]) for name, each in parts.items() if "acc_norm" in each}
    row |= {"average": percent(average["acc"]), "average_stderr": percent(average["acc_stderr"])}
    row |= {"average_norm": percent(average["acc_norm"])} if "acc_norm" in average else {}
    return row | {"asked": average["items"], "unanswered": sum(each.get("unanswered", 0) for each in parts.values())}


def training(result: dict[str, Any]) -> Row:
    """The cost of a run, and its losses."""
    names = {"steps": "trained_steps", "validation_loss": "validation_loss", "training_loss": "training_loss",
             "state_bytes": "state_bytes", "memory": "peak_bytes", "seconds": "train_seconds",
             "tokens_per_second": "tokens_per_s", "best_lr": "best_lr", "losses": "losses"}  # fmt: skip
    return {column: result.get(name, "") for name, column in names.items()}


def write_examples(args: argparse.Namespace) -> None:
    """Write the examples to learn, every so many-th of the set, as `apollo finetune` reads them."""
    path = args.work / "train.jsonl"
    if args.table == "zeroshot" or path.exists():
        return
    if args.table == "mmlu":
        docs = documents(found_file(["mmlu/validation", "validation"], "mmlu", args.data))
        asked = [mmlu_question(doc, {}, 0) for doc in docs]
        pairs = [each.requests[each.answer] for each in asked]
        records = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    else:
        records = documents(found_file(["commonsense/train", "train"], "commonsense", args.data))
    path.write_text("".join(json.dumps(record) + "\n" for record in records[:: args.every]))


def main() -> None:
    parser = common_parser(__doc__, required=True)
    parser.add_argument("table", choices=("commonsense", "mmlu", "zeroshot"))
    parser.add_argument("--model", required=True, help="as of apollo finetune; of the zero-shot table, of pretrain")
    parser.add_argument("--data", type=Path, required=True, help="folder of training examples and questions")
    parser.add_argument("--tokens", help="zeroshot: --data of apollo pretrain")
    parser.add_argument("--tokenizer", help="zeroshot: likewise")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--every", type=int, default=1, help="learn every so many-th example")
    parser.add_argument("--epochs", type=float, default=3.0, help="in place of --steps")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warmup", type=int, help="steps; by default the recipe's")
    parser.add_argument("--questions", type=int, default=0, help="of each set, or subject of MMLU; 0 for all")
    parser.add_argument("--methods", nargs="+", help="by default all of the table")
    parser.add_argument(
        "--rates",
        type=int,
        default=2,
        choices=(0, 1, 2, 3),
        help="learning rates of each method; 0: those of the recipe, of which the best is scored",
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each method at its best learning rate")
    parser.add_argument("--written", nargs="*", default=[], help="methods whose answers are written, too")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time: their seconds are those of a shared device"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument(
        "--options", type=shlex.split, default=[], help='of every training: --options="--compile false"'
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    write_examples(args)
    wanted = Table(args)
    wanted.make(wanted.first_runs())
    if args.table != "zeroshot":
        wanted.make(wanted.later_runs())
    if known := wanted.known():
        print(shown(known), end="")


if __name__ == "__main__":
    main()
