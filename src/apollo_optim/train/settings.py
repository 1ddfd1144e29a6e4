"""Options in files: every option of a command by its name, meaning what its flag means."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..choices import nearest
from .checkpoint import replace_text_


def flat(options: Any) -> dict[str, Any]:
    """Every option of a dataclass and of its sections, by name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def switches(options: Any) -> set[str]:
    """The options that are on or off: their flags take no value."""
    found: set[str] = set()
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found |= switches(value) if dataclasses.is_dataclass(value) else {field.name} if field.type is bool else set()
    return found


LARGEST_FILE, DEEPEST = 2**20, 2
"""Bytes, and levels: options, and in them lists of values."""


def read_yaml(path: Path) -> Any:
    """What a YAML file of options holds. ValueError where it cannot be one, before what it describes is built."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1).decode()
        if len(text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError("it is nested deeper than options and lists of values")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has an alias (*), for which options have no use")
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error


def flags_in(path: Path, options: Any, without: Collection[str] = ()) -> list[str]:
    """What a YAML file gives of these options, `without` some, as flags. ValueError where it gives something else."""
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be options and their values (model: 60m), got {type(values).__name__}")
    known, on_or_off = flat(options), switches(options)
    flags: list[str] = []
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: {key!r} is unknown; did you mean {nearest(name, known)!r}?")
        if name == "config":
            raise ValueError(f"{path}: a file of options cannot name another")
        if isinstance(value, dict):
            raise ValueError(f"{path}: {key} must be a value or a list of values, got {value}; options are not nested")
        if name in on_or_off and not isinstance(value, bool):
            raise ValueError(f"{path}: {key} must be true or false, got {value!r}")
        if name in without:
            continue
        flags += [_switch(name, value)] if name in on_or_off else [_flag(name), *map(str, _listed(value))]
    return flags


MEANT = {
    "learning_rate": "lr", "optimizer": "method", "optim": "method", "batch_size": "batch_tokens", "epochs": "steps",
    "num_train_epochs": "steps", "max_steps": "steps", "num_steps": "steps", "warmup_steps": "warmup",
    "warmup_ratio": "warmup", "num_layers": "model", "output_dir": "out", "dataset": "data", "seq_len": "sequence",
    "max_length": "sequence", "gradient_accumulation_steps": "micro_batch", "gradient_checkpointing":
    "activation_checkpointing", "max_grad_norm": "clip",
}  # fmt: skip
"""What other programs call an option, where the nearest name would be another."""


def check_flags(flags: Sequence[str], options: Any) -> None:
    """Raise ValueError for the first flag that is none of these options, with the one that was meant."""
    known = flat(options)
    valid = {*known, *(f"no_{name}" for name in switches(options)), "help"}
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0].replace("-", "_")
        if flag.startswith("--") and name not in valid and not name.startswith("tyro"):
            raise ValueError(f"{flag} is unknown; did you mean {_flag(MEANT.get(name) or nearest(name, known))}?")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _switch(name: str, value: bool) -> str:
    return _flag(name) if value else _flag(f"no_{name}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def save_settings(path: Path, values: Mapping[str, Any]) -> None:
    """Write options to a file that `flags_in` reads."""
    replace_text_(
        path,
        yaml.safe_dump({name: plain(value) for name, value in values.items()}, sort_keys=False, allow_unicode=True),
    )


def saved_settings(path: Path) -> dict[str, Any]:
    """The options in a file that `save_settings` wrote. ValueError where it no longer holds them."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} no longer holds the options of a run; bring it back, or begin another run")
    return values


def plain(value: Any) -> Any:
    """A value as a file holds it."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def check_unchanged(saved: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str]) -> None:
    """Raise ValueError for the first option, beside the `free` ones, that is not what it was when the run began."""
    for name, value in now.items():
        before, after = saved.get(name), plain(value)
        if name not in free and before != after:
            raise ValueError(
                f"--{name.replace('_', '-')} is {after}, and the run began with {before}; a run is resumed as it was "
                "begun, for as long or longer. Leave the option out, or begin another run in another --out"
            )
