"""Every optimizer keeps the contract of torch.optim, so that it drops into any training loop."""

import copy
import io
import pickle
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from apollo_optim import APOLLO, APOLLOMini, FactoredAdamW, StructuredAdamW
from apollo_optim.core.random import normal_quantiles, normal_table
from apollo_optim.quant.blocks import code_levels
from apollo_optim.stepping.plain import _kept_basis
from family import DISTINCT, FAMILY, partly_slow
from runs import SHAPES, bits, built, gradient, run, snapshot, weights

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)

# A matrix, a tall one and a vector: enough where the claim is about bookkeeping and not about shapes.
FEW = {name: SHAPES[name] for name in ("wide", "tall", "norm")}


@every_optimizer
def test_step_returns_the_loss_of_its_closure_computed_with_gradients_enabled(member):
    named = weights(FEW)
    optimizer = built(member, named)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(weight.square().sum() for weight in named.values())
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == sum(weight.square().sum() for weight in weights(FEW).values()).item()
    assert optimizer.step() is None


@every_optimizer
def test_a_closure_steps_as_gradients_given_before(member):
    by_closure, by_hand = weights(FEW), weights(FEW)
    first, second = built(member, by_closure), built(member, by_hand)

    def closure():
        for name, weight in by_closure.items():
            weight.grad = gradient(name, 0, weight)

    first.step(closure)
    run(second, by_hand, [0])
    assert snapshot(first) == snapshot(second)


@every_optimizer
def test_a_step_without_gradients_does_nothing_and_costs_no_state(member):
    named = weights(FEW)
    optimizer = built(member, named)
    before = snapshot(optimizer)
    optimizer.step()
    assert snapshot(optimizer) == before
    assert len(optimizer.state) == 0


@every_optimizer
def test_a_group_added_mid_run_steps_as_one_that_had_waited_for_its_first_gradient(member):
    early, late = weights(FEW), weights(FEW)
    waiting = built(member, {name: early[name] for name in ("wide", "norm")})
    waiting.add_param_group({"params": [("tall", early["tall"])], "refresh_every": 3})
    added = built(member, {name: late[name] for name in ("wide", "norm")})
    for optimizer, named in ((waiting, early), (added, late)):
        run(optimizer, {name: named[name] for name in ("wide", "norm")}, range(4))
        if optimizer is added:
            optimizer.add_param_group({"params": [("tall", named["tall"])], "refresh_every": 3})
        run(optimizer, named, range(4, 8))
    assert snapshot(waiting) == snapshot(added)


@pytest.mark.parametrize("listed", [list, tuple, iter, lambda params: params[0]], ids=["list", "tuple", "iter", "one"])
def test_bare_parameters_are_added_to_those_of_a_model_as_to_any_optimizer(listed):
    """As callbacks that unfreeze layers add them: an optimizer that was given a model has names of its weights."""
    model, late = nn.Linear(9, 40), nn.Parameter(torch.ones(40, 9))
    optimizer = APOLLO(model)
    optimizer.add_param_group({"params": listed([late]), "lr": 0.5})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"], ["parameter 2"]]
    late.grad = torch.ones(40, 9)
    optimizer.step()
    assert not torch.equal(late, torch.ones(40, 9))


@pytest.mark.parametrize("kind", [APOLLO, torch.optim.AdamW])
def test_options_of_an_added_group_are_changed_by_the_dict_that_was_added(kind):
    optimizer = kind([nn.Parameter(torch.ones(5))], lr=0.25)
    weight = nn.Parameter(torch.ones(40, 9))
    group = {"params": [weight], "lr": 0.5}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    group["lr"] = 0.0
    weight.grad = torch.ones(40, 9)
    optimizer.step()
    assert torch.equal(weight, torch.ones(40, 9))


def test_a_list_of_groups_can_go_to_a_second_optimizer():
    groups = [{"params": [nn.Parameter(torch.ones(40, 9))], "lr": 0.5}]
    first, second = APOLLO(groups), APOLLOMini(groups)
    assert (first.param_groups[0]["rank"], second.param_groups[0]["rank"]) == (0.25, 1)
    assert groups[0].keys() == {"params", "lr"}


@every_optimizer
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_is_stepped_once(member):
    ours, theirs = weights(FEW), weights(FEW)
    names = list(FEW)
    twice = member.build([(name, ours[name]) for name in (*names, names[0])])
    once = member.build([(name, theirs[name]) for name in names])
    for optimizer, named in ((twice, ours), (once, theirs)):
        run(optimizer, named, range(3))
    assert twice.param_groups[0]["param_names"] == names
    assert snapshot(twice) == snapshot(once)


@every_optimizer
def test_a_parameter_cannot_be_in_two_groups(member):
    named = weights(FEW)
    optimizer = built(member, named)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", named["wide"])]})
    assert len(optimizer.param_groups) == 1


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_every_gradient(member, set_to_none):
    named = weights(FEW)
    optimizer = built(member, named)
    run(optimizer, named, [0])
    optimizer.zero_grad(set_to_none=set_to_none)
    for weight in named.values():
        assert weight.grad is None if set_to_none else torch.count_nonzero(weight.grad) == 0


@every_optimizer
def test_hooks_run_before_and_after_a_step_and_until_removed(member):
    named = weights(FEW)
    optimizer = built(member, named)
    calls = []
    before = optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: calls.append(("before", opt, bits(named["wide"])))
    )
    after = optimizer.register_step_post_hook(
        lambda opt, args, kwargs: calls.append(("after", opt, bits(named["wide"])))
    )
    old = bits(named["wide"])
    run(optimizer, named, [0])
    assert calls == [("before", optimizer, old), ("after", optimizer, bits(named["wide"]))]
    assert old != bits(named["wide"])
    before.remove()
    after.remove()
    run(optimizer, named, [1])
    assert len(calls) == 2


@every_optimizer
def test_state_dict_hooks_may_change_what_is_saved(member):
    optimizer = built(member, weights(FEW))
    optimizer.register_state_dict_pre_hook(lambda opt: opt.param_groups[0].update(name="body"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "epoch": 3})
    saved = optimizer.state_dict()
    assert saved["epoch"] == 3
    assert saved["param_groups"][0]["name"] == "body"


@every_optimizer
def test_load_hooks_may_adapt_a_checkpoint_before_it_is_checked(member):
    # The saved run had a third group, which this one has not: refused as it is, accepted once a hook takes it out.
    named, other = weights(FEW), weights(FEW)
    larger = built(member, named)
    larger.add_param_group({"params": [("extra", nn.Parameter(torch.zeros(5)))]})
    run(larger, named, range(2))
    smaller = built(member, other)
    with pytest.raises(ValueError, match=r"2 parameter groups.* 1"):
        smaller.load_state_dict(larger.state_dict())

    loaded = []
    smaller.register_load_state_dict_pre_hook(lambda opt, saved: {**saved, "param_groups": saved["param_groups"][:1]})
    smaller.register_load_state_dict_post_hook(lambda opt: loaded.append(snapshot(opt).state))
    for _ in range(2):
        smaller.load_state_dict(larger.state_dict())
        assert len(smaller._optimizer_load_state_dict_pre_hooks) == 1
    assert loaded == [snapshot(larger).state[:3]] * 2


@every_optimizer
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda twins: pickle.loads(pickle.dumps(twins))], ids=["deepcopy", "pickle"]
)
def test_a_copy_continues_as_the_original_and_apart_from_it(member, copied):
    named = weights(FEW)
    optimizer = built(member, named)
    run(optimizer, named, range(4))
    twin_named, twin = copied((named, optimizer))
    assert snapshot(twin) == snapshot(optimizer)
    before = snapshot(optimizer)
    run(twin, twin_named, range(4, 8))
    assert snapshot(optimizer) == before
    run(optimizer, named, range(4, 8))
    assert snapshot(twin) == snapshot(optimizer)
    assert twin.skipped() == 0


def test_a_copy_of_a_fresh_optimizer_takes_further_groups():
    named = weights(FEW)
    for member in FAMILY:
        twin_named, twin = copy.deepcopy((named, built(member, named)))
        twin.add_param_group({"params": [("extra", nn.Parameter(torch.ones(5)))]})
        run(twin, twin_named, [0])
        assert len(twin.param_groups) == 2


@every_optimizer
def test_names_and_not_their_order_or_wrappers_decide_the_numbers(member):
    straight, reversed_, wrapped = weights(), weights(), weights()
    run(built(member, straight), straight, range(5))
    backwards = dict(reversed(reversed_.items()))
    run(built(member, backwards), backwards, range(5))
    prefixes = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
    optimizer = built(member, {"".join(prefixes) + name: weight for name, weight in wrapped.items()})
    run(optimizer, wrapped, range(5))
    for name, weight in straight.items():
        assert bits(weight) == bits(reversed_[name]) == bits(wrapped[name]), name


@every_optimizer
def test_names_are_kept_and_saved(member):
    optimizer = built(member, weights(FEW))
    assert optimizer.param_groups[0]["param_names"] == list(FEW)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == list(FEW)


def test_equal_weights_under_different_names_take_different_bases():
    for member in (m for m in FAMILY if m.name in ("apollo", "mini", "flora", "galore-gaussian")):
        same = {"one": (9, 40), "two": (9, 40)}
        named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in same.items()}
        optimizer = built(member, named)
        for weight in named.values():
            weight.grad = gradient("shared", 0, weight)
        optimizer.step()
        assert not torch.equal(named["one"], named["two"]), member


@every_optimizer
def test_nameless_parameters_step_alike_listed_grouped_or_apart(member):
    listed, grouped, apart = weights(), weights(), weights()
    first = member.build(list(listed.values()), lr=0.01)
    second = member.build([{"params": [weight]} for weight in grouped.values()], lr=0.01)
    run(first, listed, range(3))
    run(second, grouped, range(3))
    assert snapshot(first).weights == snapshot(second).weights
    for name, weight in apart.items():
        if name != "scalar":
            run(member.build([weight], lr=0.01), {name: weight}, range(3))
            assert bits(weight) == bits(listed[name]), name


def test_nameless_parameters_of_one_shape_have_bases_of_their_own():
    """In one optimizer or in several, as torch's `_apply_optimizer_in_backward` makes them."""
    for starts in (torch.randn(2, 9, 40), torch.zeros(2, 9, 40)):
        together = [nn.Parameter(start.clone()) for start in starts]
        optimizer = APOLLO(together, rank=4)
        apart = [nn.Parameter(start.clone()) for start in starts]
        optimizers = [APOLLO([weight], rank=4) for weight in apart]
        for weight in (*together, *apart):
            weight.grad = torch.ones_like(weight)
        for each in (optimizer, *optimizers):
            each.step()
        one, two = (int(optimizer.state[weight]["seed"]) for weight in together)
        assert one != two
        if starts.any():  # values are all that tells a weight from those of other optimizers
            assert [int(each.state[weight]["seed"]) for each, weight in zip(optimizers, apart, strict=True)] == [
                one,
                two,
            ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at this import
def test_torch_can_make_an_optimizer_for_each_parameter():
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24, bias=False), nn.Tanh(), nn.Linear(24, 12))
    twin = copy.deepcopy(model)
    _apply_optimizer_in_backward(APOLLO, model.parameters(), {"lr": 0.01, "rank": 4})
    optimizer = APOLLO(twin.parameters(), lr=0.01, rank=4)
    for step in range(4):
        batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
        for each in (model, twin):
            each(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits(one) == bits(other)


@every_optimizer
def test_a_checkpoint_holds_tensors_and_plain_values_only(member):
    named, other = weights(), weights()
    optimizer, resumed = built(member, named), built(member, other)
    run(optimizer, named, range(4))
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert snapshot(resumed)[1:] == snapshot(optimizer)[1:]


@pytest.mark.parametrize("member", partly_slow([m for m in FAMILY if not m.group], quick=DISTINCT), ids=str)
def test_groups_with_options_of_their_own_step_as_separate_optimizers(member):
    options = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6, "seed": 5, "maximize": True}
    together, apart = weights(FEW), weights(FEW)
    optimizer = built(member, {"wide": together["wide"]})
    optimizer.add_param_group({"params": [("tall", together["tall"])], "refresh_every": 3, **options})
    optimizer.add_param_group({"params": [("norm", together["norm"])], "rank": None, "lr": 0.5})
    run(optimizer, together, range(5))
    run(built(member, {"wide": apart["wide"]}), {"wide": apart["wide"]}, range(5))
    run(built(member, {"tall": apart["tall"]}, **options), {"tall": apart["tall"]}, range(5))
    run(built(member, {"norm": apart["norm"]}, lr=0.5), {"norm": apart["norm"]}, range(5))
    for name in FEW:
        assert bits(together[name]) == bits(apart[name]), name


@every_optimizer
def test_maximize_ascends_as_minimizing_the_opposite(member):
    named, other = weights(), weights()
    optimizer, opposite = built(member, named, maximize=True), built(member, other)
    run(optimizer, named, range(5))
    for step in range(5):
        for name, weight in other.items():
            weight.grad = -gradient(name, step, weight)
        opposite.step()
    assert snapshot(optimizer).weights == snapshot(opposite).weights


@pytest.mark.parametrize("member", [member for member in FAMILY if member.capturable], ids=str)
def test_capturable_steps_as_usual(member):
    # The two differ only in beta**step, a float64 power of a number or of a tensor: one rounding of 1e-16 each.
    named, other = weights(dtype=torch.float64), weights(dtype=torch.float64)
    capturable, usual = built(member, named, capturable=True), built(member, other)
    run(capturable, named, range(8))
    run(usual, other, range(8))
    for name, weight in named.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-13, atol=1e-14)
        assert torch.equal(capturable.state[weight]["step"], usual.state[other[name]]["step"])


@every_optimizer
def test_it_prints_its_options(member):
    assert "refresh_every: 3" in repr(built(member, weights(FEW)))


@pytest.mark.parametrize("optimizer", [FactoredAdamW, StructuredAdamW])
def test_a_rank_that_keeps_everything_is_printed_as_full(optimizer):
    printed = repr(optimizer([nn.Parameter(torch.zeros(3, 5))]))
    assert "\n    rank: full\n" in printed
    assert str(2**31 - 1) not in printed


@every_optimizer
def test_a_narrow_learning_rate_does_not_narrow_a_wide_step(member):
    lr = torch.tensor(0.01)
    named, other = weights(FEW, torch.float64), weights(FEW, torch.float64)
    optimizer, twin = built(member, named, lr=lr), built(member, other, lr=float(lr))
    run(optimizer, named, range(3))
    run(twin, other, range(3))
    assert snapshot(optimizer).weights == snapshot(twin).weights


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


KINDS = {
    "float32": (torch.float32, {"lr": torch.tensor(0.01)}),
    "float16": (torch.float16, {}),
    "bfloat16": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "int8": (torch.float32, {"state_dtype": torch.int8}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "member",
    [m for m in FAMILY if m.name in ("apollo", "mini-svd", "fira", "flora", "adamw", "artemis", "artemis-mini")],
    ids=str,
)
def test_a_step_does_not_ask_for_the_default_dtype_or_device(member, kind):
    dtype, options = KINDS[kind]
    outcomes = []
    for setting in (nullcontext(), default_dtype(torch.float64), default_dtype(torch.float16), torch.device("meta")):
        named = weights(FEW, dtype)
        gradients = [{name: gradient(name, step, weight) for name, weight in named.items()} for step in range(3)]
        for table in (normal_quantiles, normal_table, code_levels, _kept_basis):
            table.cache_clear()
        with setting:
            optimizer = built(member, named, **options)
            for step in gradients:
                for name, weight in named.items():
                    weight.grad = step[name]
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        outcomes.append(snapshot(optimizer)[:2])
    assert outcomes == outcomes[:1] * 4


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_adamw_in_pieces_is_adamw_in_one(piece, monkeypatch):
    outcomes = []
    for size in (piece, 10**6):
        monkeypatch.setattr("apollo_optim.stepping.plain.PIECE", size)
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(9, 11))
        optimizer = APOLLO([{"params": [weight], "rank": None}], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        outcomes.append((weight.detach(), optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]))
    for ours, whole in zip(*outcomes, strict=True):
        # Vectorised and scalar loops of one operation may differ in the last bit of a fused multiply-add.
        torch.testing.assert_close(ours, whole, rtol=2**-22, atol=2**-24)


def test_a_graph_that_must_be_whole_ends_at_the_step():
    """As docs/switching.md says; the error is the compiler's, and names what it may not trace. Nothing is changed."""
    weight = nn.Parameter(torch.ones(24, 40))
    optimizer = APOLLO([weight], lr=0.01, rank=4)
    weight.grad = torch.ones_like(weight)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ProjectedOptimizer\._step_weights"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()

    def stepped(grad):
        weight.grad = grad
        optimizer.step()
        return weight

    with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
        make_fx(stepped)(torch.ones(24, 40))
    assert not optimizer.skipped()
    assert bool((weight == 1).all())


class Operations(TorchDispatchMode):
    """Every operation with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)], ids=str)
def test_a_plain_step_of_a_projected_weight_is_fifty_operations(shape):
    """A small model's step takes as long as all its operations take to begin: 64 of them before they were counted."""
    counts = []
    for weights_of_it in (1, 2):
        named = [(str(number), nn.Parameter(torch.ones(shape))) for number in range(weights_of_it)]
        optimizer = APOLLO(named, rank=4, fused=False)
        for step in range(3):
            for name, weight in named:
                weight.grad = gradient(name, step, weight)
            with Operations() as operations:
                optimizer.step()
        counts.append(len(operations.calls))
        products = [args for name, args in operations.calls if name == "mm"]
        assert len(products) == weights_of_it
        # A product of which one side alone is transposed takes 0.6 ms on ARM, however small it is.
        assert all(left.is_contiguous() == right.is_contiguous() for left, right in products)
    assert counts[1] - counts[0] <= 50, counts
