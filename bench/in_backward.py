"""What stepping in backward costs and saves: whole training steps of a LLaMA model, in both modes.

    python bench/in_backward.py --device cpu --model 60m --sequence 64 --repeats 3 --warmup 1
    python bench/in_backward.py --device cuda --model 7b --out bench/results/in-backward-h200.csv

Both modes are first checked to follow the same losses. `host_us` is the time that Python takes for one weight, launches
included; the device works meanwhile.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apollo_optim import APOLLOMini, step_in_backward
from apollo_optim.llama import MODELS
from apollo_optim.optimizer import ProjectedOptimizer
from machine import facts, summary, times_ms, write_rows

LR = 1e-4
MODES = "ordinary", "in backward", "in backward, clipped"


def llama(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    """The paper's model at random, as Hugging Face builds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = MODELS[name]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        vocab_size=shape.vocabulary,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype)


class Training:
    """A model under APOLLO-Mini, on one batch of random tokens."""

    def __init__(self, mode: str, args: argparse.Namespace):
        self.model = llama(args.model, args.device, getattr(torch, args.dtype))
        self.optimizer = APOLLOMini(self.model, lr=LR)
        self.hook_seconds: list[float] = []
        if mode != "ordinary":
            self.optimizer._step_alone_ = self._timed(self.optimizer)
            step_in_backward(self.model, self.optimizer, clip_norm=1.0 if "clipped" in mode else None)
        self.tokens = torch.randint(MODELS[args.model].vocabulary, (args.batch, args.sequence), device=args.device)

    def _timed(self, optimizer: ProjectedOptimizer) -> Callable[[Tensor], None]:
        step_alone_ = optimizer._step_alone_

        def timed(weight: Tensor) -> None:
            start = time.perf_counter()
            step_alone_(weight)
            self.hook_seconds.append(time.perf_counter() - start)

        return timed

    def step(self) -> Tensor:
        loss = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def check(args: argparse.Namespace) -> None:
    """Both modes follow the same losses: on a GPU attention's backward may add in another order, and no more."""
    small = argparse.Namespace(**(vars(args) | {"model": "60m"}))
    losses = []
    for mode in MODES[:2]:
        training = Training(mode, small)
        losses.append(torch.stack([training.step() for _ in range(5)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)


def tidy(device: str) -> None:
    """Leave the memory to the next run: hooks and weights hold each other."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    training = Training(mode, args)
    for _ in range(args.warmup):
        training.step()
    training.hook_seconds.clear()
    if args.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"model": args.model, "mode": mode, "sequence": args.sequence, "batch": args.batch}
    row |= summary(times_ms(training.step, args.device, 0, args.repeats))
    if args.device == "cuda":
        row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    if training.hook_seconds:
        row["host_us"] = round(1e6 * statistics.median(training.hook_seconds), 1)
    return row | {"dtype": args.dtype}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="60m", choices=sorted(MODELS))
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    check(args)
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        tidy(args.device)
        row = measure(mode, args) | facts(args.device)
        row["vs_ordinary"] = round(row["median_ms"] / (rows or [row])[0]["median_ms"], 3)
        rows.append(row)
        print({key: row.get(key) for key in ("mode", "median_ms", "vs_ordinary", "host_us", "peak_GiB")}, flush=True)
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
