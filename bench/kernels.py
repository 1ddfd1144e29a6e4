"""The kernels of a fused step: time, memory traffic, and fraction of the copy bandwidth of each.

At high rank one batch of weights is projected while another is updated, so that kernels share the device. They are
timed first with one batch after another, and then that way.

    python bench/kernels.py --models 60m 1b 7b --out bench/results/kernels-h200.csv
    python bench/kernels.py --models 1b 7b --only "Factored AdamW" "AdamW, 8-bit state"
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from apollo_optim.fused.batches import KernelBatch, padded_elements
from apollo_optim.fused.step import FusedStep
from apollo_optim.llama import MODELS
from apollo_optim.optimizer import ProjectedOptimizer
from machine import common_parser, copy_bandwidth, facts, kernel_times, record_rows
from step import RANKS, add_model_arguments, chosen_models, contenders, parameters

STEPS = 10


def traffic(optimizer: ProjectedOptimizer) -> Counter[str]:
    """Bytes that each kernel must move in a step, if it reads and writes everything once."""
    moved: Counter[str] = Counter()
    for batch in _batches(optimizer):
        kind = batch.kind
        for matrix in batch.matrices:
            grad, weight = matrix.size * kind.grad.itemsize, matrix.size * kind.weight.itemsize
            if not kind.is_projected:
                state = sum(value.nbytes for value in matrix.job.state.values())
                for first in ("squares_kernel", "sizes_kernel") if kind.mode == "factored" else ("finite_kernel",):
                    moved[first] += grad
                moved["adamw_groups_kernel" if kind.group_size else "adamw_kernel"] += grad + 2 * weight + 2 * state
                continue
            moved["apply_kernel"] += grad + 2 * weight
            if kind.mode == "gemm":
                moved["normals_kernel"] += matrix.rank * matrix.side * kind.grad.itemsize
                moved["pad_kernel"] += 2 * kind.grad.itemsize * padded_elements(matrix)
                moved["project_kernel"] += grad + 4 * matrix.rank * matrix.channels * kind.moments.itemsize
            else:
                moved["reduce_rows_kernel" if matrix.channels_are_rows else "reduce_columns_kernel"] += grad
    return moved


def fused_steps(optimizer: ProjectedOptimizer) -> list[FusedStep]:
    plan = optimizer._plans.whole
    assert plan is not None
    return plan.fused


def _batches(optimizer: ProjectedOptimizer) -> list[KernelBatch]:
    return [batch for fused in fused_steps(optimizer) for batch in fused.tables.batches]


def projected(optimizer: ProjectedOptimizer) -> int:
    """Elements of gradients that go through the tensor cores."""
    batches = [batch for batch in _batches(optimizer) if batch.kind.mode == "gemm"]
    return sum(matrix.size for batch in batches for matrix in batch.matrices)


def run(model: str, whole: bool, names: Sequence[str]) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth("cuda")
    params = parameters(MODELS[model], whole, torch.bfloat16, "cuda")
    rows = []
    for name in names or ("APOLLO-Mini", f"APOLLO rank {RANKS[model]}"):
        optimizer = contenders(model, whole, "cuda")[name].build(params)
        assert isinstance(optimizer, ProjectedOptimizer)
        for _ in range(3):
            optimizer.step()
        moved = traffic(optimizer)
        overlaps = any(fused._overlaps for fused in fused_steps(optimizer))
        for overlap in (False, True) if overlaps else (False,):
            for fused in fused_steps(optimizer):
                fused._overlaps = overlap
            found = kernel_times(optimizer.step, STEPS)
            times = {kernel: found[kernel] for kernel in found if kernel.endswith("_kernel")}
            total = sum(ms for ms, _ in times.values())
            manner = "batches that overlap" if overlap else "one batch after another"
            which = f"{model} {'whole' if whole else 'matrices'}, {name}"
            print(f"\n{which}, {manner}: kernels add up to {total:.3f} ms")
            for kernel, (ms, launches) in times.items():
                row: dict[str, Any] = {"model": model, "whole": whole, "optimizer": name, "overlap": overlap}
                row |= {"kernel": kernel, "ms": round(ms, 4), "launches": launches}
                note = ""
                if amount := moved[kernel]:
                    row |= {"GB": round(amount / 1e9, 3), "of_copy": round(amount / (ms * 1e-3) / bandwidth, 3)}
                    note = f"{row['GB']:8.2f} GB  {row['of_copy']:6.1%} of the copy bandwidth"
                if kernel == "project_kernel":
                    row["TFLOP_s"] = round(2 * RANKS[model] * projected(optimizer) / (ms * 1e-3) / 1e12, 1)
                    note += f"  {row['TFLOP_s']:.0f} TFLOP/s"
                rows.append(row | {"copy_TB_s": round(bandwidth / 1e12, 3)})
                print(f"  {kernel:<24} {ms:9.4f} ms  {launches:5.1f} launches  {note}", flush=True)
        del optimizer
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = common_parser(__doc__, device=None)
    add_model_arguments(parser)
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="of bench/step.py's; by default APOLLO's two"
    )
    args = parser.parse_args()
    rows = [row | facts("cuda") for model, whole in chosen_models(args) for row in run(model, whole, args.only)]
    record_rows(args.out, rows)


if __name__ == "__main__":
    main()
