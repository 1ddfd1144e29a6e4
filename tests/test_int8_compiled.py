"""An int8 weight is a parameter like any other to compilers, checkpointing and models of other libraries."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apollo_optim import APOLLO, APOLLOMini
from apollo_optim.quant import Int8Weight, quantize_weights_
from apollo_optim.train.losses import token_loss
from int8_models import TOKENS, gradients, narrow, widened


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
