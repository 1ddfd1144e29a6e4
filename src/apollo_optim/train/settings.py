"""Options in files: every option of a command by its name, meaning what its flag means."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..flags import file_values
from .checkpoint import replace_text_


def flat(options: Any) -> dict[str, Any]:
    """Every option of a dataclass and of its sections, by name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
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


def values_in(path: Path, command: type) -> dict[str, Any]:
    """What a YAML file gives of the options of a command. ValueError where it gives something else."""
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be options and their values (model: 60m), got {type(values).__name__}")
    return file_values(command, values, path)


def save_settings(path: Path, values: Mapping[str, Any]) -> None:
    """Write options to a file that `values_in` reads."""
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
