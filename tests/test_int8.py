"""An int8 weight is a parameter like any other to whoever reads it or makes others of it."""

import pytest
import torch
from torch import Tensor, nn

from apollo_optim.quant import Int8Weight, quantize_weights_
from int8_models import TOKENS, gradients, model, narrow, widened

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
def test_a_quantized_model_reads_as_before(dtype: torch.dtype):
    net = narrow(dtype)
    for layer in (net.embed, net.up, net.down, net.lm_head):
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, Int8Weight)
        assert (weight.dtype, weight.requires_grad, weight.is_leaf) == (dtype, True, True)
        assert weight.codes.dtype == torch.int8
        assert weight.scale.shape == (len(weight), -(-weight.shape[1] // 16))
    assert type(net.norm.weight) is type(net.up.bias) is nn.Parameter
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in model().named_parameters()]


@DTYPES
def test_quantizing_moves_a_weight_by_half_a_code_at_most(dtype: torch.dtype):
    before, after = model(dtype), narrow(dtype)
    for name, weight in after.named_parameters():
        if isinstance(weight, Int8Weight):
            old = before.get_parameter(name).float()
            scale = weight.scale.repeat_interleave(16, dim=1)[:, : weight.shape[1]]
            # A scale has 16 bits: the largest element of a group is off by 2^-17 of itself, 127 codes.
            error = (weight.codes * scale - old).abs()
            assert (error <= scale * (0.5 + 127 * 2**-16)).all()
            assert weight.codes.abs().amax() == 127


@pytest.mark.parametrize("columns", [1, 7, 16, 61, 1376])
def test_a_row_may_end_in_a_shorter_group(columns: int):
    value = torch.randn(5, columns)
    weight = Int8Weight.of(value, 128)
    assert weight.scale.shape == (5, -(-columns // 128))
    for first in range(0, columns, 128):
        group = slice(first, first + 128)
        torch.testing.assert_close(
            weight.scale[:, first // 128], value[:, group].abs().amax(dim=1) / 127, rtol=2**-16, atol=0
        )


@DTYPES
def test_outputs_and_gradients_are_those_of_the_same_numbers_in_ordinary_weights(dtype: torch.dtype):
    net = narrow(dtype)
    wide = widened(net, dtype)
    assert torch.equal(net(TOKENS), wide(TOKENS))
    ours, theirs = gradients(net), gradients(wide)
    for name, grad in ours.items():
        assert type(grad) is Tensor
        assert grad.dtype == dtype
        # The same products; a library may add them up in another order.
        torch.testing.assert_close(grad, theirs[name])


def test_a_gradient_does_not_need_an_input_that_has_one():
    net = narrow()
    inputs = torch.randn(3, 24)
    net.up(inputs).sum().backward()
    torch.testing.assert_close(net.up.weight.grad, inputs.sum(dim=0).expand(61, 24))
    net.up(torch.ones(24)).sum().backward()
    torch.testing.assert_close(net.up.weight.grad, inputs.sum(dim=0).expand(61, 24) + 1)


def test_a_tied_weight_stays_one_and_gathers_both_gradients():
    net = narrow(tied=True)
    assert net.lm_head.weight is net.embed.weight
    wide = widened(net, torch.float32)
    assert wide.lm_head.weight is wide.embed.weight
    torch.testing.assert_close(gradients(net)["embed.weight"], gradients(wide)["embed.weight"])


def test_nothing_wide_is_kept_for_backward():
    net = narrow()
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        net(TOKENS)
    shapes = {(50, 24), (24, 50), (61, 24), (24, 61)}
    assert {type(tensor) for tensor in kept if tuple(tensor.shape) in shapes} == {Int8Weight}
    kept.clear()
    net.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        net.up(torch.randn(3, 24, requires_grad=True))
    # Nor the input, where it is for a weight that is not trained.
    assert [type(tensor) for tensor in kept] == [Int8Weight]


def test_operations_that_no_layer_makes_see_an_ordinary_tensor():
    net = narrow()
    weight, inputs = net.up.weight, torch.randn(3, 24)
    wide = weight.dequantize()
    assert torch.equal(inputs @ weight.t(), inputs @ wide.t())
    assert torch.equal(weight[3:5], wide[3:5])
    assert torch.equal(weight.as_strided((2, 24), (24, 1), 24), wide[1:3])
    assert torch.equal(weight.view(24, 61), wide.view(24, 61))
    assert torch.equal(weight.float() + 1, wide + 1)
    assert torch.equal(weight.int(), wide.int())
    assert weight.norm() == wide.norm()
    (inputs @ weight.T).sum().backward()
    torch.testing.assert_close(weight.grad, inputs.sum(dim=0).expand(61, 24))
    assert torch.equal(nn.functional.linear(weight, torch.eye(24)), wide)
    assert "group_size=16" in repr(weight)


def test_nothing_to_look_up_gives_nothing():
    layer = quantize_weights_(nn.Embedding(10, 16), group_size=8)
    assert layer(torch.tensor(3)).shape == (16,)
    output = layer(torch.zeros(2, 0, dtype=torch.int64))
    assert output.shape == (2, 0, 16)
    output.sum().backward()
    assert (layer.weight.grad == 0).all()
    linear = quantize_weights_(nn.Linear(16, 4), group_size=8)
    linear(torch.zeros(0, 16)).sum().backward()
    assert (linear.weight.grad == 0).all()


def test_an_embedding_keeps_its_padding_and_counts():
    torch.manual_seed(0)
    for options in ({"padding_idx": 3}, {"padding_idx": -2}, {"scale_grad_by_freq": True}):
        layer = quantize_weights_(nn.Embedding(10, 6, **options), group_size=8)
        wide = widened(layer, torch.float32)
        index = torch.tensor([[3, 3, 8], [1, 9, 8]])
        assert torch.equal(layer(index), wide(index))
        for each in (layer, wide):
            each(index).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, wide.weight.grad)
        # The function is given a negative place as it is.
        for each in (layer, wide):
            each.zero_grad()
            nn.functional.embedding(index, each.weight, padding_idx=-2).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, wide.weight.grad)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}], ids=str)
def test_an_embedding_that_writes_in_forward_or_has_sparse_gradients_is_refused(options: dict):
    layer = quantize_weights_(nn.Embedding(10, 6, **options), group_size=8)
    with pytest.raises(ValueError, match=r"takes neither max_norm .* nor sparse"):
        layer(torch.tensor([1]))


def test_autocast_computes_in_its_own_dtype():
    net = narrow()
    wide = widened(net, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = net(TOKENS), wide(TOKENS)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    for output in (ours, theirs):
        output.float().square().sum().backward()
    for name, weight in net.named_parameters():
        assert weight.grad.dtype == torch.float32
        torch.testing.assert_close(weight.grad, wide.get_parameter(name).grad, rtol=2**-7, atol=1e-2)


def test_an_index_that_no_row_has_is_refused():
    net = narrow()
    for index in (-1, 50):
        with pytest.raises(IndexError):
            net.embed(torch.tensor([index]))


def test_elements_can_be_set_and_leave_the_others_as_they_were():
    weight = narrow(torch.bfloat16).up.weight
    before = weight.dequantize()
    with torch.no_grad():
        weight[3] = 0.0
        weight[5, 2:4] = torch.tensor([0.5, -0.25])
    assert torch.equal(weight.dequantize()[3], torch.zeros(24, dtype=torch.bfloat16))
    assert weight.dequantize()[5, 2] == 0.5
    untouched = torch.ones(61, dtype=torch.bool).index_fill(0, torch.tensor([3, 5]), False)
    assert torch.equal(weight.dequantize()[untouched], before[untouched])


def test_a_group_may_be_larger_than_any_row():
    net = quantize_weights_(nn.Linear(172, 32), group_size=2**40)
    assert net.weight.scale.shape == (32, 1)
