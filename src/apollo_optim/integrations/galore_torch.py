"""A stand-in for galore-torch: `optim="galore_adamw"` and `"galore_adamw_8bit"` of transformers, and `use_galore` of
LLaMA-Factory, run on ours.

    from apollo_optim.integrations import galore_torch
    galore_torch.install()
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..variants import GaLore
from .stand_ins import Translation, install_stand_in, translated, warn_of_vocabulary

NAME = "galore_torch"

OPTIONS: dict[str, Translation] = {
    "update_proj_gap": lambda value: {"refresh_every": value},
    "scale": lambda value: {"scale": value},
    "proj_type": {"std": {}},
}
"""The options of their groups, in ours."""


class GaLoreAdamW(GaLore):
    """`GaLore` with groups as galore-torch takes them: those without a rank are AdamW's.

    Args:
        params: Groups with `rank`, `update_proj_gap`, `scale` and `proj_type`.
        lr: Learning rate.
        weight_decay: For groups that have none of their own.
        **adam: `betas` and `eps`.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, weight_decay: float = 0.0, **adam: Any):
        groups, adam = translated(params, OPTIONS, NAME, adam)
        super().__init__(groups, lr=lr, weight_decay=weight_decay, state_dtype=self.moments, **adam)
        warn_of_vocabulary(self)

    moments: torch.dtype = torch.float32
    """Dtype of the state."""


class GaLoreAdamW8bit(GaLoreAdamW):
    """The same with moments in 8 bits."""

    moments = torch.int8


class GaLoreAdafactor:
    """Raises ValueError: callers import this name, and there is no such optimizer here."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            'GaLoreAdafactor (optim="galore_adafactor") has no counterpart here: use "galore_adamw_8bit" for moments '
            "in 8 bits, or apollo_optim.Flora, whose second moment is Adafactor's"
        )


def install(replace: bool = False) -> None:
    """Make `from galore_torch import GaLoreAdamW` find ours in this process, with `replace` even over the original.

    Raises:
        RuntimeError: galore-torch is installed, and `replace` is False.
    """
    optimizers = {each.__name__: each for each in (GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit)}
    install_stand_in(NAME, optimizers, replace)
