"""Floating-point operations: what training needs, and what a device can do."""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def flops_per_token(model: "PreTrainedModel", sequence: int) -> float:
    """Floating-point operations that training on one token of a sequence needs, as PaLM's appendix B counts them.

    6 for every weight that is multiplied with (2 forward, 4 backward; an embedding is only looked up), or 4 where it
    is frozen, and 12 * layers * width * sequence for attention: its causal half is counted whole, as is usual, and
    recomputed activations are not counted. Dense models only: experts would all be counted.
    """
    head = model.get_output_embeddings()
    looked_up = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    used = {head.weight} if isinstance(head, nn.Linear) else set()
    weights = [weight for weight in model.parameters() if weight.dim() >= 2 and weight not in looked_up - used]
    products = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    width = heads * (getattr(model.config, "head_dim", None) or model.config.hidden_size // heads)
    return float(products + 12 * layers * width * sequence)


# Dense bfloat16 with float32 sums, in TFLOP/s, from the vendors' data sheets (half of what they print where that is
# with sparsity). The first name found in the device's own decides.
PEAK_TFLOPS: dict[str, float] = {
    "GB300": 2500, "B300": 2250, "GB200": 2500, "B200": 2250, "B100": 1750,
    "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989.4, "H800": 989.4, "H20": 148,
    "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121,
    "RTX PRO 6000": 503.8, "RTX 6000 Ada": 364.2, "RTX A6000": 154.8,
    "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 3090": 71,
    "MI355X": 2300, "MI325X": 1307.4, "MI300X": 1307.4, "MI250X": 383, "MI210": 181,
}  # fmt: skip


def peak_flops(device: torch.device | str) -> float | None:
    """Operations per second that the device can do at best in bfloat16, or None where that is not known."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for known, tera in PEAK_TFLOPS.items() if known in name), None)
