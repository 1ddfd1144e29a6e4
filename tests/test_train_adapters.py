"""Training at low rank: what is frozen, what a restart changes, and where factors begin; and Muon beside AdamW."""

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from apollo_optim.train.adapters import ALL_LINEAR, LowRankLinear, Restarts, Targets, prune_  # noqa: E402
from apollo_optim.train.methods import Method, prepared_method  # noqa: E402
from apollo_optim.train.model import Model, built_model  # noqa: E402
from apollo_optim.train.optimizers import Composite  # noqa: E402
from runs import bits  # noqa: E402
from small_training import STEPS, TINY, VOCABULARY, made, trained  # noqa: E402

TEXT = torch.arange(20).view(2, 10)


def logits(model):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(TEXT).logits


@pytest.mark.parametrize("method", ["lora", "dora", "relora"])
def test_lora_freezes_the_linear_layers_and_trains_the_rest(method):
    model = made(method).model
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("base_layer" not in name), name
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(adapted) == 7  # the linear layers of one layer; the head is none of them
    assert not any("lm_head" in name for name in adapted)


@pytest.mark.parametrize("method", ["apollo", "lora"])
def test_a_model_without_linear_layers_is_refused_with_what_trains_it(method):
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    with pytest.raises(ValueError, match=r"has no layers of torch\.nn\.Linear.*--others adamw"):
        prepared_method(Method(method=method), model, STEPS, targets=Targets((ALL_LINEAR,), "frozen"))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    if method == "apollo":
        prepared_method(Method(method=method), model, STEPS, targets=Targets((ALL_LINEAR,), "adamw"))
    else:
        with pytest.raises(ValueError, match=r"has no layers of torch\.nn\.Linear for adapters; choose a --method"):
            prepared_method(Method(method=method), model, STEPS, targets=Targets((ALL_LINEAR,), "adamw"))


def test_an_adapter_changes_nothing_at_first():
    plain = built_model(Model(model=TINY), VOCABULARY, "cpu", 0)
    for method in ("lora", "relora"):
        assert torch.equal(logits(made(method).model), logits(plain))
    # DoRA divides by a norm and multiplies by the same: one rounding each.
    torch.testing.assert_close(logits(made("dora").model), logits(plain), rtol=0, atol=1e-6)


def test_adapters_are_drawn_from_the_seed_and_from_nothing_else():
    def factor(seed):
        torch.rand(1)
        model = made("lora", method_seed=seed).model
        return next(weight for name, weight in model.named_parameters() if "lora_A" in name)

    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    made("lora")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(factor(1), factor(1))
    assert not torch.equal(factor(1), factor(2))


def relora():
    return made("relora", relora_every=5, relora_warmup=3)


def test_a_restart_merges_without_changing_what_is_computed():
    prepared = relora()
    trained(prepared, range(4))
    layer = prepared.model.model.layers[0].mlp.up_proj
    before, weight, a = logits(prepared.model), layer.base_layer.weight.clone(), layer.lora_A["default"].weight.clone()
    prepared.after_step(5)
    # One product of summed weights instead of two products: float32 rounding.
    torch.testing.assert_close(logits(prepared.model), before, rtol=0, atol=1e-6)
    assert not torch.equal(layer.base_layer.weight, weight)
    assert not layer.lora_B["default"].weight.any()
    renewed = layer.lora_A["default"].weight
    assert not torch.equal(renewed, a)
    assert renewed.abs().max() <= 32**-0.5
    assert renewed.std().item() == pytest.approx(32**-0.5 / 3**0.5, rel=0.15)  # uniform, 256 draws


def test_a_restart_prunes_the_moments_of_adapters_alone():
    prepared = relora()
    trained(prepared, range(4))
    state = {
        name: prepared.optimizer.state[weight]
        for name, weight in prepared.model.named_parameters()
        if weight.requires_grad
    }
    untouched = {name: bits(entries["exp_avg"]) for name, entries in state.items() if "lora" not in name}
    prepared.after_step(5)
    for name, entries in state.items():
        if "lora" in name:
            kept = entries["exp_avg"] != 0
            assert kept.sum() == entries["exp_avg"].numel() - round(0.99 * entries["exp_avg"].numel())
            assert torch.equal(entries["exp_avg_sq"] != 0, kept)
        else:
            assert bits(entries["exp_avg"]) == untouched[name]


def test_pruning_keeps_the_largest_first_moments_with_their_second():
    state = {"exp_avg": torch.tensor([-5.0, 1, 2, -3, 4]), "exp_avg_sq": torch.tensor([1.0, 50, 2, 3, 4])}
    prune_(state, fraction=0.6)
    assert state["exp_avg"].tolist() == [-5, 0, 0, 0, 4]
    assert state["exp_avg_sq"].tolist() == [1, 0, 0, 0, 4]


def test_the_step_after_a_restart_is_no_longer_than_before():
    # A first moment without a second would be divided by eps: a step of about 1e5 learning rates.
    prepared = relora()
    trained(prepared, range(5))
    before = {name: weight.clone() for name, weight in prepared.model.named_parameters()}
    trained(prepared, range(5, 6))
    for name, weight in prepared.model.named_parameters():
        assert (weight - before[name]).abs().max() <= 10 * prepared.options["lr"], name


def test_restarts_come_on_schedule_and_the_rate_rises_again_after_each():
    restarts = Restarts(every=5, warmup=3, total=15, seed=0)
    factors = [restarts.lr_factor(step) for step in range(15)]
    assert factors == [1.0] * 5 + [0.25, 0.5, 0.75, 1.0, 1.0] * 2


def test_there_is_no_restart_between_its_steps_or_after_the_last():
    prepared = relora()
    trained(prepared, range(1))
    before = [bits(weight) for weight in prepared.model.parameters()]
    for step in (1, 4, 6, STEPS):
        prepared.after_step(step)
    assert [bits(weight) for weight in prepared.model.parameters()] == before


def test_a_restart_depends_on_seed_and_step_alone():
    first, again = relora(), relora()
    for prepared, seed in ((first, 0), (again, 1)):
        trained(prepared, range(3))
        torch.manual_seed(seed)
        prepared.after_step(5)
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert bits(one) == bits(other)


@pytest.mark.parametrize("shape", [(37, 20), (20, 37)])
def test_factors_begin_at_the_best_approximation(shape):
    outputs, inputs = shape
    linear = nn.Linear(inputs, outputs)
    layer = LowRankLinear(linear, 5)
    missed = layer.dense().weight - linear.weight
    # The best rank-5 approximation misses exactly the other singular values (Eckart and Young).
    expected = torch.linalg.svdvals(linear.weight)[5:].square().sum().sqrt()
    torch.testing.assert_close(missed.norm(), expected, rtol=1e-5, atol=0)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), layer.dense()(x), rtol=0, atol=1e-5)
    assert {name: tuple(weight.shape) for name, weight in layer.named_parameters()} == {
        "up": (outputs, 5), "down": (5, inputs), "bias": (outputs,),
    }  # fmt: skip


def test_a_low_rank_model_has_factors_in_place_of_all_weights_but_the_head():
    model = made("low-rank", rank=4).model
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert linear == ["lm_head"]
    assert all(module.up.shape[1] == 4 for module in model.modules() if isinstance(module, LowRankLinear))


# Muon and AdamW as one


def test_muon_has_the_matrices_inside_and_adamw_the_rest():
    prepared = made("muon")
    inner, rest = prepared.optimizer.parts
    names = {weight: name for name, weight in prepared.model.named_parameters()}
    found = {names[weight] for group in inner.param_groups for weight in group["params"]}
    assert found == {name for name in names.values() if "_proj" in name}
    assert type(inner) is torch.optim.Muon
    assert all(group["rank"] is None for group in rest.param_groups)


def test_a_scheduler_of_the_whole_reaches_every_part():
    prepared = made("muon", lr=0.5, embedding_lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(prepared.optimizer, lambda step: 0.25)
    assert {group["lr"] for part in prepared.optimizer.parts for group in part.param_groups} == {0.125}
    trained(prepared, range(2))
    scheduler.step()
    state = prepared.optimizer.state_dict()
    again = made("muon", lr=0.5, embedding_lr=0.5)
    again.optimizer.load_state_dict(state)
    for group in again.optimizer.param_groups:
        group["lr"] = 0.75
    assert {group["lr"] for part in again.optimizer.parts for group in part.param_groups} == {0.75}


def test_the_state_of_the_whole_is_of_torchs_form():
    prepared = made("muon")
    trained(prepared, range(1))
    saved = prepared.optimizer.state_dict()
    weights = [weight for group in prepared.optimizer.param_groups for weight in group["params"]]
    assert [index for group in saved["param_groups"] for index in group["params"]] == list(range(len(weights)))
    assert saved["state"].keys() == set(range(len(weights)))
    for index, weight in enumerate(weights):
        assert saved["state"][index].keys() == prepared.optimizer.state[weight].keys()


def test_a_closure_is_called_once_and_its_loss_returned():
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    both = Composite([torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([bias], lr=0.25)])
    calls = []

    def closure():
        calls.append(1)
        both.zero_grad()
        loss = weight.sum() + bias.sum()
        loss.backward()
        return loss

    assert both.step(closure) == 5
    assert len(calls) == 1
    assert weight.tolist() == [0.5] * 3
    assert bias.tolist() == [0.75] * 2


def test_a_checkpoint_with_other_groups_is_refused():
    prepared = made("muon")
    saved = prepared.optimizer.state_dict()
    with pytest.raises(ValueError, match=r"the checkpoint has 1 parameter groups, the optimizer \d"):
        prepared.optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})


def test_a_model_continued_from_a_folder_is_adapted_too(tmp_path):
    built_model(Model(model=TINY), VOCABULARY, "cpu", 4).save_pretrained(tmp_path)
    model = built_model(Model(model=str(tmp_path)), VOCABULARY, "cpu", 0)
    prepared = prepared_method(Method(method="low-rank", rank=31), model, STEPS)
    assert trained(prepared, range(3))[0] > 0
