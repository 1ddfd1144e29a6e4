"""The loss of a language model by the kernels of other packages, which never have all logits at once.

Both ask the device how many labels there are, and Liger in backward for the factor of the loss: the host waits.

Shape letters: T tokens, H hidden size, V vocabulary.
"""

import importlib.util
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Package:
    """What computes a kind of loss."""

    name: str
    """As pip knows it."""
    module: str


PACKAGES = {
    "liger": Package(name="liger-kernel", module="liger_kernel"),
    "cce": Package(name="cut-cross-entropy", module="cut_cross_entropy"),
}
"""By kind of loss."""


def installed(kind: str) -> bool:
    """Whether a kind of loss can be imported, if it is another package's."""
    return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind].module) is not None


def check_installed(kind: str) -> None:
    """Raise ValueError where a kind of loss is of a package that is missing."""
    if not installed(kind):
        package = PACKAGES[kind].name
        raise ValueError(
            f"--loss {kind} needs {package}, which is not installed: pip install {package}, or use --loss chunked or "
            "plain"
        )


def liger_mean(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, ignored: int) -> Tensor:
    """Mean loss of the labels that are not `ignored`, 0 if there are none, by Liger's fused linear cross-entropy.

    It can be differentiated once: its backward pass multiplies the gradients that forward has made in their place.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if torch.is_grad_enabled() and head_VH.requires_grad and not hidden_TH.requires_grad:
        hidden_TH = hidden_TH.detach().requires_grad_()  # it would give the head no gradient either
    return liger_fused_linear_cross_entropy(
        hidden_TH,
        head_VH,
        labels_T,
        ignore_index=ignored,
        reduction="mean",
        # Of many small products a sum in the weight's own dtype would lose what is smaller than the last bit.
        accum_dtype=torch.promote_types(head_VH.dtype, torch.float32),
    )


def cce_sum(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, ignored: int) -> Tensor:
    """Loss of all labels that are not `ignored`, by cut-cross-entropy. Needs hidden states in bf16 or fp16."""
    from cut_cross_entropy import linear_cross_entropy

    # Release 25.1 adds gradients up in their own dtype; what its authors have written since can do better.
    known = inspect.signature(linear_cross_entropy).parameters
    wide_sums = {name: True for name in ("accum_e_fp32", "accum_c_fp32") if name in known}
    return linear_cross_entropy(
        hidden_TH,
        head_VH,
        labels_T,
        ignore_index=ignored,
        reduction="sum",  # its mean of no labels is no number
        shift=False,
        # Else blocks of gradients that are all below 2^-12 are left out: at first, every block without a label.
        filter_eps=None,
        **wide_sums,
    )
