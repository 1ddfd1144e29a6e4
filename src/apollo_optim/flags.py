"""Options of a command, the fields of frozen dataclasses: read from flags and files, and listed by --help."""

import ast
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .choices import chosen, nearest

Options = TypeVar("Options")
Place = Annotated[str, "may name files"]
"""A name, or files and folders by commas, in which `~` is a home as in a shell."""
HOMES = " (~user only where this machine has that user)"

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Values of a switch."""
FORMERLY = {"elementwise": "adamw"}
"""Former names of values of --vocabulary-state."""
UNLIKE = ValueError, TypeError, KeyError, AttributeError
"""Errors of `_as` over a value that is not of the type."""
NONE = "none", "null"
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
"""Suffixes of an integer, as in 2M steps."""

MEANT = {
    "learning_rate": "lr", "max_lr": "lr", "min_lr": "final_lr", "optimizer": "method", "optim": "method",
    "batch_size": "batch_tokens batch", "batch": "batch_tokens", "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "micro_batch", "epochs": "steps", "num_train_epochs": "epochs steps",
    "max_steps": "steps", "num_steps": "steps", "iterations": "steps", "max_iters": "steps", "warmup_steps": "warmup",
    "warmup_ratio": "warmup", "num_layers": "model", "size": "model", "output_dir": "out", "output": "out",
    "save_dir": "out", "dataset": "data", "train_file": "data", "val_data": "validation", "seq_len": "sequence",
    "max_length": "sequence", "block_size": "sequence", "context_length": "sequence", "vocab_size": "vocabulary",
    "gradient_checkpointing": "activation_checkpointing", "max_grad_norm": "clip", "grad_clip": "clip",
    "update_proj_gap": "refresh_every", "proj": "projection", "scale_type": "granularity", "wd": "weight_decay",
    "beta1": "betas", "beta2": "betas", "bf16": "dtype", "precision": "dtype", "silent": "quiet",
    "log_interval": "log_every", "eval_interval": "eval_every", "save_steps": "save_every",
    "checkpoint_every": "save_every", "gpu": "device", "report_to": "wandb", "num_workers": "workers",
}  # fmt: skip
"""Other programs' names of options, where ours are unlike them. Of several, the first that a command has is meant."""


@dataclass(frozen=True)
class Option:
    """A field that flags and files can set."""

    name: str
    kind: Any
    """Its type."""
    default: Any
    """MISSING if it is required."""
    help: str
    placed: bool = False
    """True if it is positional."""

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def is_switch(self) -> bool:
        """True if its flag means true when it stands alone."""
        return bool in _arms(self.kind)

    @property
    def is_list(self) -> bool:
        """True if it takes several values."""
        return any(get_origin(kind) is tuple for kind in _arms(self.kind))

    @property
    def names_files(self) -> bool:
        """True if it may name files or folders."""
        return Place in _arms(self.kind) or Path in _arms(self.kind)


def sections(command: type, without: Sequence[str] = ()) -> list[tuple[str, list[Option]]]:
    """The options of a dataclass and of the dataclasses in its fields, under the first line of each one's docstring.

    A command's `WITHOUT` names fields that are not its options.
    """
    kinds, helps = get_type_hints(command, include_extras=True), _helps(command)
    own: list[Option] = []
    found = [(_summary(command), own)]
    for field in fields(command):
        if is_dataclass(field.default_factory):
            found += sections(field.default_factory, getattr(command, "WITHOUT", without))
        elif field.name not in without:
            made: Callable[[], Any] | Any = field.default_factory
            default = field.default if made is MISSING else made()
            placed = default is MISSING or field.metadata.get("placed", False)
            own.append(Option(field.name, kinds[field.name], default, helps.get(field.name, ""), placed))
    return found


def options_of(command: type) -> dict[str, Option]:
    """Every option of a command by name."""
    return {option.name: option for _, options in sections(command) for option in options}


def built(command: type[Options], values: Mapping[str, Any]) -> Options:
    """The dataclass with these values, in itself and in its sections, and defaults for the others."""
    given: dict[str, Any] = {}
    for field in fields(command):  # pyrefly: ignore[bad-argument-type]
        if is_dataclass(field.default_factory):
            given[field.name] = built(field.default_factory, values)
        elif field.name in values:
            given[field.name] = values[field.name]
    return command(**given)


def flag_values(command: type, arguments: Sequence[str]) -> dict[str, Any]:
    """The options on a command line, by name. The last of a repeated option counts."""
    known = options_of(command)
    places = [option for option in known.values() if option.placed]
    found: dict[str, Any] = {}
    loose: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            loose.append(word)
            continue
        flag, given, text = word.partition("=")
        option, opposite = _option(flag, known)
        texts = [text] if given else _taken(option, rest, places)
        value = _converted(option.kind, option.flag, tuple(texts) if option.is_list else texts[0])
        if opposite and not isinstance(value, bool):
            raise ValueError(f"{flag} takes no value")
        found[option.name] = not value if opposite else value
    return found | _placed(places, loose, found)


def file_values(command: type, values: Mapping[Any, Any], path: Path | str) -> dict[str, Any]:
    """The options in a file, by name. They mean what the flags mean; `path` is for the errors."""
    known = options_of(command)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = option_name(str(key))
        if name not in known:
            raise ValueError(f"{path}: {key!r} is unknown{_perhaps(name, known, repr)}")
        if name == "config":
            raise ValueError(f"{path}: a file of options cannot name another")
        if isinstance(value, dict):
            raise ValueError(f"{path}: {key} must be a value or a list of values, got {value}; options are not nested")
        found[name] = _converted(known[name].kind, f"{path}: {key}", value)
    return found


def option_name(key: str) -> str:
    """The name of the option that a key of a file means, which may be spelt as the flag is."""
    return key.replace("-", "_")


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def said(value: Any) -> str:
    """The value of an option as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(said, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def check_utf8(name: str, text: str) -> None:
    """Raise ValueError for text with bytes that are not UTF-8, which Python reads as halves of characters."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} must be UTF-8, got {text!r:.200}")


def check_unused(options: Any, why: str, names: Sequence[str] = ()) -> None:
    """Raise ValueError for the first option that is not at its default, of all or of those with these names."""
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and (not names or field.name in names):
            given = flag_of(field.name) + ("" if value is True else f" {value}")
            raise ValueError(f"{given} has no effect {why}")


def check_each(options: Any, expected: str, accepted: Callable[[Any], bool], *names: str) -> None:
    """Raise ValueError for the first of these options whose value is neither None nor `accepted`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not accepted(value):
            raise ValueError(f"{flag_of(name)} must be {expected}, got {value}")


def _option(flag: str, known: Mapping[str, Option]) -> tuple[Option, bool]:
    """The option of a flag, and whether the flag is its opposite."""
    name = option_name(flag.removeprefix("--"))
    if name in known:
        return known[name], False
    positive = known.get(name.removeprefix("no_"))
    if name.startswith("no_") and positive is not None and positive.is_switch:
        return positive, True
    raise ValueError(f"{flag} is unknown{_perhaps(name, known, lambda near: known[near].flag)}")


def _perhaps(name: str, known: Mapping[str, Option], spelt: Callable[[str], str]) -> str:
    """A hint at the option that was probably meant."""
    elsewhere = MEANT.get(nearest(name, MEANT.keys() - known.keys(), cutoff=0.85) or "", "").split()
    near = next((each for each in elsewhere if each in known), None) or nearest(name, known, cutoff=0.66)
    return "; --help lists the options" if near is None else f"; did you mean {spelt(near)}?"


def _taken(option: Option, rest: list[str], places: Sequence[Option]) -> list[str]:
    """The values of a flag, which are removed from `rest`. `places` are the positional options."""
    end = next((number for number, word in enumerate(rest) if word.startswith("--")), len(rest))
    # Where values may also stand without a flag, a word after a switch that is no value of it is one of those.
    if option.is_switch and (end == 0 or (places and rest[0].lower() not in (*WORDS, *NONE))):
        return ["true"]
    count = end if option.is_list else min(end, 1)
    if count == 0:
        raise ValueError(f"{option.flag} needs a value: {_expected(option.kind)}")
    taken = rest[:count]
    del rest[:count]
    return taken


def _placed(places: Sequence[Option], loose: Sequence[str], flagged: Mapping[str, Any]) -> dict[str, Any]:
    """The positional values, in the order of their options. An option that was given by its flag takes none."""
    found: dict[str, Any] = {}
    left = list(loose)
    for option in places:
        if option.name in flagged:
            continue
        texts = left if option.is_list else left[:1]
        if not texts:
            if option.default is MISSING:
                raise ValueError(f"{option.name.upper()} is missing: {option.help}")
            continue
        found[option.name] = _converted(option.kind, option.name.upper(), tuple(texts) if option.is_list else texts[0])
        left = left[len(texts) :]
    if left:
        for word, option in zip(loose, places, strict=False):
            if option.name in flagged:
                by_flag = f"{option.flag} {said(flagged[option.name])}"
                raise ValueError(f"{option.name.upper()} is given twice: {word!r}, and by {by_flag}; leave one out")
        raise ValueError(f"{left[0]!r} follows no option that takes it; --help lists the options")
    return found


def _arms(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _converted(kind: Any, name: str, value: Any) -> Any:
    """The value of a flag or of a key of a file, converted to the option's type."""
    for each in value if isinstance(value, (list, tuple)) else [value]:
        check_utf8(name, str(each))
    arms = _arms(kind)
    text = str(value).strip().lower()
    if NoneType in arms and (value is None or text in NONE):
        return None
    for arm in arms:
        try:
            return _as(arm, value)
        except UNLIKE:
            continue
    if isinstance(value, str) and all(get_origin(arm) is Literal for arm in arms if arm is not NoneType):
        chosen(name, value, [choice for arm in arms for choice in get_args(arm)])
    typed = " ".join(value) if isinstance(value, tuple) else value  # a flag's values, as they were typed
    got = typed if isinstance(typed, str) else repr(typed)
    raise ValueError(f"{name} must be {_expected(kind)}, got {got}")


def _as(kind: Any, value: Any) -> Any:
    """The value as one type; raises one of `UNLIKE` where it is not of that type."""
    if get_origin(kind) is Literal:
        # YAML takes a bare `off` for false.
        text = "off" if value is False else FORMERLY.get(str(value), str(value))
        return get_args(kind)[get_args(kind).index(text)]
    if get_origin(kind) is tuple:
        return _as_tuple(get_args(kind), value)
    if kind is bool:
        return value if isinstance(value, bool) else WORDS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Path)):
        raise TypeError
    if kind is int:
        return _as_integer(value)
    if kind is Path:
        return Path(_at_home(str(value)))
    if kind == Place:
        return ",".join(map(_at_home, str(value).split(",")))
    return kind(str(value) if kind is not float else value)


def _at_home(text: str) -> str:
    """A path with `~` and `~user` expanded; ValueError where there is no such user."""
    path = os.path.expanduser(text.strip()) if text.lstrip().startswith("~") else text
    if path.startswith("~"):
        raise ValueError
    return path


def _as_integer(value: Any) -> int:
    """An integer, written as 131072, 131_072, 1e3 or 2M; not as 1.0, which may be meant as a fraction."""
    text = str(value)
    if counted := re.fullmatch(r"(\d+\.?\d*)([kKmMbB])", text):
        number = round(float(counted[1]) * UNITS[counted[2].lower()], 6)
        if number.is_integer():
            return int(number)
    if re.fullmatch(r"[+-]?\d[\d_.]*[eE]\+?\d+", text) and float(text).is_integer():
        return int(float(text))
    return int(text)


def _as_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        if kinds[0] in (int, float):
            parts = [piece for part in parts for piece in str(part).split(",")]
        return tuple(_as(kinds[0], part) for part in parts)
    if len(parts) == 1 and isinstance(parts[0], str):
        parts = parts[0].strip("()[]").split(",")
    return tuple(_as(kind, part) for kind, part in zip(kinds, parts, strict=True))


def _expected(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        each, *others = get_args(kind)
        if others == [Ellipsis]:
            return f"one or more {({int: 'integers', float: 'numbers', Path: f'paths{HOMES}'}).get(each, 'texts')}"
        return f"{len(others) + 1} numbers, as in 0.9,0.95"
    if len(arms := _arms(kind)) > 1:
        return " or ".join(dict.fromkeys(_expected(arm) for arm in arms if arm is not NoneType))
    words = {bool: "true or false", int: "an integer", float: "a number"}
    return {**words, Path: f"a path{HOMES}", Place: f"a name or a path{HOMES}"}.get(kind, "text")


def help_text(command: type, name: str) -> str:
    """The text of `apollo COMMAND --help`."""
    groups = sections(command)
    placed = [option for _, options in groups for option in options if option.placed]
    names = "".join(f" {_place(option)}" + (" ..." if option.is_list else "") for option in placed)
    lines = [f"usage: apollo {name}{names} [options]", ""]
    width = min(shutil.get_terminal_size().columns, 120)
    for title, options in groups:
        lines += textwrap.wrap(title, width, break_on_hyphens=False)
        for option in options:
            lines += _help_lines(option, width)
        lines.append("")
    return "\n".join(lines)


def _help_lines(option: Option, width: int) -> list[str]:
    shape = "" if option.kind is bool else _shape(option.kind)
    head = f"  {_place(option)}" if option.placed else f"  {option.flag} {shape}".rstrip()
    shown = "" if option.default in (MISSING, None, False, "") else f" ({said(option.default)})"
    indent = " " * 6
    text = textwrap.wrap(option.help + shown, width - len(indent), break_on_hyphens=False, break_long_words=False)
    return [head, *(indent + line for line in text)]


def _place(option: Option) -> str:
    """A positional option in the usage line."""
    return option.name.upper() if option.default is MISSING else f"[{option.name.upper()}]"


def _shape(kind: Any) -> str:
    """The value of a flag in a list of flags: N, PATH, ddp|fsdp."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        first, *_, last = get_args(kind)
        return {int: "N", float: "X"}.get(first, "TEXT") + " ..." if last is Ellipsis else "X,Y"
    if len(arms := _arms(kind)) > 1:
        return "|".join(filter(None, map(_shape, arms)))
    return {int: "N", float: "X", bool: "true|false", Path: "PATH", str: "TEXT", Place: "TEXT"}.get(kind, "")


def _summary(command: type) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


@cache
def _helps(command: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for owner in command.__mro__:
        if is_dataclass(owner):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            assert isinstance(definition, ast.ClassDef)
            for field, under in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = getattr(getattr(under, "value", None), "value", None)
                    if isinstance(text, str):
                        found.setdefault(field.target.id, text)
    return found
