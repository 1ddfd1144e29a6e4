"""A small training run, by a model that has a weight of every kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear

from apollo_optim.optimizer import ProjectedOptimizer
from family import BY_NAME, Member


class Model(nn.Module):
    """A weight of every kind: tied, shared between layers, experts, norm, scalar, and one that some batches skip."""

    def __init__(self, wrap: Callable[..., Tensor] = lambda block, x: block(x)):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.up = nn.Linear(12, 24)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 12, bias=False)
        self.twice = nn.Linear(12, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 10) / 4)
        self.temperature = nn.Parameter(torch.ones(()))
        self.seldom = nn.Linear(12, 12)
        self.wrap = wrap

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(gelu(self.up(x))))

    def forward(self, tokens: Tensor, all_of_it: bool = True) -> Tensor:
        x = self.twice(self.wrap(self.block, self.embed(tokens)))
        x = self.twice(x.tanh()) + torch.einsum("ntd,edk,efk->ntf", x, self.experts, self.experts)
        x = x + self.seldom(x) if all_of_it else x
        logits = linear(x, self.embed.weight) * self.temperature
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def model_of(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """The model, the same in every run."""
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def optimizer_of(member: Member, model: nn.Module) -> ProjectedOptimizer:
    """The member over the model, with a basis that is renewed every third step."""
    group = {"params": list(model.named_parameters()), "refresh_every": 3}
    return member.build([group], lr=0.01, weight_decay=0.1)


def batch(number: int) -> Tensor:
    """Tokens, the same for this number in every run."""
    return torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: ProjectedOptimizer, steps: range) -> None:
    """The steps of these numbers by the loop people write. Every third batch does without one of the layers."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step + steps.start))
    for number in steps:
        model(batch(number), number % 3 != 1).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def one(member: Member = BY_NAME["mini"], **options: Any) -> tuple[Model, ProjectedOptimizer]:
    """The model, made with these options, and the optimizer over it."""
    model = model_of(**options)
    return model, optimizer_of(member, model)


def pair(member: Member = BY_NAME["mini"]) -> list[tuple[Model, ProjectedOptimizer]]:
    """The same model and optimizer, twice."""
    return [one(member) for _ in range(2)]
