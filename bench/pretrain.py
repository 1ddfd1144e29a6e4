"""Where the time of a training step goes: tokens per second, MFU, and what the device was busy with.

    python bench/pretrain.py --device cpu --models 1m --micro-batch 4 --repeats 2
    python bench/pretrain.py --models 60m 350m 1b --micro-batch 512 128 64 --out bench/results/pretrain-h200.csv

Model, loss and optimizer are made as `apollo pretrain` makes them, and one micro-batch of random tokens is a batch.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import apollo_optim
from apollo_optim.llama import PRESETS
from apollo_optim.train.metrics import flops_per_token, peak_flops
from apollo_optim.train.model import Model, built_model, objective
from machine import facts, record_rows, summary, times_ms

SEQUENCE, LR, PROFILED = 256, 1e-3, 3
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq"),
    "optimizer": ("project_kernel", "apply_kernel", "adamw_kernel", "finite_kernel", "normals_kernel", "reduce_rows",
                  "reduce_columns", "combine_kernel", "decide_kernel", "prepare_kernel", "pad_kernel", "stored_kernel"),
    "loss": ("softmax_loss",),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "addmm"),
}  # fmt: skip
"""Parts of kernels' names, by what they are for; all others are elementwise."""


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "elementwise")


def device_ms(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds that the device takes for a step, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    taken = dict.fromkeys((*KINDS, "elementwise"), 0.0)
    for event in found.key_averages():
        taken[kind_of(event.key)] += event.self_device_time_total / 1e3 / PROFILED
    return {kind: round(ms, 3) for kind, ms in taken.items()}


def measure(name: str, micro_batch: int, args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    config, vocabulary = Model(model=name), PRESETS[name].vocabulary
    model = built_model(config, vocabulary, args.device, seed=0)
    if args.masked:
        model.set_attn_implementation("sdpa")
    loss_of = objective(config, model, args.device)
    groups = apollo_optim.param_groups(model, rank=PRESETS[name].hidden // 4)
    optimizer = apollo_optim.APOLLO(groups, lr=LR)
    tokens = torch.randint(vocabulary, (micro_batch, SEQUENCE + 1), device=args.device)

    def step() -> None:
        loss_of(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timed = summary(times_ms(step, args.device, args.warmup, args.repeats))
    speed = 1e3 * micro_batch * SEQUENCE / timed["median_ms"]
    row = {"model": name, "micro_batch": micro_batch, "sequence": SEQUENCE, "masked": args.masked}
    row |= timed | {"tokens_per_s": round(speed)}
    peak = peak_flops(args.device)
    row["mfu"] = round(speed * flops_per_token(model, SEQUENCE) / peak, 4) if peak else None
    row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None
    return row | (device_ms(step) if on_gpu else {}) | facts(args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", default=["60m"], choices=list(PRESETS))
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[512], help="sequences, for each of the models")
    parser.add_argument("--masked", action="store_true", help="attention by a mask, as transformers has it compiled")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.models) != len(args.micro_batch):
        parser.error(f"--micro-batch needs a number for each of {args.models}, got {args.micro_batch}")
    rows = []
    for name, micro_batch in zip(args.models, args.micro_batch, strict=True):
        rows.append(measure(name, micro_batch, args))
        print({key: value for key, value in rows[-1].items() if key not in facts(args.device)}, flush=True)
        if args.out:
            record_rows(args.out, rows)
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
