"""How the tile of the projection, its registers and the overlap of batches change the time of a step of high rank.

    python bench/tiles.py
    python bench/tiles.py --products

The second line: what the tile of a symmetric product does to its time, each checked against torch.bmm and beside it,
and to a step of Artemis. The rate is that of a product with both of its halves, so that it may exceed the card's.

Every line is a step of APOLLO on the matrices of a LLaMA model (8 layers of 7B), beside torch's fused AdamW. A tile is
(rank, channels, side, warps, stages, programs per multiprocessor); `1b-even` has 5472 channels where 1B has 5461.
"""

import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.fused import batches, products
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


PRODUCT_TILES = [
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
]
"""Rows, columns, contracted elements, warps and stages."""
PRODUCTS = [
    ((5, 4096, 4096), False),
    ((3, 4096, 11008), False),
    ((3, 4096, 11008), True),
    ((20, 2048, 2048), False),
    ((32, 512, 512), False),
]
"""Shapes of factors, and whether their columns are what lies together."""


def matrices(case: Case) -> list[nn.Parameter]:
    """Weights with gradients."""
    hidden, inner = case.hidden, case.intermediate
    shapes = [*[(hidden, hidden)] * 4, *[(inner, hidden)] * 2, (hidden, inner)] * case.layers
    made = [nn.Parameter(0.02 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    for weight in made:
        weight.grad = 1e-4 * torch.randn_like(weight)
    return made


def step_ms(optimizer: torch.optim.Optimizer, warmup: int = 5, repeats: int = 20) -> float:
    return statistics.median(times_ms(optimizer.step, "cuda", warmup, repeats))


def overlapping(optimizer: ProjectedOptimizer, overlap: bool) -> ProjectedOptimizer:
    """The optimizer after a first step, its batches one behind the other or not."""
    optimizer.step()
    plan = optimizer._plans.whole
    assert plan is not None
    for fused in plan.fused:
        fused._overlaps = overlap
    return optimizer


def multiply(shape: tuple[int, int, int], transposed: bool) -> dict[str, float]:
    """Print and return the rate of a product of this shape [N, S, K] by each tile, and by torch."""
    count, side, contracted = shape
    x = (
        torch.randn(count, contracted, side, device="cuda").bfloat16().mT
        if transposed
        else torch.randn(shape, device="cuda").bfloat16()
    )
    x /= contracted**0.5
    expected = torch.bmm(x, x.mT)
    work = 2 * count * side * side * contracted / 1e9

    def rate(product: Callable[[], Tensor]) -> float:
        return work / statistics.median(times_ms(product, "cuda", 3, 10))

    rates = {"torch.bmm": rate(lambda: torch.bmm(x, x.mT))}
    for tile in PRODUCT_TILES:
        products.product_tile = lambda *_, tile=tile: products.ProductTile(*tile)
        try:
            found = products.symmetric_product(1.0, x, x, (0.5, expected))
        except Exception as error:  # such as more shared memory than there is
            print(f"{tile!s:22} cannot run here: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        torch.testing.assert_close(found, torch.baddbmm(expected, x, x.mT, beta=0.5), rtol=2**-7, atol=2**-6)
        rates[str(tile)] = rate(lambda: products.symmetric_product(1.0, x, x))
        with_term = rate(lambda: products.symmetric_product(1.0, x, x, (0.5, expected)))
        print(
            f"{shape!s:20} {'transposed' * transposed:10} {tile!s:22} {rates[str(tile)]:6.0f} {with_term:6.0f} TFLOP/s"
        )
    best = max(rates, key=lambda name: rates[name])
    print(
        f"{shape!s:20} {'transposed' * transposed:10} torch.bmm {rates['torch.bmm']:.0f} TFLOP/s; best: {best}",
        flush=True,
    )
    return rates


def orthogonalise() -> None:
    """Time the products of Artemis, and a step of it, by each tile."""
    chosen = products.product_tile
    for shape, transposed in PRODUCTS:
        multiply(shape, transposed)
    for name in ("60m", "1b", "7b"):
        weights = matrices(CASES[name])
        muon = step_ms(torch.optim.Muon(weights, lr=LR), 2, 5)
        print(f"{name:8} torch Muon {muon:8.3f} ms")
        for tile in (None, *PRODUCT_TILES):
            products.product_tile = chosen if tile is None else lambda *_, tile=tile: products.ProductTile(*tile)
            try:
                took = step_ms(apollo_optim.Artemis([{"params": weights, "rank": 1}], lr=LR), 2, 5)
            except Exception as error:
                print(f"{name:8} {tile!s:22} cannot run here: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            print(f"{name:8} {tile or 'as chosen'!s:22} {took:8.3f} ms {took / muon:6.3f} x Muon", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        del weights
    products.product_tile = chosen


def main() -> None:
    if sys.argv[1:] == ["--products"]:
        orthogonalise()
        return
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
