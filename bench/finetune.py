r"""Tokens per second of fine-tuning all weights: `apollo finetune` and TRL's SFTTrainer with torch's fused AdamW.

    python bench/finetune.py --device cpu --model MODEL --data answers.jsonl --steps 15 --warm 5
    python bench/finetune.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data train.jsonl \
        --out bench/results/finetune-h200.csv
    python bench/finetune.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data train.jsonl --recipe commonsense \
        --out bench/results/finetune-h200.csv

With --recipe, each method of bench/downstream.py's table, by that recipe, not compiled. Otherwise both have the same
tokens and labels, batches of 32 examples, bf16 weights without a float32 copy, no checkpointing of activations, no
dropout, no clipping. Tokens are those of examples: what rows are filled up with does not count. TRL pads each batch to
its longest example, as ours does with --no-packing; "packed" is our default. Each has a process of its own; the first
--warm steps, in which things are compiled, are left out, and the median of what follows is taken, five steps at a time,
since a batch of a rare shape is compiled when it comes. Losses tell whether the same was done. "to_trl" is against TRL
without compilation, of this run or else the last one in the file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from apollo_optim.evidence.workload import apart
from apollo_optim.train.display import Display
from apollo_optim.train.tuning.base_model import base_folder
from apollo_optim.train.tuning.config import FinetuneOptions, TuningData, TuningModel
from apollo_optim.train.tuning.examples import tuning_examples
from downstream import TUNED, of_method
from machine import common_parser, facts, record_rows, recorded

BATCH, LR = 32, 2e-5
WINDOW = 5
"""Steps that are timed together."""
CONTESTANTS = {
    "trl": None,
    "trl compiled": None,
    "apollo, padded": "--method adamw-torch --no-packing --compile false",
    "apollo, padded, compiled": "--method adamw-torch --no-packing --compile true",
    "apollo, packed": "--method adamw-torch --compile false",
    "apollo, packed, compiled": "--method adamw-torch --compile true",
    "apollo, packed, compiled, rank 32": "--method apollo --rank 32 --scale 2.236 --compile true",
    "apollo, packed, compiled, mini": "--method apollo-mini --compile true",
}
"""What is timed, with options of `apollo finetune`. All but the last two use torch's fused AdamW."""
FULL = "--targets", "all", "--others", "adamw", "--dropout", "0", "--batch", str(BATCH), "--lr", str(LR)
"""All weights, as TRL trains them."""


def by_trl(args: argparse.Namespace, compiled: bool, folder: str) -> dict[str, Any]:
    """Train by TRL; returns what was measured."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    options = FinetuneOptions(model=TuningModel(model=args.model), data=TuningData(data=args.data, cache=args.cache))
    with Display(quiet=True) as screen:
        base = base_folder(args.model, dtype, args.cache, screen)
        examples = tuning_examples(options.resolved(False), base, None, screen)
    answers = examples.train
    some = [answers.example(number) for number in range(min(len(answers), args.steps * BATCH))]
    rows = [{"input_ids": ids.tolist(), "labels": [int(i) if m else -100 for i, m in zip(ids, marks, strict=True)]}
            for ids, marks in some]  # fmt: skip
    done, moments = 0, list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal done
            done += 1
            if done >= args.warm and done % WINDOW == 0:
                if args.device == "cuda":
                    torch.cuda.synchronize()
                moments.append(time.perf_counter())

    config = SFTConfig(
        output_dir=folder, max_steps=args.steps, per_device_train_batch_size=BATCH, learning_rate=LR,
        optim="adamw_torch_fused", lr_scheduler_type="linear", warmup_steps=1, max_grad_norm=0.0, weight_decay=0.0,
        bf16=False, gradient_checkpointing=False, max_length=None, packing=False, save_strategy="no",
        report_to="none", logging_steps=args.steps, torch_compile=compiled, use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="sdpa")
    pretrained = examples.tokenizer.pretrained
    if pretrained.pad_token is None:
        pretrained.pad_token = pretrained.eos_token
    trainer = SFTTrainer(
        model, args=config, train_dataset=Dataset.from_list(rows), processing_class=pretrained, callbacks=[Clock()]
    )
    result = trainer.train()
    # Every batch is read once in an order of the trainer's own: a step has the mean of all.
    tokens = BATCH * sum(len(row["input_ids"]) - 1 for row in rows) / len(rows)
    seconds = median(after - before for before, after in pairwise(moments)) / WINDOW
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return {"tokens_per_s": round(tokens / seconds), "loss": round(result.training_loss, 4), "peak_bytes": peak}


def by_apollo(args: argparse.Namespace, options: list[str], folder: str) -> dict[str, Any]:
    """Train by `apollo finetune`; returns what was measured."""
    length = ["--steps", str(args.steps), "--warmup", "1", "--log-every", str(WINDOW)]
    place = ["--model", args.model, "--data", args.data, "--cache", str(args.cache), "--out", f"{folder}/run"]
    command = [sys.executable, "-m", "apollo_optim", "finetune", *options, *length, *place]
    command += ["--device", args.device, "--quiet", "--eval-tokens", "1024", "--micro-batch", str(BATCH)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    timed = pairwise(line for line in trained if line["step"] >= args.warm)
    speed = median((b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]) for a, b in timed)
    loss = sum(line["loss"] for line in trained) / len(trained)
    return {"tokens_per_s": round(speed), "loss": round(loss, 4), "peak_bytes": max(line["memory"] for line in trained)}


def main() -> None:
    parser = common_parser(__doc__)
    parser.add_argument("--model", required=True, help="as of apollo finetune")
    parser.add_argument("--data", required=True, help="likewise")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "apollo-bench")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm", type=int, default=30, help="steps that are not timed")
    parser.add_argument("--only", nargs="+", help="by default all")
    parser.add_argument("--recipe", choices=("commonsense",), help="methods of its table in place of these")
    args = parser.parse_args()
    if args.warm % WINDOW or args.steps % WINDOW or args.steps <= args.warm:
        parser.error(
            f"--warm {args.warm} --steps {args.steps}: expected multiples of {WINDOW}, and more steps than warm"
        )
    rivals = [int(row["tokens_per_s"]) for row in recorded(args.out) if row["name"] == "trl"] if args.out else []
    chosen = {name: options and [*options.split(), *FULL] for name, options in CONTESTANTS.items()}
    if args.recipe:
        by_recipe = f"--recipe {args.recipe} --lr {LR} --compile false"
        chosen = {f"{args.recipe}, {method}": [*of_method(method), *by_recipe.split()] for method in TUNED}
    if unknown := set(args.only or ()) - set(chosen):
        parser.error(f"--only {sorted(unknown)}: expected some of {list(chosen)}")
    for name in args.only or chosen:
        options = chosen[name]
        with tempfile.TemporaryDirectory() as folder:
            if options is None:
                found = apart(by_trl, args, name == "trl compiled", folder)
            else:
                found = by_apollo(args, options, folder)
        row = {"name": name, "model": Path(args.model).name, "batch": BATCH, "steps": args.steps, **found}
        rivals += [found["tokens_per_s"]] if name == "trl" else []
        # By a recipe other weights are trained than TRL's.
        row["to_trl"] = round(found["tokens_per_s"] / rivals[-1], 3) if rivals and not args.recipe else None
        print(row, flush=True)
        record_rows(args.out, [row | facts(args.device)])


if __name__ == "__main__":
    main()
