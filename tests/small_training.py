"""Small models and runs of a few steps with any method, the same every time."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apollo_optim.train.losses import Objective
from apollo_optim.train.methods import METHODS, Method, Prepared, prepared_method
from apollo_optim.train.micro_batch import set_lr_
from apollo_optim.train.model import Model, built_model
from apollo_optim.train.optimizers import installed

TINY = str(Path(__file__).with_name("tiny_llama.json"))
"""A configuration of one layer, 32 wide."""
VOCABULARY = 64
STEPS = 20
OWN_KINDS = "plain", "chunked"
"""Of losses: those that need no other package."""


def needed(method: str) -> str:
    """The method, where what it needs is installed."""
    needs = METHODS[method].needs
    if needs and not any(map(installed, needs)):
        pytest.skip(f"{method} needs {' or '.join(needs)}")
    return method


@cache
def _built(model: str, dtype: Any) -> Any:
    return built_model(Model(model=model, dtype=dtype), VOCABULARY, "cpu", 0)


def made(method: str, model: str = TINY, dtype: Any = "fp32", **options: Any) -> Prepared:
    """A model and what trains it, for a run of STEPS steps."""
    # To copy a model takes a quarter of the time that it takes to make one.
    return prepared_method(Method(method=needed(method), **options), deepcopy(_built(model, dtype)), STEPS)


def trained(prepared: Prepared, steps: Iterable[int]) -> list[float]:
    """The losses of these steps on one batch; what dropout and rounding draw depends on the step alone."""
    text = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(0))
    whole = Objective(prepared.model)
    losses = []
    for step in steps:
        torch.manual_seed(step)
        _set_lr(prepared.optimizer, prepared.lr_factor(step) * min((step + 1) / 4, 1))
        loss = whole(text[:, :-1], text[:, 1:])
        loss.backward()
        prepared.optimizer.step()
        prepared.optimizer.zero_grad()
        prepared.after_step(step + 1)
        losses.append(loss.item())
    return losses


def _set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        set_lr_(group, group["initial_lr"] * factor)


def text(rows: int = 3, length: int = 11, vocabulary: int = 48, seed: int = 0) -> Tensor:
    """Random tokens [rows, length]."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


class Watch(TorchDispatchMode):
    """Shows every tensor that an operation makes."""

    def __init__(self, seen: Callable[[Tensor], Any]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.seen(leaf)
        return out
