"""An int8 weight is a parameter like any other to whoever copies, saves, moves or exports it."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from apollo_optim.quant import Int8Weight, dequantize_weights_, quantize_weights_
from int8_models import TOKENS, Model, model, narrow, weight_bits


def test_a_copy_is_equal_and_apart():
    net = narrow(tied=True)
    net(TOKENS).sum().backward()
    other = copy.deepcopy(net)
    assert isinstance(other.up.weight, Int8Weight)
    assert isinstance(other.up.weight, nn.Parameter)
    assert other.lm_head.weight is other.embed.weight
    assert torch.equal(other.up.weight.grad, net.up.weight.grad)
    assert weight_bits(other) == weight_bits(net)
    with torch.no_grad():
        other.up.weight.copy_(torch.zeros(61, 24))
    assert weight_bits(other) != weight_bits(net)
    assert list(other.state_dict()) == list(net.state_dict())


def test_a_checkpoint_holds_plain_int8_and_scale_tensors(tmp_path):
    from safetensors.torch import load_file, save_file

    net = narrow()
    saved = net.state_dict()
    assert "up.weight" not in saved
    assert saved["up.weight.codes"].dtype == torch.int8
    assert saved["up.weight.scale"].shape == (61, 2)
    assert {type(value) for value in saved.values()} == {Tensor}
    save_file(saved, tmp_path / "model.safetensors")
    torch.save(saved, tmp_path / "model.pt")
    for loaded in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt", weights_only=True)):
        torch.manual_seed(1)
        other = quantize_weights_(Model(), group_size=16)
        assert weight_bits(other) != weight_bits(net)
        other.load_state_dict(loaded)
        assert weight_bits(other) == weight_bits(net)
        assert isinstance(other.up.weight, Int8Weight)


def test_a_checkpoint_is_assigned_to_a_model_without_memory():
    net = narrow()
    with torch.device("meta"):
        empty = quantize_weights_(Model(), group_size=16)
    empty.load_state_dict(net.state_dict(), assign=True)
    assert weight_bits(empty) == weight_bits(net)
    assert torch.equal(empty(TOKENS), net(TOKENS))


def test_a_wide_checkpoint_is_quantized_on_its_way_in():
    net = quantize_weights_(Model(), group_size=16)
    net.load_state_dict(model().state_dict())
    assert weight_bits(net) == weight_bits(narrow())


def test_a_checkpoint_that_does_not_fit_is_named():
    net, saved = narrow(), narrow().state_dict()
    other_groups = quantize_weights_(model(), group_size=8)
    with pytest.raises(
        RuntimeError, match=r"up.weight.scale is torch.float32 \(61, 2\) in the checkpoint, .*\(61, 3\)"
    ):
        other_groups.load_state_dict(saved)
    del saved["up.weight.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "up.weight.scale"\. *$'):
        net.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Unexpected"):
        model().load_state_dict(narrow().state_dict())


def test_a_parameter_and_a_model_can_be_pickled():
    net = narrow()
    stream = io.BytesIO()
    torch.save({"weight": net.up.weight}, stream)
    stream.seek(0)
    weight = torch.load(stream, weights_only=True)["weight"]
    assert isinstance(weight, Int8Weight)
    assert torch.equal(weight.codes, net.up.weight.codes)
    other = pickle.loads(pickle.dumps(net))
    assert weight_bits(other) == weight_bits(net)
    assert isinstance(other.up.weight, nn.Parameter)


def test_moving_a_model_keeps_its_codes_and_its_parameters():
    net = narrow(tied=True)
    before, weight = weight_bits(net), net.up.weight
    net(TOKENS).sum().backward()
    net.to(torch.bfloat16)
    assert net.up.weight is weight
    assert net.lm_head.weight is net.embed.weight
    assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert net(TOKENS).dtype == torch.bfloat16
    assert {name: value for name, value in weight_bits(net).items() if "weight." in name} == {
        name: value for name, value in before.items() if "weight." in name
    }
    assert isinstance(net.to("cpu").up.weight, Int8Weight)
    moved = net.to_empty(device="meta")
    assert moved.up.weight.codes.is_meta
    assert isinstance(moved.up.weight, Int8Weight)


def test_conversion_back_gives_ordinary_weights_of_the_same_numbers():
    net = narrow(tied=True)
    net.down.weight.requires_grad_(False)
    wide = {name: weight.detach().float().clone() for name, weight in net.named_parameters()}
    assert dequantize_weights_(net) is net
    assert type(net.up.weight) is nn.Parameter
    assert net.up.weight.dtype == torch.bfloat16
    assert net.lm_head.weight is net.embed.weight
    for name in ("up.weight", "embed.weight"):
        assert torch.equal(net.get_parameter(name), wide[name].dequantize().bfloat16())
    assert "up.weight" in net.state_dict()
    assert [name for name, weight in net.named_parameters() if not weight.requires_grad] == ["down.weight"]
    quantize_weights_(net)
    assert "up.weight.codes" in net.state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_safetensors_saves_and_loads_a_model_whole(tied: bool, tmp_path):
    from safetensors.torch import load_model, save_model

    net = narrow(tied=tied)
    save_model(net, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    other = quantize_weights_(Model(tied), group_size=16)
    load_model(other, tmp_path / "model.safetensors")
    assert weight_bits(other) == weight_bits(net)


@pytest.mark.parametrize("assign", [False, True])
def test_a_wide_checkpoint_gives_int8_weights_however_it_is_loaded(assign: bool):
    net = narrow()
    net.load_state_dict(model(torch.bfloat16).state_dict(), assign=assign)
    expected = narrow(torch.bfloat16)
    assert isinstance(net.up.weight, Int8Weight)
    assert torch.equal(net.up.weight.codes, expected.up.weight.codes)
    assert net.up.weight.dtype == torch.float32


@pytest.mark.parametrize("key", ["up.weight", "up.weight.scale"])
def test_a_checkpoint_that_is_not_finite_is_refused(key: str):
    net = narrow()
    saved = (model() if key == "up.weight" else narrow()).state_dict()
    saved[key] = saved[key].clone().index_fill(0, torch.tensor([1]), torch.inf)
    with pytest.raises(RuntimeError, match=r"up.weight holds a number that is not finite in the checkpoint"):
        net.load_state_dict(saved)


def test_what_was_read_can_be_copied_back_and_changes_nothing():
    """As DistributedDataParallel does when it gives every rank the first one's weights."""
    net = narrow().bfloat16()  # whose codes are not those that what is read of them would have
    before = weight_bits(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight.detach().clone().dequantize() if isinstance(weight, Int8Weight) else weight)
    assert weight_bits(net) == before


def test_a_model_can_be_shared_between_processes():
    net = narrow()
    before = weight_bits(net)
    assert not net.up.weight.is_shared()
    assert net.share_memory() is net
    assert net.up.weight.is_shared()
    assert net.up.weight.codes.is_shared()
    assert weight_bits(net) == before


def test_two_parameters_that_are_one_tensor_become_one_weight():
    net = model()
    net.lm_head.weight = nn.Parameter(net.embed.weight.data)
    quantize_weights_(net, group_size=16)
    assert net.lm_head.weight is net.embed.weight
