"""Time of an optimizer step on LLaMA shapes, against the best alternatives, in one run.

    python bench/step.py --device cpu --whole 60m
    python bench/step.py --device cuda --models 1b 7b --whole 60m --peers --out bench/results/step-h200.csv

    python bench/step.py --device cuda --models 60m 1b 7b --peers --only Artemis Muon
    python bench/step.py --device cuda --models 1b 7b --svd --only GaLore Fira

With --svd, GaLore and Fira by the steps between decompositions; `svd_ms` is what decomposing all gradients once takes,
by one of each shape.

Where APOLLO, Artemis or Factored AdamW are among them, kernels are first checked against the plain PyTorch path on the
same shapes.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.core.projection import svd_basis
from apollo_optim.evidence.timing import step_rows, times_ms
from apollo_optim.evidence.workload import draw_gradients_
from apollo_optim.llama import MODELS, VOCABULARY, Llama, Shape
from apollo_optim.planner.models import llama_parameters
from machine import common_parser, copy_bandwidth, facts, record_rows
from peers import peers

RANKS = {"60m": 128, "130m": 192, "350m": 256, "1b": 512, "7b": 256}
"""The paper's ranks: a quarter of the width, and 256 at 7B."""

LR = 1e-3
SMALL_BYTES = 2**30
"""Smaller models are timed in turns, since their steps wait for the host."""
NO_REFRESH = 10**6
REFERENCES = "torch SGD", "torch AdamW"
"""The times of the others are divided by theirs."""

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Contender(NamedTuple):
    build: Build
    floor_passes: float = 0
    """Passes over the matrices' bytes that memory traffic cannot go below: reads of G and W, writes of W, moments."""
    decomposes: bool = False


def ours(cls: type, **options: Any) -> Build:
    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        projected = [p for p in params if p.dim() == 2 and p.shape[0] != 32000]
        rest = [p for p in params if p.dim() < 2 or p.shape[0] == 32000]
        groups = [{"params": projected, "rank": options.get("rank", 1)}] + [{"params": rest, "rank": None}] * bool(rest)
        return cls(groups, lr=LR, **options)

    return build


def contenders(model: str, whole: bool, device: str) -> dict[str, Contender]:
    """The optimizers to time, by their names in the rows."""
    rank = RANKS[model]
    mini, apollo = partial(ours, apollo_optim.APOLLOMini), partial(ours, apollo_optim.APOLLO, rank=rank)
    named, fused = (" fused", {"fused": True}) if device == "cuda" else ("", {})
    adamw = partial(torch.optim.AdamW, lr=LR, **fused)
    listed = {
        f"torch SGD{named}": Contender(partial(torch.optim.SGD, lr=LR, **fused), 3),
        f"torch AdamW{named}": Contender(adamw, 7),
        "APOLLO-Mini": Contender(mini(), 4),
        f"APOLLO rank {rank}": Contender(apollo(), 4),
    }
    if device != "cuda":
        return listed
    listed |= {
        "Factored AdamW": Contender(ours(apollo_optim.FactoredAdamW), 5.5),
        "Artemis": Contender(ours(apollo_optim.Artemis), 4.5),
        "Artemis-Mini": Contender(ours(apollo_optim.ArtemisMini, rank=1 / 64), 4),
    }
    if whole:
        # What is left in a CUDA graph is the device's own time.
        graph = {"capturable": True}
        narrow = graph | {"state_dtype": torch.bfloat16}  # as torch's AdamW has moments beside bf16 weights
        listed |= {
            "torch AdamW fused, CUDA graph": Contender(partial(adamw, **graph), 7),
            "APOLLO-Mini, CUDA graph": Contender(mini(**graph), 4),
            f"APOLLO rank {rank}, CUDA graph": Contender(apollo(**graph), 4),
            "APOLLO-Mini, bf16 moments, CUDA graph": Contender(mini(**narrow), 4),
            f"APOLLO rank {rank}, bf16 moments, CUDA graph": Contender(apollo(**narrow), 4),
        }
    if model == "60m":
        # Decomposing every gradient takes minutes beyond the smallest model; the steps between are what is timed.
        listed[f"APOLLO rank {rank} with SVD"] = Contender(apollo(projection="svd", refresh_every=NO_REFRESH), 4)
    return listed | {
        "AdamW, 8-bit state": Contender(ours(apollo_optim.APOLLO, rank=None, state_dtype="int8"), 5),
        f"APOLLO rank {rank}, 8-bit state": Contender(apollo(state_dtype="int8"), 4),
        f"APOLLO rank {rank}, bf16 moments": Contender(apollo(state_dtype=torch.bfloat16), 4),
        "APOLLO-Mini refreshing every step": Contender(mini(refresh_every=1), 4),
        f"APOLLO rank {rank} refreshing every step": Contender(apollo(refresh_every=1), 4),
    }


def decomposing(model: str) -> dict[str, Contender]:
    """Optimizers that decompose gradients. Their first step, which is not timed, takes its basis from a sketch."""
    options = {"rank": RANKS[model], "projection": "svd_lowrank", "refresh_every": NO_REFRESH}
    return {
        f"{cls.__name__} rank {RANKS[model]}": Contender(ours(cls, **options), decomposes=True)
        for cls in (apollo_optim.GaLore, apollo_optim.Fira)
    }


def decomposition_ms(params: Sequence[nn.Parameter], rank: int, device: str) -> float:
    """Time to decompose the gradients of all matrices, from that of one of each shape."""
    wide = [p.grad if p.shape[0] <= p.shape[1] else p.grad.mT for p in params if p.dim() == 2 and p.grad is not None]
    one_of = {grad.shape: grad.float() for grad in wide}
    took = {shape: times_ms(partial(svd_basis, grad, rank), device, 0, 1)[0] for shape, grad in one_of.items()}
    return sum(took[grad.shape] for grad in wide)


def parameters(model: Llama, whole: bool, dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Weights with gradients of the size that training has: all of a model's, or its matrices."""
    shapes = [shape for name, shape in llama_parameters(model) if whole or (len(shape) == 2 and name not in VOCABULARY)]
    made = nn.ParameterList(torch.randn(shape, dtype=dtype, device=device) * 0.02 for shape in shapes)
    draw_gradients_(made)
    return list(made)


def stepped(
    build: Callable[..., torch.optim.Optimizer], shapes: Sequence[Shape], dtype: torch.dtype, device: str, steps: int
) -> tuple[list[Tensor], list[nn.Parameter], torch.optim.Optimizer]:
    """Weights before and after some steps, from the same start by the same gradients; and the optimizer."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, device=device).to(dtype) * 0.02) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    optimizer = build(weights, lr=LR)
    for _ in range(steps):
        for weight in weights:
            weight.grad = (torch.randn(weight.shape, device=device) * 1e-4).to(dtype)
        optimizer.step()
    return before, weights, optimizer


def one_of_each_shape(model: str) -> list[Shape]:
    return sorted({shape for name, shape in llama_parameters(MODELS[model]) if name not in VOCABULARY})


def check_apollo(model: str, dtype: torch.dtype, device: str) -> None:
    """Kernels against the plain path on one weight of every shape of the model, over a refresh."""
    shapes = one_of_each_shape(model)
    for cls, options in ((apollo_optim.APOLLOMini, {}), (apollo_optim.APOLLO, {"rank": RANKS[model]})):
        ends = []
        for way in (False, None):
            build = partial(cls, refresh_every=3, fused=way, **options)
            _, weights, optimizer = stepped(build, shapes, dtype, device, steps=5)
            ends.append([(weight.detach(), optimizer.state[weight]["exp_avg_sq"]) for weight in weights])
        for (plain, plain_v), (fused, fused_v) in zip(*ends, strict=True):
            # Sums in another order differ in the last bits of float32; a bf16 weight then rounds to its neighbour in
            # about as many cases as those bits are to the rounding step.
            torch.testing.assert_close(fused_v, plain_v, rtol=2e-3, atol=1e-12)
            differing = (plain != fused).float().mean().item()
            assert differing < 2e-3, f"{cls.__name__} {tuple(plain.shape)}: {differing:.2%} of the weights differ"
            # Each of the five steps may have rounded a weight to its neighbour, of wherever it was then.
            torch.testing.assert_close(fused.float(), plain.float(), rtol=5 * 2**-8, atol=5 * 2**-8 * 5 * LR)


OURS = {
    "Factored AdamW": apollo_optim.FactoredAdamW,
    "Artemis": apollo_optim.Artemis,
    "Artemis-Mini": apollo_optim.ArtemisMini,
}


def check_ours(model: str, device: str, classes: Sequence[type]) -> None:
    """Kernels against the plain path in float64 on one matrix of every shape of the model."""
    matrices = [shape for shape in one_of_each_shape(model) if len(shape) == 2]
    for cls in classes:
        moves = []
        for way, wide in ((False, torch.float64), (False, torch.float32), (None, torch.float32)):
            before, weights, _ = stepped(partial(cls, fused=way), matrices, wide, device, steps=3)
            moves.append([(new.detach() - old).double() for new, old in zip(weights, before, strict=True)])
        for shape, exact, plain, fused in zip(matrices, *moves, strict=True):
            errors = [float(torch.linalg.vector_norm(each - exact) / exact.norm()) for each in (plain, fused)]
            said = f"{cls.__name__} {shape}: off by {errors[0]:.2%} plain, {errors[1]:.2%} by kernels"
            print(f"{model:>5} {said}", flush=True)
            # Rounding to bfloat16 in every product leaves one to three percent, by whatever order of sums.
            assert errors[1] < max(0.04, 1.5 * errors[0]), said


def run(model: str, whole: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = getattr(torch, args.dtype)
    bandwidth = copy_bandwidth(args.device)
    # Decomposing every gradient takes minutes beyond the smallest model; peers' ordinary step is what is timed.
    others = dict(peers(RANKS[model], with_svd=model == "60m")) if args.peers else {}
    listed = contenders(model, whole, args.device) | {name: Contender(build) for name, build in others.items()}
    listed |= decomposing(model) if args.svd else {}
    if args.only:
        kept = [
            name for name in listed if name.removesuffix(" fused") in REFERENCES or any(p in name for p in args.only)
        ]
        listed = {name: listed[name] for name in kept}
    if args.device == "cuda" and any(name.startswith("APOLLO") for name in listed):
        check_apollo(model, dtype, args.device)
    if args.device == "cuda":
        check_ours(model, args.device, [cls for name, cls in OURS.items() if name in listed])
    params = parameters(MODELS[model], whole, dtype, args.device)
    size = sum(p.numel() * p.element_size() for p in params)
    builds = {name: partial(each.build, params) for name, each in listed.items()}
    svd_ms = cache(partial(decomposition_ms, params, RANKS[model], args.device))  # the same for all who decompose
    rows = []
    for name, timed in step_rows(builds, args.device, size < SMALL_BYTES, args.warmup, args.repeats, others):
        floor_ms = 0 if whole else 1e3 * listed[name].floor_passes * size / bandwidth
        row = {"model": model, "whole": whole, "optimizer": name, **timed, "dtype": args.dtype}
        if listed[name].decomposes:
            row["svd_ms"] = round(svd_ms(), 1)
        rows.append(row | {"floor_ms": round(floor_ms, 3), "copy_TB_s": round(bandwidth / 1e12, 3)})
        show(rows[-1])
    reference = {row["optimizer"].removesuffix(" fused"): row["median_ms"] for row in rows}
    for row in rows:
        row["vs_sgd"] = round(row["median_ms"] / reference["torch SGD"], 3)
        row["vs_adamw"] = round(row["median_ms"] / reference["torch AdamW"], 3)
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:>5} {'whole' if row['whole'] else 'matrices':>8} {row['optimizer']:<40} "
        f"{row['median_ms']:9.3f} ms [{row['low_ms']:.3f}, {row['high_ms']:.3f}]  floor {row['floor_ms']:7.2f}  "
        f"state {row['state_bytes'] / 2**20:9.1f} MiB  transient {row['transient_bytes'] / 2**20:8.1f} MiB",
        flush=True,
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=[], choices=sorted(RANKS), help="whose matrices to time")
    parser.add_argument(
        "--whole", nargs="+", default=[], choices=sorted(RANKS), help="whose parameters to time, all of them"
    )


def chosen_models(args: argparse.Namespace) -> list[tuple[str, bool]]:
    """(model, whole) of everything asked for; LLaMA-60M whole where nothing was."""
    chosen = [(model, False) for model in args.models] + [(model, True) for model in args.whole]
    return chosen or [("60m", True)]


def main() -> None:
    parser = common_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--peers", action="store_true", help="time other packages too, where they are installed")
    parser.add_argument("--svd", action="store_true", help="time GaLore and Fira too, and what an SVD takes: minutes")
    parser.add_argument("--only", nargs="+", metavar="PART", help="beside torch's, those with one of these in the name")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    rows = [row | facts(args.device) for model, whole in chosen_models(args) for row in run(model, whole, args)]
    for row in rows:
        print(f"{row['model']:>5} {row['optimizer']:<40} {row['vs_sgd']:6.2f} x SGD {row['vs_adamw']:6.2f} x AdamW")
    record_rows(args.out, rows)


if __name__ == "__main__":
    main()
