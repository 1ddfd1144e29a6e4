"""Modules under the names of apollo-torch and galore-torch, whose optimizers are ours."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from ..core.shape import has_size, vocabulary_sizes
from ..optimizer import ProjectedOptimizer
from ..param_groups import warn_user

LABEL = "+apollo.optim"
"""The end of the versions of the distributions under `packaging/` and of the modules made here."""

FACTORY = (
    "optimizer_cls_and_kwargs=(apollo_optim.integrations.transformers.ApolloFactory, "
    '{"lr": ..., "step_in_backward": True, "max_grad_norm": ...})'
)

ADAM = "betas", "eps"

Translation = Callable[[Any], dict[str, Any]] | Mapping[Any, dict[str, Any]]
"""Our options for an original's option: a function of its value, or those of each value that has a counterpart."""


def install_stand_in(name: str, optimizers: Mapping[str, type], replace: bool) -> None:
    """Make `import name` find a module with these optimizers, in this process, from now on.

    Raises:
        RuntimeError: The original is installed, and `replace` is False.
    """
    found = _version(name)
    if found is not None and not found.endswith(LABEL) and not replace:
        raise RuntimeError(
            f"{name} {found} is installed, and would be hidden by our stand-in: uninstall it, or pass replace=True"
        )
    module = ModuleType(name, "A stand-in: the optimizers are those of apollo_optim.")
    # Callers look for a module with importlib.util.find_spec, which reads this of a module that is already imported.
    module.__spec__ = ModuleSpec(name, loader=None, origin="apollo_optim")
    vars(module).update(optimizers, __version__=f"0{LABEL}")
    sys.modules[name] = module
    _forget_answer(name)


def _version(name: str) -> str | None:
    """The version of the module that this name imports, "unknown" if it does not say; None if there is no module."""
    if name in sys.modules:
        return str(getattr(sys.modules[name], "__version__", "unknown"))
    if find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _forget_answer(name: str) -> None:
    """Make transformers look again for a module that it may have missed before."""
    utils = sys.modules.get("transformers.utils.import_utils")
    answer = getattr(utils, f"is_{name}_available", None)
    if hasattr(answer, "cache_clear"):
        answer.cache_clear()


def translated(
    params: Iterable[Any], options: Mapping[str, Translation], package: str, adam: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The groups of an original with our options, and the `betas` and `eps` of all of them.

    `options` translates each of the original's options in a group. A group without a rank is AdamW's. The Trainer gives
    `betas` and `eps` to the projected group alone: they then count for all.

    Raises:
        ValueError: An option has no counterpart, or the groups are those of a layer-wise mode.
    """
    items = list(params)
    if not items or not isinstance(items[0], dict):
        return [{"params": items, "rank": None}] if items else [], adam
    groups = [{**group, "params": _listed(group["params"])} for group in items]
    if len(groups) == 1 and len(groups[0]["params"]) == 1:
        raise ValueError(
            "an optimizer for a single weight, as the layer-wise modes of transformers and LLaMA-Factory build one for "
            "each: such a run saves no state, and no schedule reaches it. To step in backward with checkpoints and "
            f"schedules, use {FACTORY}"
        )
    for option in ADAM:
        given = [group[option] for group in groups if option in group]
        if option not in adam and given and all(value == given[0] for value in given):
            adam = {**adam, option: given[0]}
    return [_group(group, options, package) for group in groups], adam


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _group(group: Mapping[str, Any], options: Mapping[str, Translation], package: str) -> dict[str, Any]:
    projected = group.get("rank") is not None
    result: dict[str, Any] = {"rank": None}
    for key, value in group.items():
        ours = options.get(key)
        if ours is None:
            result[key] = value
        elif not projected:
            continue
        elif isinstance(ours, Mapping):
            if value not in ours:
                raise ValueError(f"{key}={value!r} of {package} has no counterpart here; expected one of {[*ours]}")
            result |= ours[value]
        else:
            result |= ours(value)
    return result


def warn_of_vocabulary(optimizer: ProjectedOptimizer) -> None:
    """Warn of projected weights that look like an embedding or a head: "all-linear" includes the head."""
    sizes = vocabulary_sizes(weight.shape for weight in optimizer._weights())
    for group in optimizer.param_groups:
        for weight in group["params"] if group["rank"] is not None else ():
            if has_size(weight.shape, sizes):
                warn_user(
                    f"a weight {tuple(weight.shape)} that looks like an embedding or a head is among the targets, and "
                    "projecting one ruins training: leave it out of optim_target_modules"
                )
