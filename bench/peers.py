"""Other packages' optimizers on the same weights, where they are installed: for comparison, never dependencies."""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LR = 1e-3


def _imported(name: str) -> Any:
    """A module, or None where it is not installed.

    apollo-torch and galore-torch import bitsandbytes for classes that are not timed here; an empty module serves them.
    """
    if "bitsandbytes" not in sys.modules:
        stand_in = types.ModuleType("bitsandbytes")
        for inner in ("functional", "optim", "optim.optimizer"):
            sys.modules[f"bitsandbytes.{inner}"] = types.ModuleType(f"bitsandbytes.{inner}")
        stand_in.functional = sys.modules["bitsandbytes.functional"]
        stand_in.optim = sys.modules["bitsandbytes.optim"]
        sys.modules["bitsandbytes.optim.optimizer"].Optimizer2State = object
        sys.modules["bitsandbytes"] = stand_in
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is left out: {error}")
        return None


def _groups(params: list[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    """Matrices with a projection's options, and the rest without, as these packages take them."""
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [{"params": matrices, **options}] + [{"params": rest}] * bool(rest)


def peers(rank: int, with_svd: bool) -> list[tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]]:
    """(name, build) of every peer that can be imported."""
    listed: list[tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = []
    if apollo_torch := _imported("apollo_torch"):
        common = {"proj": "random", "update_proj_gap": 200, "proj_type": "std"}

        def apollo(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
            return apollo_torch.APOLLOAdamW(_groups(params, **common, **options), lr=LR)

        listed.append(("apollo-torch Mini", lambda p: apollo(p, rank=1, scale_type="tensor", scale=128)))
        listed.append((f"apollo-torch rank {rank}", lambda p: apollo(p, rank=rank, scale_type="channel", scale=1)))
    if with_svd and (galore_torch := _imported("galore_torch")):
        galore = {"rank": rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
        listed.append((f"galore-torch rank {rank}", lambda p: galore_torch.GaLoreAdamW(_groups(p, **galore), lr=LR)))
    if with_svd and (fira := _imported("fira")):
        options = {"rank": rank, "update_proj_gap": 200, "alpha": 1.0, "proj_type": "std"}
        listed.append((f"fira rank {rank}", lambda p: fira.FiraAdamW(_groups(p, **options), lr=LR)))
    if torchao := _imported("torchao.optim"):
        listed.append(("torchao AdamW8bit", lambda p: torchao.AdamW8bit(p, lr=LR)))
    if flashoptim := _imported("flashoptim"):
        listed.append(("flashoptim FlashAdamW", lambda p: flashoptim.FlashAdamW(p, lr=LR)))
    listed.append(("torch Muon", lambda p: torch.optim.Muon(p, lr=LR)))
    return listed
