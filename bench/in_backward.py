"""Time and memory of whole training steps of a LLaMA model, stepped ordinarily and in backward.

    python bench/in_backward.py --device cpu --model 60m --sequence 64 --repeats 3 --warmup 1
    python bench/in_backward.py --device cuda --model 7b --batch 1 8 32 --out bench/results/in-backward-h200.csv

Both modes are first checked to follow the same losses. `host_us` is the time that Python takes to step the weights,
launches included, divided by their number; the device works meanwhile. `together` is how many share a step. The modes
take turns, because the host is quicker at one moment and slower at another: their models are on the device together.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from apollo_optim.evidence.timing import free_memory, summary, times_ms
from apollo_optim.evidence.workload import Workload
from apollo_optim.flags import built
from apollo_optim.llama import PRESETS
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.train.pretrain import PretrainOptions
from machine import common_parser, facts, record_rows

LR = 1e-4
IN_A_ROW = 4
"""Steps that a mode is timed for in each of its turns."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
MODES: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "in backward": {"step_in_backward": True},
    "in backward, clipped": {"step_in_backward": True, "clip_previous": 1.0},
}
"""By mode: its options of `apollo pretrain`."""


class Training(Workload):
    """A model under APOLLO-Mini, on batches of random tokens."""

    def __init__(self, mode: str, args: argparse.Namespace):
        longest = max(args.sequence)
        values = {
            "model": args.model, "dtype": DTYPES[args.dtype], "activation_checkpointing": args.checkpointing,
            "compile": args.compile, "device": args.device, "method": "apollo-mini", "lr": LR, "steps": 1000,
            "sequence": longest, "batch_tokens": longest,
        }  # fmt: skip
        super().__init__(built(PretrainOptions, values | MODES[mode]), PRESETS[args.model].vocabulary)
        self.host_seconds: list[float] = []
        """Seconds for each set of weights that was stepped together."""
        self.weights_stepped = 0
        if self.in_backward:
            assert isinstance(self.optimizer, ProjectedOptimizer)
            self._step_part_, self.optimizer._step_part_ = self.optimizer._step_part_, self._timed_part_

    def _timed_part_(self, weights: list[Tensor]) -> None:
        start = time.perf_counter()
        self._step_part_(weights)
        self.host_seconds.append(time.perf_counter() - start)
        self.weights_stepped += len(weights)

    def on(self, batch: int, sequence: int) -> Callable[[], Tensor]:
        """A step on a batch of this size, which returns its loss."""
        torch.manual_seed(0)  # the same in every mode
        return partial(self.step, self.tokens(batch)[:, : sequence + 1])


def check(args: argparse.Namespace) -> None:
    """Both modes follow the same losses: on a GPU attention's backward may add in another order, and no more."""
    small = argparse.Namespace(**(vars(args) | {"model": "60m"}))
    losses = []
    for mode in ("ordinary", "in backward"):
        step = Training(mode, small).on(args.batch[0], args.sequence[0])
        losses.append(torch.stack([step() for _ in range(5)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)


def peak_GiB(training: Training, batch: int, sequence: int, before: int) -> float:
    """The peak of two steps, beyond the bytes taken `before` this training."""
    step = training.on(batch, sequence)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def trainings(args: argparse.Namespace) -> tuple[dict[str, Training], dict[tuple[str, int, int], float]]:
    """A training for each mode, and its peaks on each kind of batch."""
    made: dict[str, Training] = {}
    peaks: dict[tuple[str, int, int], float] = {}
    for mode in MODES:
        free_memory(args.device)
        before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        made[mode] = Training(mode, args)
        if args.device == "cuda":
            for batch, sequence in itertools.product(args.batch, args.sequence):
                peaks[mode, batch, sequence] = peak_GiB(made[mode], batch, sequence, before)
    return made, peaks


def measure(
    made: dict[str, Training], batch: int, sequence: int, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Times of each mode."""
    steps = {mode: training.on(batch, sequence) for mode, training in made.items()}
    for step in steps.values():
        for _ in range(args.warmup):
            step()
    for training in made.values():
        training.host_seconds.clear()
        training.weights_stepped = 0
    times: dict[str, list[float]] = {mode: [] for mode in made}
    for _ in range(-(-args.repeats // IN_A_ROW)):
        for mode, step in steps.items():
            times[mode] += times_ms(step, args.device, 1, IN_A_ROW)
    rows = {}
    for mode, training in made.items():
        rows[mode] = {"checkpointing": args.checkpointing, "compile": args.compile, **summary(times[mode])}
        if training.host_seconds:
            rows[mode]["host_us"] = round(1e6 * sum(training.host_seconds) / training.weights_stepped, 1)
            rows[mode]["together"] = round(training.weights_stepped / len(training.host_seconds), 1)
    return rows


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--model", default="60m", choices=sorted(PRESETS))
    parser.add_argument("--sequence", type=int, nargs="+", default=[256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in backward")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    check(args)
    made, peaks = trainings(args)
    rows: list[dict[str, Any]] = []
    shown = "mode", "batch", "sequence", "median_ms", "vs_ordinary", "host_us", "together", "peak_GiB"
    for batch, sequence in itertools.product(args.batch, args.sequence):
        measured = measure(made, batch, sequence, args)
        for mode, times in measured.items():
            row = {"model": args.model, "mode": mode, "sequence": sequence, "batch": batch, **times}
            row["vs_ordinary"] = round(row["median_ms"] / measured["ordinary"]["median_ms"], 3)
            row |= {"peak_GiB": peaks.get((mode, batch, sequence)), "dtype": args.dtype, **facts(args.device)}
            rows.append(row)
            print({key: row.get(key) for key in shown}, flush=True)
    record_rows(args.out, rows)


if __name__ == "__main__":
    main()
