"""The loss of a language model, in several ways of computing it.

Shape letters: T tokens, H hidden size, V vocabulary.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..choices import chosen
from ..quant import Int8Weight
from ..quant.layers import made_whole
from .head import check_head, linear_head
from .other_losses import cce_sum, check_installed, liger_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LossKind = Literal["plain", "chunked", "liger", "cce"]
LOSS_KINDS: tuple[str, ...] = get_args(LossKind)

IGNORED = -100
"""A label that no loss is taken of, as in `torch.nn.functional.cross_entropy`."""

CHUNK = 8192
"""Tokens whose logits exist at one time."""

PITCH = 64
"""Logits between the beginnings of two rows are a multiple of this."""

PIECE = 2**24
"""Elements of a gradient that are scaled at a time."""


def token_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, kind: LossKind = "plain", chunk: int = CHUNK
) -> Tensor:
    """Mean cross-entropy of `labels` [...] under the logits `hidden` [..., H] @ `head_weight` [V, H].T.

    "plain" makes all logits at once. "chunked" makes them for `chunk` tokens at a time, and their gradient in
    their place, so that no more than `chunk` x V numbers exist; on a GPU by a kernel, which is faster too. "liger" and
    "cce" do without them by the kernels of liger-kernel and cut-cross-entropy, on a GPU. All take the softmax in
    float32. A label of `IGNORED` does not count.
    """
    chosen("loss", kind, LOSS_KINDS)
    hidden_TH, labels_T = hidden.flatten(0, -2), labels.flatten()
    if len(labels_T) != len(hidden_TH):
        raise ValueError(f"labels must be one for each of the {len(hidden_TH)} hidden states, got {len(labels_T)}")
    if kind == "plain":
        return _cross_entropy(functional.linear(hidden_TH, head_weight), labels_T)
    if kind != "chunked":
        return _other_mean(hidden_TH, head_weight, labels_T, kind)
    if chunk < 1:
        raise ValueError(f"chunk must be an integer >= 1, got {chunk}")
    return _mean(_chunked_sum(hidden_TH, head_weight, labels_T, chunk), labels_T)


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    total = functional.cross_entropy(_widened(logits_TV), labels_T, ignore_index=IGNORED, reduction="sum")
    return _mean(total, labels_T)


def _mean(total: Tensor, labels_T: Tensor) -> Tensor:
    """Per label that counts. Of a micro-batch without any the loss is 0, as its part in the batch is."""
    return total / (labels_T != IGNORED).sum().clamp(min=1)


def _widened(logits: Tensor) -> Tensor:
    """In float32, or wider where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# Inside a larger graph the compiler would put chunks side by side, and with them their logits. torch.compiler.disable
# would import the compiler, which takes seconds.
@torch._disable_dynamo
def _chunked_sum(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, chunk: int) -> Tensor:
    """The loss of all tokens together."""
    hidden_TH, head_VH = _autocast(hidden_TH, head_VH)
    if len(labels_T) <= chunk:
        return _LossAtOnce.apply(hidden_TH, head_VH, labels_T, torch.is_grad_enabled())
    return _ChunkedLoss.apply(hidden_TH, head_VH, labels_T, chunk, torch.is_grad_enabled())


@torch._disable_dynamo  # other packages ask the device questions, where a graph would end
def _other_mean(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, kind: LossKind) -> Tensor:
    """The mean loss, by another package."""
    hidden_TH, head_VH = _autocast(hidden_TH, head_VH)
    if isinstance(head_VH, Int8Weight):
        head_VH = made_whole(head_VH)
    if kind == "liger":
        return liger_mean(hidden_TH, head_VH, labels_T, IGNORED)
    return _mean(cce_sum(hidden_TH, head_VH, labels_T, IGNORED), labels_T)


def _autocast(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of autocast, if that is on: it leaves kernels alone, and products that write into something."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, head
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), head.to(dtype)


class _LossAtOnce(torch.autograd.Function):
    """Sum of the losses of all tokens, whose logits make way for their own gradient, which waits for backward."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, hidden_TH, head_VH, labels_T, training = args
        logits_TV = _logits(hidden_TH, head_VH)
        trains = training and any(ctx.needs_input_grad[:2])
        total = _softmax_loss_(logits_TV, labels_T, trains).sum()
        if trains:
            ctx.save_for_backward(hidden_TH, head_VH, logits_TV)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        (factor,) = grad_outputs
        hidden_TH, head_VH, slope_TV = ctx.saved_tensors
        for_hidden, for_head = ctx.needs_input_grad[:2]
        hidden = torch.mm(slope_TV, head_VH) if for_hidden else None
        head = torch.mm(slope_TV.T, hidden_TH) if for_head else None
        return *(grad if grad is None else _scaled(grad, factor, out=grad) for grad in (hidden, head)), None, None


class _ChunkedLoss(torch.autograd.Function):
    """The same of more tokens than a chunk has. The gradient is made with the loss: no logits are needed again."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, hidden_TH, head_VH, labels_T, chunk, training = args
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TH.device)
        for_hidden, for_head = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_TH = torch.empty_like(hidden_TH) if for_hidden else None
        # Of many small products a sum in the weight's own dtype would lose what is smaller than the last bit.
        grad_VH = torch.zeros(head_VH.shape, dtype=wide, device=head_VH.device) if for_head else None
        for start in range(0, len(labels_T), chunk):
            part = slice(start, start + chunk)
            logits_tV = _logits(hidden_TH[part], head_VH)
            total += _softmax_loss_(logits_tV, labels_T[part], for_hidden or for_head).sum()
            if grad_TH is not None:
                torch.mm(logits_tV, head_VH, out=grad_TH[part])
            if grad_VH is not None:
                _add_product_(grad_VH, logits_tV.T, hidden_TH[part])
        ctx.save_for_backward(grad_TH, grad_VH)
        ctx.head_dtype = head_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        (factor,) = grad_outputs
        grad_TH, grad_VH = ctx.saved_tensors
        hidden = None if grad_TH is None else _scaled(grad_TH, factor, out=torch.empty_like(grad_TH))
        head = (
            None if grad_VH is None else _scaled(grad_VH, factor, out=torch.empty_like(grad_VH, dtype=ctx.head_dtype))
        )
        return hidden, head, None, None, None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError('loss "chunked" has no second derivative: use loss "plain" with create_graph=True')


def _logits(hidden_tH: Tensor, head_VH: Tensor) -> Tensor:
    """hidden @ head.T, its rows whole cache lines apart: of an odd vocabulary everything else reads them slowly."""
    pitch = -(-len(head_VH) // PITCH) * PITCH
    out_tV = hidden_tH.new_empty(len(hidden_tH), pitch)[:, : len(head_VH)]
    return torch.mm(hidden_tH, head_VH.T, out=out_tV)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total <- total + left @ right; on a GPU in one pass, and nothing is rounded to the factors' narrower dtype."""
    if total.is_cuda and torch.version.hip is None and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(grad: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out, which may be grad itself, <- grad * factor, in the factor's dtype, and narrowed once.

    A piece at a time, because on a CPU both are widened first.
    """
    rows = max(1, PIECE // grad.shape[1])
    for source, target in zip(grad.split(rows), out.split(rows), strict=True):
        # With a scalar, the product would be taken in the gradient's dtype.
        torch.mul(source, factor.reshape(1), out=target)
    return out


def _softmax_loss_(logits_tV: Tensor, labels_t: Tensor, gradient: bool) -> Tensor:
    """The loss of each token, by a kernel where there is one; `logits` <- their gradient, if that is wanted."""
    if logits_tV.is_cuda and logits_tV.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from .fused_loss import softmax_loss_ as fused_softmax_loss_

        return fused_softmax_loss_(logits_tV, labels_t, IGNORED, gradient)
    return softmax_loss_(logits_tV, labels_t, IGNORED, gradient)


def softmax_loss_(logits_tV: Tensor, labels_t: Tensor, ignored: int, gradient: bool) -> Tensor:
    """The loss of each token, in float32; `logits` <- softmax - (1 at the label), or 0 where it is ignored."""
    wide_tV = _widened(logits_tV)
    counts_t = labels_t != ignored
    label_t1 = labels_t.where(counts_t, 0)[:, None]
    log_total_t1 = wide_tV.logsumexp(-1, keepdim=True)
    losses_t = (log_total_t1 - wide_tV.gather(1, label_t1))[:, 0] * counts_t
    if gradient:
        softmax_tV = (wide_tV - log_total_t1).exp()
        one_t1 = torch.ones_like(label_t1, dtype=softmax_tV.dtype)
        logits_tV.copy_(softmax_tV.scatter_add(1, label_t1, -one_t1) * counts_t[:, None])
    return losses_t


class Objective(nn.Module):
    """A causal language model with its loss as the output, so that wrappers and `torch.compile` see both as one."""

    def __init__(self, model: "PreTrainedModel", kind: LossKind = "plain", chunk: int = CHUNK):
        super().__init__()
        chosen("loss", kind, LOSS_KINDS)
        check_installed(kind)
        self.model, self.kind, self.chunk = model, kind, chunk
        if kind != "plain":
            check_head(model, kind)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of predicting `labels` [B, T] from `tokens` [B, T]: labels are the tokens one place further on."""
        if self.kind == "plain":
            logits = self.model(input_ids=tokens, use_cache=False).logits
            return _cross_entropy(logits.flatten(0, -2), labels.flatten())
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return token_loss(hidden, linear_head(self.model).weight, labels, self.kind, self.chunk)
