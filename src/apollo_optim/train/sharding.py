"""A model whose weights are split among the ranks: FSDP2, a layer at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from .losses import Objective
from .ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sharded_objective(model: "PreTrainedModel", plain: Objective, compiled: bool, ranks: Ranks) -> Objective:
    """The model with its loss, its weights split among the ranks. Build the optimizer afterwards.

    Layers are gathered one by one. What is not in a layer, embedding and head for the most part, is gathered once for
    the whole pass, because a chunked loss reads the head outside of the module that owns it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    for layer in decoder_layers(model):
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    return plain


def decoder_layers(model: "PreTrainedModel") -> nn.ModuleList:
    """The layers that a causal language model of Hugging Face repeats."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"--shard fsdp splits a model by its layers, and {type(model).__name__} has no list of them")
    return layers


@contextmanager
def gradients_kept_apart(objective: Any) -> Iterator[None]:
    """Let the backward passes inside add up gradients on their own rank."""
    objective.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        objective.set_requires_gradient_sync(True)
