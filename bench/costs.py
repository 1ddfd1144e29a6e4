"""Tables of times and of memory, for bench/results.py to fill in."""

from collections.abc import Callable, Iterable, Sequence

from apollo_optim.terminal import counted
from machine import RESULTS, Row, recorded

GIB, MIB = 2**30, 2**20
STEPS_AT, ARTEMIS_AT, GROUPS_AT = "5ccec00", "fba2727", "3e77395"
"""Commits of the steps in docs/kernels.md: the last is of those whose kernels take whole groups."""
PRODUCTS_AT = "b80783e"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def picked(file: str, **wanted: object) -> Row:
    """The last row of a file of results with these values."""
    fitting = [
        row for row in recorded(RESULTS / f"{file}.csv") if all(row[name] == str(wanted[name]) for name in wanted)
    ]
    assert fitting, f"{file}.csv has no row with {wanted}"
    return fitting[-1]


def step_row(model: str, optimizer: str, **wanted: object) -> Row:
    """The last row of bench/step.py for an optimizer on the matrices of a model."""
    return picked("step-h200", model=model, whole=False, optimizer=optimizer, **wanted)


def ms(row: Row) -> str:
    """A median, to three digits where it is below a millisecond."""
    median = float(row["median_ms"])
    return f"{median:.3f} ms" if median < 1 else f"{median:.2f} ms"


def ratio(row: Row, to: Row) -> str:
    """The ratio of two medians."""
    return f"{float(row['median_ms']) / float(to['median_ms']):.2f}"


def decimal(value: float) -> str:
    """A learning rate as it is written: 2.5e-3."""
    digits, power = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def mib(size: str) -> str:
    shown = f"{float(size) / MIB:,.0f}"
    return "0" if shown == "0" else f"{shown} MiB"


def gib(size: str) -> str:
    """A size in GiB; empty for 0."""
    return f"{float(size) / GIB:.2f}" if float(size) else ""


def steps() -> str:
    told = {
        "AdamW": ("36", "173", "torch AdamW fused", "torch AdamW fused"),
        "APOLLO": ("51", "159", "APOLLO rank 512", "APOLLO rank 256"),
        "APOLLO-Mini": ("48", "142", "APOLLO-Mini", "APOLLO-Mini"),
        "GaLore": ("371", "2874", "GaLore rank 512", "GaLore rank 256"),
        "Fira": ("421", "3086", "Fira rank 512", "Fira rank 256"),
        "Factored AdamW": ("-", "-", "Factored AdamW", "Factored AdamW"),
        "Artemis": ("-", "-", "Artemis", "Artemis"),
        "Artemis-Mini": ("-", "-", "Artemis-Mini", "Artemis-Mini"),
        "Muon": ("-", "-", "torch Muon", "torch Muon"),
    }

    def ours(model: str, name: str) -> str:
        row = step_row(model, name)
        # Of 200 steps one decomposes all gradients.
        return f"{float(row['median_ms']) + float(row['svd_ms'] or 0) / 200:.2f}"

    cells = [[name, one, ours("1b", a), seven, ours("7b", b)] for name, (one, seven, a, b) in told.items()]
    return table(["milliseconds", "1B, the paper", "1B, ours", "7B, the paper", "7B, ours"], cells)


def memory() -> str:
    rows = {row["run"]: row for row in recorded(RESULTS / "memory-h200.csv")}
    told = {
        "7b-bf16-adamw-ordinary": ("7B, AdamW, bf16 moments", "58 GB"),
        "7b-bf16-mini": ("7B, APOLLO-Mini, gradients freed in backward", "-"),
        "7b-int8-mini": ("7B int8, APOLLO-Mini, gradients freed in backward", "below 12 GB"),
        "13b-bf16-mini-ordinary": ("13B, APOLLO-Mini", "fits into 80 GB"),
        "13b-bf16-mini-ddp": ("13B, APOLLO-Mini, in DistributedDataParallel", "fits into 80 GB"),
        "13b-int8-mini": ("13B int8, APOLLO-Mini, gradients freed in backward", "-"),
    }

    cells = [
        [name, paper, *(gib(rows[run][kind]) for kind in ("peak", "weights", "state", "gradients"))]
        for run, (name, paper) in told.items()
    ]
    return table(["", "the paper", "ours, peak in GiB", "weights", "state", "gradients"], cells)


def throughput() -> str:
    rows = {row["method"]: row for row in recorded(RESULTS / "micro-batch-h200.csv")}
    told = {
        "adamw": ("4", "1"),
        "apollo": ("16", "up to 3"),
        "apollo-mini": ("16", "up to 3"),
        "apollo-mini-int8": ("-", "-"),
    }
    cells = [
        [rows[name]["label"], batch, rows[name]["micro_batch"], f"{float(rows[name]['tokens_per_s']):,.0f}", speed,
         f"{float(rows[name]['vs_adamw']):.2f}"]
        for name, (batch, speed) in told.items()
    ]  # fmt: skip
    head = ["LLaMA-7B in 80 GB", "micro-batch, the paper", "ours", "tokens/s, ours", "of AdamW, the paper", "ours"]
    return table(head, cells)


def tuning_speed() -> str:
    """Tokens a second of fine-tuning, each after the run of TRL's that it is compared with."""
    rows = [row for row in recorded(RESULTS / "finetune-h200.csv") if row["to_trl"]]
    cells = [
        [
            row["name"],
            f"{int(row['tokens_per_s']):,}",
            f"{float(row['to_trl']):.2f}",
            row["loss"],
            f"{int(row['peak_bytes']) / GIB:.1f} GiB",
            row["steps"],
            row["commit"],
        ]
        for row in rows
    ]
    return table(["", "tokens/s", "to TRL", "loss", "peak", "steps", "commit"], cells)


def step_of_matrices() -> str:
    """Steps on all matrices of 1B and 7B, of three runs."""
    told = {
        "torch SGD, fused": "torch SGD fused",
        "torch AdamW, fused": "torch AdamW fused",
        "**APOLLO-Mini**": "APOLLO-Mini",
        "**APOLLO, rank 512 (1B), 256 (7B)**": "APOLLO rank {rank}",
        "the same, `state_dtype=torch.bfloat16`": "APOLLO rank {rank}, bf16 moments",
        'the same, `state_dtype="int8"`': "APOLLO rank {rank}, 8-bit state",
        '**this library\'s AdamW** (`rank=None`), `state_dtype="int8"`': "AdamW, 8-bit state",
        "flashoptim FlashAdamW": "flashoptim FlashAdamW",
        "apollo-torch Mini": "apollo-torch Mini",
        "apollo-torch, the same ranks": "apollo-torch rank {rank}",
        "torchao AdamW8bit": "torchao AdamW8bit",
        "torch Muon": "torch Muon",
        "**Factored AdamW**": "Factored AdamW",
        "**Artemis**": "Artemis",
        "**Artemis-Mini**": "Artemis-Mini",
    }
    later = dict.fromkeys(("Factored AdamW", "AdamW, 8-bit state"), GROUPS_AT)
    later |= dict.fromkeys(("Artemis", "Artemis-Mini", "torch Muon"), ARTEMIS_AT)
    cells = []
    for label, name in told.items():
        cells.append([label])
        for model, rank in (("1b", 512), ("7b", 256)):
            commit = later.get(name, STEPS_AT)
            row = step_row(model, name.format(rank=rank), commit=commit)
            adamw = step_row(model, "torch AdamW fused", commit=commit)
            cells[-1] += [ms(row), ratio(row, adamw)]
        # From the last run: before, torchao's 8-bit state was counted as wide as its tensors say they are.
        last = step_row("7b", row["optimizer"])
        cells[-1] += [mib(last["state_bytes"]), mib(row["transient_bytes"])]
    return table(["LLaMA matrices", "1B", "of AdamW", "7B", "of AdamW", "7B state", "7B scratch"], cells)


def rounding() -> str:
    """Steps of optimizers without kernels, before and since their rounding has one."""
    cells = []
    for model, rank in (("1b", 512), ("7b", 256)):
        for name in ("GaLore", "Fira"):
            before, since = (step_row(model, f"{name} rank {rank}", commit=at) for at in ("f4c8f59", "a84d336"))
            scratch = (mib(row["transient_bytes"]) for row in (before, since))
            cells.append([f"{name}, {model.upper()}, rank {rank}", ms(before), ms(since), *scratch])
    return table(["", "before", "since", "scratch before", "since"], cells)


def step_of_a_small_model() -> str:
    """Steps on all of 60M, launched by the host and as CUDA graphs."""
    told = [
        ("torch AdamW, fused", "torch AdamW fused"),
        ("**APOLLO-Mini**", "APOLLO-Mini"),
        ("the same, `state_dtype=torch.bfloat16`, as AdamW has it", "APOLLO-Mini, bf16 moments"),
        ("the same, bases renewed at every step", "APOLLO-Mini refreshing every step"),
        ("**APOLLO, rank 128**", "APOLLO rank 128"),
        ("the same, `state_dtype=torch.bfloat16`", "APOLLO rank 128, bf16 moments"),
        ("the same, bases renewed at every step", "APOLLO rank 128 refreshing every step"),
        ('the same, `projection="svd"`, between two decompositions', "APOLLO rank 128 with SVD"),
        ('the same, `state_dtype="int8"`', "APOLLO rank 128, 8-bit state"),
        ('this library\'s AdamW, `state_dtype="int8"`', "AdamW, 8-bit state"),
        ("flashoptim FlashAdamW", "flashoptim FlashAdamW"),
        ("galore-torch, rank 128", "galore-torch rank 128"),
        ("apollo-torch Mini", "apollo-torch Mini"),
        ("fira, rank 128", "fira rank 128"),
        ("torchao AdamW8bit", "torchao AdamW8bit"),
    ]
    rows = {
        row["optimizer"]: row
        for row in recorded(RESULTS / "step-h200.csv")
        if (row["model"], row["whole"], row["commit"]) == ("60m", "True", STEPS_AT)
    }
    cells = []
    for label, name in told:
        cells.append([label])
        for way in ("", ", CUDA graph"):
            row, adamw = rows.get(name + way), rows["torch AdamW fused" + way]
            cells[-1] += [ms(row), ratio(row, adamw)] if row else ["", ""]
    return table(["all of LLaMA-60M", "by the host", "of AdamW", "as a CUDA graph", "of AdamW"], cells)


def kernels() -> str:
    """The kernels of a step, one batch after another."""
    columns = [("1b", "APOLLO-Mini"), ("7b", "APOLLO-Mini"), ("1b", "APOLLO rank 512"), ("7b", "APOLLO rank 256")]
    found = [
        {
            row["kernel"]: row
            for row in recorded(RESULTS / "kernels-h200.csv")
            if (row["model"], row["optimizer"], row["whole"], row["overlap"]) == (*column, "False", "False")
        }
        for column in columns
    ]

    def shown(rows: dict[str, Row], name: str) -> str:
        if name not in rows:
            return ""
        row = rows[name]
        rate = f", {float(row['TFLOP_s']):.0f} TFLOP/s" if row["TFLOP_s"] else ""
        if name in ("apply_kernel", "reduce_rows_kernel", "reduce_columns_kernel", "pad_kernel"):
            rate = f", {float(row['GB']) / float(row['ms']) / float(row['copy_TB_s']):.0%}"
        return f"{float(row['ms']):.2f} ms{rate}"

    names = ["apply", "reduce_rows", "reduce_columns", "project", "normals", "pad", "combine", "decide"]
    cells = [[f"`{name}_kernel`", *(shown(rows, f"{name}_kernel") for rows in found)] for name in names]
    sums = [sum(float(row["ms"]) for row in rows.values()) for rows in found]
    cells.append(["all, one batch after another", *(f"{each:.2f} ms" for each in sums)])
    steps = [step_row(model, name, commit=STEPS_AT) for model, name in columns]
    cells.append(["a step; at high rank batches overlap", *map(ms, steps)])
    return table(["kernel", "1B Mini", "7B Mini", "1B rank 512", "7B rank 256"], cells)


def losses() -> str:
    columns = [("60m", 8192), ("60m", 65536), ("7b", 256), ("7b", 8192), ("7b", 65536)]
    cells = []
    for kind in ("plain", "chunked", "liger", "cce"):
        rows = [picked("losses-h200", model=model, tokens=tokens, loss=kind) for model, tokens in columns]
        version = f" ({rows[0][kind]})" if kind in rows[0] else ""
        numbers = [f"{float(row['median_ms']):.2f}, {float(row['extra_bytes']) / MIB:.0f}" for row in rows]
        cells.append([f"`{kind}`{version}", *numbers])
    return table(["ms, MiB", *(f"{model.upper()}, {tokens:,} tokens" for model, tokens in columns)], cells)


def int8_products() -> str:
    """Products with int8 weights, as ratios over all shapes and both directions."""
    found: dict[str, dict[tuple[str, ...], dict[str, Row]]] = {}
    for row in recorded(RESULTS / "int8-matmul-h200.csv"):
        product = row["outputs"], row["inputs"], row["direction"]
        found.setdefault(row["tokens"], {}).setdefault(product, {})[row["way"]] = row

    def span(products: Iterable[dict[str, Row]], way: str, to: str) -> str:
        ratios = sorted(float(ratio(ways[way], ways[to])) for ways in products)
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"

    cells = [
        [
            f"{int(tokens):,}",
            span(products.values(), "made whole", "bf16"),
            span(products.values(), "by tiles", "made whole"),
        ]
        for tokens, products in found.items()
    ]
    return table(["tokens", "made whole, of bf16 weights", "tile by tile, of made whole"], cells)


def batches() -> str:
    """Where the time of a batch goes."""
    kinds = ("products", "attention", "elementwise", "loss", "optimizer")
    rows = {row["model"]: row for row in recorded(RESULTS / "pretrain-h200.csv")}  # the last of each
    cells = [
        [
            f"{row['model'].upper()}, {row['micro_batch']} sequences",
            counted(int(row["tokens_per_s"])),
            f"{float(row['mfu']):.1%}",
            f"{float(row['median_ms']):.1f} ms",
            *(f"{float(row[kind]):.1f}" for kind in kinds),
        ]
        for row in reversed(rows.values())
    ]
    return table(["", "tokens/s", "MFU", "batch", *kinds], cells)


def peaks() -> str:
    """Peaks of whole runs of bench/memory.py."""
    told = {
        "7b-int8-mini": "7B int8, APOLLO-Mini, in backward",
        "7b-int8-mini-rowwise": "the same, vocabulary with row-wise second moments",
        "7b-int8-mini-factored": "the same, factored vocabulary",
        "7b-bf16-mini": "7B bf16, APOLLO-Mini, in backward",
        "13b-int8-mini": "13B int8, APOLLO-Mini, in backward",
        "13b-bf16-mini-ordinary": "13B bf16, APOLLO-Mini",
        "13b-bf16-mini-ddp": "the same in `DistributedDataParallel`, one rank",
        "7b-bf16-adamw-ordinary": "7B bf16, torch AdamW, bf16 moments",
    }
    cells = []
    for run, label in told.items():
        row = picked("memory-h200", run=run, steps=120)
        rest = str(int(row["activations"]) + int(row["rest"]))
        sizes = [row["peak"], row["weights"], row["state"], row["gradients"], rest, row["process"]]
        loss = f"{float(row['loss_first']):.2f} to {float(row['loss_last']):.2f}"
        cells.append([label, *map(gib, sizes), loss])
    return table(["GiB", "peak", "weights", "state", "gradients", "rest", "whole process", "loss"], cells)


def host_state() -> str:
    cells = []
    for rank, name in (("256", "APOLLO, rank 256"), ("AdamW", "AdamW")):
        there, here = (picked("host-state-h200", model="350m", rank=rank, state_device=at) for at in ("cpu", "cuda"))
        cells.append([name, mib(there["state_bytes"]), mib(there["device_bytes"]), ms(there), ms(here)])
    return table(["", "state", "on the GPU", "a step, state on the host", "state on the GPU"], cells)


def in_backward() -> str:
    cells = []
    for again in (False, True):
        for batch in (1, 8):
            there, here = (
                picked("in-backward-h200", mode=mode, batch=batch, checkpointing=again, commit=STEPS_AT)
                for mode in ("ordinary", "in backward")
            )
            times = [f"{float(row['median_ms']):.1f} ms" for row in (there, here)]
            peaks = [f"{float(row['peak_GiB']):.1f} GiB" for row in (there, here)]
            label = [f"{batch} x 256 tokens", "computed again" if again else "kept"]
            cells.append([*label, times[0], f"{times[1]} ({ratio(here, there)})", *peaks])
    return table(["batch", "activations", "ordinary", "in backward", "peak, ordinary", "in backward"], cells)


def one_rank() -> str:
    kept = ("bf16 weights", "8-bit state", "int8 weights")
    cells = [
        [
            f"{name}, {'FSDP2' if sharded else 'whole'}",
            *(ms(picked("sharded-h200", method=method, sharded=sharded, kept=each)) for each in kept),
        ]
        for method, name in (("apollo-mini", "APOLLO-Mini"), ("apollo", "APOLLO at rank 512"))
        for sharded in (False, True)
    ]
    return table(["", *kept], cells)


def artemis() -> str:
    told = {
        "**7B, fba2727**": ("7b", "fba2727"),
        "7B, db11ce6": ("7b", "db11ce6"),
        "7B, f4c8f59": ("7b", "f4c8f59"),
        "7B, e0e01bb": ("7b", "e0e01bb"),
        "7B, b80783e: `ArtemisMini`'s factors a column at a time": ("7b", "b80783e"),
        "7B, 7e988a5": ("7b", "7e988a5"),
        "7B, d31d021: `ArtemisMini` weight by weight, by a QR": ("7b", "d31d021"),
        "**1B, fba2727**": ("1b", "fba2727"),
        "1B, db11ce6": ("1b", "db11ce6"),
        "1B, f4c8f59": ("1b", "f4c8f59"),
        "1B, b80783e: `ArtemisMini`'s factors a column at a time": ("1b", "b80783e"),
        "60M, 7e988a5": ("60m", "7e988a5"),
    }
    names = ("Artemis", "Artemis-Mini", "torch Muon")
    cells = [[label, *(ms(step_row(model, name, commit=at)) for name in names)] for label, (model, at) in told.items()]
    return table(["", "`Artemis`", "`ArtemisMini`", "torch Muon"], cells)


def products() -> str:
    """Symmetric products and steps of Artemis, for each way to read factors."""
    shapes = {
        "(8, 4096, 4096) polynomial": "8 of 4096 x 4096, with the polynomial",
        "(8, 4096, 4096)": "without",
        "(3, 4096, 11008)": "3 of 4096 x 11008",
        "(3, 4096, 11008) transposed": "transposed",
    }
    step = "step, 8 layers of 7b"
    muon = picked("products-h200", what=step, way="torch Muon", commit=PRODUCTS_AT)
    cells = []
    for way in ("descriptors", "pointers"):
        whole = picked("products-h200", what=step, way=f"Artemis, {way}", commit=PRODUCTS_AT)
        rows = [whole, *(picked("products-h200", what=shape, way=way, commit=PRODUCTS_AT) for shape in shapes)]
        cells.append([way, f"{float(whole['ms']):.1f} ms", *(f"{float(row['share']):.3f}" for row in rows)])
    return table(["", "a step", f"of Muon's {float(muon['ms']):.1f} ms", *shapes.values()], cells)


def step_on_a_cpu() -> str:
    told = {
        "torch AdamW, default settings": "torch AdamW",
        "APOLLO-Mini": "APOLLO-Mini",
        "APOLLO, rank 128": "APOLLO rank 128",
    }
    rows = {label: picked("step-cpu", optimizer=name) for label, name in told.items()}
    adamw = next(iter(rows.values()))
    cells = [[label, f"{float(row['median_ms']):.0f} ms", ratio(row, adamw)] for label, row in rows.items()]
    return table(["", "median", "of AdamW"], cells)


COSTS: dict[str, Callable[[], str]] = {
    "step": steps,
    "step matrices": step_of_matrices,
    "step 60m": step_of_a_small_model,
    "rounding": rounding,
    "step cpu": step_on_a_cpu,
    "kernels": kernels,
    "artemis": artemis,
    "products": products,
    "losses": losses,
    "int8 products": int8_products,
    "batches": batches,
    "memory": memory,
    "peaks": peaks,
    "host state": host_state,
    "in backward": in_backward,
    "one rank": one_rank,
    "throughput": throughput,
    "tuning speed": tuning_speed,
}
"""The tables, by their names on the pages."""
