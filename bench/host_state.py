"""Time of a step and memory of the device, with optimizer state on the host and on the device.

    python bench/host_state.py --device cpu --model 60m --repeats 1
    python bench/host_state.py --out bench/results/host-state-h200.csv

Both are first checked to step to the same weights, bit for bit. On a CPU, where the two are the same, the script only
runs through.
"""

import argparse
from typing import Any

import torch

from apollo_optim import APOLLO
from apollo_optim.evidence.timing import free_memory, summary, times_ms
from apollo_optim.llama import MODELS
from apollo_optim.memory import held_bytes
from machine import common_parser, facts, record_rows
from step import LR, RANKS, parameters

CHECKED_STEPS = 3


def measure(rank: int | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ends = []
    for state_device in (None, "cpu"):
        torch.manual_seed(0)
        params = parameters(MODELS[args.model], False, torch.bfloat16, args.device)
        before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        optimizer = APOLLO([{"params": params, "rank": rank}], lr=LR, state_device=state_device)
        for _ in range(CHECKED_STEPS):
            optimizer.step()
        ends.append([weight.detach().cpu() for weight in params])
        held = torch.cuda.memory_allocated() - before if args.device == "cuda" else 0
        timed = summary(times_ms(optimizer.step, args.device, args.warmup, args.repeats))
        row = {"model": args.model, "rank": rank or "AdamW", "state_device": state_device or args.device, **timed}
        row |= {"state_bytes": held_bytes(optimizer), "device_bytes": held}
        row["vs_device"] = round(timed["median_ms"] / (rows or [row])[0]["median_ms"], 3)
        rows.append(row | facts(args.device))
        del optimizer, params
        free_memory(args.device)
    assert all(map(torch.equal, *ends)), f"rank {rank}: weights differ"
    return rows


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--model", default="1b", choices=sorted(RANKS), help="whose matrices are stepped")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows = [row for rank in (RANKS[args.model], None) for row in measure(rank, args)]
    for row in rows:
        print(
            f"{row['model']} {row['rank']!s:>6} state on {row['state_device']:5} {row['median_ms']:9.3f} ms "
            f"{row['vs_device']:7.3f} x  state {row['state_bytes'] / 2**20:9.1f} MiB, of the optimizer's on the device "
            f"{row['device_bytes'] / 2**20:9.1f} MiB"
        )
    record_rows(args.out, rows)


if __name__ == "__main__":
    main()
