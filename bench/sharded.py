"""The overhead of FSDP2 in the optimizer's step, and what it saves: a LLaMA sharded over all ranks, and whole on each.

    python bench/sharded.py --device cpu --model 60m --repeats 3
    python bench/sharded.py --out bench/results/sharded-h200.csv
    torchrun --nproc-per-node 4 bench/sharded.py --device cpu --model 60m --methods artemis --kept "bf16 weights"

The step is timed by itself, with gradients of the size that training has, and so is the host's part of it, with an idle
device: where that is longer, it is the step's time. Both are first checked to step to the same weights, bit for bit on
one rank, and else to rounding.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import apollo_optim
from apollo_optim.distributed import split_as
from apollo_optim.evidence.timing import free_memory, summary, times_ms
from apollo_optim.llama import PRESETS
from apollo_optim.quant import Int8Weight
from apollo_optim.train.model import Model, built_model
from machine import common_parser, facts, record_rows

LR, CHECKED_STEPS = 1e-3, 3
METHODS = "apollo-mini", "apollo", "artemis"
KEPT: dict[str, dict[str, Any]] = {
    "bf16 weights": {},
    "8-bit state": {"state_dtype": torch.int8},
    "int8 weights": {},
}
"""How weights and state are kept, with options of the optimizer."""


def trained(
    model_name: str, method: str, kept: str, sharded: bool, device: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a few steps, with the gradients of the last."""
    vocabulary = PRESETS[model_name].vocabulary
    int8 = "all" if kept == "int8 weights" else None
    model: nn.Module = built_model(Model(model=model_name, dtype="bf16", int8=int8), vocabulary, device, seed=0)
    if sharded:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.model.layers:  # pyrefly: ignore[missing-attribute, not-iterable] (a LLaMA's)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    rank = PRESETS[model_name].hidden // 4
    options = {"lr": LR, **KEPT[kept]}
    optimizer = {
        "apollo-mini": lambda: apollo_optim.APOLLOMini(model, **options),
        "apollo": lambda: apollo_optim.APOLLO(model, rank=rank, **options),
        "artemis": lambda: apollo_optim.Artemis(model, **options),
    }[method]()
    for step in range(CHECKED_STEPS):
        torch.manual_seed(step)
        for weight in model.parameters():
            weight.grad = gradient_like(weight)
        optimizer.step()
    return model, optimizer


def gradient_like(weight: Tensor) -> Tensor:
    """Random numbers, the same on every rank, placed as the weight is."""
    return split_as(weight, torch.randn(weight.shape, dtype=weight.dtype, device=weight.device) * 1e-4)


@torch.no_grad()
def weights(model: nn.Module) -> list[Tensor]:
    """All numbers of a model, on the host; those of int8 weights as they read."""
    held = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    wide = [weight.dequantize() if isinstance(weight, Int8Weight) else weight for weight in held]
    return [weight.detach().cpu() for weight in wide]


def host_ms(optimizer: torch.optim.Optimizer, device: str, repeats: int) -> float:
    """The median time until a step returns, with nothing queued before it."""
    measured = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        measured.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(measured), 3)


def measure(method: str, kept: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ends = []
    for sharded in (False, True):
        model, optimizer = trained(args.model, method, kept, sharded, args.device)
        ends.append([weight.clone() for weight in weights(model)])
        timed = summary(times_ms(optimizer.step, args.device, args.warmup, args.repeats))
        ranks = dist.get_world_size() if sharded else 1
        row = {"model": args.model, "method": method, "kept": kept, "sharded": sharded, "ranks": ranks, **timed}
        row["host_ms"] = host_ms(optimizer, args.device, args.repeats)
        row["vs_whole"] = round(timed["median_ms"] / (rows or [row])[0]["median_ms"], 3)
        rows.append(row | facts(args.device))
        del model, optimizer
        free_memory(args.device)
    for whole, part in zip(*ends, strict=True):
        # Of sums in another order a bf16 weight may be rounded to the next one, in each step.
        apart = 0.0 if dist.get_world_size() == 1 else 2.0**-7 * CHECKED_STEPS
        assert torch.allclose(whole, part, rtol=apart, atol=LR * apart), f"{method}, {kept}: the sharded weights differ"
    return rows


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--model", default="1b", choices=list(PRESETS))
    parser.add_argument("--methods", nargs="+", default=METHODS[:2], choices=METHODS)
    parser.add_argument("--kept", nargs="+", default=list(KEPT), choices=list(KEPT))
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    backend = "nccl" if args.device == "cuda" else "gloo"
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group(backend)
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = [row for method in args.methods for kept in args.kept for row in measure(method, kept, args)]
    for row in rows if dist.get_rank() == 0 else []:
        placed, named = (
            f"FSDP2, ranks: {row['ranks']}" if row["sharded"] else "whole",
            f"{row['method']}, {row['kept']}",
        )
        took = f"{row['median_ms']:9.3f} ms  {row['vs_whole']:.3f} x  host {row['host_ms']:.2f} ms"
        print(f"{row['model']} {named:26} {placed:16} {took}")
    record_rows(args.out if dist.get_rank() == 0 else None, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
