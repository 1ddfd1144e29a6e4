"""The largest micro-batch that fits into a GPU of 80 GB, and the tokens per second of each method at its own.

    python bench/micro_batch.py --out bench/results/micro-batch-h200.csv
    python bench/micro_batch.py --device cpu --model 1m --sequence 64 --cap-gb 2

`apollo bench throughput` on LLaMA-7B in bf16, sequences of 1024, with activation checkpointing and the chunked loss,
not compiled: a batch is 512 sequences for all, but for the method that steps in backward, whose batch is a micro-batch.
"""

import sys

from apollo_optim.evidence.benches import Bench, throughputs
from apollo_optim.llama import PRESETS
from apollo_optim.train.model import Model
from machine import common_parser, facts, record_rows

NARROW = "int8=all,state_dtype=int8,vocabulary_state=rowwise,step_in_backward=true"
METHODS = {
    "adamw": ("AdamW (torch, fused)", "adamw-torch"),
    "apollo": ("APOLLO rank 256", "apollo:rank=256"),
    "apollo-mini": ("APOLLO-Mini", "apollo-mini"),
    "apollo-mini-int8": ("APOLLO-Mini, int8, in backward", f"apollo-mini:{NARROW}"),
}
"""By name: the label, and the method with its options."""


def main() -> int:
    parser = common_parser(__doc__, device="cuda")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--model", default="7b", choices=list(PRESETS))
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--cap-gb", type=float, default=80.0, help="memory of the process, its context included")
    args = parser.parse_args()
    model = Model(model=args.model, dtype="bf16", compile=False, activation_checkpointing=True, loss="chunked")
    place = {"device": args.device, "model": model, "sequence": args.sequence, "cap_gb": args.cap_gb}
    rows = []
    for name in args.methods:
        label, method = METHODS[name]
        options = Bench(what="throughput", methods=(method,), **place)
        options.check()
        row = {**throughputs(options).rows[0], "method": name, "label": label}
        rows.append(row)
        if rows[0]["method"] == "adamw" and rows[0]["micro_batch"]:
            row["vs_adamw"] = round(row["tokens_per_s"] / rows[0]["tokens_per_s"], 3)
            row["micro_batch_vs_adamw"] = round(row["micro_batch"] / rows[0]["micro_batch"], 3)
        print(label, row, flush=True)
        record_rows(args.out, [row | facts(args.device)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
