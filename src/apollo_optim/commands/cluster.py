"""`apollo memory --gpus N`: a training step on a cluster, planned."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..choices import chosen
from ..core.shape import Rank
from ..flags import check_each
from ..param_groups import Vocabulary
from ..planner.activations import LOSSES, Batch
from ..planner.collectives import Traffic
from ..planner.layout import Layout, layout_of
from ..planner.models import MODELS
from ..planner.optimizers import CONTENDERS, planned, rank_of, takes_rank
from ..planner.paper_figures import UNITS, kept_otherwise
from ..planner.plan import ModelPlan, OptimizerPlan, compute_dtype, model_plan, optimizer_plan
from ..terminal import Column, table, width_of, wrapped

VOCABULARY_STATES: dict[Vocabulary | None, str] = {
    None: "",
    "adamw": ", those of the vocabulary AdamW's",
    "rowwise": ", one second moment for each row of the vocabulary",
    "factored": ", for the vocabulary one second moment for each row and column",
    "factored-adamw": ", for the vocabulary one second moment for each row and column, and its momentum in 4 bits",
}
"""The heading's words about each."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """With --gpus: what each GPU holds, sends and receives in a training step."""

    gpus: int | None = None
    """Plan a training step on so many, also of larger models: 8b, 70b, 405b, and 671b with experts."""
    shard: str | None = None
    """ddp, fsdp (the default), hsdp, tp, fsdp+tp, hsdp+tp, or fsdp+ep: how the model is spread over them."""
    replicas: int | None = None
    """Copies of the model under hsdp; by default one for every 8 ranks."""
    tensor_gpus: int | None = None
    """Ranks of tensor parallelism; by default 8."""
    expert_gpus: int | None = None
    """Ranks that experts are dealt out over; by default 64."""
    split: str | None = None
    """The dimension of a matrix that FSDP splits: rows (its default), or channels (by a shard_placement_fn)."""
    micro_batch: int | None = None
    """Sequences that a GPU, or a group of tensor parallelism, reads at once; by default 1."""
    sequence: int | None = None
    """Tokens of a sequence; by default 4096."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    loss: str | None = None
    """plain (the default), or chunked: logits of a few tokens at a time."""

    @property
    def batch(self) -> Batch:
        """The text that a GPU reads at once."""
        check_each(self, "at least 1", lambda number: number >= 1, "micro_batch", "sequence")
        return Batch(
            sequences=self.micro_batch or 1,
            sequence=self.sequence or 4096,
            checkpointing=self.activation_checkpointing,
            loss=chosen("--loss", self.loss or "plain", LOSSES),
        )

    def layout(self, model: str) -> Layout:
        """How the model is laid out on the GPUs."""
        return layout_of(
            MODELS[model],
            self.gpus or 0,
            self.shard or "fsdp",
            replicas=self.replicas,
            tensor=self.tensor_gpus,
            expert=self.expert_gpus,
            split=self.split or "rows",
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """The options of `apollo memory` about a cluster."""

    model: str
    optimizer: str | None
    rank: Rank
    weight_dtype: torch.dtype
    state_dtype: torch.dtype | None
    """None for the default of each optimizer."""
    vocabulary: Vocabulary | None
    """None for the default of each optimizer."""


def print_plan(cluster: Cluster, question: Question, as_json: bool) -> None:
    """Print what each GPU holds and sends, by optimizer."""
    if question.model not in MODELS and Path(question.model).exists():
        raise ValueError(
            f"--gpus plans a model that it knows by name, got --model {question.model}. One of: {', '.join(MODELS)}; "
            "without --gpus, a Hugging Face config.json or folder, too"
        )
    model = MODELS[chosen("--model", question.model, MODELS)]
    names = [chosen("--optimizer", question.optimizer, CONTENDERS)] if question.optimizer else list(CONTENDERS)
    if question.rank is not None and question.optimizer and not takes_rank(question.optimizer):
        raise ValueError(f"--rank has no effect on {question.optimizer}; leave it out")
    layout, batch = cluster.layout(question.model), cluster.batch
    whole = model_plan(model, layout, batch, question.weight_dtype, compute_dtype(question.weight_dtype))
    plans: dict[str, OptimizerPlan] = {}
    left_out: list[str] = []
    for name in names:
        optimizer = planned(name, question.rank, question.weight_dtype, question.state_dtype, question.vocabulary)
        try:
            plans[name] = optimizer_plan(model, layout, optimizer)
        except ValueError as error:  # blocks of 4 bits that ranks would have to share
            if question.optimizer:
                raise
            left_out.append(f"\nwithout {CONTENDERS[name]}: {error}")
    if as_json:
        print(json.dumps(_data(question, layout, batch, whole, plans), indent=2))
    else:
        held = _held_table(question.rank, whole, plans)
        _print_tables(_heading(cluster, question, layout, batch) + "".join(left_out), held, whole.traffic)


def _data(
    question: Question, layout: Layout, batch: Batch, whole: ModelPlan, plans: Mapping[str, OptimizerPlan]
) -> dict[str, Any]:
    return {
        "model": question.model,
        "layout": asdict(layout),
        "batch": asdict(batch),
        "tokens": batch.tokens * layout.readers,
        **{field.name: getattr(whole, field.name) for field in fields(whole) if field.name != "traffic"},
        "traffic": _traffic_data(whole.traffic),
        "optimizers": [
            {
                "optimizer": name,
                "rank": rank_of(name, question.rank),
                "state": plan.state,
                "step": plan.step,
                "peak": plan.peak(whole),
                "traffic": _traffic_data(plan.traffic),
                "refresh_traffic": _traffic_data(plan.refresh_traffic),
            }
            for name, plan in plans.items()
        ],
    }


def _traffic_data(traffic: Sequence[Traffic]) -> list[dict[str, Any]]:
    return [asdict(each) | {"sent": each.sent} for each in traffic]


def _heading(cluster: Cluster, question: Question, layout: Layout, batch: Batch) -> str:
    """The plan in words."""
    model = MODELS[question.model]
    numbers = sum(math.prod(weight.shape) for weight in model.weights())
    sizes = {
        "copies": layout.replicas,
        "ranks share a weight": layout.shard,
        "ranks of tensor parallelism": layout.tensor,
        "ranks of expert parallelism": layout.expert,
    }
    parts = [f"{size} {what}" for what, size in sizes.items() if size > 1]
    moments = question.state_dtype or torch.float32
    held, kept = (str(dtype).removeprefix("torch.") for dtype in (question.weight_dtype, moments))
    shown = [question.optimizer] if question.optimizer else CONTENDERS
    if others := kept_otherwise(shown, question.state_dtype, moments):
        kept += f" ({others})"
    reader = "group of tensor parallelism" if layout.tensor > 1 else "GPU"
    words = VOCABULARY_STATES[question.vocabulary]
    words += " where the optimizer is of this library" if words else ""
    recomputed, tokens = "recomputed" if batch.checkpointing else "kept", batch.tokens * layout.readers
    return (
        f"{question.model.upper()}, {numbers / 1e9:.1f} billion parameters, on {layout.gpus} GPUs: "
        f"{cluster.shard or 'fsdp'} ({', '.join(parts) or 'alone'})\n"
        f"weights in {held}, moments in {kept}{words}, activations {recomputed}, loss {batch.loss}\n"
        f"{batch.sequences} x {batch.sequence:,} tokens at once on each {reader}: {tokens:,} in all"
    )


NOTES = (
    "buffers: gathered weights, gradients to be reduced and the loss, at the worst moment of the two passes",
    "peak: all of it, or during the optimizer's step what that holds instead of activations and buffers",
    "sent: what a GPU puts on the network in a step if collectives go in rings; +refresh: at a step with new bases",
)


def _print_tables(heading: str, held: Sequence[Column], traffic: Sequence[Traffic]) -> None:
    width = width_of(sys.stdout)
    print(wrapped(heading, width), end="\n\n")
    print("In GB (10^9 bytes) of a GPU:")
    print(table(held, width), end="\n\n")
    print("Forward and backward:")
    print(table(_traffic_table(traffic), width), end="\n\n")
    print(wrapped("\n".join(NOTES), width))


def _held_table(rank: Rank, whole: ModelPlan, by_name: Mapping[str, OptimizerPlan]) -> list[Column]:
    plans, ranks = by_name.values(), [rank_of(name, rank) for name in by_name]

    def gigabytes(heading: str, size: Callable[[OptimizerPlan], int], use: int = 0) -> Column:
        return Column(heading, [f"{size(plan) / UNITS['GB']:.2f}" for plan in plans], use=use)

    sent = [sum(each.sent for each in plan.traffic) for plan in plans]
    more = [sum(each.sent for each in plan.refresh_traffic) - usual for plan, usual in zip(plans, sent, strict=True)]
    return [
        Column("optimizer", [CONTENDERS[name] for name in by_name], left=True),
        Column("rank", ["" if each is None else str(each) for each in ranks]),
        gigabytes("weights", lambda _: whole.weights, use=5),
        gigabytes("gradients", lambda _: whole.gradients, use=4),
        gigabytes("state", lambda plan: plan.state),
        gigabytes("activations", lambda _: whole.activations, use=3),
        gigabytes("buffers", lambda _: whole.buffers, use=6),
        gigabytes("peak", lambda plan: plan.peak(whole)),
        Column("collectives", [str(sum(each.count for each in plan.traffic)) for plan in plans], use=1),
        Column("sent", [_size(size) for size in sent], use=7),
        Column("+refresh", [_size(size) if size else "" for size in more], use=2),
    ]


def _traffic_table(traffic: Sequence[Traffic]) -> list[Column]:
    return [
        Column("what", [each.what for each in traffic], left=True),
        Column("collective", [each.kind for each in traffic], left=True),
        Column("ranks", [str(each.ranks) for each in traffic], use=1),
        Column("collectives", [str(each.count) for each in traffic], use=2),
        Column("sent", [_size(each.sent) for each in traffic]),
    ]


def _size(size: int) -> str:
    for unit, length in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"
