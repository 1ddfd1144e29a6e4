"""Triton's interpreter, as quick as it can be."""

import dataclasses

import pytest


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out four in five of its operations: on elements that a small weight does not have, and on overflow."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr("apollo_optim.kernels.fused.launch.PAIRS", 1)
    unchecked = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", unchecked)
