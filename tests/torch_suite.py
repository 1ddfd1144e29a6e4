"""PyTorch's own tests of optimizers, run with ours in place of its.

    python tests/torch_suite.py PYTORCH/test/test_optim.py -q
    python tests/torch_suite.py PYTORCH/test/optim/test_lrscheduler.py -q

PYTORCH is a checkout of PyTorch: its wheel has no tests. They need `expecttest`. What fails is listed in
docs/compatibility.md, with the reasons.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal import common_optimizers as theirs

import apollo_optim

NAMES = "APOLLO", "APOLLOMini", "StructuredAdamW", "GaLore", "Fira", "Flora", "Artemis", "ArtemisMini"
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "nonzero weight_decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "Tensor lr": {"lr": torch.tensor(0.001)},
    "Tensor betas": {"betas": (torch.tensor(0.9), torch.tensor([[0.99]]))},
}


def inputs(device: str, dtype: torch.dtype | None = None) -> list[theirs.OptimizerInput]:
    """The options that each test goes through."""
    return [theirs.OptimizerInput(params=None, kwargs=dict(options), desc=name) for name, options in CHOICES.items()]


OUR_WORDS = {
    "params argument given to the optimizer should be an iterable of Tensors or dicts": "params must be a module or an",
    "Tensor lr must be 1-element": "lr must be a number >= 0 or a floating-point tensor holding one",
}
"""What errors of ours say where they are of the same type."""


def error_inputs(device: str, dtype: torch.dtype) -> list[theirs.ErrorOptimizerInput]:
    """What every optimizer has to refuse."""
    wanted = theirs.get_error_inputs_for_all_optims(device, dtype)
    for each in wanted:
        each.error_regex = OUR_WORDS.get(each.error_regex, each.error_regex)
    return wanted


def put_in_place_() -> None:
    """Have PyTorch's tests of all optimizers be of ours, and those of schedulers take APOLLO for SGD and Adam."""
    theirs.optim_db[:] = [
        theirs.OptimizerInfo(
            getattr(apollo_optim, name),
            optim_inputs_func=inputs,
            optim_error_inputs_func=error_inputs,
            supported_impls=(),
            not_og_supported_flags=("maximize", "capturable"),
            has_capturable_arg=True,
            supports_complex=False,
        )
        for name in NAMES
    ]

    class InPlaceOfSGD(apollo_optim.APOLLO):
        """With the options of SGD that schedulers set, which mean nothing here."""

        def __init__(self, params: Any, lr: Any = 1e-3, momentum: float = 0.0, **options: Any):
            super().__init__(params, lr, **options)
            for group in self.param_groups:
                group.setdefault("momentum", momentum)

    torch.optim.SGD = InPlaceOfSGD
    torch.optim.Adam = torch.optim.AdamW = apollo_optim.APOLLO


if __name__ == "__main__":
    put_in_place_()
    sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
    sys.exit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider", "--rootdir", str(Path(sys.argv[1]).parent)]))
