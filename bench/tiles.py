"""The effect of the projection's tile and of overlapping batches on the time of a step of high rank.

    python bench/tiles.py
    python bench/tiles.py --products --out bench/results/products-h200.csv

With --products: how the way to read the factors of a symmetric product changes its time, beside torch.bmm's (half of
which is the least), and the time of a step of Artemis, beside torch's Muon; and the time of each kernel in such a step.
Products are checked against float64.

Every line is a step of APOLLO on the matrices of a LLaMA model (8 layers of 7B), beside torch's fused AdamW. A tile is
(rank, channels, side, warps, stages, programs per multiprocessor); `1b-even` has 5472 channels where 1B has 5461.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import apollo_optim
from apollo_optim.core import orthogonal
from apollo_optim.core.orthogonal import Polynomial
from apollo_optim.evidence.timing import free_memory, summary, times_ms
from apollo_optim.fused import matrix, products
from apollo_optim.llama import MODELS
from apollo_optim.optimizer import ProjectedOptimizer
from kernels import fused_steps
from machine import common_parser, facts, kernel_times, record_rows
from step import LR, RANKS, parameters

CASES = {
    **{name: MODELS[name] for name in ("60m", "130m", "350m", "1b")},
    "1b-even": replace(MODELS["1b"], intermediate=5472),
    "7b": replace(MODELS["7b"], layers=8),
}
TILES = [
    (64, 64, 64, 4, 3, 4),
    (128, 64, 64, 4, 3, 3),
    (128, 128, 64, 8, 3, 2),
    (256, 128, 64, 8, 3, 1),
    (256, 128, 64, 8, 4, 1),
    (128, 256, 64, 8, 3, 1),
]
WAYS = {"descriptors": True, "pointers": False}
"""Ways in which a symmetric product can read its factors."""
ROUNDS = 3
"""Rounds in which all are timed, one after the other: a card that has become hot is slower."""
PRODUCTS = [
    ((8, 4096, 4096), False, orthogonal.COEFFICIENTS),
    ((8, 4096, 4096), False, None),
    ((3, 4096, 11008), False, None),
    ((3, 4096, 11008), True, None),
]
"""Shapes of factors of a 7B model, whether their columns are contiguous, and a polynomial."""
LOAD_MS = 150.0
"""Milliseconds for which a product is repeated before and while it is timed: a card at its limit is slower."""


def step_ms(optimizer: torch.optim.Optimizer, warmup: int = 5, repeats: int = 20) -> float:
    return summary(times_ms(optimizer.step, "cuda", warmup, repeats))["median_ms"]


def overlapping(optimizer: ProjectedOptimizer, overlap: bool) -> ProjectedOptimizer:
    """The optimizer after a first step, its batches one behind the other or not."""
    optimizer.step()
    for fused in fused_steps(optimizer):
        fused._overlaps = overlap
    return optimizer


def loaded_ms(product: Callable[[], Tensor]) -> float:
    """Time of a product on a card that has been multiplying for a while."""
    once = summary(times_ms(product, "cuda", 1, 3))["median_ms"]
    count = max(3, round(LOAD_MS / once))
    return statistics.mean(times_ms(product, "cuda", count, count))


def multiply(shape: tuple[int, int, int], transposed: bool, polynomial: Polynomial | None) -> Iterator[dict[str, Any]]:
    """Check and time a product of this shape [N, S, K] by each tile."""
    count, side, contracted = shape
    x = torch.randn(count, contracted, side, device="cuda").bfloat16() / contracted**0.5
    x = x.mT if transposed else x.mT.contiguous()
    if polynomial is not None:
        x = torch.bmm(x, x.mT) / 4
    expected = orthogonal.symmetric_product(x[-1:].double(), x[-1:].double(), polynomial)[0]
    whole = loaded_ms(lambda: torch.bmm(x, x.mT))
    where = f"{shape}{' transposed' * transposed}{' polynomial' * (polynomial is not None)}"
    yield row_of(where, "torch.bmm, whole", whole, whole, off=0.0)
    for way, described in WAYS.items():
        products.reads_by_descriptors = lambda _, described=described: described
        found = products.symmetric_product(x, x, polynomial)[-1].double()
        off = float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
        largest = float((found - expected).abs().max() / expected.abs().max())
        # Rounded once to bfloat16: off by at most 2^-9, and by 0.17% at the root mean square.
        assert off < 0.004, f"by {way} it is off by {off:.2%}"
        assert largest < 2**-8, f"by {way} it is off by {largest:.2%} of the largest"
        took = loaded_ms(lambda: products.symmetric_product(x, x, polynomial))
        yield row_of(where, way, took, whole, off=off)


def orthogonalise() -> Iterator[dict[str, Any]]:
    """Time steps of Artemis by each way, and of torch's Muon; and each kernel that takes 1% of Artemis's."""
    where, weights = "step, 8 layers of 7b", parameters(CASES["7b"], False, torch.bfloat16, "cuda")
    muon = torch.optim.Muon(weights, lr=LR)
    artemis = apollo_optim.Artemis([{"params": weights, "rank": 1}], lr=LR)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        times.setdefault("torch Muon", []).append(step_ms(muon, 1, 4))
        for way, described in WAYS.items():
            products.reads_by_descriptors = lambda _, described=described: described
            times.setdefault(f"Artemis, {way}", []).append(step_ms(artemis, 1, 4))
    medians = {way: statistics.median(each) for way, each in times.items()}
    for way, took in medians.items():
        yield row_of(where, way, took, medians["torch Muon"])
    products.reads_by_descriptors = lambda _: True
    whole = medians["Artemis, descriptors"]
    for kernel, (took, _) in kernel_times(artemis.step, 4).items():
        if took > 0.01 * whole:
            yield row_of("Artemis, a kernel of that step", kernel, took, whole)


def row_of(what: str, way: str, took: float, whole: float, **others: float) -> dict[str, Any]:
    """A row of the results, which is also printed; its share is of `whole`."""
    share = took / whole
    print(f"{what:28} {way:68} {took:9.4f} ms {share:6.3f}", flush=True)
    return {"what": what, "way": way, "ms": round(took, 4), "share": round(share, 3), **others}


def main() -> None:
    parser = common_parser(__doc__, device=None, help="CSV to which times of products are added")
    parser.add_argument("--products", action="store_true", help="time symmetric products, and steps of Artemis")
    args = parser.parse_args()
    if args.products:
        rows = [*itertools.chain.from_iterable(multiply(*each) for each in PRODUCTS), *orthogonalise()]
        record_rows(args.out, [row | facts("cuda") for row in rows])
        return
    chosen = matrix.gemm_tile
    for name, case in CASES.items():
        weights, rank = parameters(case, False, torch.bfloat16, "cuda"), RANKS[name.removesuffix("-even")]
        adamw = step_ms(torch.optim.AdamW(weights, lr=LR, fused=True))
        print(f"{name:8} torch AdamW fused {adamw:7.3f} ms")
        for tile, overlap in itertools.product(TILES, (False, True)):
            matrix.gemm_tile = lambda *_, tile=tile: matrix.GemmTile(*tile)
            groups = [{"params": weights, "rank": rank}]
            optimizer = overlapping(apollo_optim.APOLLO(groups, lr=LR, rank=rank), overlap)
            took = step_ms(optimizer)
            print(f"{name:8} {tile!s:26} overlap {overlap!s:5} {took:7.3f} ms {took / adamw:6.3f} x AdamW", flush=True)
            del optimizer
            free_memory("cuda")
        del weights
        free_memory("cuda")
    matrix.gemm_tile = chosen


if __name__ == "__main__":
    main()
