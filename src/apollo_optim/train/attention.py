"""Causal attention without a mask, so that compiled models use flash kernels.

transformers leaves out the mask of a causal batch only if it can look at the positions, which a compiler cannot. So
compiled models would read a mask of all pairs of tokens in every layer, and flash kernels take none.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CAUSAL = "apollo_causal"
"""The name of this attention in transformers."""


def use_causal_attention_(model: "PreTrainedModel") -> None:
    """Let a model build no mask for batches without padding, if each of its layers attends to all tokens before."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not (type(model)._supports_attention_backend and model._supports_sdpa and reads_all(model.config)):
        return
    AttentionInterface.register(CAUSAL, attended)
    AttentionMaskInterface.register(CAUSAL, _mask)
    model.set_attn_implementation(CAUSAL)


def has_causal_attention(model: "PreTrainedModel") -> bool:
    """True if the model uses this attention."""
    return model.config._attn_implementation == CAUSAL


def reads_all(config: "PretrainedConfig") -> bool:
    """True if by its configuration every layer attends to all tokens before."""
    text = config.get_text_config()  # itself, unless the model also sees or hears
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return kinds <= {"full_attention"} and not any(windows)


def _mask(*, attention_mask: Any = None, q_length: int, kv_length: int, use_vmap: bool = False, **rest: Any) -> Any:
    """None, so that the kernel is causal by itself; the usual mask if there is padding or a cache."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and q_length == kv_length and not use_vmap:
        return None
    return sdpa_mask(attention_mask=attention_mask, q_length=q_length, kv_length=kv_length, use_vmap=use_vmap, **rest)


def packed_inputs(positions: Tensor, starts: Tensor | None) -> dict[str, Any]:
    """The inputs that keep packed examples apart, whose `positions` [B, T] begin again with each: their starts in
    the flattened rows, or else a mask.
    """
    if starts is None:
        return {"attention_mask": packed_mask(positions)}
    return {"cu_seq_lens_q": starts, "max_length_q": positions.shape[1]}


def packed_mask(positions: Tensor) -> Tensor:
    """The mask [B, 1, T, T] by which tokens attend to those before of the same example."""
    example = (positions == 0).cumsum(-1)
    place = torch.arange(positions.shape[1], device=positions.device)
    return ((example[:, :, None] == example[:, None]) & (place[:, None] >= place))[:, None]


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attended values [B, T, H, D] of queries [B, H, T, D], with the signature of transformers."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    starts = options.get("cu_seq_lens_q")
    if starts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    whole = query, repeat_kv(key, groups), repeat_kv(value, groups)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in whole)
    longest, scale = options["max_length_q"], options.get("scaling")
    found: Any = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
    return found.unflatten(0, (query.shape[0], query.shape[2])), None


def reads_starts(model: "PreTrainedModel", device: torch.device) -> bool:
    """True if a kernel that takes the starts of examples can compute this model's attention: it has no dropout, and
    needs 16 bits.
    """
    if not has_causal_attention(model):
        return False
    config: Any = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and model.dtype in (torch.bfloat16, torch.float16)
        and head % 8 == 0
        and head <= 256
        and not getattr(config, "attention_dropout", 0.0)
        and _has_kernel()
    )


def _has_kernel() -> bool:
    """True if PyTorch has this kernel. Importing it takes two seconds, so ask last."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters  # torch 2.10 has it causal without a scale only
