"""An int8 weight is a parameter like any other to whoever reads it, copies it, saves it or compiles it."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from apollo_optim import APOLLO, APOLLOMini, param_groups
from apollo_optim.quant import Int8Weight, dequantize_weights_, quantize_weights_
from apollo_optim.quant.groups import LEAST_SCALE
from apollo_optim.train.losses import token_loss
from runs import bits


class Model(nn.Module):
    """A vocabulary, two layers whose rows no group divides, and a head."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.up = nn.Linear(24, 61)
        self.norm = nn.LayerNorm(61)
        self.down = nn.Linear(61, 24, bias=False)
        self.lm_head = nn.Linear(24, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.lm_head(hidden + self.down(torch.relu(self.norm(self.up(hidden)))))


TOKENS = torch.arange(12).view(3, 4) * 3


def model(dtype: torch.dtype = torch.float32, **options: bool) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def narrow(dtype: torch.dtype = torch.float32, **options: bool) -> Model:
    return quantize_weights_(model(dtype, **options), group_size=16)


def widened(int8: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same numbers in ordinary weights."""
    return dequantize_weights_(copy.deepcopy(int8), dtype)


def gradients(net: nn.Module, forward=None, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    net.zero_grad()
    (net if forward is None else forward)(tokens).square().sum().backward()
    return {name: weight.grad for name, weight in net.named_parameters()}


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


# What it is.


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
    assert torch.equal(weight.float() + 1, wide + 1)
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


# Copies and checkpoints.


def weight_bits(net: nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in net.state_dict().items()}


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
    wide = {name: weight.detach().float().clone() for name, weight in net.named_parameters()}
    assert dequantize_weights_(net) is net
    assert type(net.up.weight) is nn.Parameter
    assert net.up.weight.dtype == torch.bfloat16
    assert net.lm_head.weight is net.embed.weight
    for name in ("up.weight", "embed.weight"):
        assert torch.equal(net.get_parameter(name), wide[name].dequantize().bfloat16())
    assert "up.weight" in net.state_dict()
    quantize_weights_(net)
    assert "up.weight.codes" in net.state_dict()


# Compilers and checkpointing.


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_compiled_model_computes_the_same(device: str):
    torch._dynamo.reset()
    net, tokens = narrow().to(device), TOKENS.to(device)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    expected = {name: grad.clone() for name, grad in gradients(net, tokens=tokens).items()}
    torch.testing.assert_close(compiled(tokens), net(tokens))
    for name, grad in gradients(net, compiled, tokens).items():
        torch.testing.assert_close(grad, expected[name])


def test_the_compiler_makes_a_weight_whole_as_we_do():
    """Rows that end in a shorter group: torch 2.13's compiler gets another way of writing this wrong."""
    torch._dynamo.reset()
    layer = narrow(torch.bfloat16).up
    inputs = torch.eye(24, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(inputs), layer(inputs))


def test_a_compiled_model_sees_what_a_step_has_written():
    torch._dynamo.reset()
    net = narrow()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = APOLLO(net, lr=0.1, rank=4)
    first = compiled(TOKENS)
    first.square().sum().backward()
    optimizer.step()
    assert not torch.equal(compiled(TOKENS), first)
    torch.testing.assert_close(compiled(TOKENS), net(TOKENS))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool):
    net = narrow()
    expected = {name: grad.clone() for name, grad in gradients(net).items()}

    def forward(tokens: Tensor) -> Tensor:
        hidden = net.embed(tokens)
        middle = checkpoint(lambda x: net.down(torch.relu(net.norm(net.up(x)))), hidden, use_reentrant=reentrant)
        return net.lm_head(hidden + middle)

    for name, grad in gradients(net, forward).items():
        assert torch.equal(grad, expected[name])


def test_a_hugging_face_model_trains_unchanged():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    net = quantize_weights_(LlamaForCausalLM(config).to(torch.bfloat16), group_size=32)
    assert sum(isinstance(weight, Int8Weight) for weight in net.parameters()) == 2 * 7 + 2
    net.gradient_checkpointing_enable()
    optimizer = APOLLOMini(net, lr=2e-2)
    tokens = torch.randint(40, (4, 12))
    losses = []
    for _ in range(30):
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_a_language_model_loss_reads_an_int8_head(kind: str):
    net = narrow()
    wide = widened(net, torch.float32)
    hidden, labels = torch.randn(6, 24), torch.arange(6)
    losses = []
    for each in (net, wide):
        losses.append(token_loss(hidden, each.lm_head.weight, labels, kind, chunk=4))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(net.lm_head.weight.grad, wide.lm_head.weight.grad)


# What is refused.


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
    with pytest.raises(RuntimeError, match=r"would write to an int8 weight.*optimizers of apollo_optim"):
        optimizer([net.up.weight], lr=0.1, foreach=foreach).step()
    assert weight_bits(net) == before


def test_a_fused_optimizer_of_another_library_is_refused_by_name():
    net = narrow()
    net(TOKENS).sum().backward()
    with pytest.raises(RuntimeError, match="would write to an int8 weight"):
        torch.optim.AdamW([net.up.weight], lr=0.1, fused=True).step()


@pytest.fixture
def mesh():
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


SHARDED = {
    "fully_shard": lambda net, mesh: fully_shard(net.up, mesh=mesh),
    "distribute_tensor": lambda net, mesh: distribute_tensor(net.up.weight, mesh, [Shard(0)]),
    "distribute_module": lambda net, mesh: distribute_module(net.up, mesh),
    "from_local": lambda net, mesh: DTensor.from_local(net.up.weight, mesh),
    "parallelize_module": lambda net, mesh: parallelize_module(net, mesh, {"up": ColwiseParallel()}),
}


@pytest.mark.parametrize("shard", SHARDED.values(), ids=SHARDED)
def test_what_would_shard_a_wide_weight_is_refused(shard, mesh):
    net = narrow()
    with pytest.raises(
        ValueError, match=r"int8 weights cannot be sharded.*shape \(61, 24\).*step_in_backward.*dequantize"
    ):
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


def test_taking_a_weight_apart_by_hand_gives_ordinary_parts():
    weight = narrow().up.weight
    assert torch.equal(torch.cat(torch.chunk(weight, 3)), weight.dequantize())


def test_groups_of_parameters_are_made_as_from_a_wide_model():
    ours, theirs = param_groups(narrow(), rank=4), param_groups(model(), rank=4)
    assert [[name for name, _ in group["params"]] for group in ours] == [
        [name for name, _ in group["params"]] for group in theirs
    ]


def test_a_group_of_zeros_has_the_least_scale():
    weight = Int8Weight.of(torch.zeros(3, 20), 8)
    assert (weight.scale == LEAST_SCALE).all()
    assert (weight.dequantize() == 0).all()
