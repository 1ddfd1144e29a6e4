"""Checkpoints that fit restore everything; those that do not are refused and change nothing."""

import copy
import gzip
import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from apollo_optim import APOLLO
from apollo_optim.options import LATER, STRUCTURE
from apollo_optim.state import NAMES
from family import BY_NAME, DISTINCT, FAMILY, Member, partly_slow
from runs import SHAPES, bits, built, run, snapshot, weights

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)

FEW = {name: SHAPES[name] for name in ("wide", "tall", "norm")}


def trained(member, shapes=FEW, steps=4, **options):
    named = weights(shapes)
    optimizer = built(member, named, **options)
    run(optimizer, named, range(steps))
    return named, optimizer


def contents(value):
    """A checkpoint with every tensor by its bits, to compare."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: contents(each) for key, each in value.items()}
    return [contents(each) for each in value] if isinstance(value, list) else value


def refusal(optimizer, checkpoint) -> str:
    """The message with which a checkpoint is refused, once it is certain that nothing has changed."""
    before, groups, state = snapshot(optimizer), optimizer.param_groups, optimizer.state
    kept = contents(checkpoint)
    with pytest.raises(ValueError, match="checkpoint") as caught:
        optimizer.load_state_dict(checkpoint)
    assert snapshot(optimizer) == before
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert contents(checkpoint) == kept
    return str(caught.value)


def test_every_optimizer_refuses_the_checkpoints_of_every_other():
    # The wide one is Artemis with another state_dtype, which a checkpoint brings along.
    members = [member for member in FAMILY if member.name != "artemis-wide"]
    runs = {member.name: trained(member, {"wide": (9, 40)}, steps=1)[1] for member in members}
    for here, optimizer in runs.items():
        for there, other in runs.items():
            if here != there:
                assert refusal(optimizer, other.state_dict()).startswith("wide "), (here, there)


OTHERS = ": it was saved by another optimizer, or with other options, and fits only those"
MISFITS = {
    "rank": ({"rank": 8}, "wide (9, 40): rank is 8 in the checkpoint, 4 here"),
    "fraction": ({"rank": 0.5}, "tall (40, 9): rank is 4 in the checkpoint, 2 here"),
    "no rank": ({"rank": None}, "wide (9, 40): rank is None in the checkpoint, 4 here"),
    "projection": ({"projection": "svd"}, "wide (9, 40): projection is svd in the checkpoint, gaussian here"),
    "granularity": ({"granularity": "tensor"}, "wide (9, 40): granularity is tensor in the checkpoint, channel here"),
}


@pytest.mark.parametrize("misfit", ["rank", "no rank", "projection", "granularity"])
def test_a_misfit_is_named_with_both_values(misfit):
    options, message = MISFITS[misfit]
    _, saved = trained(BY_NAME["apollo"], **options)
    _, optimizer = trained(BY_NAME["apollo"])
    assert refusal(optimizer, saved.state_dict()) == message + OTHERS


def test_a_misfit_is_found_before_the_first_step_of_either_run():
    named, other = weights(FEW), weights(FEW)
    saved, optimizer = built(BY_NAME["apollo"], named, rank=8), built(BY_NAME["apollo"], other)
    assert refusal(optimizer, saved.state_dict()) == MISFITS["rank"][1] + OTHERS


def test_ranks_are_compared_as_they_turn_out():
    # Of the smaller side 9, a fraction of 0.45 is 4 rows.
    _, optimizer = trained(BY_NAME["apollo"], {"wide": (9, 40)}, rank=0.45)
    other = weights({"wide": (9, 40)})
    fresh = built(BY_NAME["apollo"], other, rank=4)
    fresh.load_state_dict(optimizer.state_dict())
    assert snapshot(fresh).state == snapshot(optimizer).state


@every_optimizer
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ((9, 40), (9, 41)),
        ((9, 40), (12, 40)),
        ((9, 40), (40, 9)),
        ((40,), (41,)),
        ((3, 10, 24), (4, 10, 24)),
        ((), (1,)),
    ],
    ids=str,
)
def test_another_shape_is_refused(member, there, here):
    # Moments of R x C say nothing of the smaller side, nor of the orientation: the groups do.
    _, saved = trained(member, {"weight": there}, steps=1)
    _, optimizer = trained(member, {"weight": here}, steps=1)
    assert refusal(optimizer, saved.state_dict()) == f"weight: its shape is {there} in the checkpoint, {here} here"


@every_optimizer
def test_moments_of_another_shape_are_refused(member):
    _, optimizer = trained(member)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["state"][0]["exp_avg"] = torch.zeros(3, 3)
    told = refusal(optimizer, checkpoint)
    assert re.match(r"wide \(9, 40\): exp_avg is \(3, 3\) in the checkpoint, \(\d+, (40|20|9)\) here", told)


@every_optimizer
def test_state_that_is_not_tensors_is_refused(member):
    _, optimizer = trained(member)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["state"][2]["exp_avg"] = 4
    assert refusal(optimizer, checkpoint) == "norm: exp_avg is 4 in the checkpoint, expected a tensor"


@every_optimizer
@pytest.mark.parametrize("number", [int, float])
def test_scalars_may_be_plain_numbers(member, number):
    """As torch.optim kept `step` once, and as other tools write it."""
    _, optimizer = trained(member)
    fresh = built(member, weights(FEW))
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for state in checkpoint["state"].values():
        state.update(step=number(state["step"]), seed=int(state["seed"]))
    fresh.load_state_dict(checkpoint)
    assert snapshot(fresh).state == snapshot(optimizer).state


@every_optimizer
def test_incomplete_state_is_refused(member):
    _, optimizer = trained(member)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    del checkpoint["state"][1]["seed"]
    message = refusal(optimizer, checkpoint)
    kept, expected = re.fullmatch(r"tall: the checkpoint keeps \[(.*)\], expected \[(.*)\]", message).groups()
    assert set(expected.split(", ")) - set(kept.split(", ")) == {"'seed'"}


@every_optimizer
def test_state_of_a_parameter_in_no_group_is_refused(member):
    _, optimizer = trained(member)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["state"][7] = checkpoint["state"][0]
    assert refusal(optimizer, checkpoint) == "the checkpoint keeps state for [7], which is in none of its groups"


@every_optimizer
def test_other_groups_are_refused(member):
    _, optimizer = trained(member)
    named, more = trained(member)
    more.add_param_group({"params": [("extra", nn.Parameter(torch.zeros(5)))]})
    assert refusal(optimizer, more.state_dict()) == "the checkpoint has 2 parameter groups, the optimizer 1"
    fewer = built(member, {"wide": named["wide"], "tall": named["tall"]})
    assert refusal(optimizer, fewer.state_dict()) == "group 0 of the checkpoint has 2 parameters, the optimizer's has 3"


@every_optimizer
@pytest.mark.parametrize("foreign", [torch.optim.AdamW, torch.optim.SGD])
def test_a_checkpoint_of_torch_is_refused_as_another_optimizers(member, foreign):
    named, optimizer = trained(member)
    other = foreign(named.items(), lr=0.1)
    other.step()
    message = refusal(optimizer, other.state_dict())
    assert message.startswith("group 0 of the checkpoint lacks ['rank', 'projection'")
    assert "it was made by another optimizer" in message
    assert message.endswith("Load the model's weights alone and warm up again (docs/migration.md)")


def test_another_optimizers_checkpoint_is_not_taken_for_one_with_other_groups():
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    saved, optimizer = torch.optim.AdamW(model.parameters()), APOLLO(model)
    assert len(optimizer.param_groups) > 1
    assert refusal(optimizer, saved.state_dict()).startswith("group 0 of the checkpoint lacks ['rank', 'projection'")


@every_optimizer
def test_an_optimizer_continues_after_a_refusal_as_if_never_asked(member):
    named, optimizer = trained(member)
    twins, twin = trained(member)
    _, misfit = trained(member, {"wide": (9, 41), "tall": (40, 9), "norm": (40,)})
    refusal(optimizer, misfit.state_dict())
    run(optimizer, named, range(4, 8))
    run(twin, twins, range(4, 8))
    assert snapshot(optimizer) == snapshot(twin)


@every_optimizer
def test_loading_shares_no_memory_with_the_checkpoint(member):
    _, source = trained(member, SHAPES, lr=torch.tensor(0.01))
    others = weights()
    optimizer = built(member, others, lr=torch.tensor(0.5))
    checkpoint = source.state_dict()
    before = contents(checkpoint)
    optimizer.load_state_dict(checkpoint)
    run(optimizer, others, range(4, 8))
    optimizer.param_groups[0]["lr"].zero_()
    assert contents(checkpoint) == before
    loaded = {value.data_ptr() for state in optimizer.state.values() for value in state.values()}
    assert loaded.isdisjoint(value.data_ptr() for state in checkpoint["state"].values() for value in state.values())


@every_optimizer
def test_options_come_from_the_checkpoint(member):
    _, source = trained(member)
    source.param_groups[0].update(lr=0.3, betas=(0.8, 0.9), seed=7, eps=1e-4, name="body")
    optimizer = built(member, weights(FEW))
    optimizer.load_state_dict(source.state_dict())
    assert snapshot(optimizer).options == snapshot(source).options


@every_optimizer
def test_weights_without_state_stay_without_it(member):
    named = weights(FEW)
    source = built(member, named)
    run(source, {"wide": named["wide"]}, range(2))
    others = weights(FEW)
    optimizer = built(member, others)
    optimizer.load_state_dict(source.state_dict())
    assert set(optimizer.state) == {others["wide"]}


# Distributed checkpoints. torch makes the state of a fresh optimizer by stepping it with zero gradients at lr 0, and
# then loads over it.

FORMS = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
}


def model_of(dtype: torch.dtype) -> nn.ParameterDict:
    return nn.ParameterDict(weights(dtype=dtype))


def optimizer_of(member, model: nn.Module, **options):
    return built(member, dict(model.named_parameters()), **options)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_making_state_for_a_distributed_checkpoint_leaves_weights_as_they_are(member, dtype):
    model = model_of(dtype)
    optimizer = optimizer_of(member, model)
    before = [bits(weight) for weight in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert [bits(weight) for weight in model.parameters()] == before
    assert len(optimizer.state) == len(SHAPES)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())
    assert optimizer.skipped() == 0


@every_optimizer
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("nested", torch.float32), ("nested", torch.bfloat16), ("flat", torch.bfloat16), ("full", torch.bfloat16)],
    ids=str,
)
def test_a_distributed_checkpoint_restores_the_run(member, form, dtype):
    options = StateDictOptions(**FORMS[form])
    model, twin = model_of(dtype), model_of(dtype)
    optimizer = optimizer_of(member, model)
    run(optimizer, dict(model.named_parameters()), range(4))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))

    fresh = optimizer_of(member, twin, lr=0.5, seed=9)
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, fresh, saved, options=options)
    assert snapshot(fresh) == snapshot(optimizer)
    run(optimizer, dict(model.named_parameters()), range(4, 7))
    run(fresh, dict(twin.named_parameters()), range(4, 7))
    assert snapshot(fresh) == snapshot(optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_distributed_checkpoints_pass_through_files(tmp_path, form):
    options = StateDictOptions(**FORMS[form])
    model, twin = nn.ModuleDict(), nn.ModuleDict()
    runs = {}
    members = [BY_NAME[name] for name in ("apollo", "mini", "galore", "fira", "flora", "adamw")]
    for member in members:
        model[member.name], twin[member.name] = model_of(torch.bfloat16), model_of(torch.bfloat16)
        optimizer = optimizer_of(member, model[member.name])
        run(optimizer, dict(model[member.name].named_parameters()), range(4))
        runs[member.name] = optimizer
    saved = {name: get_optimizer_state_dict(model[name], runs[name], options=options) for name in runs}
    dcp.save(saved, checkpoint_id=tmp_path)

    # As a loop resumes: state of the right shapes is made first, filled from the files, and then loaded.
    for member in members:
        name = member.name
        fresh = optimizer_of(member, twin[name])
        blank = {name: get_optimizer_state_dict(twin[name], fresh, options=options)}
        dcp.load(blank, checkpoint_id=tmp_path)
        set_optimizer_state_dict(twin[name], fresh, blank[name], options=options)
        assert snapshot(fresh)[1:] == snapshot(runs[name])[1:], name


@every_optimizer
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_no_state_of_ours_is_taken_for_a_users(member, state_dtype):
    _, optimizer = trained(member, state_dtype=state_dtype)
    assert all(state.keys() <= NAMES for state in optimizer.state.values())


def test_what_users_keep_beside_the_state_comes_along():
    named, optimizer = trained(BY_NAME["apollo"])
    for weight in named.values():
        optimizer.state[weight]["ema"] = weight.detach().clone().bfloat16()
    others = weights(FEW)
    fresh = built(BY_NAME["apollo"], others)
    fresh.load_state_dict(optimizer.state_dict())
    assert snapshot(fresh).state == snapshot(optimizer).state
    assert fresh.state[others["wide"]]["ema"].dtype == torch.bfloat16
    assert fresh.state[others["wide"]]["ema"].data_ptr() != optimizer.state[named["wide"]]["ema"].data_ptr()


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_parameters_in_another_order_are_refused(wrapper):
    shapes = {"query": (9, 40), "key": (9, 40)}
    _, saved = trained(BY_NAME["apollo"], shapes)
    named = {wrapper + name: weight for name, weight in weights({"key": (9, 40), "query": (9, 40)}).items()}
    optimizer = built(BY_NAME["apollo"], named)
    assert refusal(optimizer, saved.state_dict()) == (
        f"the checkpoint has query in the place of {wrapper}key: give the optimizer its parameters in the "
        "order in which they were saved"
    )


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_distributed_checkpoint_finds_its_weights_in_another_order(flat):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    other = copy.deepcopy(model)
    optimizer = BY_NAME["apollo"].build(list(model.named_parameters()))
    turned = BY_NAME["apollo"].build(list(reversed(list(other.named_parameters()))))
    for size, weight in enumerate(model.parameters()):
        weight.grad = torch.full((16, 16), 100.0**size)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, turned, saved, options=options)
    for name, weight in model.named_parameters():
        assert bits(turned.state[other.get_parameter(name)]["exp_avg_sq"]) == bits(
            optimizer.state[weight]["exp_avg_sq"]
        )


def test_a_model_keeps_its_own_names():
    _, saved = trained(BY_NAME["apollo"], {"wide": (9, 40), "norm": (5,)})
    renamed = {"matrix": nn.Parameter(torch.zeros(9, 40)), "module.norm": nn.Parameter(torch.zeros(5))}
    optimizer = built(BY_NAME["apollo"], renamed)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["param_names"] == ["matrix", "module.norm"]


def test_how_a_step_is_computed_here_is_not_the_checkpoints_to_say():
    _, saved = trained(BY_NAME["apollo"], fused=False, capturable=True)
    named = weights(FEW)
    optimizer = built(BY_NAME["apollo"], named, state_device="cpu")
    optimizer.load_state_dict(saved.state_dict())
    (group,) = optimizer.param_groups
    assert (group["fused"], group["capturable"], group["state_device"]) == (None, False, "cpu")
    run(optimizer, named, range(3, 4))


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_what_a_schedule_has_written_is_loaded_as_it_is(option):
    """As by one that rounding takes below zero at its end."""
    _, saved = trained(BY_NAME["apollo"])
    saved.param_groups[0][option] = -1e-20
    optimizer = built(BY_NAME["apollo"], weights(FEW))
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0][option] == -1e-20


def test_what_a_schedule_has_written_in_numpys_numbers_is_saved_in_pythons():
    _, optimizer = trained(BY_NAME["apollo"])
    optimizer.param_groups[0] |= {"lr": np.float64(0.5), "weight_decay": np.float32(0.25), "refresh_every": np.int64(3)}
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    (group,) = torch.load(file, weights_only=True)["param_groups"]
    assert (group["lr"], group["weight_decay"], group["refresh_every"]) == (0.5, 0.25, 3)


def test_numpys_numbers_that_a_schedule_keeps_for_itself_are_saved_in_pythons():
    _, optimizer = trained(BY_NAME["apollo"])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=np.float64(0.5), total_steps=10)  # pyrefly: ignore
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    (group,) = torch.load(file, weights_only=True)["param_groups"]
    assert (group["max_lr"], type(group["initial_lr"])) == (0.5, float)


@pytest.mark.parametrize("there", [0.01, torch.tensor(0.01)], ids=["from a number", "from a tensor"])
@pytest.mark.parametrize("here", [0.5, torch.tensor(0.5)], ids=["to a number", "to a tensor"])
def test_a_rate_is_loaded_as_what_it_is_here(here, there):
    """A tensor on a GPU is for `capturable`, which is this machine's to say."""
    _, saved = trained(BY_NAME["apollo"], lr=there)
    optimizer = built(BY_NAME["apollo"], weights(FEW), lr=here)
    optimizer.load_state_dict(saved.state_dict())
    rate = optimizer.param_groups[0]["lr"]
    assert type(rate) is type(here)
    assert float(rate) == pytest.approx(0.01, rel=1e-7)  # float32's


def test_options_that_cannot_be_are_refused():
    _, optimizer = trained(BY_NAME["apollo"])
    checkpoint = copy.deepcopy(optimizer.state_dict())
    checkpoint["param_groups"][0]["eps"] = -5
    assert refusal(optimizer, checkpoint) == "eps in group 0 of the checkpoint must be a number >= 0, got -5"
    with pytest.raises(ValueError, match=r'state_dict must have "state" and "param_groups", got \[\]'):
        optimizer.load_state_dict({})


# Checkpoints of other versions.

RELEASED = sorted(Path(__file__).with_name("checkpoints").glob("*.pt.gz"))
"""Written once, by the version they are named for: weights and optimizer after four steps, and weights after eight."""


LATER_MEMBERS = {"adafactor", "factored-adamw", "artemis", "artemis-wide", "artemis-mini"}
"""Members that came after that version."""


def machine() -> str:
    """What the last bits of a matrix product or an SVD depend on."""
    about = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", about.read_text()) if about.exists() else None
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {model and model[1]}"


def released_member(name: str) -> Member:
    of = {"rowwise": "adamw", "capturable": "apollo"}.get(name, name)
    return next(member for member in sorted(FAMILY, key=lambda each: -len(each.name)) if of.startswith(member.name))


@pytest.mark.parametrize("file", RELEASED, ids=lambda file: file.name)
def test_a_released_checkpoint_continues_as_its_version_did(file):
    released = torch.load(io.BytesIO(gzip.decompress(file.read_bytes())), weights_only=True)
    assert released["runs"].keys() >= BY_NAME.keys() - LATER_MEMBERS
    for name, saved in released["runs"].items():
        named = {each: nn.Parameter(value.clone()) for each, value in saved["weights"].items()}
        # State is of the checkpoint's dtype or it is not, of the checkpoint's rule of second moments or not.
        structure = {key: saved["optimizer"]["param_groups"][0][key] for key in ("state_dtype", "second_moment")}
        group = {"params": list(named.items()), "second_moment": structure.pop("second_moment")}
        optimizer = released_member(name).build([group], **structure)
        optimizer.load_state_dict(saved["optimizer"])
        for index, weight in enumerate(named.values()):
            kept = saved["optimizer"]["state"][index]
            assert {key: bits(value) for key, value in optimizer.state[weight].items()} == {
                key: bits(value) for key, value in kept.items()
            }, name
        run(optimizer, named, range(4, 8))
        for each, value in saved["continued"].items():
            if machine() == released["machine"]:
                assert bits(named[each]) == bits(value), (name, each)
            else:
                # Another machine sums in another order; what is rounded at random then may fall to the other side.
                torch.testing.assert_close(
                    named[each].data, value, rtol=max(1e-4, 2 * torch.finfo(value.dtype).eps), atol=1e-5
                )


@every_optimizer
def test_options_that_a_checkpoint_lacks_are_those_given_here(member):
    """So that no option that is added makes the checkpoints of before it worthless."""
    named, optimizer = trained(member)
    twins, twin = trained(member)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    for key in checkpoint["param_groups"][0].keys() - {*STRUCTURE, "params", "lr"}:
        del checkpoint["param_groups"][0][key]
    optimizer = built(member, named)
    optimizer.load_state_dict(checkpoint)
    assert snapshot(optimizer) == snapshot(twin)
    run(optimizer, named, range(4, 8))
    run(twin, twins, range(4, 8))
    assert snapshot(optimizer) == snapshot(twin)


def test_an_option_that_came_later_is_off_in_checkpoints_and_copies_that_lack_it():
    _, saved = trained(BY_NAME["apollo"])
    group = {"params": list(weights(FEW).items()), "vocabulary": (40,)}
    optimizer = BY_NAME["apollo"].build([group])
    checkpoint = copy.deepcopy(saved.state_dict())
    del checkpoint["param_groups"][0]["vocabulary"]
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["vocabulary"] == ()
    assert snapshot(optimizer).state == snapshot(saved).state
    del saved.defaults["vocabulary"], saved.param_groups[0]["vocabulary"]
    twin = pickle.loads(pickle.dumps(saved))
    assert twin.param_groups[0]["vocabulary"] == twin.defaults["vocabulary"] == ()


@pytest.mark.parametrize("key", [key for key in STRUCTURE if key not in LATER])
def test_what_says_what_state_means_may_not_be_lacking(key):
    _, optimizer = trained(BY_NAME["apollo"])
    checkpoint = copy.deepcopy(optimizer.state_dict())
    del checkpoint["param_groups"][0][key]
    assert refusal(optimizer, checkpoint).startswith(
        f"group 0 of the checkpoint lacks ['{key}']: it was made by another"
    )


@every_optimizer
def test_a_wrapper_may_keep_state_of_its_own_before_the_first_step(member):
    """As schedule-free averaging does with its `z`."""
    named, twins = weights(FEW), weights(FEW)
    optimizer, twin = built(member, named), built(member, twins)
    kept = {name: optimizer.state[weight] for name, weight in named.items()}
    for name, weight in named.items():
        kept[name]["z"] = weight.detach().clone()
    early = copy.deepcopy(optimizer.state_dict())
    run(optimizer, named, range(4))
    run(twin, twins, range(4))
    assert snapshot(optimizer).weights == snapshot(twin).weights
    for name, weight in named.items():
        assert optimizer.state[weight] is kept[name]
        assert kept[name].keys() == twin.state[twins[name]].keys() | {"z"}
    others = weights(FEW)
    fresh = built(member, others)
    fresh.load_state_dict(early)
    run(fresh, others, range(4))
    assert snapshot(fresh) == snapshot(optimizer)
