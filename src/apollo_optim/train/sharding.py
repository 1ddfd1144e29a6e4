"""A model whose weights are split among the ranks: FSDP2, a layer at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .losses import Objective
from .ranks import Ranks


class Splitting:
    """Splits a model among the ranks. Build the optimizer afterwards."""

    def __init__(self, ranks: Ranks, compiled: bool):
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        self.compiled = compiled

    def split_layer_(self, layer: nn.Module) -> None:
        """Leave this rank its part of a layer, which is gathered when it computes."""
        from torch.distributed.fsdp import fully_shard

        if self.compiled:
            layer.compile()
        fully_shard(layer, mesh=self.mesh)

    def split_rest_(self, objective: Objective) -> None:
        """Split what is not in a layer, embedding and head for the most part.

        It is gathered once for the whole pass, because a chunked loss reads the head outside of the module that owns
        it.
        """
        from torch.distributed.fsdp import fully_shard

        fully_shard(objective, mesh=self.mesh)


@contextmanager
def gradients_kept_apart(objective: Any) -> Iterator[None]:
    """Let the backward passes inside add up gradients on their own rank."""
    objective.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        objective.set_requires_gradient_sync(True)
