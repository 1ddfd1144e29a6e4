"""The accepted values of every option, in one table, with an error that names them."""

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .choices import nearest
from .core.rule import GRANULARITIES, PROJECTIONS, SECOND_MOMENTS

STATE_DTYPES = torch.float32, torch.bfloat16, torch.float64, torch.int8, "nf4"
ROUNDINGS = "stochastic", "nearest"
STRUCTURE = "rank", "projection", "granularity", "residual", "second_moment", "flatten"
"""Options that decide what state holds: a checkpoint must agree with them."""

LATER: dict[str, Any] = {"vocabulary": (), "state_device": None}
"""Options that came after the first checkpoints, with the values that step as was done before them."""

PLANNED = (
    *STRUCTURE, *LATER, "caps_scale", "scale", "refresh_every", "growth_limit",
    "state_dtype", "rounding", "fused", "capturable",
)  # fmt: skip
"""Options that decide how a weight is stepped. The others are read anew at every step."""


def spell_out_(options: dict[str, Any]) -> None:
    """Write options as an optimizer holds them: Python's numbers, tuples and torch's dtypes, whoever's they were.

    What is none of these stays as it is, for `check_options` to refuse.
    """
    for name, value in options.items():
        if name in ("betas", "vocabulary"):
            options[name] = _pair_or_more(value)
        elif name == "state_dtype":
            options[name] = DTYPES_BY_NAME.get(value, value) if isinstance(value, str) else value
        elif name in ACCEPTED:
            options[name] = plain_number(value)


def settled(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A new group with those of its options that do not simply follow the optimizer's `defaults`.

    Weights that are not projected have AdamW's second moment unless their group asks for another, whatever that of the
    rule is. With a factored one they have no momentum unless their group has betas of its own.
    """
    if group.get("rank", defaults["rank"]) is not None:
        return dict(group)
    result = {"second_moment": "elementwise", **group}
    if result["second_moment"] == "factored":
        result = {"betas": (0.0, defaults["betas"][1]), **result}
    return result


DTYPES_BY_NAME: dict[str, Any] = {
    name: dtype for dtype in STATE_DTYPES for name in (str(dtype), str(dtype).removeprefix("torch."))
}


def plain_number(value: Any) -> Any:
    """Python's own int, float or bool for one of numpy's; anything else as it is."""
    if not isinstance(value, torch.Tensor) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


def _pair_or_more(value: Any) -> Any:
    """A tuple of Python's numbers for a list, an array, a tensor, or a sequence of a configuration library."""
    listed = (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(value, "ndim", 0) == 1
    if not listed:
        return value
    return tuple(
        plain_number(each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each) for each in value
    )


_planned = operator.itemgetter(*PLANNED)
_read_anew = operator.itemgetter("lr", "betas", "eps", "weight_decay")


def plan_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options of a group that a plan of its step depends on."""
    sound = _are_sound(*_read_anew(group))
    return _planned(group), sound and group["betas"][0] == 0, sound


def _are_sound(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> bool:
    """A quick check of the options that are read anew at every step; `recheck_` says which is impossible, and why.

    A schedule's rate may fall below zero, and be a number of anyone's library.
    """
    try:
        first, second = betas
        finite = isinstance(lr, torch.Tensor) or math.isfinite(lr)
    except (TypeError, ValueError):
        return False
    return finite and _is_beta(first) and _is_beta(second) and _is_size(eps) and _is_size(weight_decay)


def recheck_(group: dict[str, Any]) -> None:
    """Spell out the options of a group that a user may have changed; raise ValueError where they cannot be."""
    spell_out_(group)
    check_options({name: group[name] for name in (*PLANNED, "betas", "eps", "weight_decay")})
    lr = group["lr"]
    if not isinstance(lr, torch.Tensor) and not (is_number(lr) and math.isfinite(lr)):
        check_option("lr", "lr", lr)
    check_together(group)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A tensor elsewhere is taken on trust: asking would stall the device.
        sound = value.device.type != "cpu" or (value.numel() == 1 and bool(value >= 0) and bool(value < math.inf))
        return value.numel() == 1 and value.dtype.is_floating_point and sound
    return _is_size(value)


def _is_rank(value: Any) -> bool:
    return value is None or (_is_integer(value) and value >= 1) or (isinstance(value, float) and 0 < value < 1)


def _is_size(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _is_beta(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _are_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_beta, value))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(_is_integer(size) and size >= 1 for size in value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_is_rate, "a number >= 0 or a floating-point tensor holding one"),
    "betas": (_are_betas, "two numbers in [0, 1)"),
    "eps": (_is_size, "a number >= 0"),
    "weight_decay": (_is_size, "a number >= 0"),
    "rank": (_is_rank, "an integer >= 1, a fraction of the smaller side strictly between 0 and 1, or None for AdamW"),
    "scale": (
        lambda v: (isinstance(v, str) and v == "auto") or (is_number(v) and 0 < v < math.inf),
        'a number > 0 or "auto"',
    ),
    "refresh_every": (lambda v: _is_integer(v) and v >= 1, "an integer >= 1"),
    "projection": (lambda v: v in PROJECTIONS, f"one of {PROJECTIONS}"),
    "granularity": (lambda v: v in GRANULARITIES, f"one of {GRANULARITIES}"),
    "second_moment": (lambda v: v in SECOND_MOMENTS, f"one of {SECOND_MOMENTS}"),
    "growth_limit": (lambda v: v is None or (is_number(v) and v > 1), "a number > 1, or None for no limit"),
    "seed": (lambda v: _is_integer(v) and 0 <= v < 2**63, "an integer in [0, 2**63)"),
    "state_dtype": (lambda v: v in STATE_DTYPES, f"one of {STATE_DTYPES}, or the name of one"),
    "state_device": (lambda v: v is None or v == "cpu", 'None, for that of the weight, or "cpu"'),
    "rounding": (lambda v: v in ROUNDINGS, f"one of {ROUNDINGS}"),
    "fused": (lambda v: v is None or _is_bool(v), "True, False, or None to choose by device"),
    "capturable": (_is_bool, "True or False"),
    "maximize": (_is_bool, "True or False"),
    "flatten": (_is_bool, "True or False"),
    "residual": (_is_bool, "True or False"),
    "caps_scale": (_is_bool, "True or False"),
    "vocabulary": (_are_sizes, "a sequence of integers >= 1: the larger sides of matrices that are left to AdamW"),
    "foreach": (lambda v: v is None or v is False, "None or False: kernels step all weights together"),
    "differentiable": (lambda v: v is False, "False: a step cannot be differentiated through"),
}

TOLERATED = frozenset({"foreach", "differentiable"})
"""Options of torch.optim's that have one meaning here, and so are checked but not kept."""

RENAMED = {
    "update_proj_gap": "call it refresh_every",
    "proj": 'call it projection ("random" is "gaussian" here)',
    "proj_type": 'leave it out: the smaller side is always projected, as by "std"',
    "scale_type": "call it granularity",
    "scale_front": "leave it out: the limiter acts on the scaled update, in proportion to its last",
}
"""Options of apollo-torch and galore-torch, which would otherwise be taken for users' own keys, and do nothing."""

GROUPING = "exclude", "adamw_lr", "adamw_second_moment", "vocabulary", "vocabulary_lr", "no_decay"
"""Options of `param_groups`, which no optimizer takes itself."""

# Keys that torch and its users put into groups.
OTHER_KEYS = frozenset({"params", "param_names", "param_shapes", "initial_lr", "name"})


MISSPELT = 0.75
"""Likeness from which an unknown key is taken for a misspelt option, and not for one of another library's."""


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError for the first option that cannot be, and for a key that looks like a misspelt one."""
    for name, value in options.items():
        if name in ACCEPTED:
            check_option(name + where, name, value)
        elif name in RENAMED:
            raise ValueError(
                f"{name!r} in a parameter group is an option of apollo-torch or galore-torch: {RENAMED[name]}. "
                "apollo-torch's scale is the square of ours"
            )
        elif name not in OTHER_KEYS and (close := _misspelt(name)):
            raise ValueError(f"unknown option {name!r} in a parameter group; did you mean {close!r}?")


def check_option(called: str, name: str, value: Any) -> None:
    """Raise ValueError, with the option called thus, where it cannot be."""
    accepts, expected = ACCEPTED[name]
    if not accepts(value):
        raise ValueError(f"{called} must be {expected}, got {value!r}")


def _misspelt(name: str) -> str | None:
    """The option that was meant, unless `name` is a key of someone else's that contains one whole, as `lr_scale` is."""
    if any(f"_{option}_" in f"_{name}_" for option in ACCEPTED):
        return None
    return nearest(name, ACCEPTED, MISSPELT)


def unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a keyword that a function does not have, with the one that was meant."""
    near = nearest(name, known, cutoff=0.6)
    hint = RENAMED.get(name) or (f"did you mean {near!r}?" if near else f"the options are {', '.join(known)}")
    if name == "learning_rate":
        hint = "call it lr"
    elif name in GROUPING:
        hint = f"give it to param_groups: {function}(param_groups(model, {name}=...))"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")


def check_together(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are each valid but contradict each other."""
    if options["capturable"] and options["projection"] in ("svd", "svd_lowrank", "power"):
        raise ValueError(
            f"capturable=True cannot go with projection={options['projection']!r}: the host takes part in decomposing "
            "a matrix. Use another projection or capturable=False"
        )
    _check_4_bits(options)
    _check_spectral(options)
    if options["capturable"] and options["state_device"] is not None:
        raise ValueError(
            f"capturable=True cannot go with state_device={options['state_device']!r}: a graph would hold copies of "
            "state that the host may replace. Use capturable=False"
        )
    if options["second_moment"] == "rowwise" and options["rank"] is not None:
        raise ValueError(
            f"second_moment='rowwise' is for weights that are not projected, got rank={options['rank']}. Give their "
            'group rank=None, or let param_groups(model, adamw_second_moment="rowwise") choose them'
        )
    _check_factored(options)
    if isinstance(options["lr"], torch.Tensor) and options["lr"].device.type != "cpu" and not options["capturable"]:
        raise ValueError(
            f"lr is a tensor on {options['lr'].device}, which needs capturable=True; a float or a CPU tensor does not"
        )
    if isinstance(options["lr"], torch.Tensor) and options["lr"].dtype not in (torch.float32, torch.float64):
        raise ValueError(f"lr as a tensor must be float32 or float64, got {options['lr'].dtype}")


def _check_factored(options: Mapping[str, Any]) -> None:
    """Raise ValueError for what a factored second moment cannot go with, where weights are stepped by the rule."""
    if options["second_moment"] != "factored" or options["rank"] is None:
        return
    if options["granularity"] != "element" or options["residual"]:
        raise ValueError(
            f"second_moment='factored' with rank={options['rank']} is Flora's rule, which needs granularity='element' "
            f"and residual=False, got {options['granularity']!r} and {options['residual']}. Use Flora, or give the "
            "group rank=None for Adafactor"
        )
    if options["projection"] == "identity":
        if options["scale"] != 1.0:
            raise ValueError(
                f"scale={options['scale']!r} cannot go with second_moment='factored' and projection='identity', as "
                "FactoredAdamW has them: its steps are as long as AdamW's. Use scale=1.0, and lr for other steps"
            )
    elif options["capturable"]:
        raise ValueError(
            "capturable=True cannot go with Flora: the host decides when its momentum is carried over to a new "
            "basis. Use capturable=False"
        )


def _check_4_bits(options: Mapping[str, Any]) -> None:
    """Raise ValueError for 4-bit codes of anything but a momentum of the weight's own size."""
    granularity, projection = options["granularity"], options["projection"]
    factored, unprojected = options["second_moment"] == "factored", options["rank"] is None
    by_rule = granularity == "spectral" or (granularity == "element" and (factored or unprojected))
    if options["state_dtype"] == "nf4" and not ((by_rule and projection == "identity") or (factored and unprojected)):
        raise ValueError(
            "state_dtype='nf4' is for the momentum of Artemis and FactoredAdamW, and of groups with rank=None and "
            f"second_moment='factored', got granularity={granularity!r}, projection={projection!r}, "
            f"second_moment={options['second_moment']!r}, where 4 bits are too few. Use torch.int8 or torch.bfloat16"
        )


def _check_spectral(options: Mapping[str, Any]) -> None:
    """Raise ValueError for what only a spectral step has, or cannot have."""
    granularity, projection = options["granularity"], options["projection"]
    if granularity != "spectral":
        if projection == "power":
            raise ValueError(f"projection='power' is for the momentum of ArtemisMini, got granularity={granularity!r}")
        return
    if projection not in ("identity", "power"):
        raise ValueError(f"granularity='spectral' needs projection='identity' or 'power', got {projection!r}")
    if options["residual"]:
        raise ValueError("granularity='spectral' needs residual=False, got True")
