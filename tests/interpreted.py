"""Triton's interpreter, as quick as it can be, and as strict about promises as a card is."""

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out four in five of its operations: on elements that a small weight does not have, and on overflow."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    monkeypatch.setattr(TensorHandle, "set_attr", hold_to)
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


@cache
def _interpret_once() -> None:
    """Give the language its interpreted meaning for good: triton 3.7 does so again at each call of each function."""
    import triton.language as tl
    from triton.runtime import interpreter

    languages = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(languages)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    _remember_types()


def _remember_types() -> None:
    """Work out once what follows from types alone: triton does so at each operation, for longer than the operation."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    numpy_dtype, element_changed = interpreter._get_np_dtype, tl.block_type.with_element_ty
    broadcast, made, same = TritonSemantic.broadcast_impl_value, tl.tensor.__init__, tl.dtype.__eq__
    numpy_dtypes: dict[str, np.dtype] = {}

    def remembered_numpy_dtype(dtype: Any) -> np.dtype:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    def with_element_ty(self: Any, element: Any) -> Any:
        others = self.__dict__.setdefault("others", {})
        if element.name not in others:
            others[element.name] = element_changed(self, element)
        return others[element.name]

    def make(self: Any, handle: Any, type: Any) -> None:
        if "extent" not in type.__dict__:
            made(self, handle, type)
            type.extent = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.extent

    def broadcast_together(self: Any, left: Any, right: Any) -> Any:
        shapes = getattr(left.type, "shape", ()), getattr(right.type, "shape", ())
        return (left, right) if list(shapes[0]) == list(shapes[1]) else broadcast(self, left, right)

    interpreter._get_np_dtype = remembered_numpy_dtype
    tl.block_type.with_element_ty = with_element_ty
    tl.block_type.to_ir = lambda self, builder: self
    tl.tensor.__init__ = make
    tl.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    TritonSemantic.broadcast_impl_value = broadcast_together
