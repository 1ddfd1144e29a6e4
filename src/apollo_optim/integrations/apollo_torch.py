"""A stand-in for apollo-torch: `optim="apollo_adamw"` of transformers and `use_apollo` of LLaMA-Factory run on ours.

    from apollo_optim.integrations import apollo_torch
    apollo_torch.install()

Their `scale` is the square of ours. The random bases are others, so that numbers differ from the original's.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..variants import APOLLO
from .stand_ins import Translation, install_stand_in, translated, warn_of_vocabulary

NAME = "apollo_torch"

OPTIONS: dict[str, Translation] = {
    "proj": {"random": {"projection": "gaussian"}, "svd": {"projection": "svd"}},
    "scale_type": {each: {"granularity": each} for each in ("channel", "tensor")},
    "update_proj_gap": lambda value: {"refresh_every": value},
    "scale": lambda value: {"scale": math.sqrt(value)},
    "proj_type": {"std": {}},
    # Before or behind a constant factor, a limit on growth is the same.
    "scale_front": {True: {}, False: {}},
}
"""The options of their groups, in ours."""


class APOLLOAdamW(APOLLO):
    """`APOLLO` with groups as apollo-torch takes them: those without a rank are AdamW's.

    Args:
        params: Groups with `rank`, `proj`, `scale_type`, `update_proj_gap`, `scale`, `proj_type` and `scale_front`.
        lr: Learning rate.
        weight_decay: For groups that have none of their own.
        **adam: `betas` and `eps`.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, weight_decay: float = 0.0, **adam: Any):
        groups, adam = translated(params, OPTIONS, NAME, adam)
        super().__init__(groups, lr=lr, weight_decay=weight_decay, **adam)
        warn_of_vocabulary(self)


def install(replace: bool = False) -> None:
    """Make `from apollo_torch import APOLLOAdamW` find ours in this process, with `replace` even over the original.

    Raises:
        RuntimeError: apollo-torch is installed, and `replace` is False.
    """
    install_stand_in(NAME, {"APOLLOAdamW": APOLLOAdamW}, replace)
