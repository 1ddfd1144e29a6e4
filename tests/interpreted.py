"""Triton's interpreter, as quick as it can be."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import pytest


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out four in five of its operations: on elements that a small weight does not have, and on overflow."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr("apollo_optim.fused.launches.PAIRS", 1)
    unchecked = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", unchecked)
    _interpret_once()


@cache
def _interpret_once() -> None:
    """Give the language its interpreted meaning for good: triton 3.7 does so again at each call of each function."""
    import triton.language as tl
    from triton.runtime import interpreter

    languages = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(languages)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
