"""Peak memory of training large LLaMA models on one GPU, by what it is for.

    python bench/memory.py --data 'corpus/*.jsonl.zst' --tokenizer t5 --out bench/results/memory-h200.csv
    python bench/memory.py --runs 7b-int8-mini --steps 20
    python bench/memory.py --device cpu --model 1m --steps 30 --jobs 2
    python bench/plot.py memory-h200

Each run trains in a process of its own from random weights on real text, one sequence of 256 tokens a step, and fails
unless its loss falls. The peak is of the allocator's count of tensors, the building of the model included. Rows are
appended to the file as runs end. The second line tries one run, and the third the script itself, on a CPU, where memory
is not counted.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from apollo_optim.evidence.throughput import context_bytes
from apollo_optim.evidence.workload import PEAK_KINDS, Workload, apart, process_memory, watched_training
from apollo_optim.flags import built
from apollo_optim.memory import bytes_of
from apollo_optim.param_groups import Vocabulary
from apollo_optim.train.data.batches import Windows
from apollo_optim.train.data.config import Data
from apollo_optim.train.data.corpus import Corpus, prepared_corpus
from apollo_optim.train.pretrain import PretrainOptions
from machine import common_parser, facts, record_rows

SEQUENCE, VOCABULARY, LR, EDGE = 256, 32000, 1e-3, 20
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """One run of the table."""

    model: str
    method: str = "apollo-mini"
    int8: bool = False
    """Weights and moments."""
    vocabulary: Vocabulary = "adamw"
    """How embedding and head are stepped."""
    in_backward: bool = False
    ddp: bool = False
    limit_gib: float | None = None
    """Limit of the peak."""
    process_limit_gib: float | None = None
    """Limit of the whole process."""


RUNS = {
    "7b-int8-mini": Setting("7b", int8=True, in_backward=True, limit_gib=8.0, process_limit_gib=9.0),
    "7b-int8-mini-rowwise": Setting(
        "7b", int8=True, vocabulary="rowwise", in_backward=True, limit_gib=8.0, process_limit_gib=9.0
    ),
    "7b-int8-mini-factored": Setting("7b", int8=True, vocabulary="factored", in_backward=True, limit_gib=7.0),
    "7b-bf16-mini": Setting("7b", in_backward=True, limit_gib=15.5),
    "13b-int8-mini": Setting("13b", int8=True, in_backward=True, limit_gib=15.0),
    "13b-bf16-mini-ordinary": Setting("13b", limit_gib=60.0),
    "13b-bf16-mini-ddp": Setting("13b", ddp=True, limit_gib=60.0),
    "7b-bf16-adamw-ordinary": Setting("7b", method="adamw"),
}


def options_of(setting: Setting, steps: int, device: str) -> PretrainOptions:
    values: dict[str, Any] = {
        "model": setting.model, "dtype": "bf16", "compile": False, "activation_checkpointing": True, "loss": "chunked",
        "sequence": SEQUENCE, "batch_tokens": SEQUENCE, "steps": steps, "device": device, "lr": LR, "embedding_lr": LR,
        "weight_decay": 0.0, "step_in_backward": setting.in_backward,
    }  # fmt: skip
    if setting.method == "adamw":
        return built(PretrainOptions, values | {"method": "adamw-torch"})
    values |= {"method": setting.method, "rank": 1, "vocabulary_state": setting.vocabulary}
    return built(PretrainOptions, values | ({"int8": "all", "state_dtype": "int8"} if setting.int8 else {}))


def trained(
    setting: Setting, rows: Callable[[int], Tensor], steps: int, device: str, context: int | None = None
) -> dict[str, Any]:
    """Losses, memory and time of a run."""
    started = time.perf_counter()
    work = Workload(options_of(setting, steps, device), VOCABULARY)
    if setting.ddp:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        work.objective = nn.parallel.DistributedDataParallel(work.objective, gradient_as_bucket_view=True)
    buckets = sum(map(bytes_of, work.model.parameters())) if setting.ddp else 0
    building = time.perf_counter() - started
    seen = watched_training(work, warmed_up(work, map(rows, range(steps))), buckets)
    edge = max(1, min(EDGE, steps // 2))
    found = {
        **seen.peak,
        "loss_first": sum(seen.losses[:edge]) / edge,
        "loss_last": sum(seen.losses[-edge:]) / edge,
        "build_s": round(building, 2),
        "ms_per_step": round(seen.ms_per_step, 2),
    }
    if device == "cuda":
        found |= process_memory(context)
    if setting.ddp:
        dist.destroy_process_group()
    return found


def warmed_up(work: Workload, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """The batches, yielded after the learning rate of their step is set."""
    for number, tokens in enumerate(batches, start=1):
        for group in work.optimizer.param_groups:
            group["lr"] = LR * min(1.0, number / EDGE)
        yield tokens


def corpus(args: argparse.Namespace) -> Corpus:
    data = Data(data=args.data, tokenizer=args.tokenizer, cache=args.cache)
    found = prepared_corpus(data, tokens_wanted=args.steps * (SEQUENCE + 1))
    found.check(SEQUENCE + 1, VOCABULARY)
    return found


def run(name: str, args: argparse.Namespace, context: int | None) -> dict[str, Any]:
    """The row of a run, made in this process."""
    windows = Windows(corpus(args).train, SEQUENCE, seed=0)
    setting = chosen_setting(name, args)
    result = trained(setting, lambda step: windows.rows(step, 1), args.steps, args.device, context)
    return {"run": name, **vars(setting), "steps": args.steps, **result, **facts(args.device)}


def chosen_setting(name: str, args: argparse.Namespace) -> Setting:
    return replace(RUNS[name], model=args.model) if args.model else RUNS[name]


def results(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """The row of each run, made in a process of its own, or why it failed; in the order in which they end."""
    # Where others are on the device, what a process takes besides its tensors is that of an idle one.
    context = apart(context_bytes) if args.jobs > 1 and args.device == "cuda" else None
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(apart, run, name, args, context): name for name in args.runs}
        for future in as_completed(waiting):
            error = future.exception()
            yield waiting[future], error if isinstance(error, Exception) else future.result()


def shown(result: dict[str, Any]) -> None:
    kinds = "  ".join(f"{kind} {result[kind] / GIB:.2f}" for kind in PEAK_KINDS)
    process = f"; process {result['process'] / GIB:.2f}" if "process" in result else ""
    print(
        f"{result['run']:24} peak {result['peak'] / GIB:6.2f} GiB ({kinds}{process}) in {result['peak_in']}  "
        f"loss {result['loss_first']:.2f} to {result['loss_last']:.2f}  {result['ms_per_step']:.0f} ms a step",
        flush=True,
    )


def check(setting: Setting, result: dict[str, Any]) -> list[str]:
    """Messages on limits that are exceeded, and on a loss that does not fall."""
    limits = ("peak", setting.limit_gib), ("process", setting.process_limit_gib)
    wrong = [
        f"{result['run']}: {kind} of {result[kind] / GIB:.2f} GiB, above {limit}"
        for kind, limit in limits
        if limit is not None and result.get(kind, 0) > limit * GIB
    ]
    if not result["loss_last"] < result["loss_first"] - 0.5:
        wrong.append(f"{result['run']}: the loss went from {result['loss_first']:.2f} to {result['loss_last']:.2f}")
    return wrong


def arguments() -> argparse.Namespace:
    parser = common_parser(__doc__, device="cuda")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--data", default="python", help="as in apollo pretrain")
    parser.add_argument("--tokenizer")
    parser.add_argument("--cache", type=Path, default=Data().cache)
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time; all of them must fit")
    parser.add_argument("--model", help="train this one in place of every run's own: to try the script")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    corpus(args)  # once, and not in every run
    wrong = []
    for name, result in results(args):
        if isinstance(result, Exception):
            wrong.append(f"{name} failed: {result}")
            continue
        shown(result)
        wrong += check(chosen_setting(name, args), result)
        record_rows(args.out, [result])
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
