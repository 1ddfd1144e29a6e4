"""The collectives of a step, and the bytes that each GPU puts on the network."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..stepping.collectives import Request, Step, in_lockstep
from .layout import Layout
from .models import ROOT, Transformer, Weight

DDP_BUCKET = 25 * 2**20
FIRST_DDP_BUCKET = 2**20
"""Default bytes of gradients that DistributedDataParallel sends together."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a GPU's step."""

    what: str
    kind: str
    """all-reduce, all-gather, reduce-scatter or all-to-all."""
    ranks: int
    """Ranks that take part in each."""
    count: int
    bytes: int
    """Bytes of all collectives: of the whole that is gathered, of what is added up, or of what a rank deals out."""

    @property
    def sent(self) -> int:
        """Bytes that a GPU sends, in rings: each part goes once around, in an all-reduce twice."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) // self.ranks


def merged(traffic: Iterable[Traffic]) -> list[Traffic]:
    """The same traffic, with collectives of the same kind, purpose and ranks added up."""
    found: dict[tuple[str, str, int], Traffic] = {}
    for each in traffic:
        key = each.what, each.kind, each.ranks
        before = found.get(key, replace(each, count=0, bytes=0))
        found[key] = replace(before, count=before.count + each.count, bytes=before.bytes + each.bytes)
    return [each for each in found.values() if each.count]


def units(weights: Sequence[Weight]) -> dict[str, list[Weight]]:
    """The weights that FSDP2 gathers and reduces together."""
    found: dict[str, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.unit, []).append(weight)
    return found


def sharding_traffic(weights: Sequence[Weight], layout: Layout, compute: int, reduce: int) -> list[Traffic]:
    """FSDP2's collectives: every layer is gathered forward and backward, the rest once; gradients are reduced.

    `compute` and `reduce` are the bytes of a number when weights are gathered and when gradients are reduced.
    """
    traffic: list[Traffic] = []
    for unit, members in units(weights).items():
        ranks = layout.fsdp_ranks(members[0])
        held = sum(layout.gathered_numbers(weight) for weight in members)
        if ranks > 1:
            passes = 1 if unit == ROOT else 2  # the root keeps its weights until its backward
            traffic.append(Traffic("weights", "all-gather", ranks, passes, passes * held * compute))
            traffic.append(Traffic("gradients", "reduce-scatter", ranks, 1, held * reduce))
            if layout.replicas > 1:
                shard = held // ranks * reduce
                traffic.append(Traffic("gradients of copies", "all-reduce", layout.replicas, 1, shard))
    return merged(traffic)


def copies_traffic(weights: Sequence[Weight], layout: Layout, itemsize: int) -> list[Traffic]:
    """DistributedDataParallel's collectives, which average gradients in buckets from the last layer to the first."""
    buckets, filled, limit = 0, 0, FIRST_DDP_BUCKET
    total = 0
    for weight in reversed(weights):
        size = math.prod(layout.local_shape(weight)) * itemsize
        total, filled = total + size, filled + size
        if filled >= limit:
            buckets, filled, limit = buckets + 1, 0, DDP_BUCKET
    return [Traffic("gradients", "all-reduce", layout.replicas, buckets + (filled > 0), total)]


def tensor_traffic(model: Transformer, layout: Layout, tokens: int, compute: int, recomputed: bool) -> list[Traffic]:
    """Tensor parallelism's collectives, between layers split by sequence and matrices split by rows and columns.

    Attention and MLP each gather their input and scatter their sum, and the reverse in backward; so do the embedding,
    which has no input to gather, and the head, which has no sum. Recomputing stops before a layer's last sum.
    """
    size = tokens * model.hidden * compute
    gathers = model.layers * (6 if recomputed else 4) + 2
    scatters = model.layers * (5 if recomputed else 4) + 2
    return [
        Traffic("activations", "all-gather", layout.tensor, gathers, gathers * size),
        Traffic("activations", "reduce-scatter", layout.tensor, scatters, scatters * size),
    ]


def expert_traffic(model: Transformer, layout: Layout, tokens: int, compute: int, recomputed: bool) -> list[Traffic]:
    """Expert parallelism's collectives: tokens travel to their experts and back, and so do their gradients."""
    assert model.experts is not None
    layers = model.layers - model.experts.dense_layers
    count = layers * (6 if recomputed else 4)
    size = tokens * model.experts.active * model.hidden * compute
    return [Traffic("tokens to experts", "all-to-all", layout.expert, count, count * size)]


STEP_TRAFFIC = {
    "max": ("scales of 8-bit moments", "all-reduce"),
    "scatter": ("projected gradients", "reduce-scatter"),
    "reduce": ("projected gradients", "all-reduce"),
    "gather": ("gains, steps or gradients", "all-gather"),
    "deal": ("whole matrices", "all-to-all"),
    "return": ("whole matrices", "all-to-all"),
    "sum": ("norms", "all-reduce"),
}
"""The values that each kind of request of a sharded step sends, and the collective that sends them."""


def request_bytes(request: Request) -> int:
    """Bytes of the whole that a request gathers, of what it adds up, or of the part of a matrix that a rank deals."""
    if request.kind == "return":
        return math.prod(request.answer_shape) * request.tensor.itemsize
    return request.tensor.nbytes * (request.axis.size if request.kind == "gather" else 1)


@torch.no_grad()
def requests_of(step: Step[Any]) -> Sequence[Request]:
    """The requests that a sharded step on meta tensors makes of other ranks, in order."""
    found: list[Request] = []

    def empty(requests: Sequence[Request]) -> list[Tensor]:
        found.extend(requests)
        return [request.tensor.new_empty(request.answer_shape) for request in requests]

    in_lockstep([step], empty)
    return found


def step_traffic(steps: Iterable[Sequence[Request]]) -> list[Traffic]:
    """Collectives of sharded steps that run side by side, from the requests of each."""
    traffic: list[Traffic] = []

    def count(requests: Sequence[Request]) -> list[Tensor]:
        what, collective = STEP_TRAFFIC[requests[0].kind]
        traffic.append(Traffic(what, collective, requests[0].axis.size, 1, sum(map(request_bytes, requests))))
        return [request.tensor for request in requests]

    in_lockstep([_replayed(requests) for requests in steps], count)
    return merged(traffic)


def _replayed(requests: Sequence[Request]) -> Step[None]:
    """A step that makes the same requests, whatever the answers."""
    for request in requests:  # noqa: UP028 (a sequence has no `send`)
        yield request
