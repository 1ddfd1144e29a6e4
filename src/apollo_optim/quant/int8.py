"""A weight kept as int8 codes and scales that everyone else may take for an ordinary parameter.

`nn.Linear` and `nn.Embedding` read it through functions of their own, which make the whole weight for a moment in
forward and again in backward. FSDP2 takes it apart by rows, and gathers codes and scales. Any other operation is handed
the whole weight, and gets ordinary tensors back.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from .groups import dequantized, group_count, quantized, row_pieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten


class Int8Weight(Tensor):
    """A matrix of int8 codes with one scale for each `group_size` elements of a row; `dtype` is what it reads as."""

    codes: Tensor
    scale: Tensor
    group_size: int

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, flat: bool = False
    ) -> "Int8Weight":
        shape, strides = ((codes.numel(),), (1,)) if flat else (codes.shape, codes.stride())
        return Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype, flat: bool = False):
        """`flat` is the matrix seen as one row of numbers, which FSDP2 keeps of every weight."""
        self.codes, self.scale, self.group_size = codes, scale, group_size

    @classmethod
    def of(cls, value: Tensor, group_size: int) -> "Int8Weight":
        """A matrix rounded to the nearest codes, to be read in its own dtype."""
        codes = torch.empty(value.shape, dtype=torch.int8, device=value.device)
        scale = value.new_empty(len(value), group_count(value.shape[1], group_size), dtype=torch.float32)
        for rows in row_pieces(*value.shape):
            codes[rows], scale[rows] = quantized(value[rows].detach().float(), group_size)
        return cls(codes, scale, group_size, value.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole weight, as an ordinary tensor without a gradient; in the dtype it reads as, or in another."""
        return dequantized(self.codes, self.scale, self.group_size, dtype or self.dtype).view(self.shape)

    def like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "Int8Weight":
        """A weight of the changed codes and scales."""
        codes, scale = change(self.codes), change(self.scale)
        return Int8Weight(codes, scale, self.group_size, dtype or self.dtype, self.dim() == 1)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"Int8Weight(shape={tuple(self.shape)}, group_size={self.group_size}, dtype={self.dtype}, "
            f"device='{self.device}', requires_grad={self.requires_grad})"
        )

    # What FSDP2 asks of a tensor made of others.

    def fsdp_pre_all_gather(self, mesh: "DeviceMesh") -> tuple[tuple[Tensor, Tensor], None]:
        """The tensors that this rank gives to the others: its rows, and zeros behind them where it has fewer."""
        # With the mesh alone for an argument: with five, FSDP2 refuses scales of parts that are not equal (torch 2.13).
        return (_padded(self.codes), _padded(self.scale)), None

    def fsdp_post_all_gather(
        self, parts: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple["Int8Weight", tuple[Tensor, ...]] | None:
        """The whole weight, made of what was gathered; `out` is one that is made of it already."""
        codes, *scales = parts
        # One rank alone gathers nothing, and FSDP2 then hands over a copy of the codes only (torch 2.13).
        scale = scales[0] if scales else self.scale
        if isinstance(out, Int8Weight):
            out.scale = scale[: len(out)]
            return None
        return Int8Weight(codes, scale, self.group_size, dtype), ()

    # What torch.compile asks of a tensor made of others.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype, bool]]:
        return ["codes", "scale"], (self.group_size, self.dtype, self.dim() == 1)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[int, torch.dtype, bool], size: Any, stride: Any
    ) -> "Int8Weight":
        return cls(inner["codes"], inner["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        facts = self.shape, self.stride(), self.scale.shape, self.group_size, self.dtype, self.device
        return repr((*facts, self.requires_grad))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.chunk and not torch.compiler.is_compiling():
            _check_rows(args[0], args[2] if len(args) > 2 else kwargs.get("dim", 0))
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is nn.functional.linear and isinstance(weight, Int8Weight):
            return linear(*args, **kwargs)
        if func is nn.functional.embedding and isinstance(weight, Int8Weight):
            return embedded(*args, **kwargs)
        if func in ON_MEMORY and isinstance(args[0], Int8Weight):
            return ON_MEMORY[func](*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    # pyrefly: ignore[bad-override] (torch's stubs take the class for an argument)
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in KEPT and isinstance(args[0], Int8Weight):
            kept = KEPT[func](func, *args, **kwargs)
            if kept is not None:
                return return_and_correct_aliasing(func, args, kwargs, kept)
        if func is aten.copy_.default and isinstance(args[0], Int8Weight):
            _copy_(args[0], args[1])
            return args[0]
        if func.namespace == "c10d":
            raise _cannot_be_sharded(
                str(func), next(each for each in tree_leaves(args) if isinstance(each, Int8Weight))
            )
        if any(isinstance(leaf, Int8Weight) for leaf in tree_leaves(list(_written(func, args, kwargs)))):
            raise RuntimeError(
                f"{func} would write to an int8 weight, which takes copy_() and the optimizers of apollo_optim alone "
                "(APOLLO, APOLLOMini, ...): another optimizer cannot step it. Use one of those, or give the model its "
                "wide weights back with apollo_optim.quant.dequantize_weights_(model)"
            )
        args, kwargs = tree_map_only(Int8Weight, Int8Weight.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def _check_rows(weight: Tensor, dim: int) -> None:
    """Raise ValueError where a weight is to be taken apart inside its rows, as `fully_shard` can be told to."""
    if dim % weight.dim() != 0:
        raise ValueError(
            f"an int8 weight of shape {tuple(weight.shape)} is sharded by rows, because elements of a row share a "
            f"scale: got dimension {dim}. Shard it on dimension 0"
        )


def _padded(tensor: Tensor) -> Tensor:
    """All rows of the memory that a tensor is the first rows of: FSDP2 gives the parts of all ranks the same."""
    columns = tensor.shape[1]
    rows = tensor.untyped_storage().nbytes() // max(1, columns * tensor.element_size())
    return tensor.as_strided((rows, columns), (columns, 1), 0)


def _set_item(weight: Int8Weight, index: Any, value: Any) -> None:
    wide = weight.dequantize(torch.float32)
    wide[index] = value.dequantize(torch.float32) if isinstance(value, Int8Weight) else value
    weight.copy_(wide)


def _set_data(weight: Int8Weight, value: Tensor) -> None:
    raise RuntimeError(
        f"the data of an int8 weight {tuple(weight.shape)} cannot be replaced: write to it with weight.copy_(), or "
        "give the model its wide weights back with apollo_optim.quant.dequantize_weights_(model)"
    )


def _share_memory(weight: Int8Weight) -> Int8Weight:
    weight.codes.share_memory_()
    weight.scale.share_memory_()
    return weight


def _is_shared(weight: Int8Weight) -> bool:
    return weight.codes.is_shared() and weight.scale.is_shared()


ON_MEMORY: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _set_item,
    vars(torch._C.TensorBase)["data"].__set__: _set_data,
    Tensor.share_memory_: _share_memory,
    Tensor.is_shared: _is_shared,
}
"""Operations on memory that such a weight does not have, and what is done instead."""


def _cannot_be_sharded(operation: str, weight: Tensor) -> ValueError:
    return ValueError(
        f"int8 weights are sharded by FSDP2 (torch.distributed.fsdp.fully_shard) only, and {operation} was given one "
        f"of shape {tuple(weight.shape)}: use that, or shard wide weights, which "
        "apollo_optim.quant.dequantize_weights_(model) gives back"
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def _same(func: Any, weight: Int8Weight, **options: Any) -> Int8Weight:
    return weight.like(lambda tensor: func(tensor, **options))


def _moved(func: Any, weight: Int8Weight, **options: Any) -> Any:
    """On another device, or read in another dtype."""
    dtype = options.get("dtype") or weight.dtype
    if not dtype.is_floating_point:
        return func(weight.dequantize(), **options)
    options = {key: value for key, value in options.items() if key in ("device", "non_blocking", "pin_memory")}
    return weight.like(lambda tensor: func(tensor, **options), dtype)


def _rows(
    func: Any, weight: Int8Weight, dim: int = 0, first: int | None = None, stop: int | None = None, step: int = 1
) -> Int8Weight | None:
    if weight.dim() == 1 or dim % 2 != 0:
        return None
    return weight.like(lambda tensor: func(tensor, 0, first, stop, step))


def _runs_of_rows(func: Any, weight: Int8Weight, sizes: Any, dim: int = 0) -> list[Int8Weight] | None:
    if weight.dim() == 1 or dim % 2 != 0:
        return None
    pairs = zip(func(weight.codes, sizes), func(weight.scale, sizes), strict=True)
    return [Int8Weight(*pair, group_size=weight.group_size, dtype=weight.dtype) for pair in pairs]


def _first_rows(
    func: Any, weight: Int8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Int8Weight | None:
    fits = weight.dim() == len(size) == 2 and size[1] == weight.shape[1] and size[0] <= len(weight)
    if not fits or tuple(stride) != weight.stride() or offset:
        return None
    return weight.like(lambda tensor: tensor[: size[0]])


def _viewed(func: Any, weight: Int8Weight, size: Sequence[int]) -> Int8Weight | None:
    """Flat, or as it is."""
    flat = list(size) in ([-1], [weight.numel()])
    if not flat and tuple(size) != tuple(weight.shape):
        return None
    return Int8Weight(weight.codes, weight.scale, weight.group_size, weight.dtype, flat)


def _new(func: Any, weight: Int8Weight, size: Sequence[int], **options: Any) -> Tensor:
    """Another matrix as wide, or an ordinary tensor."""
    if len(size) != 2 or size[1] != weight.codes.shape[1] or options.get("dtype", weight.dtype) != weight.dtype:
        return func(weight.codes, size, **({"dtype": weight.dtype} | options))
    options.pop("dtype", None)
    return weight.like(lambda tensor: func(tensor, (size[0], tensor.shape[1]), **options))


KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _moved,
    aten.empty_like.default: _moved,
    aten.slice.Tensor: _rows,
    aten.split.Tensor: _runs_of_rows,
    aten.split_with_sizes.default: _runs_of_rows,
    aten.as_strided.default: _first_rows,
    aten.view.default: _viewed,
    aten.new_zeros.default: _new,
    aten.new_empty.default: _new,
}
"""Operations whose result is an int8 weight again, unless they return None: then they are given the whole weight."""


def _copy_(weight: Int8Weight, value: Tensor) -> None:
    """weight <- value, rounded to the nearest codes unless it is codes already."""
    if not (isinstance(value, Int8Weight) and value.group_size == weight.group_size):
        wide = value.dequantize() if isinstance(value, Int8Weight) else value
        wide = wide.to(weight.device).expand(weight.shape)
        if wide.dtype == weight.dtype and torch.equal(wide, weight.dequantize()):
            return  # what was read, rounded, is not what is to be kept
        value = Int8Weight.of(wide, weight.group_size)
    weight.codes.copy_(value.codes)
    weight.scale.copy_(value.scale)


def linear(input: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
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
    def forward(ctx: Any, input: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        # A weight that is not trained needs no input kept for its gradient.
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        with torch.autocast(input.device.type, enabled=False):
            return nn.functional.linear(input, weight.dequantize(dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        by_input, by_weight, by_bias, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            return (
                grad @ weight.dequantize(grad.dtype) if by_input else None,
                _in_rows(grad).mT @ _in_rows(input) if by_weight else None,
                _in_rows(grad).sum(dim=0) if by_bias else None,
                None,
            )


def _in_rows(tensor: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def made_whole(weight: Int8Weight) -> Tensor:
    """The weight as an ordinary tensor, whose gradient is the weight's: for kernels that read memory."""
    return _MadeWhole.apply(weight)


class _MadeWhole(torch.autograd.Function):
    @staticmethod
    # pyrefly: ignore[bad-override] (torch leaves the arguments to each function)
    def forward(ctx: Any, weight: Int8Weight) -> Tensor:
        return weight.dequantize()

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def embedded(
    input: Tensor,
    weight: Int8Weight,
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
    def forward(ctx: Any, index: Tensor, weight: Int8Weight, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
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


# So that torch.load(..., weights_only=True) reads what torch.save has made of one.
torch.serialization.add_safe_globals([Int8Weight])
