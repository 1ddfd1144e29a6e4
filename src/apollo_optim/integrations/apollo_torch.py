"""A stand-in for apollo-torch: `optim="apollo_adamw"` of transformers and `use_apollo` of LLaMA-Factory run on ours.

    from apollo_optim.integrations import apollo_torch
    apollo_torch.install()

Their `scale` is the square of ours. What the bases are is not the same, so that numbers differ from the original's.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..variants import APOLLO
from .stand_ins import install_stand_in, only, translated, warn_of_vocabulary

NAME = "apollo_torch"

NAMES: dict[str, Any] = {
    "proj": only("proj", {"random": {"projection": "gaussian"}, "svd": {"projection": "svd"}}, NAME),
    "scale_type": only("scale_type", {each: {"granularity": each} for each in ("channel", "tensor")}, NAME),
    "update_proj_gap": lambda value: {"refresh_every": value},
    "scale": lambda value: {"scale": math.sqrt(value)},
    "proj_type": only("proj_type", {"std": {}}, NAME),
    # Before or behind a constant factor, a limit on growth is the same.
    "scale_front": only("scale_front", {True: {}, False: {}}, NAME),
}
"""Options of a group of theirs, each with ours."""


class APOLLOAdamW(APOLLO):
    """`APOLLO` with groups as apollo-torch takes them: those without a rank are AdamW's.

    Args:
        params: Groups with `rank`, `proj`, `scale_type`, `update_proj_gap`, `scale`, `proj_type` and `scale_front`.
        lr: Learning rate.
        weight_decay: Of all groups that have none of their own.
        **adam: `betas` and `eps`.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, weight_decay: float = 0.0, **adam: Any):
        groups, adam = translated(params, NAMES, adam)
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **adam)
        warn_of_vocabulary(self)


def install(replace: bool = False) -> None:
    """Have `from apollo_torch import APOLLOAdamW` find ours, in this process; with `replace` instead of the original.

    Raises:
        RuntimeError: apollo-torch is installed, and `replace` is False.
    """
    install_stand_in(NAME, {"APOLLOAdamW": APOLLOAdamW}, replace)
