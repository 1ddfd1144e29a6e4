"""Programs that import apollo-torch or galore-torch run on our optimizers, unchanged."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, GaLore
from apollo_optim.integrations import apollo_torch, galore_torch
from runs import snapshot

STAND_INS = {"apollo_torch": apollo_torch, "galore_torch": galore_torch}
STEPS = 5


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Neither an original nor a stand-in is there, and what a test installs is gone after it."""
    before = importlib.util.find_spec
    for name in STAND_INS:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def without_originals(name, package=None):
        return None if name in STAND_INS and name not in sys.modules else before(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_originals)
    monkeypatch.setattr("apollo_optim.integrations.stand_ins.find_spec", without_originals)
    yield
    for name in STAND_INS:
        sys.modules.pop(name, None)
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is not None:
        utils.is_apollo_torch_available.cache_clear()
        utils.is_galore_torch_available.cache_clear()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 20), nn.LayerNorm(20))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(others, matrices)"""
    return [p for p in model.parameters() if p.dim() < 2], [p for p in model.parameters() if p.dim() == 2]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        torch.manual_seed(step)
        model(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


APOLLOS = {
    "defaults of transformers": (
        {"rank": 4, "proj": "random", "scale_type": "channel", "update_proj_gap": 3, "scale": 1.0, "proj_type": "std"},
        {"rank": 4, "projection": "gaussian", "granularity": "channel", "refresh_every": 3, "scale": 1.0},
    ),
    "Mini, as LLaMA-Factory": (
        {"rank": 1, "proj": "random", "scale_type": "tensor", "update_proj_gap": 2, "scale": 128.0, "proj_type": "std",
         "scale_front": True, "weight_decay": 0.1},
        {"rank": 1, "granularity": "tensor", "refresh_every": 2, "scale": 128**0.5, "weight_decay": 0.1},
    ),
    "SVD": (
        {"rank": 4, "proj": "svd", "scale_type": "channel", "update_proj_gap": 3, "scale": 32.0, "scale_front": False},
        {"rank": 4, "projection": "svd", "refresh_every": 3, "scale": 32**0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", APOLLOS)
def test_groups_of_apollo_torch_step_as_ours_translated(case):
    theirs, ours = APOLLOS[case]
    first, second = net(), net()
    others, matrices = split(first)
    stand_in = apollo_torch.APOLLOAdamW([{"params": others}, {"params": matrices, **theirs}], lr=0.01)
    others, matrices = split(second)
    optimizer = APOLLO([{"params": others, "rank": None}, {"params": matrices, **ours}], lr=0.01)
    train(first, stand_in)
    train(second, optimizer)
    assert snapshot(stand_in) == snapshot(optimizer)


@pytest.mark.parametrize("bits", [32, 8])
def test_groups_of_galore_torch_step_as_ours_translated(bits):
    first, second = net(), net()
    theirs = {"rank": 4, "update_proj_gap": 3, "scale": 0.5, "proj_type": "std"}
    stand_in_class = galore_torch.GaLoreAdamW if bits == 32 else galore_torch.GaLoreAdamW8bit
    others, matrices = split(first)
    stand_in = stand_in_class([{"params": others}, {"params": matrices, **theirs}], lr=0.01, betas=(0.8, 0.9))
    others, matrices = split(second)
    ours = {"rank": 4, "refresh_every": 3, "scale": 0.5}
    optimizer = GaLore(
        [{"params": others, "rank": None}, {"params": matrices, **ours}],
        lr=0.01,
        betas=(0.8, 0.9),
        state_dtype="float32" if bits == 32 else "int8",
    )
    train(first, stand_in)
    train(second, optimizer)
    assert snapshot(stand_in) == snapshot(optimizer)
    assert stand_in.state[matrices_of(first)[0]]["exp_avg"].dtype == (torch.float32 if bits == 32 else torch.int8)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return split(model)[1]


def test_betas_and_eps_of_one_group_are_those_of_all():
    others, matrices = split(net())
    group = {"params": matrices, "rank": 4, "betas": (0.5, 0.6), "eps": 1e-5}
    built = apollo_torch.APOLLOAdamW([{"params": others}, group], lr=0.01)
    assert {(group["betas"], group["eps"]) for group in built.param_groups} == {((0.5, 0.6), 1e-5)}
    built = apollo_torch.APOLLOAdamW([{"params": others}, group], lr=0.01, betas=(0.1, 0.2))
    assert [group["betas"] for group in built.param_groups] == [(0.1, 0.2), (0.5, 0.6)]


def test_empty_groups_and_bare_parameters_are_taken():
    others, matrices = split(net())
    groups = [{"params": []}, {"params": others, "proj": "strange"}, {"params": matrices, "rank": 4}]
    built = apollo_torch.APOLLOAdamW(groups, lr=0.01)
    assert [len(group["params"]) for group in built.param_groups] == [0, 4, 2]
    assert groups[0] == {"params": []}
    bare = apollo_torch.APOLLOAdamW(net().parameters(), lr=0.01)
    assert [group["rank"] for group in bare.param_groups] == [None]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"proj": "qr"}, r"proj='qr' of apollo_torch has no counterpart here; expected one of \['random', 'svd'\]"),
        ({"proj_type": "left"}, r"proj_type='left' of apollo_torch has no counterpart here; expected one of \['std'\]"),
        ({"scale_type": "row"}, "scale_type='row' of apollo_torch has no counterpart"),
        ({"quantize": True, "rnak": 3}, "unknown option 'rnak'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(option, message):
    others, matrices = split(net())
    with pytest.raises(ValueError, match=message):
        apollo_torch.APOLLOAdamW([{"params": others}, {"params": matrices, "rank": 4, **option}])


def test_adafactor_is_refused_by_name():
    with pytest.raises(ValueError, match=r"GaLoreAdafactor .* has no counterpart here: use .galore_adamw_8bit."):
        galore_torch.GaLoreAdafactor(net().parameters(), lr=0.01, scale_parameter=False)


def test_a_checkpoint_of_an_original_is_refused():
    model = net()
    others, matrices = split(model)
    built = apollo_torch.APOLLOAdamW([{"params": others}, {"params": matrices, "rank": 4}], lr=0.01)
    groups = [
        {"params": [0, 1, 2, 3], "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0},
        {"params": [4, 5], "lr": 0.01, "betas": (0.9, 0.999), "rank": 4, "proj": "random", "scale": 1.0},
    ]
    with pytest.raises(ValueError, match=r"it was made by another optimizer.*Load the model's weights alone"):
        built.load_state_dict({"state": {4: {"step": 3, "projector": object()}}, "param_groups": groups})


def test_a_head_among_the_targets_is_warned_of():
    with pytest.warns(UserWarning, match=r"a weight \(32000, 16\).*leave it out of optim_target_modules"):
        apollo_torch.APOLLOAdamW(
            [{"params": [nn.Parameter(torch.zeros(4))]}, {"params": [nn.Parameter(torch.zeros(32000, 16))], "rank": 4}]
        )


@pytest.mark.parametrize("name", STAND_INS)
def test_an_original_is_hidden_only_where_that_is_asked_for(name, monkeypatch):
    original = types.ModuleType(name)
    original.__version__ = "1.0.3"
    monkeypatch.setitem(sys.modules, name, original)
    with pytest.raises(RuntimeError, match=rf"{name} 1\.0\.3 is installed.*pass replace=True"):
        STAND_INS[name].install()
    assert sys.modules[name] is original
    STAND_INS[name].install(replace=True)
    assert importlib.util.find_spec(name).origin == "apollo_optim"
    STAND_INS[name].install()


@pytest.mark.parametrize("name", STAND_INS)
def test_the_packages_for_programs_without_a_line_of_ours_have_the_same_optimizers(name, monkeypatch):
    folder = Path(__file__).parents[1] / "packaging" / name.replace("_", "-")
    location = folder / name / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, location)
    packaged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packaged)
    STAND_INS[name].install()
    installed = sys.modules[name]
    assert {each: getattr(installed, each) for each in packaged.__all__} == {
        each: getattr(packaged, each) for each in packaged.__all__
    }
    assert packaged.__version__ == installed.__version__
    project = (folder / "pyproject.toml").read_text()
    assert f'version = "{packaged.__version__}"' in project
    assert '"Private :: Do Not Upload"' in project
    # Where the package is installed, there is nothing to refuse.
    monkeypatch.setitem(sys.modules, name, packaged)
    STAND_INS[name].install()


# Through the Trainer.


def trainer(folder, **given):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=24, intermediate_size=44, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(0))
    optimizers = given.pop("optimizers", lambda model: None)(model), None
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(folder), max_steps=STEPS, save_steps=2, learning_rate=0.01, report_to=[], use_cpu=True,
            disable_tqdm=True, optim_target_modules=["self_attn", "mlp"], **given,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=optimizers,
    )  # fmt: skip


BY_NAME = {
    "apollo_adamw": (APOLLO, "rank=4,scale=16,update_proj_gap=3", {"rank": 4, "scale": 4.0, "refresh_every": 3}),
    "galore_adamw": (GaLore, "rank=4,scale=0.5,update_proj_gap=3", {"rank": 4, "scale": 0.5, "refresh_every": 3}),
    "galore_adamw_8bit": (GaLore, "rank=4,update_proj_gap=3", {"rank": 4, "scale": 0.25, "refresh_every": 3}),
}


@pytest.mark.parametrize("optim", BY_NAME)
def test_a_trainers_optim_by_name_equals_our_optimizer_and_resumes(tmp_path, optim):
    optimizer, arguments, ours = BY_NAME[optim]

    def by_hand(model):
        targets = ("self_attn", "mlp")
        matrices = [p for name, p in model.named_parameters() if any(target in name for target in targets)]
        others = [p for name, p in model.named_parameters() if not any(target in name for target in targets)]
        options = {"state_dtype": "int8"} if optim.endswith("8bit") else {}
        groups = [{"params": others, "rank": None}, {"params": matrices, **ours}]
        return optimizer(groups, lr=0.01, **options)

    for stand_in in STAND_INS.values():
        stand_in.install()
    named = trainer(tmp_path / "named", optim=optim, optim_args=arguments)
    named.train()
    expected = trainer(tmp_path / "expected", optimizers=by_hand)
    expected.train()
    resumed = trainer(tmp_path / "resumed", optim=optim, optim_args=arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "named" / "checkpoint-2"))
    assert isinstance(named.optimizer.optimizer, optimizer)
    for name, weight in expected.model.named_parameters():
        assert torch.equal(dict(named.model.named_parameters())[name], weight), name
        assert torch.equal(dict(resumed.model.named_parameters())[name], weight), name


@pytest.mark.parametrize("optim", ["apollo_adamw_layerwise", "galore_adamw_layerwise"])
def test_layer_wise_modes_are_refused_with_what_to_use(tmp_path, optim):
    for stand_in in STAND_INS.values():
        stand_in.install()
    with pytest.raises(ValueError, match=r"saves no state.*ApolloFactory.*\"step_in_backward\": True"):
        trainer(tmp_path, optim=optim, optim_args="rank=4").train()


def test_transformers_finds_a_stand_in_that_it_has_missed_before():
    utils = pytest.importorskip("transformers.utils.import_utils")
    utils.is_apollo_torch_available.cache_clear()
    assert not utils.is_apollo_torch_available()
    apollo_torch.install()
    assert utils.is_apollo_torch_available()
