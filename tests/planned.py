"""Small models that a planner's numbers are held to, and what is measured of them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apollo_optim.planner.models import Experts, GroupedAttention, LatentAttention, Transformer

# Nothing divides by four but the heads: parts of ranks differ in length, and some have none of a narrow matrix.
DENSE = Transformer(
    hidden=72,
    intermediate=190,
    layers=3,
    vocabulary=203,
    attention=GroupedAttention(heads=8, key_heads=2, head=10),
)
# Heads of one width throughout, for which the CPU has a fused attention as well.
MIXTURE = Transformer(
    hidden=64,
    intermediate=150,
    layers=3,
    vocabulary=203,
    attention=LatentAttention(heads=4, query_rank=26, key_rank=18, plain=10, rotary=6, value=16),
    experts=Experts(count=8, active=3, shared=1, intermediate=40, dense_layers=1),
)
MODELS = {"dense": DENSE, "mixture": MIXTURE}


def hugging_face(model: Transformer, dtype: torch.dtype = torch.float32) -> Any:
    """The same as a model of transformers, in training mode."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    common = {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention.heads,
        "num_key_value_heads": model.attention.key_heads,
        "tie_word_embeddings": False,
    }
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    if isinstance(model.attention, GroupedAttention):
        config = LlamaConfig(**common, head_dim=model.attention.head)
        return LlamaForCausalLM._from_config(config, **options).train()
    assert model.experts is not None
    config = DeepseekV3Config(
        **common,
        moe_intermediate_size=model.experts.intermediate,
        n_routed_experts=model.experts.count,
        num_experts_per_tok=model.experts.active,
        n_shared_experts=model.experts.shared,
        first_k_dense_replace=model.experts.dense_layers,
        n_group=2,
        topk_group=2,
        q_lora_rank=model.attention.query_rank,
        kv_lora_rank=model.attention.key_rank,
        qk_nope_head_dim=model.attention.plain,
        qk_rope_head_dim=model.attention.rotary,
        v_head_dim=model.attention.value,
    )
    return DeepseekV3ForCausalLM._from_config(config, **options).train()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensor: Tensor) -> int:
    held = local(tensor)
    return held.numel() * held.element_size()


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that `forward` leaves for the backward pass, beside the model's own tensors."""
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


class Live(TorchDispatchMode):
    """The most bytes that tensors seen by it hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((result, args, kwargs)):
            if isinstance(each, Tensor):
                storage = local(each).untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Counted anew every time: FSDP2 frees a tensor's memory and takes it again while the tensor stays."""
        held = {key: storage for key, each in self._storages.items() if (storage := each()) is not None}
        self._storages = {key: self._storages[key] for key in held}
        return sum(storage.nbytes() for storage in held.values())


COLLECTIVES = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::alltoall_base_": ("all-to-all", 1),
}
"""Kinds, and which argument has what is gathered, added up or dealt out."""


class Collectives(TorchDispatchMode):
    """By kind, how many collectives there were and the bytes of what they gathered, added up or dealt out.

    `CommDebugMode` counts them too, but follows every other operation as well, and takes ten times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, position = COLLECTIVES[func._schema.name]
            tensors = args[position]
            count, total = self.seen.get(kind, (0, 0))
            size = sum(map(bytes_of, tensors if isinstance(tensors, (list, tuple)) else [tensors]))
            self.seen[kind] = count + 1, total + size
        return func(*args, **(kwargs or {}))
