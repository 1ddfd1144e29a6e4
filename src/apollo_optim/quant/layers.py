"""`nn.Linear` and `nn.Embedding` with an int8 weight, which is made whole for each of their products only."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .groups import dequantized


class Coded(Protocol):
    """A matrix kept as codes and scales, to be read in `dtype`."""

    codes: Tensor
    scale: Tensor
    group_size: int

    @property
    def dtype(self) -> torch.dtype: ...


def linear(input: Tensor, weight: Coded, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias"""
    kind, dtype = input.device.type, weight.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    return _Linear.apply(input, weight, bias, dtype)


class _Linear(torch.autograd.Function):
    """A linear layer that keeps codes and scales for backward, and never the whole weight."""

    @staticmethod
    # pyrefly: ignore[bad-override] (torch leaves the arguments to each function)
    def forward(ctx: Any, input: Tensor, weight: Coded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        # A weight that is not trained needs no input kept for its gradient.
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input, _whole(weight, dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        by_input, by_weight, by_bias, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            return (
                grad @ _whole(weight, grad.dtype) if by_input else None,
                _rows(grad).mT @ _rows(input) if by_weight else None,
                _rows(grad).sum(dim=0) if by_bias else None,
                None,
            )


def _rows(tensor: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _whole(weight: Coded, dtype: torch.dtype) -> Tensor:
    return dequantized(weight.codes, weight.scale, weight.group_size, dtype)


def made_whole(weight: Coded) -> Tensor:
    """The weight as an ordinary tensor, whose gradient is the weight's: for kernels that read memory."""
    return _MadeWhole.apply(weight)


class _MadeWhole(torch.autograd.Function):
    @staticmethod
    # pyrefly: ignore[bad-override] (torch leaves the arguments to each function)
    def forward(ctx: Any, weight: Coded) -> Tensor:
        return _whole(weight, weight.dtype)

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def embedded(
    input: Tensor,
    weight: Coded,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The rows of `weight` that `input` names."""
    if max_norm is not None or sparse:
        raise ValueError(
            f"an int8 embedding takes neither max_norm (got {max_norm}), which writes to the weight in forward, nor "
            f"sparse gradients (got sparse={sparse})"
        )
    # As in torch: a negative index counts from the end, and -1 in the operator means none.
    padding = -1 if padding_idx is None else padding_idx % len(weight.codes)
    return _Embedding.apply(input, weight, padding, scale_grad_by_freq)


class _Embedding(torch.autograd.Function):
    """An embedding that makes whole only the rows it looks up."""

    @staticmethod
    # pyrefly: ignore[bad-override] (torch leaves the arguments to each function)
    def forward(ctx: Any, index: Tensor, weight: Coded, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.options = len(weight.codes), padding_idx, scale_grad_by_freq
        flat = index.reshape(-1)
        # And not by indexing, which would count negative ones from the end.
        codes, scale = weight.codes.index_select(0, flat), weight.scale.index_select(0, flat)
        rows = dequantized(codes, scale, weight.group_size, weight.dtype)
        return rows.view(*index.shape, rows.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad, index, *ctx.options), None, None
