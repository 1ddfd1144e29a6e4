"""What int8 weights refuse, and what they are left out of."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from apollo_optim import param_groups
from apollo_optim.quant import Int8Weight, dequantize_weights_, quantize_weights_
from apollo_optim.quant.groups import LEAST_SCALE
from int8_models import TOKENS, gradients, model, narrow, weight_bits


@pytest.mark.parametrize("group_size", [0, 1, 4, 7, 12, 100, -8, 64.0, None])
def test_a_group_size_that_cannot_be_is_refused(group_size: object):
    net = model()
    with pytest.raises(ValueError, match="group_size must be a power of two and at least 8, got"):
        quantize_weights_(net, group_size)
    assert not isinstance(net.up.weight, Int8Weight)


def test_a_model_is_quantized_once():
    net = narrow()
    with pytest.raises(ValueError, match=r"embed.weight is int8 already"):
        quantize_weights_(net)


def test_weights_that_int8_cannot_hold_are_refused_before_any_is_changed():
    net = model()
    net.lm_head.weight.data[3, 4] = torch.inf
    with pytest.raises(ValueError, match=r"lm_head.weight holds a number that is not finite"):
        quantize_weights_(net)
    assert not isinstance(net.up.weight, Int8Weight)
    with pytest.raises(ValueError, match=r"embed.weight has dtype torch.float64; expected one of"):
        quantize_weights_(model(torch.float64))
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch.int8"):
        dequantize_weights_(narrow(), torch.int8)


def test_what_is_excluded_stays_wide():
    for exclude in ((nn.Embedding, "lm_head"), (nn.Embedding,)):
        net = quantize_weights_(model(), exclude=exclude)
        wide = {name for name, weight in net.named_parameters() if not isinstance(weight, Int8Weight)}
        assert {"embed.weight", "lm_head.weight"} <= wide
        assert {"up.weight", "down.weight"}.isdisjoint(wide)
    tied = quantize_weights_(model(tied=True), exclude=("lm_head",))
    assert tied.lm_head.weight is tied.embed.weight
    assert not isinstance(tied.embed.weight, Int8Weight)
    with pytest.raises(ValueError, match="match no linear layer or embedding of the model: 'norm'"):
        quantize_weights_(model(), exclude=("norm",))


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_of_another_library_is_refused_by_name(optimizer: type, foreach: bool):
    net = narrow()
    before = weight_bits(net)
    net(TOKENS).sum().backward()
    with pytest.raises(RuntimeError, match=rf"{optimizer.__name__} cannot step an int8 weight.*apollo_optim \(APOLLO"):
        optimizer([net.up.weight], lr=0.1, foreach=foreach).step()
    assert weight_bits(net) == before


def test_it_is_refused_before_a_closure_makes_the_gradient():
    net = narrow()
    before = weight_bits(net)
    with pytest.raises(RuntimeError, match="SGD cannot step an int8 weight"):
        torch.optim.SGD([net.up.weight], lr=0.1).step(lambda: net(TOKENS).sum().backward())
    assert weight_bits(net) == before
    assert net.up.weight.grad is None


def test_operations_that_write_are_refused():
    net = narrow()
    before = weight_bits(net)
    for write in (lambda weight: weight.add_(1.0), lambda weight: torch._foreach_mul_([weight], 2.0)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"would write to an int8 weight.*optimizers of apollo"):
            write(net.up.weight)
    assert weight_bits(net) == before


@pytest.fixture
def mesh():
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


SHARDED = {
    "fully_shard": lambda net, mesh: fully_shard(net.up, mesh=mesh, shard_placement_fn=lambda weight: Shard(1)),
    "distribute_tensor": lambda net, mesh: distribute_tensor(net.up.weight, mesh, [Shard(1)]),
    "parallelize_module": lambda net, mesh: parallelize_module(net, mesh, {"up": RowwiseParallel()}),
}


@pytest.mark.parametrize("shard", SHARDED.values(), ids=SHARDED)
def test_a_weight_is_not_sharded_inside_its_rows(shard, mesh):
    net = narrow()
    with pytest.raises(ValueError, match=r"int8 weight of shape \(61, 24\) is sharded by rows.*got dimension 1"):
        shard(net, mesh)
    assert isinstance(net.up.weight, Int8Weight)


def test_fsdp_leaves_weights_alone_that_it_is_told_to_ignore(mesh):
    net = narrow()
    fully_shard(
        net, mesh=mesh, ignored_params={weight for weight in net.parameters() if isinstance(weight, Int8Weight)}
    )
    assert isinstance(net.up.weight, Int8Weight)
    assert isinstance(net.up.bias, DTensor)
    assert gradients(net)["up.weight"].shape == (61, 24)


def test_taking_a_weight_apart_by_hand_gives_its_numbers():
    weight = narrow().up.weight
    assert torch.equal(torch.cat(weight.chunk(3)), weight.dequantize())
    assert torch.equal(weight.view(-1), weight.dequantize().view(-1))
    assert torch.equal(weight.view(-1)[30:40] * 2, weight.dequantize().view(-1)[30:40] * 2)


def test_groups_of_parameters_are_made_as_from_a_wide_model():
    ours, theirs = param_groups(narrow(), rank=4), param_groups(model(), rank=4)
    assert [[name for name, _ in group["params"]] for group in ours] == [
        [name for name, _ in group["params"]] for group in theirs
    ]


def test_a_group_of_zeros_has_the_least_scale():
    weight = Int8Weight.of(torch.zeros(3, 20), 8)
    assert (weight.scale == LEAST_SCALE).all()
    assert (weight.dequantize() == 0).all()


def test_an_optimizer_that_copies_its_result_is_refused_too():
    class Copying(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:
            for weight in self.param_groups[0]["params"]:
                weight.data.copy_(weight.data - 0.1 * weight.grad)

    net = narrow()
    before = weight_bits(net)
    net(TOKENS).sum().backward()
    with pytest.raises(RuntimeError, match=r"Copying cannot step an int8 weight \(61, 24\).*optimizer of apollo_optim"):
        Copying([net.up.weight], {}).step()
    Copying([net.norm.weight], {}).step()
    net.up.weight.grad = None
    torch.optim.SGD([net.norm.bias, net.up.weight.requires_grad_(False)], lr=0.0).step()  # a frozen one may be there
    changed = weight_bits(net)
    assert {name for name in before if changed[name] != before[name]} == {"norm.weight"}


def test_data_that_would_be_replaced_is_refused():
    weight = narrow().up.weight
    with pytest.raises(RuntimeError, match=r"data of an int8 weight \(61, 24\) cannot be replaced"):
        weight.data = torch.zeros(61, 24)
