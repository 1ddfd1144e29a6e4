"""Perplexity of many settings on one model, compiled once: every run begins with the same weights and batches.

    python bench/sweep.py --device cpu --model 1m --data python --runs bench/runs/smoke.json --steps 20 --batch 8 \\
        --validation-rows 64
    python bench/sweep.py --data TOKENS --validation TOKENS --runs bench/runs/quality-60m.json --steps 1000 \\
        --out bench/results/quality-h200.csv

The file of runs is {name: [PART, ...]}. A part says what it steps, by which rule, and with which options:

    {"on": "matrices", "by": "apollo", "lr": 5e-3, "rank": 128}        one of the package's optimizers
    {"on": "vocabulary", "by": "sketch", "lr": 2.5e-3, "normalize": "factored", "size": "rms"}

where "on" is matrices, embedding, head, vocabulary (both of them), vectors or rest (all that no other part steps). A
"defaults" beside the runs has options of every part by its rule; a run {"seed": 43, "parts": [...]} has another seed
than 42. Rows are appended to the CSV; runs that it has already, of as many steps, are not repeated.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.llama import PRESETS
from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import prepared_corpus
from apollo_optim.train.data.shards import TokenSet
from apollo_optim.train.model import Model, built_model, objective
from apollo_optim.train.schedule import lr_factor
from machine import facts, record_rows, recorded
from sketches import Sketch

WARMUP, FINAL_LR, SEED = 0.1, 0.1, 42
DIVERGED = 9.0
"""A loss, a quarter into the run, that is not worth going on with."""
FAMILY = {
    "apollo": apollo_optim.APOLLO, "apollo-mini": apollo_optim.APOLLOMini, "fira": apollo_optim.Fira,
    "artemis": apollo_optim.Artemis, "artemis-mini": apollo_optim.ArtemisMini,
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


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    if isinstance(optimizer, Sketch):
        return optimizer.state_bytes()
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Trial:
    """A compiled model with its tokens on the device, for one run after another."""

    def __init__(self, args: argparse.Namespace):
        self.device, self.batch = args.device, args.batch
        self.config, self.vocabulary = Model(model=args.model), PRESETS[args.model].vocabulary
        tokenizer = {} if args.tokenizer is None else {"tokenizer": args.tokenizer}
        data = Data(data=args.data, validation=args.validation, vocabulary=self.vocabulary, **tokenizer)
        corpus = prepared_corpus(data, report=print)
        corpus.check(args.sequence + 1, self.vocabulary)
        self.train = self.rows(corpus.train, args.sequence)
        held_out = torch.cat([self.rows(tokens, args.sequence) for tokens in corpus.validation.values()])
        self.validation = held_out[: args.validation_rows]
        self.model = built_model(self.config, self.vocabulary, self.device, SEED)
        self.loss_of = objective(self.config, self.model, self.device)

    def rows(self, tokens: TokenSet, sequence: int) -> Tensor:
        """The tokens as sequences of one more than is trained on [rows, sequence + 1]."""
        whole = torch.cat([torch.from_numpy(shard[:].astype("int32")) for shard in tokens.shards])
        length = sequence + 1
        return whole[: len(whole) // length * length].view(-1, length).to(self.device)

    def begin_(self, seed: int) -> None:
        """Give the model the first weights that this seed draws."""
        fresh = built_model(self.config, self.vocabulary, self.device, seed)
        for weight, first in zip(self.model.parameters(), fresh.parameters(), strict=True):
            weight.data.copy_(first.data)
            weight.grad = None

    def run(self, parts: list[Part], steps: int, seed: int) -> dict[str, Any]:
        """Train from the beginning; what came out of it."""
        self.begin_(seed)
        optimizers = optimizers_of(weights_of(self.model), parts)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        losses: list[Tensor] = []
        start = time.perf_counter()
        for step in range(steps):
            factor = lr_factor(step, steps, WARMUP, FINAL_LR)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * factor
            picked = order[torch.arange(step * self.batch, (step + 1) * self.batch) % len(order)]
            losses.append(self.loss(self.train[picked.to(self.device)]))
            losses[-1].backward()
            for optimizer in optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)
            losses[-1] = losses[-1].detach()
            if step == steps // 4 and not float(losses[-1]) < DIVERGED:
                break
        perplexity = self.perplexity()
        return {
            "perplexity": round(perplexity, 3),
            "train_loss": round(float(torch.stack(losses[-20:]).float().mean()), 4),
            "highest_loss": round(float(torch.stack(losses[len(losses) // 20 :]).float().max()), 3),
            "ended_at": len(losses),
            "state_bytes": sum(map(state_bytes, optimizers)),
            "seconds": round(time.perf_counter() - start, 1),
        }

    def loss(self, rows: Tensor) -> Tensor:
        rows = rows.long()
        return self.loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    @torch.no_grad()
    def perplexity(self) -> float:
        """Over the validation text in whole batches: another shape would be compiled anew."""
        count = max(len(self.validation) // self.batch, 1) * self.batch
        losses = [self.loss(rows) for rows in self.validation[:count].split(self.batch)]
        return math.exp(min(20.0, float(torch.stack(losses).float().mean())))


def finished(path: Path | None, steps: int) -> set[str]:
    """Names of the runs of so many steps that the file has."""
    return set() if path is None else {row["name"] for row in recorded(path) if int(row["steps"]) == steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="60m", choices=list(PRESETS))
    parser.add_argument("--data", required=True, help="as of apollo pretrain")
    parser.add_argument("--validation", help="likewise")
    parser.add_argument("--tokenizer", help="likewise")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of the runs to take, in this order; by default all")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=320, help="sequences of a step")
    parser.add_argument("--validation-rows", type=int, help="sequences to validate on; by default all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run that would end after this many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.perf_counter()
    described = json.loads(args.runs.read_text())
    defaults, runs = described.get("defaults", {}), described["runs"]
    done = finished(args.out, args.steps)
    trial = Trial(args)
    longest = 0.0
    rows: list[dict[str, Any]] = []
    for name in args.only or runs:
        if name in done:
            continue
        if time.perf_counter() - begun + longest > args.seconds:
            print(f"no time left for {name}", flush=True)
            continue
        run = runs[name] if isinstance(runs[name], dict) else {"parts": runs[name]}
        parts = [{**defaults.get(part["by"], {}), **part} for part in run["parts"]]
        started = time.perf_counter()
        result = trial.run(parts, args.steps, run.get("seed", SEED))
        longest = max(longest, time.perf_counter() - started)
        print(f"{name:40} {result}", flush=True)
        if args.out:
            setting = {"name": name, "model": args.model, "steps": args.steps, "sequence": args.sequence}
            setting |= {"batch_tokens": args.batch * args.sequence, "seed": run.get("seed", SEED)}
            setting |= {"parts": json.dumps(parts)}
            rows.append(setting | result | facts(args.device))
            record_rows(args.out, rows)


if __name__ == "__main__":
    main()
