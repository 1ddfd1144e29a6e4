"""Loss and gradient of a block of logits in one pass over memory, on a GPU: the twin of `losses.softmax_loss_`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fastest of nine on one H200, whose caches hold the rows between the two passes; whole rows in registers were
# slower.
BLOCK = 4096
WARPS = 8

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""In place of a logit beyond the vocabulary: minus infinity less itself would be no number."""


def softmax_loss_(logits_tV: Tensor, labels_t: Tensor, ignored: int, gradient: bool) -> Tensor:
    """The loss of each token, in float32; `logits` <- softmax - (1 at the label), or 0 where it is ignored.

    Of a label that no row has, loss and gradient are NaN: to ask for one beforehand, the host would have to wait.
    """
    losses_t = torch.empty(len(labels_t), dtype=torch.float32, device=logits_tV.device)
    if len(labels_t) > 0:
        _softmax_loss_kernel[(len(labels_t),)](
            logits_tV, labels_t, losses_t, logits_tV.stride(0), logits_tV.shape[1],
            IGNORED=ignored, GRADIENT=gradient, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses_t


@triton.jit
def _softmax_loss_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program: log of the sum of exponentials, then the gradient over the logits.

    Every column of a block has its own highest logit and its own sum so far, which come together only at the end.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    label = tl.load(labels + token)
    counts = label != IGNORED
    there = counts & (label >= 0) & (label < vocabulary)
    column = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], LOWEST, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(row + start + column, mask=inside, other=LOWEST).to(tl.float32) * LOG2_E
        higher = tl.maximum(tops, x)
        totals = totals * tl.exp2(tops - higher) + tl.exp2(x - higher)
        tops = higher
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    chosen = tl.load(row + label, mask=there, other=float("nan")).to(tl.float32)
    tl.store(losses + token, tl.where(counts, (top + tl.log2(total)) / LOG2_E - chosen, 0.0))
    if GRADIENT:
        factor = tl.where(counts, tl.where(there, 1.0, float("nan")), 0.0) / total
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            inside = start + column < vocabulary
            x = tl.load(row + start + column, mask=inside, other=0.0).to(tl.float32)
            slope = tl.exp2(x * LOG2_E - top) * factor
            tl.store(row + start + column, slope.to(logits.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        slope = tl.exp2(chosen * LOG2_E - top) * factor - 1.0
        tl.store(row + label, slope.to(logits.dtype.element_ty), mask=there)
