"""The largest micro-batch that fits into a GPU of 80 GB, and the tokens per second of each method at its own.

    python bench/micro_batch.py --out bench/results/micro-batch-h200.csv
    python bench/micro_batch.py --device cpu --model 1m --sequence 64

Pre-training of LLaMA-7B in bf16, sequences of 1024, with activation checkpointing and the chunked loss, not compiled.
Each method runs in a process of its own, whose memory is capped. Its largest micro-batch is computed from the peaks of
two small ones, with gradients and state already there, and then tried; where it does not fit a smaller one is.

A batch is 512 sequences for all, so that every method takes the same optimizer steps: with micro-batches of m it takes
512 / m passes, each of the time measured at m, and one optimizer step. Stepping in backward keeps no gradients to add
up, so that method steps after every pass: its step is part of the pass, and its batch is one micro-batch. The second
line tries the script, on a CPU, where no memory is counted.
"""

import argparse
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import apollo_optim
from apollo_optim.llama import PRESETS
from apollo_optim.train.model import Model, built_model, objective
from machine import answer, facts, record_rows, summary, times_ms
from meter import context_bytes, memory_of

BATCH, LR, RANK = 512, 1e-6, 256
SPARE = 0.02
"""Of the memory, what a first guess leaves free."""
SMALLER = 0.94
"""Of a micro-batch that did not fit, what is tried next."""
LARGER = 1.05
"""Times a micro-batch that fits, what there must be room for to try again."""
LEAST_S = 2.0
"""Passes are repeated until they have taken this long."""


@dataclass(frozen=True)
class Method:
    label: str
    optimizer: str
    int8: bool = False
    """Weights in int8, 8-bit state, and each weight stepped in backward."""


METHODS = {
    "adamw": Method("AdamW (torch, fused)", "adamw"),
    "apollo": Method(f"APOLLO rank {RANK}", "apollo"),
    "apollo-mini": Method("APOLLO-Mini", "apollo-mini"),
    "apollo-mini-int8": Method("APOLLO-Mini, int8, in backward", "apollo-mini", int8=True),
}


def optimizer_of(method: Method, model: nn.Module, device: str) -> torch.optim.Optimizer:
    if method.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LR, fused=device == "cuda" or None)
    if method.optimizer == "apollo":
        return apollo_optim.APOLLO(model, lr=LR, rank=RANK)
    if not method.int8:
        return apollo_optim.APOLLOMini(model, lr=LR)
    groups = apollo_optim.param_groups(model, rank=1, adamw_second_moment="rowwise")
    return apollo_optim.APOLLOMini(groups, lr=LR, state_dtype=torch.int8)


class Training:
    """A method at work on random tokens; gradients are added up, as between the micro-batches of a batch."""

    def __init__(self, method: Method, args: argparse.Namespace):
        self.device, self.sequence, self.vocabulary = args.device, args.sequence, PRESETS[args.model].vocabulary
        config = Model(
            model=args.model,
            dtype="bf16",
            compile=False,
            int8="all" if method.int8 else None,
            activation_checkpointing=True,
            loss="chunked",
        )
        model = built_model(config, self.vocabulary, args.device, seed=0)
        self.objective = objective(config, model, args.device)
        self.optimizer = optimizer_of(method, model, args.device)
        self.in_backward = method.int8
        if self.in_backward:
            apollo_optim.step_in_backward(model, self.optimizer)
        self.memory = memory_of(args.device)

    def run(self, micro_batch: int) -> None:
        """Forward and backward; and the step, where that is part of it."""
        tokens = torch.randint(self.vocabulary, (micro_batch, self.sequence + 1), device=self.device)
        self.objective(tokens[:, :-1], tokens[:, 1:]).backward()
        if self.in_backward:
            self.optimizer.step()

    def attempt(self, micro_batch: int) -> float | None:
        """Milliseconds of a pass, or None where it does not fit."""
        self.memory.highest()
        try:
            (taken,) = times_ms(lambda: self.run(micro_batch), self.device, 0, 1)
        except torch.OutOfMemoryError:
            taken = None
        if taken is None:  # outside of the handler, which holds the tensors of the failed pass
            gc.collect()
            torch.cuda.empty_cache()
            if self.in_backward:
                self.optimizer.step()  # or the next backward would be taken for more of the failed one
        return taken

    def more_ms(self, micro_batch: int, first: float) -> list[float]:
        """Of further passes, as many as take `LEAST_S` where the first one was quicker."""
        again = min(10, int(LEAST_S * 1e3 / first))
        return times_ms(lambda: self.run(micro_batch), self.device, 0, again) if again else []


def guessed(peaks: dict[int, int], room: int) -> int:
    """The micro-batch that takes `room`, if peaks go on growing as they do between the two largest of these."""
    (small, low), (large, high) = sorted(peaks.items())[-2:]
    each = (high - low) / (large - small)
    return max(1, int(large + (room - high) / each))


def largest(training: Training, probes: tuple[int, int], room: int) -> tuple[int, float, dict[int, int]]:
    """The largest micro-batch that was seen to fit, its time in ms, and the peaks from which it was computed."""
    room = int(room * (1 - SPARE))
    peaks = {}
    for size in probes:
        training.attempt(size)
        peaks[size] = training.memory.highest()
    micro_batch = guessed(peaks, room)
    while (taken := training.attempt(micro_batch)) is None:
        if micro_batch == 1:
            raise torch.OutOfMemoryError("not even one sequence fits")
        micro_batch = min(micro_batch - 1, int(micro_batch * SMALLER))
    peaks[micro_batch] = training.memory.highest()
    # The small ones may have had their peak elsewhere, and so have grown faster.
    better = guessed(peaks, room) if micro_batch > max(probes) else micro_batch
    if better > LARGER * micro_batch and (longer := training.attempt(better)) is not None:
        peaks[better] = training.memory.highest()
        return better, longer, peaks
    return micro_batch, taken, peaks


def capped(args: argparse.Namespace) -> int:
    """Bytes that are left for tensors under the cap, which is set for this process."""
    total = torch.cuda.get_device_properties(0).total_memory
    room = int(args.cap_gb * 1e9) - context_bytes()
    torch.cuda.set_per_process_memory_fraction(room / total)
    return room


def here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A method in this process."""
    method, on_gpu = METHODS[name], args.device == "cuda"
    room = capped(args) if on_gpu else 0
    training = Training(method, args)
    training.run(args.probes[0])
    training.optimizer.step()  # makes the state; gradients stay, as in the middle of a batch
    if on_gpu:
        micro_batch, taken, peaks = largest(training, args.probes, room)
    else:
        micro_batch, peaks = args.probes[1], {}
        taken = training.attempt(micro_batch)
        assert taken is not None  # no cap is set
    passed = summary([taken, *training.more_ms(micro_batch, taken)])
    step_ms = 0.0
    if not training.in_backward:
        step_ms = summary(times_ms(training.optimizer.step, args.device, 1, 5))["median_ms"]
    batch = micro_batch if training.in_backward else BATCH
    seconds = 1e-3 * (batch / micro_batch * passed["median_ms"] + step_ms)
    row = {"method": name, "label": method.label, "model": args.model, "sequence": args.sequence}
    row |= {"micro_batch": micro_batch, "batch": batch, **{f"pass_{key}": value for key, value in passed.items()}}
    row |= {"step_ms": step_ms, "tokens_per_s": round(batch * args.sequence / seconds, 1), "room": room}
    row |= {"peak": peaks.get(micro_batch, 0), "peaks": " ".join(f"{size}:{peak}" for size, peak in peaks.items())}
    return row | facts(args.device)


def shown(row: dict[str, Any]) -> None:
    print(
        f"{row['label']:32} micro-batch {row['micro_batch']:4}  pass {row['pass_median_ms']:10.1f} ms  step "
        f"{row['step_ms']:7.1f} ms  {row['tokens_per_s']:9.0f} tokens/s  peak {row['peak'] / 2**30:6.2f} GiB",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--model", default="7b", choices=list(PRESETS))
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--cap-gb", type=float, default=80.0, help="memory of the process, its context included")
    parser.add_argument("--probes", type=int, nargs=2, help="micro-batches that are measured to compute the largest")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="run the first method in this process and print JSON")
    args = parser.parse_args()
    # More tokens than a chunk of the loss has, so that its memory is what it is at any larger size.
    args.probes = tuple(args.probes or ((9, 18) if args.device == "cuda" else (1, 2)))
    return args


def main() -> int:
    args = arguments()
    if args.here:
        print(json.dumps(here(args.methods[0], args)))
        return 0
    options = [f"--model={args.model}", f"--sequence={args.sequence}", f"--cap-gb={args.cap_gb}"]
    options += [f"--device={args.device}", "--probes", *map(str, args.probes)]
    rows = []
    for name in args.methods:
        row = answer(__file__, "--here", "--methods", name, *options)
        rows.append(row)
        shown(row)
        if rows[0]["method"] == "adamw":
            row["vs_adamw"] = round(row["tokens_per_s"] / rows[0]["tokens_per_s"], 3)
            row["micro_batch_vs_adamw"] = round(row["micro_batch"] / rows[0]["micro_batch"], 3)
            print(
                f"{'':32} {row['vs_adamw']:.2f} x AdamW's tokens/s, {row['micro_batch_vs_adamw']:.2f} x its micro-batch"
            )
        if args.out:
            record_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
