"""The loss of a language model: from all logits, in chunks, or by the kernels of other packages.

The host waits for the device in the kernels of other packages, which ask for the number of labels.

Shape letters: T tokens, H hidden size, V vocabulary.
"""

import copy
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..choices import chosen
from ..distributed import is_sharded
from ..quant import Int8Weight
from ..quant.int8 import made_whole
from .attention import has_causal_attention, packed_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LossKind = Literal["plain", "chunked", "liger", "cce"]
LOSS_KINDS: tuple[str, ...] = get_args(LossKind)

IGNORED = -100
"""A label that does not count, as in `torch.nn.functional.cross_entropy`."""

CHUNK = 8192
"""Tokens whose logits exist at one time."""

PITCH = 64
"""Rows of logits are a multiple of this many elements apart."""

PIECE = 2**24
"""Elements of a gradient that are scaled at a time."""


def token_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, kind: LossKind = "plain", chunk: int = CHUNK
) -> Tensor:
    """Mean cross-entropy of `labels` [...] under the logits `hidden` [..., H] @ `head_weight` [V, H].T.

    "plain" computes all logits at once; "chunked" those of `chunk` tokens at a time, and overwrites them with their
    gradient, on a GPU by a kernel. "liger" and "cce" use the kernels of liger-kernel and cut-cross-entropy, on a GPU.
    All compute the softmax in float32. Labels of `IGNORED` do not count.
    """
    chosen("loss", kind, LOSS_KINDS)
    hidden_TH, labels_T = hidden.flatten(0, -2), labels.flatten()
    if len(labels_T) != len(hidden_TH):
        raise ValueError(f"labels must be one for each of the {len(hidden_TH)} hidden states, got {len(labels_T)}")
    if kind == "plain":
        return _cross_entropy(functional.linear(hidden_TH, head_weight), labels_T)
    if chunk < 1:
        raise ValueError(f"chunk must be an integer >= 1, got {chunk}")
    return _without_all_logits(hidden_TH, head_weight, labels_T, kind, chunk)


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    total = functional.cross_entropy(_widened(logits_TV), labels_T, ignore_index=IGNORED, reduction="sum")
    return _mean(total, labels_T)


def _mean(total: Tensor, labels_T: Tensor) -> Tensor:
    """The loss per label that counts; 0 if there is none."""
    return total / (labels_T != IGNORED).sum().clamp(min=1)


def _widened(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# The compiler would merge chunks, so that all their logits exist at once; and other packages ask the device questions,
# which end a graph. torch.compiler.disable would import the compiler, which takes seconds.
@torch._disable_dynamo
def _without_all_logits(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor, kind: LossKind, chunk: int) -> Tensor:
    """The mean loss of every kind but "plain"."""
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device):  # which has no effect on kernels and on products with `out`
        dtype = torch.get_autocast_dtype(device)
        hidden_TH, head_VH = hidden_TH.to(dtype), head_VH.to(dtype)
    if kind == "chunked":
        if len(labels_T) <= chunk:
            total = _LossAtOnce.apply(hidden_TH, head_VH, labels_T, torch.is_grad_enabled())
        else:
            total = _ChunkedLoss.apply(hidden_TH, head_VH, labels_T, chunk, torch.is_grad_enabled())
        return _mean(total, labels_T)
    if isinstance(head_VH, Int8Weight):
        head_VH = made_whole(head_VH)
    if kind == "liger":
        return liger_mean(hidden_TH, head_VH, labels_T)
    return _mean(cce_sum(hidden_TH, head_VH, labels_T), labels_T)


class _LossAtOnce(torch.autograd.Function):
    """The summed loss of all tokens. Forward overwrites the logits with their gradient, and keeps it for backward."""

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
    """The same for more tokens than a chunk has. Forward computes all gradients, so that no logits are kept."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, hidden_TH, head_VH, labels_T, chunk, training = args
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TH.device)
        for_hidden, for_head = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_TH = torch.empty_like(hidden_TH) if for_hidden else None
        # A sum of many small products in the weight's own dtype would lose what is below its last bit.
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
    """hidden @ head.T, with rows whole cache lines apart; those of an odd vocabulary would be slow to read."""
    pitch = -(-len(head_VH) // PITCH) * PITCH
    out_tV = hidden_tH.new_empty(len(hidden_tH), pitch)[:, : len(head_VH)]
    return torch.mm(hidden_tH, head_VH.T, out=out_tV)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total <- total + left @ right; on a GPU in one pass, without rounding the product to the factors' dtype."""
    if total.is_cuda and torch.version.hip is None and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(grad: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out <- grad * factor, in the factor's dtype, and narrowed once; `out` may be `grad` itself.

    A piece at a time, because a CPU widens both first.
    """
    rows = max(1, PIECE // grad.shape[1])
    for source, target in zip(grad.split(rows), out.split(rows), strict=True):
        # With a scalar factor the product would be computed in the gradient's dtype.
        torch.mul(source, factor.reshape(1), out=target)
    return out


def _softmax_loss_(logits_tV: Tensor, labels_t: Tensor, gradient: bool) -> Tensor:
    """The loss of each token, by a kernel if there is one; `logits` <- their gradient, if wanted."""
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


PACKAGES = {"liger": "liger-kernel", "cce": "cut-cross-entropy"}
"""The package of each kind of loss that is not ours."""


def loss_installed(kind: str) -> bool:
    """True if a kind of loss is ours, or its package is installed."""
    return kind not in PACKAGES or importlib.util.find_spec(PACKAGES[kind].replace("-", "_")) is not None


def check_installed(kind: str) -> None:
    """Raise ValueError if the package of a loss is missing, or is a release with a wrong gradient."""
    if kind == "cce" and not (loss_installed(kind) and cce_sums_are_wide()):
        raise ValueError(
            "--loss cce needs a cut-cross-entropy later than its release 25.1.1, which now and then loses parts of "
            "gradients on a GPU: install one from github.com/apple/ml-cross-entropy, or use --loss chunked, liger or "
            "plain"
        )
    if not loss_installed(kind):
        package = f"{PACKAGES[kind]}, which is not installed: pip install {PACKAGES[kind]}"
        raise ValueError(f"--loss {kind} needs {package}, or use --loss chunked or plain")


def cce_sums_are_wide() -> bool:
    """True if the installed cut-cross-entropy can sum gradients in float32.

    Release 25.1.1 cannot, and has a race: a block may read a sum before all threads of another have written theirs.
    """
    from cut_cross_entropy import linear_cross_entropy

    return "accum_e_fp32" in inspect.signature(linear_cross_entropy).parameters


def liger_mean(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Mean loss of the labels that count, 0 if there are none, by Liger's fused linear cross-entropy.

    It can be differentiated only once: backward scales the gradients of forward in place.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if torch.is_grad_enabled() and head_VH.requires_grad and not hidden_TH.requires_grad:
        hidden_TH = hidden_TH.detach().requires_grad_()  # otherwise the head would have no gradient either
    return liger_fused_linear_cross_entropy(
        hidden_TH,
        head_VH,
        labels_T,
        ignore_index=IGNORED,
        reduction="mean",
        # As in _ChunkedLoss.
        accum_dtype=torch.promote_types(head_VH.dtype, torch.float32),
    )


def cce_sum(hidden_TH: Tensor, head_VH: Tensor, labels_T: Tensor) -> Tensor:
    """Summed loss of the labels that count, by cut-cross-entropy. Needs hidden states in bf16 or fp16."""
    from cut_cross_entropy import linear_cross_entropy

    wide_sums = {"accum_e_fp32": True, "accum_c_fp32": True} if cce_sums_are_wide() else {}
    return linear_cross_entropy(
        hidden_TH,
        head_VH,
        labels_T,
        ignore_index=IGNORED,
        reduction="sum",  # its mean of no labels is NaN
        shift=False,
        # Otherwise it skips blocks of gradients that are all below 2^-12: at first, every block without a label.
        filter_eps=None,
        **wide_sums,
    )


LOGIT_EXTRAS = "final_logit_softcapping", "logit_scale", "logits_scaling"
"""Options of architectures that change logits after the head."""

LARGE = 1000.0
"""A logit that every soft cap would change."""


def logit_extras(model: "PreTrainedModel") -> list[str]:
    """Everything that makes the logits more than hidden states times the head's weight, by name."""
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
    """A made-up output of a base model: last hidden states, and None for everything else."""

    def __init__(self, last_hidden_state: Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Tensor | tuple[Tensor, ...]:
        return (self.last_hidden_state,)[place]


@torch.no_grad()
def _found_by_trial(model: "PreTrainedModel", head: nn.Linear) -> list[str]:
    """The same, found by running the model's own `forward`: whatever the head returns must be the logits.

    It runs on a shallow copy in which base model and head return made-up numbers, so that no layer is gathered from
    ranks or draws random numbers, and the model itself is not touched.
    """
    device, dtype = head.weight.device, head.weight.dtype
    hidden = torch.linspace(-1, 1, 2 * head.in_features, device=device).view(1, 2, head.in_features).to(dtype)
    words = torch.linspace(-LARGE, LARGE, 2 * head.out_features, device=device).view(1, 2, head.out_features).to(dtype)
    read: list[Tensor] = []

    def head_forward(hidden_states: Tensor) -> Tensor:
        read.append(hidden_states)
        return words

    def base_forward(*_: Any, **__: Any) -> _Hidden:
        return _Hidden(hidden)

    stand_ins = {
        id(model.base_model): _stand_in(model.base_model, base_forward),
        id(head): _stand_in(head, head_forward),
    }
    trial: Any = copy.copy(model)
    trial._modules = {name: stand_ins.get(id(child), child) for name, child in model._modules.items()}
    output = trial(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    if not read:
        return ["a head that it does not call"]
    logits = output[0] if isinstance(output, tuple) else output.logits
    extras = {
        "something between its last hidden states and the head": not _equal(read[0], hidden),
        "something between the head and its logits": not _equal(logits, words),
    }
    return [name for name, there in extras.items() if there]


def _stand_in(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of a module, with its weights and hooks, and another `forward`."""
    other = copy.copy(module)
    other.forward = forward
    return other


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


class Objective(nn.Module):
    """A causal language model with its loss as output, so that DDP, FSDP and `torch.compile` see both as one module."""

    def __init__(self, model: "PreTrainedModel", kind: LossKind = "plain", chunk: int = CHUNK):
        super().__init__()
        chosen("loss", kind, LOSS_KINDS)
        check_installed(kind)
        self.model, self.kind, self.chunk = model, kind, chunk
        if kind != "plain" and (extras := logit_extras(model)):
            raise ValueError(
                f'loss "{kind}" needs a head that is one linear layer without bias, and {type(model).__name__} has '
                f'{", ".join(extras)}; use loss "plain"'
            )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        places: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of predicting `labels` from `tokens` [B, T]: labels are the tokens one place further on.

        There is a label for each place [B, T], or for the places in `places` [N], which index the flattened rows. Where
        `positions` [B, T] begin again, another example does, which does not see the one before. `starts` are those
        places, and the end, for attention that `reads_starts`.
        """
        inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        if positions is not None and has_causal_attention(self.model):
            inputs |= packed_inputs(positions, starts)
        if self.kind == "plain":
            logits = self.model(**inputs).logits
            return _cross_entropy(_of_places(logits, places), labels.flatten())
        hidden = self.model.base_model(**inputs).last_hidden_state
        head: Any = self.model.get_output_embeddings()  # a linear layer, as was checked
        return token_loss(_of_places(hidden, places), head.weight, labels, self.kind, self.chunk)


def _of_places(states: Tensor, places: Tensor | None) -> Tensor:
    """The states [B, T, ...] at all places [B * T, ...], or at some [N, ...]."""
    flat = states.flatten(0, -2)
    return flat if places is None else flat.index_select(0, places)
