"""What the package offers by name, and what its docstrings show."""

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import apollo_optim
from apollo_optim import param_groups, variants
from apollo_optim.in_backward import handle as in_backward

NAMES = {
    "APOLLO",
    "APOLLOMini",
    "Fira",
    "Flora",
    "GaLore",
    "StructuredAdamW",
    "dequantize_weights_",
    "optimizer_memory",
    "param_groups",
    "quantize_weights_",
    "step_in_backward",
}
OPTIMIZERS = [apollo_optim.APOLLO, apollo_optim.APOLLOMini, apollo_optim.StructuredAdamW]
OPTIMIZERS += [apollo_optim.GaLore, apollo_optim.Fira, apollo_optim.Flora]


def test_the_public_names_are_there():
    assert set(apollo_optim.__all__) >= NAMES
    assert all(hasattr(apollo_optim, name) for name in apollo_optim.__all__)


def test_the_version_is_that_of_the_package():
    """Written once, in the package, where the build reads it, too."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "src/apollo_optim/__init__.py"' in project
    assert re.fullmatch(r"\d+\.\d+\.\d+", apollo_optim.__version__)
    assert f"## {apollo_optim.__version__}" in (Path(__file__).parents[1] / "CHANGELOG.md").read_text()


def test_names_stay_what_they_are_whatever_is_imported_first():
    # The module of this name is imported by others, and must not take the place of the function.
    code = (
        "import apollo_optim.train.methods, apollo_optim; from apollo_optim import param_groups; "
        "print(callable(param_groups), apollo_optim.quant.quantize_weights_ is apollo_optim.quantize_weights_, "
        "apollo_optim.APOLLO.__name__ in dir(apollo_optim), hasattr(apollo_optim, 'Apollo'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "False"]


def test_the_examples_of_the_docstrings_run():
    failed, attempted = doctest.testmod(variants)
    assert failed == 0
    assert attempted >= 5 * len(OPTIMIZERS)
    failed, attempted = doctest.testmod(in_backward)
    assert failed == 0
    assert attempted >= 5


def defaults(optimizer) -> dict:
    parameters = inspect.signature(optimizer).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.__name__)
def test_every_option_is_in_the_signature_in_the_order_of_adamw(optimizer):
    names = list(inspect.signature(optimizer).parameters)
    assert names[:5] == list(inspect.signature(torch.optim.AdamW).parameters)[:5]
    built = optimizer([torch.nn.Parameter(torch.zeros(9, 40))])
    assert {name: built.defaults[name] for name in defaults(optimizer)} == defaults(optimizer)
    assert names[-len(variants.SHARED) :] == list(variants.SHARED)


def test_a_subclass_has_a_signature_of_its_own():
    class Mine(apollo_optim.APOLLO):
        def __init__(self, params, temperature=1.0):
            super().__init__(params)

    assert list(inspect.signature(Mine).parameters) == ["params", "temperature"]


def test_apollo_has_the_signature_that_is_promised():
    assert list(inspect.signature(apollo_optim.APOLLO).parameters)[:2] == ["params", "lr"]
    assert defaults(apollo_optim.APOLLO) == {
        "lr": 1e-2,
        "rank": 0.25,
        "scale": 1.0,
        "refresh_every": 200,
        "projection": "gaussian",
        "granularity": "channel",
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "growth_limit": 1.01,
        "seed": 0,
        "state_dtype": torch.float32,
        "state_device": None,
        "rounding": "stochastic",
        "fused": None,
        "capturable": False,
        "maximize": False,
    }


@pytest.mark.parametrize(
    ("optimizer", "published"),
    [
        (apollo_optim.APOLLOMini, {"lr": 5e-3, "rank": 1, "scale": 128**0.5, "granularity": "tensor"}),
        (apollo_optim.StructuredAdamW, {"lr": 5e-3, "granularity": "channel", "growth_limit": 1.01, "scale": 1.0}),
        (apollo_optim.GaLore, {"lr": 1e-2, "rank": 0.25, "scale": 0.25, "refresh_every": 200, "projection": "svd"}),
        (apollo_optim.Fira, {"lr": 1e-2, "rank": 0.25, "scale": 1.0, "refresh_every": 200, "growth_limit": 1.01}),
        (apollo_optim.Flora, {"lr": 1e-3, "projection": "gaussian", "refresh_every": 1000}),
        (apollo_optim.Artemis, {"lr": 1e-2, "scale": 0.2}),
        (apollo_optim.ArtemisMini, {"lr": 1e-2, "rank": 1 / 64, "scale": 0.2}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_each_variant_has_its_papers_defaults(optimizer, published):
    assert published.items() <= defaults(optimizer).items()


def learned(build: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 50) -> float:
    """The loss, on inputs it has not seen, of a small classifier after so many steps with a schedule."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 10))
    model = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    inputs = torch.randn(64 * (steps + 16), 48)
    labels = teacher(inputs).argmax(-1)
    optimizer = build(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, steps, pct_start=0.1, cycle_momentum=False)
    for some, right in zip(inputs.split(64)[:steps], labels.split(64), strict=False):
        nn.functional.cross_entropy(model(some), right).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs[64 * steps :]), labels[64 * steps :]))


def test_with_their_default_learning_rates_they_learn_faster_than_adamw_with_its():
    """GaLore and Flora move within a subspace, and stay behind at any learning rate."""
    theirs = learned(lambda model: torch.optim.AdamW(model.parameters()))
    for name in ("APOLLO", "APOLLOMini", "StructuredAdamW", "Fira"):
        assert learned(getattr(apollo_optim, name)) < theirs, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.__name__)
def test_each_variant_says_its_rule_its_state_when_to_choose_it_and_shows_an_example(optimizer):
    text = inspect.getdoc(optimizer)
    for part in ("update", "State", "Choose it", "Args:", "Examples:", ">>> "):
        assert part in text, part


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.__name__)
def test_each_variant_is_a_torch_optimizer(optimizer):
    assert issubclass(optimizer, torch.optim.Optimizer)


def test_param_groups_takes_what_is_promised():
    assert {"model", "rank", "lr", "weight_decay", "exclude", "adamw_lr"} <= set(
        inspect.signature(param_groups).parameters
    )
    assert inspect.signature(param_groups).parameters["exclude"].default == (torch.nn.Embedding, "lm_head")


def test_the_package_is_typed():
    assert (Path(apollo_optim.__file__).parent / "py.typed").exists()
