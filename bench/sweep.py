"""Perplexity of many methods and settings on one model, compiled once: runs begin with the same weights and batches.

    python bench/sweep.py --device cpu --model 1m --data python --runs bench/runs/smoke.json --steps 20 --batch 8 \\
        --validation-rows 64
    python bench/sweep.py --data TOKENS --runs bench/runs/paper-60m.json bench/runs/paper-130m.json \\
        --minutes 25 --out bench/results/quality-h200.csv

A file of runs says on what they run, and has runs by name: {"model": "60m", "steps": 1000, "runs": {NAME: RUN, ...}}.
Its "settings" are places to go through in turn: [{"model": "130m", "steps": 2000}, {"batch": 80}]. A run is a method of
`apollo pretrain` with its options, and "int8" where the weights are:

    {"method": "galore", "recipe": "paper", "lr": 5e-3, "int8": "layers"}

or a list of parts, which say what they step, by which rule, and with which options:

    {"on": "matrices", "by": "apollo", "lr": 5e-3, "rank": 128}        one of the package's optimizers
    {"on": "vocabulary", "by": "sketch", "lr": 2.5e-3, "normalize": "factored", "size": "rms"}

where "on" is matrices, embedding, head, vocabulary (both of them), vectors or rest (all that no other part steps). A
"defaults" beside the runs has options of every part by its rule; a run {"seed": 43, ...}, with "parts" in it where it
has some, has another seed than --seed. A row is appended to the CSV after each run; runs that it has already, on the
same model, as long and in batches as large, are not repeated. The model is compiled anew only where weights are int8
or have adapters. Should a run stand still, `kill -USR1 PID` prints where.
"""

import argparse
import faulthandler
import itertools
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.llama import PRESETS
from apollo_optim.memory import held_bytes
from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import Corpus, prepared_corpus, validation_text
from apollo_optim.train.data.shards import TokenSet
from apollo_optim.train.display import Progress
from apollo_optim.train.methods import METHODS, Method, prepared_method
from apollo_optim.train.metrics import model_bytes
from apollo_optim.train.model import Model, built_model, objective
from apollo_optim.train.schedule import Schedule
from machine import common_parser, facts, record_rows, recorded
from sketches import Sketch

SCHEDULE = Schedule(warmup=0.1, final_lr=0.1)
SETTING = {"model": "60m", "steps": 1000, "sequence": 256, "batch": 320, "seed": 42}
"""Defaults, if neither a file of runs nor the command sets them; "batch" is sequences of a step."""
CURVE = 10
"""How many perplexities a run records, with the last one."""
DIVERGED = 9.0
"""A run is given up if its loss is above this after a quarter of the steps."""
FAMILY = {
    "apollo": apollo_optim.APOLLO, "apollo-mini": apollo_optim.APOLLOMini, "fira": apollo_optim.Fira,
    "artemis": apollo_optim.Artemis, "artemis-mini": apollo_optim.ArtemisMini,
    "factored-adamw": apollo_optim.FactoredAdamW,
    "galore": apollo_optim.GaLore, "flora": apollo_optim.Flora, "structured-adamw": apollo_optim.StructuredAdamW,
}  # fmt: skip
SECOND_MOMENTS = {"adamw": "elementwise", "factored": "factored"}
"""Rules without a projection, and what they keep of the squared gradient."""
NOT_OPTIONS = {"on", "by"}

Part = dict[str, Any]


def weights_of(model: nn.Module) -> dict[str, list[Tensor]]:
    """The weights of a language model by what they are for."""
    ends = {"embedding": model.get_input_embeddings().weight, "head": model.get_output_embeddings().weight}
    inner = [weight for weight in model.parameters() if all(weight is not end for end in ends.values())]
    return {
        "matrices": [weight for weight in inner if weight.dim() == 2],
        "vectors": [weight for weight in inner if weight.dim() < 2],
        **{name: [weight] for name, weight in ends.items()},
    }


def parts_of(weights: dict[str, list[Tensor]], run: list[Part]) -> Iterator[tuple[Part, list[Tensor]]]:
    """Each part with what it steps; raises ValueError where a weight is stepped twice or never."""
    left = dict(weights)
    for part in run:
        names = {"vocabulary": ["embedding", "head"], "rest": list(left)}.get(part["on"], [part["on"]])
        if missing := [name for name in names if name not in left]:
            raise ValueError(f"{missing} is stepped by two parts, or is none of {[*weights, 'vocabulary', 'rest']}")
        yield part, [weight for name in names for weight in left.pop(name)]
    if left:
        raise ValueError(f"no part steps {list(left)}: give one that is on 'rest'")


def optimizers_of(weights: dict[str, list[Tensor]], run: list[Part]) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []
    for part, params in parts_of(weights, run):
        options = {name: value for name, value in part.items() if name not in NOT_OPTIONS}
        # Norms are not decayed, whoever steps them.
        kinds = [[p for p in params if p.dim() == 2], [p for p in params if p.dim() < 2]]
        groups = [{"params": kind, **({"weight_decay": 0.0} if kind[0].dim() < 2 else {})} for kind in kinds if kind]
        if part["by"] == "sketch":
            made.append(Sketch([{**options, **group} for group in groups]))
            continue
        options |= {"betas": tuple(options["betas"])} if "betas" in options else {}
        if part["by"] in SECOND_MOMENTS:
            unprojected = {"rank": None, "second_moment": SECOND_MOMENTS[part["by"]]}
            made.append(apollo_optim.APOLLO([{**options, **group, **unprojected} for group in groups], **options))
        else:
            rank = options.pop("rank", 1 if part["by"] == "apollo-mini" else 0.25)
            made.append(FAMILY[part["by"]]([{**group, "rank": rank} for group in groups], **options))
    return made


def method_of(run: dict[str, Any]) -> Method:
    """The method of a run, with its options."""
    options = {name: value for name, value in run.items() if name not in ("seed", "int8")}
    return Method(**options | ({"betas": tuple(options["betas"])} if "betas" in options else {}))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return optimizer.state_bytes() if isinstance(optimizer, Sketch) else held_bytes(optimizer)


@dataclass
class Trained:
    """The optimizers of a model, and what else its method does at a step."""

    optimizers: list[torch.optim.Optimizer]
    lr_factor: Callable[[int], float] = lambda step: 1.0
    """A factor on the schedule's learning rate, by the number of steps taken before."""
    after_step: Callable[[int], None] = lambda step: None


class Trial:
    """A compiled model with its tokens on the device, for one run after another."""

    def __init__(self, args: argparse.Namespace, setting: dict[str, Any], corpus: Corpus, c4: dict[str, TokenSet]):
        self.device, self.setting = args.device, setting
        self.vocabulary = PRESETS[setting["model"]].vocabulary
        corpus.check(setting["sequence"] + 1, self.vocabulary)
        self.train = self.rows(corpus.train)
        self.validation = self.all_rows(corpus.validation)[: args.validation_rows]
        self.c4 = self.all_rows(c4)[: args.validation_rows] if c4 else None
        self.compiled_for: Model | None = None

    def all_rows(self, sets: dict[str, TokenSet]) -> Tensor:
        return torch.cat([self.rows(tokens) for tokens in sets.values()])

    def rows(self, tokens: TokenSet) -> Tensor:
        """The tokens as sequences of one more than is trained on [rows, sequence + 1]."""
        whole = torch.cat([torch.from_numpy(shard[:].astype("int32")) for shard in tokens.shards])
        length = self.setting["sequence"] + 1
        return whole[: len(whole) // length * length].view(-1, length).to(self.device)

    def begin_(self, config: Model, seed: int, adapts: bool) -> None:
        """Give the model the first weights that this seed draws. It stays compiled where it is the same model."""
        fresh = built_model(config, self.vocabulary, self.device, seed)
        if config == self.compiled_for and not adapts:
            with torch.no_grad():
                for weight, first in zip(self.model.parameters(), fresh.parameters(), strict=True):
                    weight.copy_(first)
                    weight.grad = None
            return
        torch._dynamo.reset()  # it gives up on a function that it has compiled for eight models
        self.model, self.compiled_for = fresh, None if adapts else config
        self.loss_of = objective(config, fresh, self.device)

    def trained(self, run: dict[str, Any], seed: int) -> Trained:
        """The model with its first weights, and its optimizers."""
        adapts = "method" in run and METHODS[run["method"]].adapt is not None
        self.begin_(Model(model=self.setting["model"], int8=run.get("int8")), seed, adapts)
        if "parts" in run:
            return Trained(optimizers_of(weights_of(self.model), run["parts"]))
        prepared = prepared_method(method_of(run), self.model, self.setting["steps"], seed)
        return Trained([prepared.optimizer], prepared.lr_factor, prepared.after_step)

    def run(self, run: dict[str, Any], seed: int) -> dict[str, Any]:
        """Train from the beginning; returns the results."""
        steps, batch = self.setting["steps"], self.setting["batch"]
        trained = self.trained(run, seed)
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        losses: list[Tensor] = []
        curve: dict[int, float] = {}
        start = time.perf_counter()
        for step in range(steps):
            factor = SCHEDULE.lr_factor(step, steps) * trained.lr_factor(step)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            picked = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
            losses.append(self.loss(self.train[picked.to(self.device)]))
            losses[-1].backward()
            for optimizer in trained.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)
            losses[-1] = losses[-1].detach()
            trained.after_step(step + 1)
            if step == steps // 4 and not float(losses[-1]) < DIVERGED:
                break
            if (step + 1) % max(steps // CURVE, 1) == 0:
                curve[step + 1] = round(self.perplexity(self.validation), 3)
                print(f"  after {step + 1:,} steps: {curve[step + 1]}", flush=True)
        return {
            "perplexity": curve.get(len(losses)) or round(self.perplexity(self.validation), 3),
            "perplexity_c4": None if self.c4 is None else round(self.perplexity(self.c4), 3),
            "curve": " ".join(f"{step}:{value}" for step, value in curve.items()),
            "train_loss": round(float(torch.stack(losses[-20:]).float().mean()), 4),
            "highest_loss": round(float(torch.stack(losses[len(losses) // 20 :]).float().max()), 3),
            "ended_at": len(losses),
            "state_bytes": sum(map(state_bytes, trained.optimizers)),
            "weight_bytes": model_bytes(self.model, in_backward=False)["weight_bytes"],
            "seconds": round(time.perf_counter() - start, 1),
        }

    def loss(self, rows: Tensor) -> Tensor:
        rows = rows.long()
        return self.loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    @torch.no_grad()
    def perplexity(self, text: Tensor) -> float:
        """The perplexity of the text in whole batches, since another shape would be compiled anew."""
        batch = self.setting["batch"]
        self.model.eval()
        losses = [self.loss(rows) for rows in text[: max(len(text) // batch, 1) * batch].split(batch)]
        self.model.train()
        return math.exp(min(20.0, float(torch.stack(losses).float().mean())))


IDENTITY = "name", "model", "steps", "sequence", "batch_tokens", "seed"
"""Columns that identify a run that was made before."""


def described_runs(path: Path, args: argparse.Namespace) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The setting of each run of a file, with its name and seed, and the run itself; once where several are equal."""
    described = json.loads(path.read_text())
    given = {name: value for name in SETTING if (value := getattr(args, name)) is not None}
    shared = SETTING | {name: value for name, value in described.items() if name in SETTING}
    defaults = described.get("defaults", {})
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for place, (name, told) in itertools.product(described.get("settings", [{}]), described["runs"].items()):
        setting = shared | place | given
        run = dict(told) if isinstance(told, dict) else {"parts": told}
        if "parts" in run:
            run["parts"] = [{**defaults.get(part["by"], {}), **part} for part in run["parts"]]
        batch_tokens = setting["batch"] * setting["sequence"]
        each = {"name": name, "batch_tokens": batch_tokens, **setting, "seed": run.get("seed", setting["seed"])}, run
        if (args.only is None or name in args.only) and each not in found:
            found.append(each)
    return found


def main() -> int:
    parser = common_parser(__doc__)
    parser.add_argument("--data", required=True, help="as of apollo pretrain")
    parser.add_argument("--validation", help="likewise")
    parser.add_argument("--tokenizer", help="likewise")
    parser.add_argument("--c4", help="documents of C4, or their tokens, to validate on as well")
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--only", nargs="+", help="names of the runs to take; by default all")
    parser.add_argument("--model", choices=list(PRESETS), help="this and the next four: in place of what the file says")
    for name, what in (("steps", None), ("sequence", None), ("batch", "sequences of a step"), ("seed", None)):
        parser.add_argument(f"--{name}", type=int, help=what)
    parser.add_argument("--validation-rows", type=int, help="sequences to validate on; by default all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end after this many")
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    begun = time.perf_counter()
    planned = [each for path in args.runs for each in described_runs(path, args)]
    done = {tuple(row[name] for name in IDENTITY) for row in recorded(args.out)} if args.out else set()
    left = [each for each in planned if tuple(str(each[0][name]) for name in IDENTITY) not in done]
    print(f"{len(planned)} runs, {len(planned) - len(left)} of them made before", flush=True)
    tokenizer = {} if args.tokenizer is None else {"tokenizer": args.tokenizer}
    vocabulary = max(PRESETS[place["model"]].vocabulary for place, _ in planned)
    data = Data(data=args.data, validation=args.validation, vocabulary=vocabulary, **tokenizer)
    corpus = prepared_corpus(data, report=Progress(print))
    c4 = validation_text(Data(data=args.c4), corpus.tokenizer, report=Progress(print)) if args.c4 else {}
    trial, failed = None, 0
    expected = 0.0  # the seconds of the run before, whatever its setting was; the first of a setting also compiles
    for place, run in left:
        setting = {name: value for name, value in place.items() if name not in ("name", "batch_tokens", "seed")}
        if trial is None or trial.setting != setting:
            trial = Trial(args, setting, corpus, c4)
        if time.perf_counter() - begun + expected > 60 * args.minutes:
            print(f"no time left for {place['name']}", flush=True)
            continue
        started = time.perf_counter()
        try:
            result = trial.run(run, place["seed"])
        except Exception:  # the others are made nonetheless
            traceback.print_exc()
            print(f"{place['name']} failed", flush=True)
            trial, failed = None, failed + 1
            continue
        expected = time.perf_counter() - started
        print(f"{place['name']:40} {result}", flush=True)
        row = {name: place[name] for name in IDENTITY} | {"parts": json.dumps(run.get("parts", run))}
        row |= result | facts(args.device)
        record_rows(args.out, [row])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
