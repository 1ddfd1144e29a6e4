"""Whether the logits of a model are its last hidden states times the weight of its head, and nothing else."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
    elif not extras and not head.weight.is_meta:
        extras = _found_by_trial(model, head)
    return extras


@torch.no_grad()
def _found_by_trial(model: "PreTrainedModel", head: nn.Linear) -> list[str]:
    """The same, where no configuration says so: numbers in place of the head's output must be the logits."""
    seen: dict[str, Tensor] = {}

    def on_base(_: nn.Module, __: Any, output: Any) -> None:
        seen["hidden"] = output.last_hidden_state

    def on_head(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        words = torch.linspace(-LARGE, LARGE, output.shape[-1], device=output.device)
        seen["output"] = words.to(output.dtype).expand_as(output)
        return seen["output"]

    tokens = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    hooks = [model.base_model.register_forward_hook(on_base), head.register_forward_hook(on_head)]
    try:
        # Dropout draws numbers, and a run should not depend on how its loss was chosen.
        with torch.random.fork_rng([head.weight.device] if head.weight.is_cuda else []):
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    extras = {
        "something between its last hidden states and the head": not _equal(seen["input"], seen["hidden"]),
        "something between the head and its logits": not _equal(logits, seen["output"]),
    }
    return [name for name, there in extras.items() if there]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
