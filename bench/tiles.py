"""How the tile of the projection, its registers and the overlap of batches change the time of a step of high rank.

    python bench/tiles.py
    python bench/tiles.py --products pointers --out bench/results/products-h200.csv
    python bench/tiles.py --products descriptors persistent --out bench/results/products-h200.csv

The latter: what the tile of a symmetric product, and how it reads its factors, do to its time, each checked against
float64 and beside torch.bmm's, and to a step of Artemis. About half of torch.bmm's is the least.

Every line is a step of APOLLO on the matrices of a LLaMA model (8 layers of 7B), beside torch's fused AdamW. A tile is
(rank, channels, side, warps, stages, programs per multiprocessor); `1b-even` has 5472 channels where 1B has 5461.
"""

import argparse
import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import apollo_optim
from apollo_optim.core import orthogonal
from apollo_optim.core.orthogonal import Polynomial
from apollo_optim.fused import batches, products
from apollo_optim.optimizer import ProjectedOptimizer
from machine import facts, record_rows, times_ms

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
    products.ProductTile(128, 256, 64, 8, 3),
    products.ProductTile(128, 128, 64, 4, 3),
    products.ProductTile(128, 128, 64, 8, 3),
    products.ProductTile(128, 256, 64, 8, 4, "descriptors"),
    products.ProductTile(128, 128, 64, 4, 3, "descriptors"),
    products.ProductTile(128, 256, 64, 8, 4),
    products.ProductTile(128, 256, 64, 8, 3, "persistent"),
]
PRODUCTS = [
    ((8, 4096, 4096), False, orthogonal.COEFFICIENTS),
    ((8, 4096, 4096), False, None),
    ((3, 4096, 11008), False, None),
    ((3, 4096, 11008), True, None),
]
"""Shapes of factors of a 7B model, whether their columns are what lies together, and a polynomial."""
LOAD_MS = 150.0
"""How long a product is repeated before and while it is timed: a card that is hot and at its limit is slower."""


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


def loaded_ms(product: Callable[[], Tensor]) -> float:
    """Time of a product on a card that has been multiplying for a while."""
    once = statistics.median(times_ms(product, "cuda", 1, 3))
    count = max(3, round(LOAD_MS / once))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(2 * count):
        if number == count:
            start.record()
        product()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def by_panels(x: Tensor, y: Tensor, polynomial: Polynomial | None = None, height: int = 1024) -> Tensor:
    """A symmetric product by torch.bmm: rows of blocks up to the diagonal, and copies of those below it."""
    count, side, _ = x.shape
    result = torch.empty(count, side, side, dtype=x.dtype, device=x.device)
    for top in range(0, side, height):
        rows, columns = slice(top, top + height), slice(0, top + height)
        factors, panel = (x[:, rows], y[:, columns].mT), result[:, rows, columns]
        if polynomial is None:
            torch.bmm(*factors, out=panel)
        else:
            a, b, c = polynomial
            torch.baddbmm(x[:, rows, columns], *factors, beta=b, alpha=c, out=panel)
            panel[:, :, rows].diagonal(dim1=-2, dim2=-1).add_(a)
        result[:, :top, rows] = result[:, rows, :top].mT
    return result


@dataclass
class Candidates:
    """Times of each way to multiply, as shares of torch.bmm's, and the rows of all of them."""

    tiles: list[products.ProductTile]
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def multiply(self, shape: tuple[int, int, int], transposed: bool, polynomial: Polynomial | None) -> None:
        """Check and time a product of this shape [N, S, K]."""
        count, side, contracted = shape
        x = torch.randn(count, contracted, side, device="cuda").bfloat16() / contracted**0.5
        x = x.mT if transposed else x.mT.contiguous()
        if polynomial is not None:
            x = torch.bmm(x, x.mT) / 4
        expected = orthogonal.symmetric_product(x[-1:].double(), x[-1:].double(), polynomial)[0]
        whole = loaded_ms(lambda: torch.bmm(x, x.mT))
        ways: dict[str, Callable[[], Tensor]] = {
            named(tile): partial(by_tile, tile, x, polynomial) for tile in self.tiles
        }
        ways["torch.bmm, panels"] = partial(by_panels, x, x, polynomial)
        where = f"{shape}{' transposed' * transposed}{' polynomial' * (polynomial is not None)}"
        self._record(where, "torch.bmm, whole", whole, whole, 0.0)
        for name, way in ways.items():
            if name in self.failed:
                continue
            try:
                found = way()[-1].double()
                off = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
                largest = float((found - expected).abs().max() / expected.abs().max())
                # Rounded once to bfloat16, or twice: each is off by at most 2^-9, and by 0.17% at the root mean square.
                assert off < 0.004, f"off by {off:.2%}"
                assert largest < 2**-8, f"off by {largest:.2%} of the largest"
                self._record(where, name, loaded_ms(way), whole, off)
            except Exception as error:  # such as more shared memory than there is
                self.failed.add(name)
                print(f"{name:44} cannot run here: {type(error).__name__}: {str(error)[:200]}", flush=True)

    def _record(self, where: str, name: str, took: float, whole: float, off: float) -> None:
        share = took / whole
        self.rows.append({"what": where, "way": name, "ms": round(took, 4), "share": round(share, 3), "off": off})
        print(f"{where:38} {name:44} {took:8.4f} ms {share:6.3f} of a whole one, off by {off:.2%}", flush=True)

    def best(self) -> list[products.ProductTile]:
        """Tiles by what they took of all products, the fastest first."""
        shares: dict[str, float] = {}
        for row in self.rows:
            shares[row["way"]] = shares.get(row["way"], 0.0) + row["share"]
        able = [tile for tile in self.tiles if named(tile) not in self.failed]
        return sorted(able, key=lambda tile: shares[named(tile)])


def by_tile(tile: products.ProductTile, x: Tensor, polynomial: Polynomial | None) -> Tensor:
    with_tile(tile)
    return products.symmetric_product(x, x, polynomial)


def with_tile(tile: products.ProductTile) -> None:
    products.product_tile = lambda *_: tile


def named(tile: products.ProductTile) -> str:
    rows, columns, contracted, warps, stages, way = tile
    return f"{rows} x {columns} x {contracted}, {warps} warps, {stages} stages, {way}"


def orthogonalise(tiles: list[products.ProductTile], out: Path | None) -> None:
    """Time the products of Artemis by each tile, and a step of it by the best of them beside torch's Muon."""
    chosen = products.product_tile
    candidates = Candidates(tiles)
    for product in PRODUCTS:
        candidates.multiply(*product)
    weights = matrices(CASES["7b"])
    muon = step_ms(torch.optim.Muon(weights, lr=LR), 2, 5)
    rows = [{"what": "step, 8 layers of 7b", "way": "torch Muon", "ms": round(muon, 2), "share": 1.0}]
    print(f"torch Muon {muon:8.2f} ms", flush=True)
    single = orthogonal.SQUARE_RUNS
    best = candidates.best()[:2]
    for tile, runs in [*((tile, single) for tile in best), (best[0], orthogonal.RUNS)]:
        with_tile(tile)
        orthogonal.SQUARE_RUNS = runs
        optimizer = apollo_optim.Artemis([{"params": weights, "rank": 1}], lr=LR)
        took = step_ms(optimizer, 2, 5)
        name = f"{named(tile)}, square weights by {len(runs)} runs"
        rows.append({"what": rows[0]["what"], "way": name, "ms": round(took, 2), "share": round(took / muon, 3)})
        print(f"{name:72} {took:8.2f} ms {took / muon:6.3f} x Muon", flush=True)
        del optimizer
        gc.collect()
        torch.cuda.empty_cache()
    orthogonal.SQUARE_RUNS, products.product_tile = single, chosen
    if out is not None:
        record_rows(out, [row | facts("cuda") for row in (*candidates.rows, *rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = "pointers", "descriptors", "persistent"
    parser.add_argument(
        "--products", nargs="+", choices=ways, help="time symmetric products that read their factors so"
    )
    parser.add_argument("--out", type=Path, help="CSV to which times of products are added")
    args = parser.parse_args()
    if args.products:
        orthogonalise([tile for tile in PRODUCT_TILES if tile.way in args.products], args.out)
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
