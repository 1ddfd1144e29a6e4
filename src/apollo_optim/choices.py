"""A name out of a list of names, or an error that says which one was meant."""

import difflib
from collections.abc import Iterable


def chosen(option: str, value: str, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`; else a ValueError that names the nearest."""
    names = list(valid)
    if value in names:
        return value
    raise ValueError(
        f"{option} {value!r} is unknown; did you mean {nearest(value, names)!r}? One of: {', '.join(names)}"
    )


def nearest(value: str, names: Iterable[str]) -> str:
    """The one of `names` that is most like `value`."""
    return difflib.get_close_matches(value.lower(), list(names), n=1, cutoff=0.0)[0]
