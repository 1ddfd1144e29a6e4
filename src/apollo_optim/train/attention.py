"""Causal attention without a mask: what lets a compiled model reach the flash kernels.

transformers leaves the mask of a causal batch out only where it can look at the positions, and a compiler cannot. So
compiled models read a mask of every pair of tokens in every layer, and no flash kernel takes one.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CAUSAL = "apollo_causal"
"""What transformers knows this attention as."""


def use_causal_attention_(model: "PreTrainedModel") -> None:
    """Have a model build no mask for batches without padding, where each of its layers reads all tokens before."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not (type(model)._supports_attention_backend and model._supports_sdpa and reads_all(model.config)):
        return
    AttentionInterface.register(CAUSAL, attended)
    AttentionMaskInterface.register(CAUSAL, _mask)
    model.set_attn_implementation(CAUSAL)


def has_causal_attention(model: "PreTrainedModel") -> bool:
    """Whether the model was given this attention."""
    return model.config._attn_implementation == CAUSAL


def reads_all(config: "PretrainedConfig") -> bool:
    """Whether every layer attends to all tokens before, by what a configuration says."""
    text = config.get_text_config()  # itself, unless the model also sees or hears
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return kinds <= {"full_attention"} and not any(windows)


def _mask(*, attention_mask: Any = None, q_length: int, kv_length: int, use_vmap: bool = False, **rest: Any) -> Any:
    """None, for the kernel to be causal by itself; as without this attention where there is padding or a cache."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and q_length == kv_length and not use_vmap:
        return None
    return sdpa_mask(attention_mask=attention_mask, q_length=q_length, kv_length=kv_length, use_vmap=use_vmap, **rest)


def packed_inputs(positions: Tensor, starts: Tensor | None) -> dict[str, Any]:
    """What keeps packed examples apart in a model with this attention, where `positions` [B, T] begin again with each:
    the places where they do so in all rows after one another, or else a mask.
    """
    if starts is None:
        return {"attention_mask": packed_mask(positions)}
    return {"cu_seq_lens_q": starts, "max_length_q": positions.shape[1]}


def packed_mask(positions: Tensor) -> Tensor:
    """Which tokens attend to which [B, 1, T, T]: to those before of the same example."""
    example = (positions == 0).cumsum(-1)
    place = torch.arange(positions.shape[1], device=positions.device)
    return ((example[:, :, None] == example[:, None]) & (place[:, None] >= place))[:, None]


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The values that queries [B, H, T, D] attend to [B, T, H, D], in the form that transformers has for it."""
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
    """Whether a kernel that is told where examples begin can compute the attention of this model: it knows no dropout,
    and 16 bits only.
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
    """Whether PyTorch has it as it is called here. Asked when it is needed: importing it takes two seconds."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters  # torch 2.10 has it causal without a scale only
