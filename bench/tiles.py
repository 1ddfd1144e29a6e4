"""How the tile of the projection, its registers and the overlap of batches change the time of a step of high rank.

    python bench/tiles.py

Every line is a step of APOLLO on the matrices of a LLaMA model (8 layers of 7B), beside torch's fused AdamW. A tile is
(rank, channels, side, warps, stages, programs per multiprocessor); `1b-even` has 5472 channels where 1B has 5461.
"""

import gc
import itertools
import statistics
from dataclasses import dataclass

import torch
from torch import nn

import apollo_optim
from apollo_optim.fused import batches
from apollo_optim.optimizer import ProjectedOptimizer
from machine import times_ms

LR = 1e-3


@dataclass(frozen=True)
class Case:
    hidden: int
    intermediate: int
    layers: int
    rank: int


CASES = {
    "60m": Case(512, 1376, 8, 128),
    "130m": Case(768, 2048, 12, 192),
    "350m": Case(1024, 2736, 24, 256),
    "1b": Case(2048, 5461, 24, 512),
    "1b-even": Case(2048, 5472, 24, 512),
    "7b": Case(4096, 11008, 8, 256),
}
TILES = [
    (64, 64, 64, 4, 3, 4),
    (128, 64, 64, 4, 3, 3),
    (128, 128, 64, 8, 3, 2),
    (256, 128, 64, 8, 3, 1),
    (256, 128, 64, 8, 4, 1),
    (128, 256, 64, 8, 3, 1),
]


def matrices(case: Case) -> list[nn.Parameter]:
    """Weights with gradients."""
    hidden, inner = case.hidden, case.intermediate
    shapes = [*[(hidden, hidden)] * 4, *[(inner, hidden)] * 2, (hidden, inner)] * case.layers
    made = [nn.Parameter(0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    for weight in made:
        weight.grad = 1e-4 * torch.randn_like(weight)
    return made


def step_ms(optimizer: torch.optim.Optimizer) -> float:
    return statistics.median(times_ms(optimizer.step, "cuda", 5, 20))


def overlapping(optimizer: ProjectedOptimizer, overlap: bool) -> ProjectedOptimizer:
    """The optimizer after a first step, its batches one behind the other or not."""
    optimizer.step()
    plan = optimizer._plans.whole
    assert plan is not None
    for fused in plan.fused:
        fused._overlaps = overlap
    return optimizer


def main() -> None:
    chosen = batches.gemm_tile
    for name, case in CASES.items():
        weights = matrices(case)
        adamw = step_ms(torch.optim.AdamW(weights, lr=LR, fused=True))
        print(f"{name:8} torch AdamW fused {adamw:7.3f} ms")
        for tile, overlap in itertools.product(TILES, (False, True)):
            batches.gemm_tile = lambda *_, tile=tile: batches.GemmTile(*tile)
            groups = [{"params": weights, "rank": case.rank}]
            optimizer = overlapping(apollo_optim.APOLLO(groups, lr=LR, rank=case.rank), overlap)
            took = step_ms(optimizer)
            print(f"{name:8} {tile!s:26} overlap {overlap!s:5} {took:7.3f} ms {took / adamw:6.3f} x AdamW", flush=True)
            del optimizer
            gc.collect()
            torch.cuda.empty_cache()
        del weights
        gc.collect()
        torch.cuda.empty_cache()
    batches.gemm_tile = chosen


if __name__ == "__main__":
    main()
