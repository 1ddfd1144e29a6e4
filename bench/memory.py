"""Peak memory of training large LLaMA models on one GPU, by what it is for.

    python bench/memory.py --data corpus/*.jsonl.zst --tokenizer t5 --out bench/results/memory-h200.csv
    python bench/memory.py --runs 7b-int8-mini --steps 20

Each run trains in a process of its own from random weights on real text, one sequence of 256 tokens a step, and fails
unless its loss falls. Peaks are of `torch.cuda.max_memory_allocated`, the building of the model included.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.quant import Int8Weight
from apollo_optim.train.data import Batches, Data, prepared_corpus
from apollo_optim.train.losses import Objective
from apollo_optim.train.model import Model, built_model
from machine import facts, write_rows

SEQUENCE, LR, EDGE = 256, 1e-3, 20
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """One run of the table."""

    model: str
    method: str = "apollo-mini"
    int8: bool = False
    in_backward: bool = False
    ddp: bool = False
    limit_gib: float | None = None
    """What the peak must stay below."""


RUNS = {
    "7b-int8-mini": Setting("7b", int8=True, in_backward=True, limit_gib=8.0),
    "7b-bf16-mini": Setting("7b", in_backward=True, limit_gib=15.5),
    "13b-int8-mini": Setting("13b", int8=True, in_backward=True, limit_gib=15.0),
    "13b-bf16-mini-ordinary": Setting("13b", limit_gib=60.0),
    "13b-bf16-mini-ddp": Setting("13b", ddp=True, limit_gib=60.0),
    "7b-bf16-adamw-ordinary": Setting("7b", method="adamw"),
}


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.method == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    # What is left is the vocabulary's: a first moment of 8 bits a number, and a second one a row.
    moments, state_dtype = ("rowwise", torch.int8) if setting.int8 else ("elementwise", torch.float32)
    groups = apollo_optim.param_groups(model, rank=1, adamw_second_moment=moments)
    return apollo_optim.APOLLOMini(groups, lr=LR, state_dtype=state_dtype)


def stored(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the parts it is made of."""
    parts = [tensor.codes, tensor.scale] if isinstance(tensor, Int8Weight) else [tensor]
    return sum(part.numel() * part.element_size() for part in parts)


class Peaks:
    """Memory of one training run, split by what it is for."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.activations = 0

    def after_forward(self, before: int) -> None:
        self.activations = max(self.activations, torch.cuda.memory_allocated() - before)

    def by_kind(self, in_backward: bool) -> dict[str, int]:
        weights = list(self.model.parameters())
        full = [weight.numel() * weight.element_size() for weight in weights]
        found = {
            "weights": sum(map(stored, weights)),
            "state": sum(
                value.numel() * value.element_size()
                for entries in self.optimizer.state.values()
                for value in entries.values()
                if isinstance(value, Tensor)
            ),
            "gradients": max(full) if in_backward else sum(full),
            "activations": self.activations,
        }
        peak = torch.cuda.max_memory_allocated()
        return {"peak": peak, **found, "rest": max(0, peak - sum(found.values()))}


def trained(setting: Setting, rows: Callable[[int], Tensor], steps: int) -> dict[str, Any]:
    """Losses, memory and time of a run."""
    started = time.perf_counter()
    config = Model(
        model=setting.model, dtype="bf16", int8="all" if setting.int8 else None, activation_checkpointing=True
    )
    model = built_model(config, 32000, "cuda", seed=0)
    objective: nn.Module = Objective(model, "chunked")
    optimizer = optimizer_of(setting, model)
    if setting.in_backward:
        apollo_optim.step_in_backward(model, optimizer)
    if setting.ddp:
        torch.distributed.init_process_group("nccl", init_method="tcp://localhost:29517", rank=0, world_size=1)
        objective = nn.parallel.DistributedDataParallel(objective, device_ids=[0], gradient_as_bucket_view=True)
    built, peaks, losses = time.perf_counter() - started, Peaks(model, optimizer), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / EDGE)
        tokens = rows(step).cuda(non_blocking=True)
        before = torch.cuda.memory_allocated()
        loss = objective(tokens[:, :-1], tokens[:, 1:])
        peaks.after_forward(before)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    seconds = time.perf_counter() - started - built
    return {
        **peaks.by_kind(setting.in_backward),
        "process": process_bytes(),
        "loss_first": sum(values[:EDGE]) / EDGE,
        "loss_last": sum(values[-EDGE:]) / EDGE,
        "build_s": built,
        "ms_per_step": 1e3 * seconds / steps,
    }


def process_bytes() -> int:
    """What the driver counts for this process: the allocator's reserve and the context."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A run in this process."""
    data = Data(data=args.data, tokenizer=args.tokenizer, cache=args.cache)
    corpus = prepared_corpus(data, tokens_wanted=args.steps * (SEQUENCE + 1))
    batches = Batches(corpus.train, SEQUENCE + 1, seed=0)
    return trained(RUNS[name], lambda step: batches.rows(step, 1), args.steps)


def shown(name: str, result: dict[str, Any]) -> None:
    kinds = "  ".join(f"{kind} {result[kind] / GIB:.2f}" for kind in ("weights", "state", "gradients", "activations"))
    print(
        f"{name:24} peak {result['peak'] / GIB:6.2f} GiB ({kinds}, rest {result['rest'] / GIB:.2f}; process "
        f"{result['process'] / GIB:.2f})  loss {result['loss_first']:.2f} to {result['loss_last']:.2f}  "
        f"{result['ms_per_step']:.0f} ms a step",
        flush=True,
    )


def check(name: str, result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    limit, wrong = RUNS[name].limit_gib, []
    if limit is not None and result["peak"] > limit * GIB:
        wrong.append(f"{name}: a peak of {result['peak'] / GIB:.2f} GiB, above {limit}")
    if not result["loss_last"] < result["loss_first"] - 0.5:
        wrong.append(f"{name}: the loss went from {result['loss_first']:.2f} to {result['loss_last']:.2f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--data", default="python", help="as in apollo pretrain")
    parser.add_argument("--tokenizer")
    parser.add_argument("--cache", type=Path, default=Data().cache)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="train in this process and print JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(one(args.runs[0], args)))
        return 0
    rows, wrong = [], []
    for name in args.runs:
        given = [argument for argument in sys.argv[1:] if argument not in args.runs and argument != "--runs"]
        command = [sys.executable, __file__, *given, "--runs", name, "--here"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(ran.stdout.splitlines()[-1])
        shown(name, result)
        wrong += check(name, result)
        rows.append({"run": name, **vars(RUNS[name]), **result, **facts("cuda")})
    if args.out:
        write_rows(args.out, rows)
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
