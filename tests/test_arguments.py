"""What cannot be is refused at once, with the argument, its value and what is accepted."""

import copy
import inspect
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apollo_optim import (
    APOLLO,
    APOLLOMini,
    Artemis,
    ArtemisMini,
    Fira,
    Flora,
    GaLore,
    StructuredAdamW,
    optimizer_memory,
    param_groups,
    step_in_backward,
)
from apollo_optim.quant import dequantize_weights_, quantize_weights_
from family import BY_NAME, FAMILY
from runs import bits, snapshot, steps

EACH_CLASS = [
    BY_NAME[name]
    for name in (
        "apollo",
        "mini",
        "structured-channel",
        "galore",
        "fira",
        "flora",
        "factored-adamw",
        "artemis",
        "artemis-mini",
    )
]
every_class = pytest.mark.parametrize("member", EACH_CLASS, ids=str)

RANK = "an integer >= 1, a fraction of the smaller side strictly between 0 and 1, or None for AdamW"
NUMBER = "a number >= 0"
STATE_DTYPES = "one of (torch.float32, torch.bfloat16, torch.float64, torch.int8, 'nf4'), or the name of one"
REFUSED = [
    ("lr", -0.1, "a number >= 0 or a floating-point tensor holding one"),
    ("lr", math.nan, "a number >= 0 or a floating-point tensor holding one"),
    ("lr", math.inf, "a number >= 0 or a floating-point tensor holding one"),
    ("lr", "0.1", "a number >= 0 or a floating-point tensor holding one"),
    ("lr", None, "a number >= 0 or a floating-point tensor holding one"),
    ("lr", torch.tensor(-0.1), "a number >= 0 or a floating-point tensor holding one"),
    ("lr", torch.tensor(math.nan), "a number >= 0 or a floating-point tensor holding one"),
    ("lr", torch.tensor([0.1, 0.2]), "a number >= 0 or a floating-point tensor holding one"),
    ("lr", torch.tensor(1), "a number >= 0 or a floating-point tensor holding one"),
    ("rank", 0, RANK),
    ("rank", -4, RANK),
    ("rank", 1.0, RANK),
    ("rank", 0.0, RANK),
    ("rank", -0.25, RANK),
    ("rank", 4.5, RANK),
    ("rank", math.nan, RANK),
    ("rank", True, RANK),
    ("rank", "4", RANK),
    ("scale", 0, 'a number > 0 or "auto"'),
    ("scale", -1.0, 'a number > 0 or "auto"'),
    ("scale", math.inf, 'a number > 0 or "auto"'),
    ("scale", "automatic", 'a number > 0 or "auto"'),
    ("scale", torch.ones(2), 'a number > 0 or "auto"'),
    ("refresh_every", 0, "an integer >= 1"),
    ("refresh_every", -1, "an integer >= 1"),
    ("refresh_every", 1.5, "an integer >= 1"),
    ("projection", "random", "one of ('identity', 'gaussian', 'svd', 'svd_lowrank', 'power')"),
    ("projection", None, "one of ('identity', 'gaussian', 'svd', 'svd_lowrank', 'power')"),
    ("granularity", "row", "one of ('element', 'channel', 'tensor', 'spectral')"),
    ("betas", (0.9, 1.0), "two numbers in [0, 1)"),
    ("betas", (-0.1, 0.9), "two numbers in [0, 1)"),
    ("betas", (0.9, math.nan), "two numbers in [0, 1)"),
    ("betas", (0.9,), "two numbers in [0, 1)"),
    ("betas", 0.9, "two numbers in [0, 1)"),
    ("betas", "ab", "two numbers in [0, 1)"),
    ("betas", {0.9, 0.99}, "two numbers in [0, 1)"),
    ("betas", (0.9, torch.tensor([0.9, 0.9])), "two numbers in [0, 1)"),
    ("eps", -1e-8, NUMBER),
    ("eps", math.nan, NUMBER),
    ("weight_decay", -0.1, NUMBER),
    ("weight_decay", math.inf, NUMBER),
    ("growth_limit", 1, "a number > 1, or None for no limit"),
    ("growth_limit", 0.5, "a number > 1, or None for no limit"),
    ("growth_limit", -1.01, "a number > 1, or None for no limit"),
    ("growth_limit", math.nan, "a number > 1, or None for no limit"),
    ("seed", -1, "an integer in [0, 2**63)"),
    ("seed", 2**63, "an integer in [0, 2**63)"),
    ("seed", 0.5, "an integer in [0, 2**63)"),
    ("state_dtype", torch.float16, STATE_DTYPES),
    ("state_dtype", "float16", STATE_DTYPES),
    ("rounding", "up", "one of ('stochastic', 'nearest')"),
    ("fused", "yes", "True, False, or None to choose by device"),
    ("capturable", None, "True or False"),
    ("maximize", 1, "True or False"),
]
every_refusal = pytest.mark.parametrize(("name", "value", "accepted"), REFUSED, ids=lambda each: repr(each)[:24])


@every_refusal
def test_a_bad_argument_is_named_with_its_value_and_what_is_accepted(name, value, accepted):
    takers = [member for member in FAMILY if name in inspect.signature(member.optimizer).parameters]
    assert takers
    for member in takers:
        with pytest.raises(ValueError, match=rf"^{name} must be ") as caught:
            member.build([nn.Parameter(torch.zeros(9, 40))], **{name: value})
        assert str(caught.value) == f"{name} must be {accepted}, got {value!r}"


@every_refusal
def test_a_bad_option_of_a_group_is_refused_alike(name, value, accepted):
    for member in FAMILY:
        group = {"params": [nn.Parameter(torch.zeros(9, 40))], name: value}
        optimizer = member.build([nn.Parameter(torch.zeros(5))])
        before = snapshot(optimizer)
        for attempt in (member.build, optimizer.add_param_group):
            with pytest.raises(ValueError, match=rf"^{name} must be ") as caught:
                attempt([group] if attempt == member.build else group)
            assert str(caught.value) == f"{name} must be {accepted}, got {value!r}"
        assert snapshot(optimizer) == before


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, v, _ in REFUSED if n in ("rank", "scale", "eps", "seed")])
def test_param_groups_refuses_a_bad_option_itself(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        param_groups(nn.Linear(9, 40), **{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": "x"}, "lr must be a number >= 0 or a floating-point tensor holding one, got 'x'"),
        ({"adamw_lr": -1.0}, "adamw_lr must be a number >= 0 or a floating-point tensor holding one, got -1.0"),
        ({"exclude": 5}, "patterns must come in a sequence, got 5"),
        ({"exclude": ["("]}, r"the pattern '(' is not a regular expression: "),
        ({"residual": "yes"}, "residual must be True or False, got 'yes'"),
        ({"caps_scale": 3}, "caps_scale must be True or False, got 3"),
    ],
    ids=str,
)
def test_param_groups_names_what_it_refuses(given, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        param_groups(nn.Linear(9, 40), **given)


def test_param_groups_are_of_a_module():
    with pytest.raises(ValueError, match=r"^model must be a torch.nn.Module, got \[Linear"):
        param_groups([nn.Linear(9, 40)])


ACCEPTED = [
    ("lr", 0.0),
    ("lr", 1),
    ("lr", torch.tensor(0.1)),
    ("lr", torch.tensor([0.1], dtype=torch.float64)),
    ("rank", 1),
    ("rank", 10**6),
    ("rank", 0.999),
    ("rank", 1e-9),
    ("rank", None),
    ("scale", "auto"),
    ("scale", 1e-9),
    ("betas", [0, 0.999]),
    ("eps", 0),
    ("growth_limit", None),
    ("growth_limit", math.inf),
    ("refresh_every", 1),
    ("seed", 2**63 - 1),
    ("state_dtype", torch.float64),
    ("fused", False),
]


@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_an_option_at_its_limit_is_accepted_and_steps(member):
    gradients = [torch.randn(9, 40, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    for name, value in ACCEPTED:
        if name == "rank" and value is not None and member.group:
            continue  # a factored second moment is for weights without a rank
        if name == "scale" and not member.takes_scale:
            continue
        weight = nn.Parameter(torch.ones(9, 40))
        optimizer = member.build([{"params": [weight], name: value}], weight_decay=0.1)
        for each in gradients:
            weight.grad = each
            optimizer.step()
        assert weight.isfinite().all(), (name, value)


@every_class
def test_no_parameters_are_refused(member):
    for nothing in ([], (), {}, iter(()), nn.ReLU(), nn.Linear(3, 4).requires_grad_(False)):
        with pytest.raises(ValueError, match=r"^params is empty; expected a module with weights that require a grad"):
            member.build(nothing)


@every_class
def test_what_has_no_parameters_to_list_is_a_type_error_as_in_torch(member):
    with pytest.raises(TypeError, match=r"^params must be a module or an iterable of parameters, got None"):
        member.build(None)
    with pytest.raises(TypeError, match=r"iterable of parameters, got a tensor \(9, 40\)"):
        member.build(nn.Parameter(torch.zeros(9, 40)))


@every_class
def test_a_parameter_that_is_trained_and_not_real_is_refused_by_name(member):
    kept, strange = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(9, 40, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"^strange has dtype torch.complex64; only real floating-point"):
        member.build([("kept", kept), ("strange", strange)])
    optimizer = member.build([kept])
    with pytest.raises(ValueError, match=r"^parameter 1 "):
        optimizer.add_param_group({"params": [strange]})
    assert len(optimizer.param_groups) == 1


@every_class
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool], ids=str)
def test_what_is_frozen_may_be_of_any_dtype(member, dtype):
    """As quantised layers are, in `model.parameters()`."""
    trained = nn.Parameter(torch.zeros(9, 40))
    frozen = nn.Parameter(torch.zeros(9, 40, dtype=dtype), requires_grad=False)
    optimizer = member.build([("trained", trained), ("frozen", frozen)])
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert set(optimizer.state) == {trained}
    if dtype.is_complex:
        frozen.grad = torch.ones_like(frozen)
        with pytest.raises(ValueError, match=rf"^frozen has dtype {dtype}; only real floating-point"):
            optimizer.step()


@every_class
def test_a_lazy_weight_is_refused_by_name_until_a_batch_has_gone_through_the_model(member):
    model = nn.Sequential(nn.Embedding(7, 40), nn.LazyLinear(9))
    for given, name in (
        (model, "1.weight"),
        (model.named_parameters(), "1.weight"),
        (model.parameters(), "parameter 1"),
    ):
        with pytest.raises(
            ValueError, match=rf"^{name} is of a lazy module, .* not initialised yet: put a batch through the model"
        ):
            member.build(given)
    model(torch.tensor([3]))
    assert len(member.build(model)._weights()) == 3


WEIGHT = nn.Parameter(torch.zeros(6, 20))
MISSPELT = {
    "rnak": "rank",
    "ranks": "rank",
    "weigth_decay": "weight_decay",
    "granularty": "granularity",
    "beta": "betas",
}


@pytest.mark.parametrize("written", MISSPELT)
def test_a_misspelt_option_of_a_group_is_refused_with_the_one_meant(written):
    attempts = [partial(member.build, [{"params": [WEIGHT], written: 4}]) for member in EACH_CLASS]
    for attempt in (*attempts, lambda: param_groups(nn.Linear(9, 40), **{written: 4})):
        with pytest.raises(ValueError, match=r"^unknown option") as caught:
            attempt()
        meant = f"did you mean '{MISSPELT[written]}'?"
        assert str(caught.value) == f"unknown option '{written}' in a parameter group; {meant}"


@every_class
def test_keys_that_others_keep_in_groups_are_left_alone(member):
    # Schedulers and layer-wise learning rates note things in groups; what contains an option whole is no misspelling.
    keys = "name", "initial_lr", "lr_scale", "weight_decay_mult", "layer_id", "max_lr", "tag"
    noted = dict.fromkeys(keys, 0.5)
    optimizer = member.build([{"params": [WEIGHT], **noted}])
    assert {key: optimizer.param_groups[0][key] for key in keys} == noted


@pytest.mark.parametrize("member", [member for member in FAMILY if not member.capturable], ids=str)
def test_capturable_is_refused_where_the_host_decides(member):
    message = "capturable=True cannot go with (projection='svd|projection='power'|Flora)"
    with pytest.raises(ValueError, match=message):
        member.build([nn.Parameter(torch.zeros(9, 40))], capturable=True)
    optimizer = member.build([nn.Parameter(torch.zeros(5))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(9, 40))], "capturable": True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5)
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@every_class
def test_a_learning_rate_on_another_device_needs_capturable(member):
    lr = torch.tensor(0.1, device="meta")
    with pytest.raises(ValueError, match="lr is a tensor on meta, which needs capturable=True"):
        member.build([nn.Parameter(torch.zeros(9, 40))], lr=lr)
    if member.capturable:
        member.build([nn.Parameter(torch.zeros(9, 40))], lr=lr, capturable=True)


def test_a_learning_rate_is_a_tensor_that_kernels_can_read():
    with pytest.raises(ValueError, match=r"^lr as a tensor must be float32 or float64, got torch.bfloat16"):
        APOLLO([nn.Parameter(torch.zeros(9, 40))], lr=torch.tensor(0.1, dtype=torch.bfloat16))


def test_kernels_that_are_asked_for_and_cannot_be_had_are_refused_by_name():
    weight = nn.Parameter(torch.zeros(9, 40, dtype=torch.float64))
    optimizer = APOLLO([("body.weight", weight)], fused=True)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"^fused=True, but body.weight \(9, 40\) cannot be: "):
        optimizer.step()


@every_class
def test_options_come_in_the_order_of_adamw(member):
    given = (0.1, (0.8, 0.9), 1e-6, 0.05)
    optimizer = member.optimizer([nn.Parameter(torch.zeros(9, 40))], *given)
    theirs = torch.optim.AdamW([nn.Parameter(torch.zeros(9, 40))], *given)
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert optimizer.param_groups[0][name] == theirs.param_groups[0][name]
    with pytest.raises(TypeError, match="positional"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], *given, 4)


@every_class
def test_words_of_adamw_that_have_one_meaning_here_are_taken_in_that_meaning(member):
    weight = nn.Parameter(torch.zeros(9, 40))
    for off in ({"foreach": None}, {"foreach": False}, {"differentiable": False}):
        assert off.keys().isdisjoint(member.build([weight], **off).param_groups[0])
        member.build([{"params": [weight], **off}])
    for on in ("foreach", "differentiable"):
        for attempt in (
            lambda on=on: member.build([weight], **{on: True}),
            lambda on=on: member.build([{"params": [weight], on: True}]),
        ):
            with pytest.raises(ValueError, match=rf"^{on} must be (None or )?False: .*, got True"):
                attempt()


@every_class
def test_an_unknown_keyword_is_a_type_error_with_the_one_that_was_meant(member):
    unknown = rf"^{member.optimizer.__name__}\(\) got an unexpected keyword argument"
    with pytest.raises(TypeError, match=rf"{unknown} 'rounds'; did you mean 'rounding'\?$"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], rounds=4)
    with pytest.raises(TypeError, match=rf"{unknown} 'x'; the options are lr, .*rounding, fused, .*"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], x=4)
    with pytest.raises(TypeError, match=r"'update_proj_gap'; call it refresh_every$"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], update_proj_gap=4)
    with pytest.raises(TypeError, match=r"'learning_rate'; call it lr$"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], learning_rate=1e-3)
    groups = rf"give it to param_groups: {member.optimizer.__name__}\(param_groups\(model, adamw_lr=...\)\)$"
    with pytest.raises(TypeError, match=rf"{unknown} 'adamw_lr'; {groups}"):
        member.optimizer([nn.Parameter(torch.zeros(9, 40))], adamw_lr=1e-3)


@pytest.mark.parametrize("key", ["update_proj_gap", "proj", "proj_type", "scale_type", "scale_front"])
def test_options_of_other_packages_are_refused_with_ours(key):
    """As users' own keys they would be kept, and do nothing."""
    for attempt in (APOLLO, lambda groups: param_groups(nn.Linear(9, 40), **{key: 4})):
        with pytest.raises(ValueError, match=rf"^'{key}' in a parameter group is an option of apollo-torch or galore-"):
            attempt([{"params": [nn.Parameter(torch.zeros(9, 40))], key: 4}])


class Configured(Sequence):
    """A list as configuration libraries hold one, which is neither a list nor a tuple."""

    def __init__(self, *values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]

    def __len__(self):
        return len(self.values)


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("betas", Configured(0.5, 0.75), (0.5, 0.75)),
        ("betas", [0, np.float32(0.75)], (0, 0.75)),
        ("betas", np.array([0.5, 0.75]), (0.5, 0.75)),
        ("betas", torch.tensor([0.5, 0.75]), (0.5, 0.75)),
        ("betas", (torch.tensor(0.5), torch.tensor([0.75])), (0.5, 0.75)),
        ("state_dtype", "bfloat16", torch.bfloat16),
        ("state_dtype", "torch.float64", torch.float64),
        ("state_dtype", "int8", torch.int8),
        ("rank", np.int64(3), 3),
        ("rank", np.float32(0.25), 0.25),
        ("lr", np.float32(0.5), 0.5),
        ("eps", np.array(0.5), 0.5),
        ("scale", np.float64(2), 2.0),
        ("maximize", np.bool_(True), True),
        ("seed", np.uint8(7), 7),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # every process must find the same
)
def test_options_are_held_as_plain_values_whoever_made_them(name, given, held):
    weight = nn.Parameter(torch.zeros(9, 40))
    model = nn.Linear(9, 40)
    for optimizer in (
        APOLLO([weight], **{name: given}),
        APOLLO([{"params": [weight], name: given}]),
        APOLLO(param_groups(model, **{name: given})),
    ):
        value = optimizer.param_groups[0][name]
        assert value == held
        assert type(value) is type(held)
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_two_parameters_in_the_same_memory_are_refused_by_name():
    embed = nn.Parameter(torch.zeros(9, 40))
    optimizer = APOLLO([("embed", embed)])
    message = r"^embed and head \(9, 40\) are two parameters in the same memory, .*: make them one, as "
    head = nn.Parameter(embed.data)
    with pytest.raises(ValueError, match=message):
        APOLLO([("embed", embed), ("head", head)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("head", head)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("head", head.requires_grad_(False))]})  # which no step moves


def test_twice_as_many_groups_are_named_twice_as_often(monkeypatch):
    """Which counts the parameters of all groups before: a thousand groups took seconds where each named all others."""

    def namings(count: int) -> int:
        named: list[dict[str, Any]] = []
        names = APOLLO._names
        with monkeypatch.context() as patch:
            patch.setattr(APOLLO, "_names", lambda self, group: named.append(group) or names(self, group))
            APOLLO([{"params": [nn.Parameter(torch.zeros(9, 40))]} for _ in range(count)])
        return len(named)

    assert namings(20) == 2 * namings(10) > 0


def test_parts_of_one_memory_can_be_parameters():
    flat = torch.zeros(9 * 40 + 5)
    APOLLO([nn.Parameter(flat[:360].view(9, 40)), nn.Parameter(flat[360:]), nn.Parameter(flat[360:360])])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_without_memory_share_none(device):
    APOLLO([nn.Parameter(torch.zeros(9, 0 if device == "cpu" else 40, device=device)) for _ in range(2)])


@pytest.mark.parametrize("kind", [APOLLO, APOLLOMini, StructuredAdamW, Fira, Artemis])
def test_a_factored_second_moment_of_projected_weights_is_floras_alone(kind):
    group = {"params": [nn.Parameter(torch.zeros(9, 40))], "second_moment": "factored"}
    with pytest.raises(ValueError, match=r"^second_moment='factored' with rank=.* is Flora's rule, which needs "):
        kind([group])
    kind([{**group, "rank": None}])


def test_galore_with_a_factored_second_moment_is_flora():
    options = {"rank": 4, "scale": 1.0, "projection": "gaussian", "lr": 0.01}
    runs = []
    for kind, group in ((GaLore, {"second_moment": "factored"}), (Flora, {})):
        weight = nn.Parameter(torch.ones(9, 40))
        optimizer = kind([{"params": [("weight", weight)], **group}], refresh_every=2, **options)
        runs.append(bits(steps(optimizer, range(3))))
    assert runs[0] == runs[1]


def test_a_group_that_is_refused_stays_as_it_was():
    group = {"params": [nn.Parameter(torch.zeros(9, 40))], "betas": [0.5, 0.75], "rank": -1}
    with pytest.raises(ValueError, match=r"^rank must be "):
        APOLLO([group])
    assert group["betas"] == [0.5, 0.75]


NOT_PARAMETERS = [
    ("abc", TypeError, "^params must be a module or an iterable of parameters, got 'abc'"),
    ({"params": [WEIGHT]}, TypeError, r"got a dict of 'params': write \[group\] for one group of parameters"),
    (nn.Linear(6, 20).state_dict(), TypeError, "got a dict of 'weight', 'bias': .* in place of a state_dict"),
    (dict.fromkeys(map(str, range(999)), WEIGHT), TypeError, r"got a dict of .{200}: write \[group\]"),
    ([{"rank": 2}], ValueError, r"^a parameter group must have \"params\", got \['rank'\]"),
    ([{"params": None}], TypeError, '^"params" of a group must be a parameter or an iterable of parameters, got None'),
    ([{"params": "abc"}], TypeError, "an iterable of parameters, got 'abc'"),
    ([None], TypeError, '^"params" of a group must be parameters, or pairs of name and parameter, got None'),
    ([("one", WEIGHT, 1)], TypeError, "pairs of name and parameter, got .'one', Parameter"),
    ([nn.Linear(6, 20)], TypeError, "pairs of name and parameter, got Linear"),
]


@pytest.mark.parametrize(("params", "kind", "message"), NOT_PARAMETERS, ids=range(len(NOT_PARAMETERS)))
def test_what_is_no_list_of_parameters_is_shown_with_what_would_be(params, kind, message):
    with pytest.raises(kind, match=message):
        APOLLO(params)


NOT_CHECKPOINTS = [
    ("checkpoint.pt", TypeError, r"^state_dict must be a dict, as torch.load\(\) reads it .*, got 'checkpoint.pt'"),
    ([0] * 999, TypeError, r"^state_dict must be a dict, .*, got .{200}$"),
    ({"state": None, "param_groups": []}, ValueError, '^"state" of state_dict must be a dict of dicts, got None'),
    ({"state": {0: 3}, "param_groups": []}, ValueError, "must be a dict of dicts, got {0: 3}"),
    ({"state": {}, "param_groups": 3}, ValueError, '^"param_groups" of state_dict must be a list of dicts, got 3'),
]


@pytest.mark.parametrize(("state", "kind", "message"), NOT_CHECKPOINTS, ids=range(len(NOT_CHECKPOINTS)))
def test_what_is_no_checkpoint_is_shown_with_what_would_be(state, kind, message):
    with pytest.raises(kind, match=message):
        APOLLO([WEIGHT]).load_state_dict(state)


def test_a_weight_that_cannot_be_written_is_refused_by_name_before_anything_changes():
    shared = nn.Parameter(torch.ones(6, 1).expand(6, 9))
    optimizer = APOLLO([("shared", shared)])
    shared.grad = torch.ones(6, 9)
    with pytest.raises(RuntimeError, match=r"^shared \(6, 9\) has elements that share memory \(strides \(1, 0\)\)"):
        optimizer.step()
    assert not optimizer.state
    eighths = nn.Parameter(torch.zeros(6, 9).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"^parameter 0 has dtype torch.float8_e4m3fn; .* of 16 bits or more"):
        APOLLO([eighths])


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", np.float32("nan")),
        ("lr", "0.1"),
        ("weight_decay", math.nan),
        ("betas", (0.9, 1.0)),
        ("eps", -1.0),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_between_steps_and_changes_nothing(name, value, in_backward):
    torch.manual_seed(0)
    layer = nn.Linear(24, 17)
    optimizer = APOLLO(layer.parameters(), rank=3, lr=0.1)
    if in_backward:
        step_in_backward(layer, optimizer)

    def step():
        layer(torch.ones(1, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = layer.weight.detach().clone()
    sound, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
    shown = re.escape(repr(float(value) if isinstance(value, np.float32) else value))
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {shown}$"):
        step()
    assert torch.equal(layer.weight, before)
    if not in_backward:  # which is in the middle of a batch
        optimizer.param_groups[0][name] = sound
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        assert layer.weight.isfinite().all()


def test_a_momentum_that_state_has_not_is_refused_by_the_name_of_its_option():
    weight = nn.Parameter(torch.ones(24, 40))
    optimizer = ArtemisMini([weight], betas=(0.0, 0.98))
    weight.grad = torch.ones(24, 40)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.98)
    with pytest.raises(ValueError, match=r"state has None\. .* whether the first of betas is 0, .* cannot change"):
        optimizer.step()


READ_AT_EVERY_STEP = {"lr", "betas", "eps", "weight_decay", "maximize", "seed"}


@pytest.mark.parametrize("fused", [False, True])
def test_a_schedule_may_compute_with_numpy_and_no_step_is_planned_anew_for_it(fused):
    ends = []
    for number in (float, np.float32, np.array):
        weight = nn.Parameter(torch.ones(24, 40))
        optimizer = APOLLO([weight], rank=3, weight_decay=0.5, fused=fused)
        (group,) = optimizer.param_groups
        plans = set()
        for rate in (0.5, 0.25, -0.125):
            weight.grad = torch.ones_like(weight)
            group["lr"] = number(rate)
            optimizer.step()
            plans.add(optimizer._plans.whole)
        assert len(plans) == 1
        ends.append(weight.detach())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("name", sorted(APOLLO([WEIGHT]).defaults.keys() - READ_AT_EVERY_STEP))
@pytest.mark.parametrize("value", ["x", -1, (0,)])
def test_an_option_that_is_changed_between_steps_is_checked_as_a_new_one(name, value):
    weight = nn.Parameter(torch.ones(6, 20))
    optimizer = APOLLO([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {re.escape(repr(value))}"):
        optimizer.step()


def test_what_memory_is_asked_of_is_checked():
    with pytest.raises(
        TypeError, match=r"^model_or_shapes must be a module, or parameters or shapes to list, got None"
    ):
        optimizer_memory(None)
    with pytest.raises(ValueError, match=r"^a shape must be of integers >= 0, got \(-3, 4\)"):
        optimizer_memory([(-3, 4)])
    for dtype in ("bfloat16", torch.int64):
        with pytest.raises(ValueError, match=rf"^dtype must be a floating-point torch.dtype, .*, got {dtype!r}$"):
            optimizer_memory([(3, 4)], dtype=dtype)
    for optimizer in ("apollo", torch.optim.AdamW):
        with pytest.raises(ValueError, match=r"^optimizer must be a class of apollo_optim, got"):
            optimizer_memory(nn.Linear(6, 20), optimizer)


@pytest.mark.parametrize("change", [quantize_weights_, dequantize_weights_])
def test_only_a_model_has_weights_to_quantise(change):
    with pytest.raises(ValueError, match=r"^model must be a torch.nn.Module, got None"):
        change(None)


def test_what_is_asked_whether_gradients_accumulate_can_be_called():
    model = nn.Linear(6, 20)
    with pytest.raises(ValueError, match=r"^accumulating must be a function without arguments, or None, got 3"):
        step_in_backward(model, APOLLO(model), accumulating=3)
