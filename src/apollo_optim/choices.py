"""Choosing a name from a list, with an error that suggests the nearest one."""

import difflib
from collections.abc import Iterable


def chosen(option: str, value: str, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`; else raises a ValueError that suggests the nearest."""
    names = list(valid)
    if value in names:
        return value
    near = nearest(value, names)
    meant = "." if near is None else f"; did you mean {near!r}?"
    raise ValueError(f"{option} {value!r} is unknown{meant} One of: {', '.join(names)}")


def nearest(value: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name most like `value`; None if none is like it."""
    return next(iter(difflib.get_close_matches(value.lower(), list(names), n=1, cutoff=cutoff)), None)
