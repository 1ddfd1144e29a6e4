"""Whether the logits of a model are its last hidden states times the weight of its head, and nothing else."""

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..distributed import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_EXTRAS = "final_logit_softcapping", "logit_scale", "logits_scaling"
"""What configurations of other architectures do to logits after the head."""

LARGE = 1000.0
"""A logit that any cap would change."""


def check_head(model: "PreTrainedModel", kind: str) -> None:
    """Raise ValueError where this kind of loss, which never sees the logits, would be that of another model."""
    if extras := logit_extras(model):
        raise ValueError(
            f'loss "{kind}" needs a head that is one linear layer without bias, and {type(model).__name__} has '
            f'{", ".join(extras)}; use loss "plain"'
        )


def linear_head(model: "PreTrainedModel") -> nn.Linear:
    """The head of a model that was checked."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def logit_extras(model: "PreTrainedModel") -> list[str]:
    """What makes logits more than hidden states times the head's weight."""
    head = model.get_output_embeddings()
    extras = [name for name in LOGIT_EXTRAS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if not isinstance(head, nn.Linear):
        extras.append(type(head).__name__)
    elif head.bias is not None:
        extras.append("a bias of the head")
    elif not extras and not head.weight.is_meta and not is_sharded(head.weight):
        extras = _found_by_trial(model, head)
    return extras


class _Hidden:
    """Output of a base model without having run it: last hidden states, and nothing else that one could ask for."""

    def __init__(self, last_hidden_state: Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Tensor | tuple[Tensor, ...]:
        return (self.last_hidden_state,)[place]


@torch.no_grad()
def _found_by_trial(model: "PreTrainedModel", head: nn.Linear) -> list[str]:
    """The same, where no configuration says so: other numbers in place of the head's output must be the logits.

    Hidden states are made up, too. No layer is run, which could be split among ranks, or draw numbers.
    """
    device, dtype = head.weight.device, head.weight.dtype
    hidden = torch.linspace(-1, 1, 2 * head.in_features, device=device).view(1, 2, head.in_features).to(dtype)
    words = torch.linspace(-LARGE, LARGE, 2 * head.out_features, device=device).view(1, 2, head.out_features).to(dtype)
    read: list[Tensor] = []

    def on_head(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> Tensor:
        read.append(inputs[0])
        return words

    def made_up(*_: Any, **__: Any) -> _Hidden:
        return _Hidden(hidden)

    hook = head.register_forward_hook(on_head)
    try:
        with patch.object(model.base_model, "forward", made_up):
            output: Any = model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    finally:
        hook.remove()
    if not read:
        return ["a head that it does not call"]
    logits = output[0] if isinstance(output, tuple) else output.logits
    extras = {
        "something between its last hidden states and the head": not _equal(read[0], hidden),
        "something between the head and its logits": not _equal(logits, words),
    }
    return [name for name, there in extras.items() if there]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
