"""A training step on many GPUs: the bytes that the fullest of them holds, and what each sends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .activations import Activations, Batch
from .collectives import (
    Traffic,
    copies_traffic,
    expert_traffic,
    sharding_traffic,
    tensor_traffic,
    units,
)
from .layout import Layout
from .models import ROOT, Transformer, Weight
from .optimizers import Planned


def compute_dtype(weights: torch.dtype) -> torch.dtype:
    """The dtype that weights are gathered and computed with in: their own 16 bits, or bfloat16 for wider masters."""
    return weights if weights.itemsize == torch.bfloat16.itemsize else torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Bytes of a GPU that do not depend on the optimizer, and collectives."""

    weights: int
    gradients: int
    activations: int
    """Saved for the backward pass."""
    buffers: int
    """Bytes held besides at the worst moment of the two passes: gathered weights, their gradients, the loss."""
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """Bytes of a GPU and collectives that an optimizer adds."""

    state: int
    step: int
    """Bytes held besides during its step, when there are no activations."""
    traffic: tuple[Traffic, ...]
    """Collectives of every step."""
    refresh_traffic: tuple[Traffic, ...]
    """Collectives of a step that begins new bases."""

    def peak(self, model: ModelPlan) -> int:
        """Bytes held at the worst moment of a training step."""
        return model.weights + model.gradients + self.state + max(model.activations + model.buffers, self.step)


def model_plan(
    model: Transformer, layout: Layout, batch: Batch, weight_dtype: torch.dtype, computed_in: torch.dtype
) -> ModelPlan:
    """Weights, gradients, activations and collectives of forward and backward on the fullest rank.

    Gradients have the dtype of the weights, and are reduced in it; `computed_in` is usually `compute_dtype` of it.
    """
    weights, reduce = model.weights(), weight_dtype.itemsize
    held = layout.local_numbers(weights) * reduce
    activations = Activations(model, batch, computed_in.itemsize, layout.tensor)
    return ModelPlan(
        weights=held,
        gradients=held,
        activations=activations.saved,
        buffers=_buffers(weights, layout, activations, reduce),
        traffic=tuple(_model_traffic(layout, activations, reduce)),
    )


def _buffers(weights: Sequence[Weight], layout: Layout, activations: Activations, reduce: int) -> int:
    """Bytes held beside activations at the worst moment of the two passes."""
    compute = activations.compute
    root, layer = _gathered(weights, layout)
    in_loss = compute * (root + layer) + activations.in_loss
    if layer == 0:
        fresh = max(math.prod(layout.local_shape(weight)) for weight in weights if weight.unit != ROOT)
        return max(in_loss, activations.in_layer - activations.of_head + compute * fresh)
    # FSDP2 has two layers gathered at a time, and the weights outside them throughout. A layer's gradients are copied
    # and reduced during the next layer's backward; those of head and embedding are reduced together at the end.
    head = layout.gathered_numbers(weights[-1])
    always = compute * (root + head + 2 * layer) - activations.of_head
    after_one = always + reduce * layer - activations.of_layer
    in_first, in_second = always + activations.in_layer, after_one + activations.in_layer
    in_embedding = (2 * compute + reduce) * root - activations.saved
    return max(in_loss, in_first, in_second, after_one + compute * layer, in_embedding)


def _gathered(weights: Sequence[Weight], layout: Layout) -> tuple[int, int]:
    """Numbers that a rank gathers of the weights outside the layers, and of the largest layer with its experts."""
    sizes: dict[str, int] = {}
    for unit, members in units(weights).items():
        layer = unit.removesuffix(".mlp.experts")
        split = [weight for weight in members if layout.fsdp_ranks(weight) > 1]
        sizes[layer] = sizes.get(layer, 0) + sum(layout.gathered_numbers(weight) for weight in split)
    return sizes.pop(ROOT), max(sizes.values())


def _model_traffic(layout: Layout, activations: Activations, reduce: int) -> list[Traffic]:
    model, batch, compute = activations.model, activations.batch, activations.compute
    weights = model.weights()
    traffic = sharding_traffic(weights, layout, compute, reduce)
    if layout.shard == 1 and layout.replicas > 1:
        traffic += copies_traffic(weights, layout, reduce)
    if layout.tensor > 1:
        traffic += tensor_traffic(model, layout, batch.tokens, compute, batch.checkpointing)
    if layout.expert > 1:
        traffic += expert_traffic(model, layout, batch.tokens, compute, batch.checkpointing)
    return traffic


def optimizer_plan(model: Transformer, layout: Layout, optimizer: Planned) -> OptimizerPlan:
    """State and collectives of an optimizer on the fullest rank."""
    weights = model.weights()
    return OptimizerPlan(
        state=optimizer.state_bytes(weights, layout),
        step=optimizer.step_bytes(weights, layout),
        traffic=tuple(optimizer.traffic(weights, layout)),
        refresh_traffic=tuple(optimizer.traffic(weights, layout, refresh=True)),
    )
