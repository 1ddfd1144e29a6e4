"""Optimizer state between a checkpoint and a running optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .distributed import Entry, Part, whole
from .host_state import STAYS, kept_on_host, visits
from .options import ACCEPTED, LATER, STRUCTURE, check_options, is_number, plain_number, spell_out_
from .state import (
    NAMES,
    bare_name,
    folded_seed,
    laid_out,
    part_of_weight,
    projected_shape,
    rule_of,
    state_entries,
    zeros,
)


def portable(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Options to save: Python's numbers, whatever a schedule has written, and dtypes by name.

    `torch.load(weights_only=True)` and torch.distributed.checkpoint take numbers, strings and containers only.
    """
    saved = []
    for group in groups:
        options = dict(group)
        spell_out_(options)
        # A schedule's own options, too, such as its initial_lr.
        saved.append({key: str(v) if isinstance(v, torch.dtype) else plain_number(v) for key, v in options.items()})
    return saved


LOCAL = "fused", "capturable", "param_names", "state_device"
"""Options of how this machine computes, or this model calls its weights: if there is one here, it stays."""


def loadable(loaded: Mapping[str, Any], groups: list[dict[str, Any]], names: list[list[str]]) -> dict[str, Any]:
    """A checkpoint as torch.optim can take it in; raises ValueError where it is not of an optimizer with these groups.

    `names` are those of the parameters of each group, for messages.
    """
    _check_form(loaded)
    loaded = _completed(loaded, groups)
    _check_fits(loaded, groups, names)
    pairs = zip(loaded["param_groups"], groups, strict=True)
    kept = [
        saved | {key: own[key] for key in LOCAL if key in own} | {"lr": _rate_as_here(saved["lr"], own["lr"])}
        for saved, own in pairs
    ]
    return {"state": _protected(loaded["state"]), "param_groups": kept}


def _rate_as_here(saved: Any, own: float | Tensor) -> Any:
    """A saved learning rate as a number or as a tensor, whichever it is here, where `capturable` may ask for one."""
    if isinstance(saved, Tensor):
        return saved.to(own.device) if isinstance(own, Tensor) else float(saved)
    return torch.full_like(own, saved) if isinstance(own, Tensor) and is_number(saved) else saved


def _check_form(loaded: Mapping[str, Any]) -> None:
    """Raise ValueError where a checkpoint is not made of groups and of a dict of state for each parameter."""
    if not loaded.keys() >= {"state", "param_groups"}:
        raise ValueError(f'state_dict must have "state" and "param_groups", got {sorted(loaded)}')
    state, groups = loaded["state"], loaded["param_groups"]
    if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
        raise ValueError(f'"state" of state_dict must be a dict of dicts, got {state!r:.200}')
    if not isinstance(groups, (list, tuple)) or not all(isinstance(each, Mapping) for each in groups):
        raise ValueError(f'"param_groups" of state_dict must be a list of dicts, got {groups!r:.200}')


def _completed(loaded: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A checkpoint with the options that its groups lack: those that came later as before them, others as here.

    Raises ValueError where a group lacks what says what its state means: no optimizer of ours wrote that.
    """
    for number, saved in enumerate(loaded["param_groups"]):
        if lacking := [key for key in STRUCTURE if key not in saved]:
            raise ValueError(
                f"group {number} of the checkpoint lacks {lacking}: it was made by another optimizer, whose state has "
                "another meaning. Load the model's weights alone and warm up again (docs/migration.md)"
            )
    if len(loaded["param_groups"]) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(loaded['param_groups'])} parameter groups, the optimizer {len(groups)}"
        )
    pairs = zip(loaded["param_groups"], groups, strict=True)
    filled = [{key: own[key] for key in own if key in ACCEPTED} | LATER | saved for saved, own in pairs]
    for group in filled:
        spell_out_(group)  # dtypes by name, and what a checkpoint format made lists of
        _correct_second_moment_(group, loaded["state"])
    return {**loaded, "param_groups": filled}


def _correct_second_moment_(group: dict[str, Any], state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Call AdamW's second moment by its name: Flora's weights that are not projected once had it as "factored"."""
    kept = [state[index] for index in group["params"] if index in state]
    is_adamw = all("exp_avg_sq" in each for each in kept)
    if group["rank"] is None and group["second_moment"] == "factored" and kept and is_adamw:
        group["second_moment"] = "elementwise"


SCHEDULED = frozenset({"lr", "weight_decay"})
"""Options that users' schedules write at every step, unchecked, and that therefore are not checked in a checkpoint."""


class Protected:
    """A tensor that torch.optim must not cast to the weight's dtype on its way in."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _protected(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Saved state with every tensor wrapped, and scalars of ours that are plain numbers; `placed` unwraps it."""

    def wrapped(name: str, value: Any) -> Any:
        if name in NAMES and is_number(value):
            dtype = torch.int64 if isinstance(value, int) else torch.float64
            value = torch.tensor(value, dtype=dtype, device="cpu")
        return Protected(value) if isinstance(value, Tensor) else value

    return {index: {name: wrapped(name, each) for name, each in entries.items()} for index, entries in state.items()}


def placed(state: Mapping[str, Any], weight: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Loaded state on the devices it belongs to, in its own dtypes, sharing no memory with the checkpoint."""
    entries = state_entries(weight.shape, weight.dtype, group)
    part = part_of_weight("a weight", weight, group)
    result = {}
    for name, value in state.items():
        if isinstance(value, Protected) and name not in NAMES:
            value = value.tensor.detach().to(weight.device, copy=True)
        elif isinstance(value, Protected):
            if name not in entries:
                continue
            device = torch.device("cpu") if entries[name].on_host else weight.device
            tensor = value.tensor.detach()
            tensor = whole(tensor) if part is None else part.placed(name, tensor)
            value = tensor.to(device=device, dtype=entries[name].dtype, copy=part is None)
        result[name] = value
    return result


def conform_(state: dict[str, Tensor], name: str, weight: Tensor, group: Mapping[str, Any], part: Part | None) -> None:
    """Bring a weight's state in line with options that were changed between two steps, or say why it cannot be."""
    entries = state_entries(weight.shape, weight.dtype, group)
    if "basis" in state and "basis" not in entries:
        raise _unfit(name, weight, "no basis", state, "basis")
    for key, entry in entries.items():
        if key != "last_norm" and (key not in state or not _alike(state[key], entry)):
            raise _unfit(name, weight, f"{key} of {entry.shape}", state, key)
    for key in state.keys() & NAMES - entries.keys():
        del state[key]  # of a limiter or a momentum that was switched off since
    for key, entry in entries.items():
        device = torch.device("cpu") if entry.on_host else weight.device
        if key == "last_norm":
            # A limiter that was switched on since has no previous norm yet.
            state.setdefault(key, zeros(key, entry, weight, part))
        if part is not None and not part.is_placed(key, state[key]):
            state[key] = part.placed(key, state[key])
        if state[key].device != device or state[key].dtype != entry.dtype:
            state[key] = state[key].to(device=device, dtype=entry.dtype)
        state[key] = laid_out(key, entry, state[key], part)
        if visits(weight, group) and key not in STAYS:
            state[key] = kept_on_host(state[key], weight)


def _unfit(name: str, weight: Tensor, asked: str, state: Mapping[str, Tensor], key: str) -> ValueError:
    """Why a weight's state cannot be brought in line: what the group asks for, and what the state has as `key`."""
    found = None if key not in state else f"{tuple(state[key].shape)} in {state[key].dtype}"
    return ValueError(
        f"{name} {tuple(weight.shape)}: the group asks for {asked}, its state has {found}. Options that decide the "
        f"state ({', '.join(STRUCTURE)}, whether the first of betas is 0, and whether state_dtype is int8 or nf4) "
        "cannot change once there is one: delete optimizer.state[weight] to begin anew"
    )


def _alike(value: Tensor, entry: Entry) -> bool:
    """True if a state tensor can be made the entry by a cast: numbers cannot be cast to codes."""
    return tuple(value.shape) == entry.shape and value.is_floating_point() == entry.dtype.is_floating_point


def _check_fits(loaded: Mapping[str, Any], groups: list[dict[str, Any]], names: list[list[str]]) -> None:
    """Raise ValueError, naming the parameter and both values, where a checkpoint is not of this optimizer."""
    saved_groups = loaded["param_groups"]
    for number, saved in enumerate(saved_groups):
        checked = {key: value for key, value in saved.items() if key in ACCEPTED and key not in SCHEDULED}
        check_options(checked, f" in group {number} of the checkpoint")
    for number, (saved, own) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(own["params"]):
            raise ValueError(
                f"group {number} of the checkpoint has {len(saved['params'])} parameters, "
                f"the optimizer's has {len(own['params'])}"
            )
        for shape, name, weight in zip(saved.get("param_shapes", ()), names[number], own["params"], strict=False):
            if shape != str(tuple(weight.shape)):
                raise ValueError(f"{name}: its shape is {shape} in the checkpoint, {tuple(weight.shape)} here")
        for index, name, weight in zip(saved["params"], names[number], own["params"], strict=True):
            # Which weights are left to AdamW though their group has a rank, is the checkpoint's to say.
            _check_structure(name, weight, saved, {**own, "vocabulary": saved["vocabulary"]})
            if index in loaded["state"]:
                _check_state(name, weight, saved, loaded["state"][index])
    _check_places(loaded, groups)
    strangers = loaded["state"].keys() - {index for saved in saved_groups for index in saved["params"]}
    if strangers:
        raise ValueError(f"the checkpoint keeps state for {sorted(strangers)}, which is in none of its groups")


def _check_places(loaded: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError where a weight would get the state of another one that this optimizer has, too.

    Names alone do not tell: torch.distributed.checkpoint brings state to its weights, but leaves names where they were.
    The seed that was made from a name stays with its state.
    """
    known = {bare_name(name) for own in groups for name in own.get("param_names", ())}
    for saved, own in zip(loaded["param_groups"], groups, strict=True):
        names = saved.get("param_names", ()), own.get("param_names", ())
        for index, theirs, ours in zip(saved["params"], *names, strict=False):
            seed = loaded["state"].get(index, {}).get("seed")
            elsewhere = bare_name(theirs) != bare_name(ours) and bare_name(theirs) in known
            if elsewhere and type(seed) is Tensor and int(seed) == folded_seed(saved["seed"], theirs):
                raise ValueError(
                    f"the checkpoint has {theirs} in the place of {ours}: give the optimizer its parameters in the "
                    "order in which they were saved"
                )


def _check_structure(name: str, weight: Tensor, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError where options decide another state. Ranks are compared for this weight: 0.25 may mean 128."""
    ours, theirs = projected_shape(weight.shape, own), projected_shape(weight.shape, saved)
    compared = [("rank", ours and ours.rank, theirs and theirs.rank)]
    if ours is not None and theirs is not None:
        # First what tells another optimizer: its rank may be nothing that anyone has asked for.
        compared = [(option, own[option], saved[option]) for option in STRUCTURE if option != "rank"] + compared
    elif ours is None and theirs is None:
        compared += [("second_moment", *(rule_of(weight.shape, group).second_moment for group in (own, saved)))]
    for option, here, there in compared:
        if here != there:
            differs = f"{name} {tuple(weight.shape)}: {option} is {there} in the checkpoint, {here} here"
            raise ValueError(
                f"{differs}: it was saved by another optimizer, or with other options, and fits only those"
            )


def _check_state(name: str, weight: Tensor, saved: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    expected = state_entries(weight.shape, weight.dtype, saved)
    if NAMES.isdisjoint(state):
        return  # a wrapper's own, of before the first step
    # The limiter can be switched on and off between two steps, and its norm begins anew.
    if (state.keys() & NAMES ^ expected.keys()) - {"last_norm"}:
        raise ValueError(f"{name}: the checkpoint keeps {sorted(state)}, expected {sorted(expected)}")
    for key in expected.keys() & state.keys():
        entry = expected[key]
        if entry.shape == () and is_number(state[key]):
            continue
        if not isinstance(state[key], Tensor):
            raise ValueError(f"{name}: {key} is {state[key]!r} in the checkpoint, expected a tensor")
        if tuple(state[key].shape) != entry.shape:
            raise ValueError(
                f"{name} {tuple(weight.shape)}: {key} is {tuple(state[key].shape)} in the checkpoint, "
                f"{entry.shape} here"
            )
