"""A small model whose weights are int8, and the same numbers in ordinary weights."""

import copy

import torch
from torch import Tensor, nn

from apollo_optim.quant import dequantize_weights_, quantize_weights_
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


def weight_bits(net: nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in net.state_dict().items()}
