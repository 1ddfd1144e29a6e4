"""A name out of a list of names, or an error that says which one was meant."""

import difflib
from collections.abc import Iterable


def chosen(option: str, value: str, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`; else a ValueError that names the nearest."""
    names = list(valid)
    if value in names:
        return value
    near = nearest(value, names)
    meant = "." if near is None else f"; did you mean {near!r}?"
    raise ValueError(f"{option} {value!r} is unknown{meant} One of: {', '.join(names)}")


def nearest(value: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `names` that is most like `value`; None where none is like it."""
    return next(iter(difflib.get_close_matches(value.lower(), list(names), n=1, cutoff=cutoff)), None)
