"""Triton's interpreter, as quick as it can be, and as strict about promises as a card is."""

import dataclasses
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

NOT_PROMOTED = "fp32", "fp64", "int1", "int8", "int32", "int64", "uint8", "uint32", "uint64"
"""Types of numbers of which two are added up, or divided, as they are."""


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out four in five of its operations: on elements that a small weight does not have, and on overflow."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    # Triton imports it at its first launch, when the interpreter has put Python's print in place of Triton's. That has
    # no signature before Python 3.11, and the import fails.
    with suppress(ImportError):  # triton before 3.4 has none
        import triton.experimental.gluon  # noqa: F401

    monkeypatch.setattr(TensorHandle, "set_attr", hold_to)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", product_and_sum)
    for name, place_of_mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        access = getattr(InterpreterBuilder, name)
        monkeypatch.setattr(InterpreterBuilder, name, whole_numbers(access, place_of_mask))
    monkeypatch.setattr("apollo_optim.fused.launches.PAIRS", 1)
    unchecked = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", unchecked)
    _interpret_once()


def hold_to(handle: Any, name: str, values: list[int]) -> None:
    """Fail where a kernel promises the compiler what is not so: on a card it would read something else, or crash."""
    data, whole = np.atleast_1d(handle.data), values[-1]
    follows = np.diff(data, axis=-1) == 1
    if name == "tt.divisibility":  # of the first of each run of neighbours
        begins = np.concatenate([np.ones_like(data[..., :1], bool), ~follows], axis=-1)
        assert not (data[begins] % whole).any(), f"not multiples of {whole}: {data[begins]}"
    elif name == "tt.contiguity":
        ends = np.arange(1, data.shape[-1]) % whole == 0
        assert (follows | ends).all(), f"not runs of {whole}: {data}"


def whole_numbers(access: Any, place_of_mask: int) -> Any:
    """Fail where a number is read or written that begins inside of another, which a card refuses."""

    def checked(builder: Any, pointers: Any, *arguments: Any, **options: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = arguments[place_of_mask].data
        assert size <= 1 or not (pointers.data % np.uint64(size) * inside).any(), f"not at multiples of {size} bytes"
        return access(builder, pointers, *arguments, **options)

    return checked


def product_and_sum(builder: Any, left: Any, right: Any, other: Any) -> Any:
    """left * right + other of float32, rounded once as on a card; triton's interpreter rounds the product, too."""
    wide = left.data.astype(np.float64) * right.data + other.data
    return type(other)(wide.astype(other.data.dtype), other.dtype.scalar)


@cache
def _interpret_once() -> None:
    """Give the language its interpreted meaning for good: triton 3.7 does so again at each call of each function."""
    import triton.language as tl
    from triton.runtime import interpreter

    _remember_types()
    interpreter._patch_attr = _patch_attr
    languages = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(languages)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _patch_attr(language: Any, name: str, builtin: Any, builder: Any, scope: Any) -> None:
    """Have a builtin interpreted. triton does so by two functions around it, which copy its arguments."""
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(builtin, "__wrapped__", builtin)  # of a method of tensors there is one more, which has none

    def interpreted(*arguments: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*arguments, _semantic=interpreter_semantic, **options)

    scope.set_attr(language, name, interpreted)


def _remember_types() -> None:
    """Work out once what follows from types alone: triton does so at each operation, for longer than the operation."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    numpy_dtype, checked = interpreter._get_np_dtype, TritonSemantic.binary_op_type_checking_impl
    broadcast, block = TritonSemantic.broadcast_impl_value, tl.block_type.__init__
    made, same = tl.tensor.__init__, tl.dtype.__eq__
    numpy_dtypes: dict[str, np.dtype] = {}
    blocks: dict[tuple[Any, ...], Any] = {}
    numbers: dict[tuple[Any, ...], Any] = {}

    def remembered_numpy_dtype(dtype: Any) -> np.dtype:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    def new_block(cls: Any, element: Any, shape: Any) -> Any:
        sizes = element.name, *map(int, shape)
        if sizes not in blocks:
            blocks[sizes] = object.__new__(cls)
        return blocks[sizes]

    def make_block(self: Any, element: Any, shape: Any) -> None:
        if not self.__dict__:
            block(self, element, shape)

    def make(self: Any, handle: Any, type: Any) -> None:
        if "extent" not in type.__dict__:
            made(self, handle, type)
            type.extent = self.shape, self.numel, self.dtype
            type.sizes = [size.value for size in self.shape]
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = type.extent

    def check(self: Any, left: Any, right: Any, *allowed: bool, **options: bool) -> Any:
        if not isinstance(left, tl.tensor):
            return checked(self, left, right, *allowed, **options)
        if isinstance(right, tl.tensor):
            alike = left.type is right.type and left.dtype.name in NOT_PROMOTED
            return (left, right) if alike else checked(self, left, right, *allowed, **options)
        key = left.type.name, type(right), right, *allowed, *options.items()
        if key in numbers:
            return left, numbers[key]
        found, number = checked(self, left, right, *allowed, **options)
        if found is left:
            numbers[key] = number
        return found, number

    def broadcast_together(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.type.sizes == right.type.sizes else broadcast(self, left, right)

    interpreter._get_np_dtype = remembered_numpy_dtype
    tl.block_type.__new__ = new_block
    tl.block_type.__init__ = make_block
    tl.block_type.to_ir = lambda self, builder: self
    tl.tensor.__init__ = make
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    interpreter.TensorHandle.__post_init__ = lambda self: None  # asks whether numpy's numbers have the type's size
    TritonSemantic.binary_op_type_checking_impl = check
    TritonSemantic.broadcast_impl_value = broadcast_together
