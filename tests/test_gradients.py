"""Gradients that cannot be used: not finite, sparse, or of weights that a framework has flattened."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from apollo_optim import param_groups
from family import DISTINCT, FAMILY, partly_slow
from runs import SHAPES, bits, built, gradient, run, snapshot, weights

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)
FEW = {name: SHAPES[name] for name in ("wide", "experts", "norm")}
every_value = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)


def spoil(named, step, value, names) -> None:
    """Give every weight its gradient of `step`, those of `names` with one bad number in it."""
    for name, weight in named.items():
        weight.grad = gradient(name, step, weight)
        if name in names:
            weight.grad.view(-1)[-1] = value


@every_optimizer
@every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_not_finite_leaves_weight_and_state_as_they_were(member, value, dtype):
    named = weights(dtype=dtype)
    optimizer = built(member, named)
    run(optimizer, named, range(2))
    for refused in (1, 2):
        before = snapshot(optimizer)
        spoil(named, 5, value, SHAPES)
        optimizer.step()
        assert snapshot(optimizer) == before
        assert optimizer.skipped() == refused * len(SHAPES)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before", [0, 1, 3], ids=["first step", "second step", "refresh"])
def test_the_next_step_proceeds_as_if_the_bad_one_had_not_been(member, dtype, before):
    named, twins = weights(FEW, dtype), weights(FEW, dtype)
    optimizer, twin = built(member, named), built(member, twins)
    run(optimizer, named, range(before))
    spoil(named, 77, math.nan, FEW)
    optimizer.step()
    run(optimizer, named, range(before, before + 3))
    run(twin, twins, range(before + 3))
    assert snapshot(optimizer) == snapshot(twin)


@every_optimizer
def test_only_the_weight_with_the_bad_gradient_is_held_back(member):
    for victim in FEW:
        named, twins = weights(FEW), weights(FEW)
        optimizer, twin = built(member, named), built(member, twins)
        run(optimizer, named, range(2))
        run(twin, twins, range(2))
        held = bits(named[victim])
        spoil(named, 2, math.nan, [victim])
        optimizer.step()
        run(twin, twins, [2])
        assert optimizer.skipped() == 1
        for name, weight in named.items():
            assert bits(weight) == (held if name == victim else bits(twins[name])), (victim, name)


@every_optimizer
@pytest.mark.parametrize("position", [(0, 0), (4, 20), (8, 39), (8, 0)], ids=str)
def test_one_bad_number_anywhere_is_found(member, position):
    weight = nn.Parameter(torch.ones(9, 40))
    optimizer = built(member, {"weight": weight})
    weight.grad = gradient("weight", 0, weight)
    weight.grad[position] = math.inf
    optimizer.step()
    assert torch.equal(weight, torch.ones(9, 40))
    assert optimizer.skipped() == 1


@every_optimizer
def test_one_bad_expert_holds_back_its_weight_whole(member):
    named = {"experts": nn.Parameter(torch.ones(3, 10, 24))}
    optimizer = built(member, named)
    run(optimizer, named, range(2))
    before = snapshot(optimizer)
    named["experts"].grad = gradient("experts", 2, named["experts"])
    named["experts"].grad[1, 2, 3] = math.nan
    optimizer.step()
    assert snapshot(optimizer) == before
    assert optimizer.skipped() == 1


@pytest.mark.parametrize("member", [member for member in FAMILY if member.capturable], ids=str)
def test_capturable_does_not_count_a_refused_step(member):
    named, twins = weights(), weights()
    optimizer, twin = built(member, named, capturable=True), built(member, twins, capturable=True)
    spoil(named, 5, math.nan, SHAPES)
    optimizer.step()
    run(optimizer, named, range(3))
    run(twin, twins, range(3))
    assert snapshot(optimizer) == snapshot(twin)


@every_optimizer
def test_a_large_finite_gradient_is_a_gradient(member):
    # Up to 1e17 the squares of 40 x 9 numbers still have a sum in float32.
    weight = nn.Parameter(torch.ones(9, 40))
    optimizer = built(member, {"weight": weight})
    for step in range(3):
        weight.grad = gradient("weight", step, weight) * 1e17
        optimizer.step()
    assert optimizer.skipped() == 0
    assert weight.isfinite().all()
    assert not torch.equal(weight, torch.ones(9, 40))


@every_optimizer
@pytest.mark.parametrize("shape", [(4, 64), (1, 64), (64, 1), (9, 40)], ids=str)
def test_a_channel_whose_gradient_has_no_square_spoils_no_other(member, shape):
    """A rank of one has no sum of squares, in which such numbers would vanish."""
    weight = nn.Parameter(torch.ones(shape))
    optimizer = built(member, {"weight": weight})
    for step in range(3):
        weight.grad = gradient("weight", step, weight)
        if step == 2:
            weight.grad[..., :7] *= 1e-41
        optimizer.step()
    assert optimizer.skipped() == 0
    assert weight.isfinite().all()
    assert all(value.isfinite().all() for value in optimizer.state[weight].values())


@every_optimizer
def test_a_channel_that_never_had_a_gradient_needs_no_eps(member):
    """0 / 0 would be no number, and where one number scales a whole weight, none of it."""
    weight = nn.Parameter(torch.ones(9, 40))
    optimizer = member.build([weight], eps=0.0)
    for step in range(3):
        weight.grad = gradient("wide", step, weight)
        weight.grad[:, 3] = 0
        optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.skipped() == 0


@every_optimizer
def test_a_step_on_the_meta_device_makes_the_state(member):
    weight = nn.Parameter(torch.empty(9, 40, device="meta"))
    optimizer = member.build([weight])
    weight.grad = torch.empty_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    assert all(state[name].is_meta for name in state.keys() - {"step", "seed"})
    assert member.name == "artemis-mini" or state["exp_avg"].is_meta


@every_optimizer
def test_a_sparse_gradient_is_refused_by_name_before_anything_moves(member):
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(10, 4, sparse=True))
    optimizer = built(member, dict(model.named_parameters()))
    before = snapshot(optimizer).weights
    model[0](model[1](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"^1\.weight has a sparse gradient; make it dense"):
        optimizer.step()
    assert snapshot(optimizer).weights == before


@every_optimizer
def test_a_gradient_that_turns_sparse_mid_run_is_refused_too(member):
    named = {"table": nn.Parameter(torch.ones(10, 4))}
    optimizer = built(member, named)
    run(optimizer, named, range(2))
    named["table"].grad = torch.ones(10, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"^table has a sparse gradient"):
        optimizer.step()


# Frameworks that flatten weights.


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 20))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused_naming_fsdp2(one_process, use_orig_params):
    sharded = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    for member in FAMILY:
        for params in (sharded, sharded.parameters(), list(sharded.named_parameters())):
            with pytest.raises(ValueError, match=r"is flattened by FSDP1, .* with FSDP2"):
                member.build(params)


@every_optimizer
def test_deepspeed_zero3_is_refused_naming_fsdp2(member):
    model = layers()
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number  # as deepspeed.zero.Init marks what it has partitioned
    with pytest.raises(ValueError, match=r"^0\.weight is flattened by DeepSpeed ZeRO, .* with FSDP2"):
        member.build(model)


@every_optimizer
def test_weights_flattened_after_construction_are_refused_naming_fsdp2(member):
    # ZeRO 1 and 2 put flat partitions into the groups; others swap the data of the same parameters.
    partition = nn.Parameter(torch.zeros(600))
    swapped = built(member, dict(layers().named_parameters()))
    swapped.param_groups[0]["params"][:] = [partition]
    partition.grad = torch.ones(600)
    with pytest.raises(RuntimeError, match=r"^0\.weight was \(32, 16\) when .* and is \(600,\) now.* FSDP2"):
        swapped.step()

    model = layers()
    flattened = built(member, dict(model.named_parameters()))
    model[1].weight.data = model[1].weight.data.flatten()
    model[1].weight.grad = torch.ones(640)
    with pytest.raises(RuntimeError, match=r"^1\.weight was \(20, 32\) when .* and is \(640,\) now.* FSDP2"):
        flattened.step()


def test_groups_can_be_made_from_a_model_sharded_by_fsdp2(one_process):
    def model():
        return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 100))

    def summary(groups):
        return [(group.get("rank", ...), [name for name, _ in group["params"]]) for group in groups]

    sharded = model()
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    assert summary(param_groups(sharded)) == summary(param_groups(model()))


@every_optimizer
def test_a_weight_that_was_resized_between_steps_is_refused_saying_what_to_do(member):
    """As by resize_token_embeddings, which keeps the parameter and replaces its data."""
    model = layers()
    optimizer = built(member, dict(model.named_parameters()))
    run(optimizer, dict(model.named_parameters()), range(1))
    model[1].weight.data = torch.zeros(24, 32)
    model[1].weight.grad = torch.ones(24, 32)
    with pytest.raises(
        RuntimeError, match=r"^1\.weight was \(20, 32\) .* is \(24, 32\) now: build the optimizer after"
    ):
        optimizer.step()
