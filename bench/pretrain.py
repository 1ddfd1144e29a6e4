"""Training steps: tokens per second, MFU, and the time of the device by kind of kernel.

    python bench/pretrain.py --device cpu --models 1m --micro-batch 4 --repeats 2
    python bench/pretrain.py --models 60m 350m 1b --micro-batch 512 128 64 --out bench/results/pretrain-h200.csv

Model, loss and optimizer are made as `apollo pretrain` makes them, and one micro-batch of random tokens is a batch.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from apollo_optim.evidence.timing import free_memory, summary, times_ms
from apollo_optim.evidence.workload import Workload
from apollo_optim.flags import built
from apollo_optim.llama import PRESETS
from apollo_optim.train.metrics import flops_per_token, peak_flops
from apollo_optim.train.pretrain import PretrainOptions
from machine import common_parser, facts, kernel_times, record_rows

PROFILED = 3
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq"),
    "optimizer": ("project_kernel", "apply_kernel", "adamw_kernel", "finite_kernel", "normals_kernel", "reduce_rows",
                  "reduce_columns", "combine_kernel", "decide_kernel", "prepare_kernel", "pad_kernel", "stored_kernel"),
    "loss": ("softmax_loss",),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "addmm"),
}  # fmt: skip
"""Parts of the names of kernels, by kind; all other kernels are elementwise."""


def device_ms(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds that the device takes for a step, by kind of kernel."""
    taken = dict.fromkeys((*KINDS, "elementwise"), 0.0)
    for kernel, (ms, _) in kernel_times(step, PROFILED).items():
        kinds = (kind for kind, parts in KINDS.items() if any(part in kernel for part in parts))
        taken[next(kinds, "elementwise")] += ms
    return {kind: round(ms, 3) for kind, ms in taken.items()}


def measure(name: str, micro_batch: int, args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    options = built(PretrainOptions, {"model": name, "device": args.device, "steps": 1000, "method": "apollo"})
    work = Workload(options, PRESETS[name].vocabulary)
    if args.masked:
        work.model.set_attn_implementation("sdpa")
    step = partial(work.step, work.tokens(micro_batch))
    timed = summary(times_ms(step, args.device, args.warmup, args.repeats))
    speed = 1e3 * micro_batch * work.sequence / timed["median_ms"]
    row = {"model": name, "micro_batch": micro_batch, "sequence": work.sequence, "masked": args.masked}
    row |= timed | {"tokens_per_s": round(speed)}
    peak = peak_flops(args.device)
    row["mfu"] = round(speed * flops_per_token(work.model, work.sequence) / peak, 4) if peak else None
    row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None
    return row | (device_ms(step) if on_gpu else {})


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["60m"], choices=list(PRESETS))
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[512], help="sequences, for each of the models")
    parser.add_argument("--masked", action="store_true", help="attention by a mask, as transformers has it compiled")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if len(args.models) != len(args.micro_batch):
        parser.error(f"--micro-batch needs a number for each of {args.models}, got {args.micro_batch}")
    for name, micro_batch in zip(args.models, args.micro_batch, strict=True):
        row = measure(name, micro_batch, args)
        print(row, flush=True)
        record_rows(args.out, [row | facts(args.device)])
        free_memory(args.device)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
