"""Every method of training: it learns, resumes to the bit, exports a plain model, and takes the options it says."""

import io

import pytest
import torch

transformers = pytest.importorskip("transformers")

from apollo_optim.llama import PRESETS  # noqa: E402
from apollo_optim.train import methods as table  # noqa: E402
from apollo_optim.train.adapters import without_adapters  # noqa: E402
from apollo_optim.train.methods import METHODS, OWN, Method, prepared_method  # noqa: E402
from apollo_optim.train.model import Model, built_model  # noqa: E402
from apollo_optim.train.recipes import RECIPES, SHORT_STEPS, nearest_preset, recipe, recipe_name  # noqa: E402
from family import partly_slow  # noqa: E402
from runs import bits  # noqa: E402
from small_training import STEPS, TINY, VOCABULARY, made, needed, trained  # noqa: E402


@pytest.fixture(autouse=True)
def uncompiled():
    """torchao compiles its step, which takes longer than all the steps here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters(prepared):
    return [weight for group in prepared.optimizer.param_groups for weight in group["params"]]


# Our own are one class with other options: of what has nothing to do with those, one shows it.
ONE_OF_OURS = ["apollo", *(method for method in METHODS if method not in OWN)]


@pytest.mark.parametrize("method", METHODS)
def test_a_few_steps_make_the_loss_fall(method):
    losses = trained(made(method), range(STEPS))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("method", "dtype"),
    partly_slow(
        [(method, dtype) for method in METHODS for dtype in ("fp32", "bf16")],
        quick=[*((method, "fp32") for method in ONE_OF_OURS), ("apollo", "bf16"), ("lora", "bf16")],
    ),
)
def test_a_resumed_run_goes_on_to_the_bit(method, dtype):
    options = {"relora_every": 2, "relora_warmup": 1} if method == "relora" else {}
    whole = made(method, dtype=dtype, **options)
    trained(whole, range(3))
    file = io.BytesIO()
    torch.save([whole.model.state_dict(), whole.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = made(method, dtype=dtype, **options)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    assert trained(again, range(3, 6)) == trained(whole, range(3, 6))
    theirs = dict(again.model.named_parameters())
    for name, weight in whole.model.named_parameters():
        assert bits(weight) == bits(theirs[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_every_trainable_parameter_is_stepped_by_one_optimizer(method):
    prepared = made(method)
    claimed = parameters(prepared)
    expected = {weight for weight in prepared.model.parameters() if weight.requires_grad}
    assert len(claimed) == len(set(claimed))
    assert set(claimed) == expected
    assert prepared.trainable == sum(weight.numel() for weight in expected)
    assert prepared.parameters == sum(weight.numel() for weight in prepared.model.parameters())
    assert isinstance(prepared.optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("method", partly_slow(METHODS, quick=ONE_OF_OURS))
def test_the_export_is_a_plain_model_that_computes_the_same(tmp_path, method):
    prepared = made(method)
    trained(prepared, range(3))
    before = [bits(weight) for weight in prepared.model.parameters()]
    exported = without_adapters(prepared.model)
    exported.save_pretrained(tmp_path)
    assert [bits(weight) for weight in prepared.model.parameters()] == before
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    plain = built_model(Model(model=TINY), VOCABULARY, "cpu", 0)
    assert {n: w.shape for n, w in loaded.named_parameters()} == {n: w.shape for n, w in plain.named_parameters()}
    text = torch.arange(20).view(2, 10)
    prepared.model.eval()
    loaded.eval()
    with torch.no_grad():
        # A merged weight is one product instead of two or three: float32 sums of 88 terms in another order.
        torch.testing.assert_close(loaded(text).logits, prepared.model(text).logits, rtol=0, atol=2e-6)
    trained(prepared, range(3, 5))  # the trained model is still one


@pytest.mark.parametrize("method", METHODS)
def test_embedding_and_head_have_their_own_learning_rate(method):
    prepared = made(method, lr=0.25, embedding_lr=0.125)
    vocabulary = {prepared.model.get_input_embeddings().weight, prepared.model.get_output_embeddings().weight}
    for group in prepared.optimizer.param_groups:
        for weight in group["params"]:
            assert float(group["lr"]) == (0.125 if weight in vocabulary else 0.25)


@pytest.mark.parametrize(("method", "ratio"), [("adamw", 4), ("muon", 1), ("artemis", 0.4), ("apollo", 1)])
def test_the_recipes_learning_rate_of_embedding_and_head_moves_with_the_one_given(method, ratio):
    """A model that is trained further, slowly, keeps the vocabulary that it has."""
    prepared = made(method, lr=1e-5)
    assert prepared.options["embedding_lr"] == pytest.approx(ratio * 1e-5, rel=1e-12)
    vocabulary = prepared.model.get_input_embeddings().weight
    (rate,) = [
        group["lr"] for group in prepared.optimizer.param_groups if any(w is vocabulary for w in group["params"])
    ]
    assert rate == prepared.options["embedding_lr"]
    assert ("embedding-lr 4e-05" in prepared.described) == (method == "adamw")


def test_adam_mini_trains_a_model_whose_heads_share_nothing():
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))  # its configuration has no key-value heads
    trained(prepared_method(Method(method="adam-mini"), model, STEPS), range(2))


@pytest.mark.parametrize("method", METHODS)
def test_weight_decay_is_of_matrices_alone(method):
    prepared = made(method, weight_decay=0.5)
    decays = {w: group["weight_decay"] for group in prepared.optimizer.param_groups for w in group["params"]}
    if method == "adam-mini":  # which decides by names of its own
        assert set(decays.values()) == {0.0, 0.5}
    else:
        assert all(decay == (0.5 if weight.dim() == 2 else 0.0) for weight, decay in decays.items())


# Values that are neither a method's default nor a recipe's.
OPTIONS = {
    "lr": 0.123, "embedding_lr": 0.11, "rank": 3, "scale": 0.7, "refresh_every": 7, "projection": "svd_lowrank",
    "granularity": "element", "growth_limit": 1.5, "betas": (0.8, 0.9), "eps": 1e-5, "momentum": 0.5,
    "state_dtype": "bf16", "rounding": "nearest", "alpha": 5.0, "dropout": 0.3, "relora_every": 3, "relora_warmup": 2,
    "vocabulary_state": "rowwise", "weight_decay": 0.05, "state_device": "cpu",
}  # fmt: skip
OTHER_DEFAULTS = {("galore", "granularity"): "channel", ("artemis-mini", "state_dtype"): "fp32"}
"""Where that is a method's own default."""


def description(prepared):
    """All that options decide: groups, layers, the schedule of restarts, and what an optimizer keeps to itself."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in prepared.optimizer.param_groups]
    factors = [prepared.lr_factor(step) for step in range(STEPS)]
    scalings = [getattr(module, "scaling", None) for module in prepared.model.modules()]
    shapes = [tuple(weight.shape) for weight in prepared.model.parameters()]
    own = {name: value for name, value in vars(prepared.optimizer).items() if isinstance(value, (bool, float, str))}
    return repr((groups, factors, scalings, shapes, str(prepared.model), own))


@pytest.mark.parametrize("method", METHODS)
def test_every_option_that_is_taken_is_passed_on(method):
    base = {"relora_every": 5, "relora_warmup": 1} if method == "relora" else {}
    default = description(made(method, **base))
    for option in METHODS[needed(method)].takes:
        value = OTHER_DEFAULTS.get((method, option), OPTIONS[option])
        assert description(made(method, **(base | {option: value}))) != default, option


@pytest.mark.parametrize("method", METHODS)
def test_an_option_that_is_not_taken_is_refused_with_who_takes_it(method):
    for option in OPTIONS.keys() - METHODS[needed(method)].takes:
        takers = [other for other, row in METHODS.items() if option in row.takes]
        with pytest.raises(
            ValueError, match=f"--{option.replace('_', '-')} has no effect on --method {method}"
        ) as error:
            Method(method=method, **{option: OPTIONS[option]}).check()
        assert str(error.value).endswith("it is for " + ", ".join(takers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "appolo"}, r"--method 'appolo' is unknown; did you mean 'apollo'\?"),
        ({"method": "adam-8bit"}, r"did you mean 'adam8bit'\?"),
        ({"recipe": "papers"}, r"--recipe 'papers' is unknown; did you mean 'paper'\? One of: auto, paper"),
        ({"method": "galore", "recipe": "paper-tuned"}, r"paper-tuned has nothing for galore; it is for apollo-mini"),
        ({"lr": -1.0}, r"^--lr must be a number >= 0"),
        ({"rank": 0}, r"^--rank must be an integer >= 1"),
        ({"rank": 1.0}, r"strictly between 0 and 1"),
        ({"betas": (0.9, 1.0)}, r"^--betas must be two numbers in \[0, 1\)"),
        ({"weight_decay": -0.1}, r"^--weight-decay must be a number >= 0"),
        ({"embedding_lr": -0.1}, r"^--embedding-lr must be a number >= 0"),
        ({"state_dtype": "fp8"}, r"--state-dtype 'fp8' is unknown"),
        ({"method": "sgd", "momentum": 1.0}, r"^--momentum must be a number in \[0, 1\), got 1.0"),
        ({"method": "lora", "alpha": 0.0}, r"^--alpha must be a number > 0, got 0.0"),
        ({"method": "lora", "dropout": 1.5}, r"^--dropout must be a number in \[0, 1\), got 1.5"),
        (
            {"method": "relora", "relora_every": STEPS},
            r"^--relora-every must be less than the 20 steps of the run, got 20",
        ),
        (
            {"method": "relora", "relora_every": 5, "relora_warmup": 5},
            r"^--relora-warmup must be less than --relora-every 5",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(monkeypatch, options, message):
    monkeypatch.setattr(table, "installed", lambda package: True)
    with pytest.raises(ValueError, match=message):
        Method(**options).check(STEPS)


@pytest.mark.parametrize("method", [method for method, row in METHODS.items() if row.needs])
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch, method):
    monkeypatch.setattr(table, "installed", lambda package: False)
    needs = METHODS[method].needs
    with pytest.raises(ValueError, match=f"needs {' or '.join(needs)}, .*: pip install {needs[0]}"):
        Method(method=method).check()


def test_the_growth_limit_can_be_switched_off():
    prepared = made("apollo", growth_limit="off")
    assert {group["growth_limit"] for group in prepared.optimizer.param_groups} == {None}


def test_the_seed_is_the_runs_unless_the_method_has_one():
    def seeds(run, own):
        built = built_model(Model(model=TINY), VOCABULARY, "cpu", 0)
        optimizer = prepared_method(Method(method_seed=own), built, STEPS, seed=run).optimizer
        return {group["seed"] for group in optimizer.param_groups}

    assert (seeds(7, None), seeds(7, 0), seeds(7, 5)) == ({7}, {0}, {5})


# Recipes


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_sourced_recipe_for_every_model(method, model):
    found = recipe(method, model)
    assert found.source
    assert found.options.keys() <= METHODS[method].takes
    Method(method=needed(method), **found.options).check()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_of_methods_and_models_that_exist(name):
    for row in RECIPES[name]:
        assert set(row.methods) <= METHODS.keys()
        assert set(row.models) <= PRESETS.keys()
        assert row.options.keys() <= METHODS[row.methods[0]].takes


@pytest.mark.parametrize(
    ("method", "model", "lr", "rank", "scale"),
    [
        ("apollo", "60m", 0.01, 128, 1.0),
        ("apollo", "130m", 0.01, 192, 1.0),
        ("apollo", "350m", 0.01, 256, 1.0),
        ("apollo", "1b", 0.01, 512, 0.5**0.5),
        ("apollo", "7b", 0.01, 256, 1.0),
        ("apollo-svd", "350m", 0.01, 256, 1.0),
        ("apollo-svd", "1b", 0.01, 512, 0.4),
        ("apollo-mini", "60m", 0.01, 1, 128**0.5),
        ("apollo-mini", "7b", 0.01, 1, 128**0.5),
        ("galore", "60m", 0.01, 128, 0.25),
        ("galore", "130m", 0.01, 256, 0.25),
        ("galore", "7b", 0.01, 1024, 0.25),
        ("fira", "130m", 0.01, 192, 0.25),
    ],
)
def test_the_papers_numbers(method, model, lr, rank, scale):
    found = recipe(method, model)
    resolved = found.rank if isinstance(found.rank, int) else round(found.rank * PRESETS[model].hidden)
    assert (found.lr, resolved, found.scale, found.refresh_every) == (lr, rank, scale, 200)


def test_the_scale_of_high_rank_at_1b_is_for_that_rank():
    assert recipe("apollo", "1b", rank=512).scale == recipe("apollo", "1b", rank=0.25).scale == 0.5**0.5
    assert recipe("apollo", "1b", rank=256).scale == 1.0


def test_other_recipes_are_taken_by_name():
    assert recipe("apollo-mini", "60m", name="paper-tuned").lr == 0.02
    assert recipe("adamw", "60m", name="short-run").lr == 1.25e-3
    assert recipe("adamw", "350m", name="short-run").lr == 6.25e-4
    assert recipe("apollo", "350m", name="long-context").rank == 0.125
    assert {g["lr"] for g in made("apollo", recipe="short-run").optimizer.param_groups} == {5e-3}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_nearest_to_itself(name):
    shape = PRESETS[name]
    body = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    assert nearest_preset(body) == name


def test_a_short_run_has_the_recipe_of_one_where_that_was_measured():
    assert recipe_name("auto", "apollo", SHORT_STEPS) == "short-run"
    assert recipe_name("auto", "apollo", SHORT_STEPS + 1) == recipe_name("auto", "apollo", None) == "paper"
    assert recipe_name("auto", "fira", 10) == "paper"
    assert recipe_name("long-context", "apollo", 10) == "long-context"
    assert {group["lr"] for group in made("apollo").optimizer.param_groups} == {5e-3}
    assert {group["lr"] for group in made("apollo", recipe="paper").optimizer.param_groups} == {1e-2}


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("method", ["apollo", "apollo-mini"])
def test_the_length_of_a_run_does_not_change_its_rank(method, model):
    """And so neither the memory that it takes."""
    assert recipe(method, model, name="short-run").rank == recipe(method, model, name="paper").rank


def test_what_a_recipe_chose_is_told_apart_from_what_was_given():
    chosen = "lr 0.01  embedding-lr 0.004  vocabulary-state factored  weight-decay 0.1  (docs/quality.md"
    assert made("artemis").described.startswith(chosen)
    assert "betas 0.9,0.98  weight-decay 0.1  (docs/" in made("adamw").described
    given = made("apollo", recipe="paper", lr=0.02, growth_limit="off", state_dtype="bf16").described
    expected = "lr 0.02  growth-limit off  state-dtype bfloat16  as given; rank 0.25  scale 1  refresh-every 200  (the"
    assert given.startswith(expected)
    assert made("flora", lr=1.0, rank=2, scale=2.0, refresh_every=3).described.endswith("refresh-every 3  as given")


def test_a_model_of_another_shape_takes_the_recipe_of_its_size():
    assert made("apollo-mini", recipe="paper").recipe is recipe("apollo-mini", "1m")
