"""AdamW with one second moment per row: little state for embeddings and heads."""

import pytest
import torch
from torch import nn

import papers
from apollo_optim import APOLLO, APOLLOMini, optimizer_memory, param_groups
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import Int8Weight
from runs import bits, state_bytes_of, steps

BETAS = pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99)], ids=["momentum", "no momentum"])
SHAPES = pytest.mark.parametrize("shape", [(24, 40), (61, 21), (8, 4, 3, 3)], ids=str)


def built(weight: nn.Parameter, **options: object) -> ProjectedOptimizer:
    group = {"params": [("embed.weight", weight)], "rank": None, "second_moment": "rowwise"}
    return APOLLO([group], **({"lr": 0.01, "weight_decay": 0.1} | options))


@BETAS
@SHAPES
def test_every_step_is_the_papers(betas: tuple[float, float], shape: tuple[int, ...]):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    optimizer = built(weight, betas=betas)
    oracle = papers.RowwiseAdamW(papers.Settings(betas=betas))
    expected = start.flatten(1).clone()
    for step in range(6):
        steps(optimizer, range(step, step + 1))
        expected -= 0.01 * 0.1 * expected
        expected -= 0.01 * oracle.update(weight.grad.flatten(1))
        torch.testing.assert_close(weight.detach().flatten(1), expected, rtol=1e-10, atol=0)


def test_a_row_of_equal_squares_steps_as_adamw_does():
    """There the mean of a row's squares is each of them."""
    sign = torch.randint(0, 2, (24, 40), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    ours, theirs = nn.Parameter(torch.ones(24, 40)), nn.Parameter(torch.ones(24, 40))
    optimizers = built(ours), APOLLO([theirs], rank=None, lr=0.01, weight_decay=0.1)
    for step in range(4):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = sign * (step + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@BETAS
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_is_a_number_per_row_and_the_momentum_if_there_is_one(
    betas: tuple[float, float], state_dtype: torch.dtype
):
    groups = [{"params": [nn.Parameter(torch.ones(24, 40)), nn.Parameter(torch.ones(40))], "rank": None}]
    groups[0]["second_moment"] = "rowwise"
    options = {"betas": betas, "state_dtype": state_dtype}
    promised = optimizer_memory([dict(group) for group in groups], APOLLO, **options)
    optimizer = APOLLO(groups, **options)
    matrix, vector = optimizer.param_groups[0]["params"]
    matrix.grad, vector.grad = torch.ones(24, 40), torch.ones(40)
    optimizer.step()
    assert promised == state_bytes_of(optimizer)
    assert optimizer.state[matrix]["exp_avg_sq"].shape == (24,)
    assert optimizer.state[matrix]["exp_avg_sq"].dtype == torch.float32
    assert ("exp_avg" in optimizer.state[matrix]) == (betas[0] > 0)
    assert optimizer.state[vector]["exp_avg_sq"].shape == (40,)
    assert optimizer.state[vector]["exp_avg_sq"].dtype == state_dtype
    assert "exp_avg" in optimizer.state[vector]


def test_groups_of_a_model_take_it_where_nothing_is_projected():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 24)
            self.body = nn.Linear(24, 24)

    groups = param_groups(Model(), rank=4, adamw_second_moment="rowwise")
    assert [group.get("second_moment", "elementwise") for group in groups if group["rank"] is not None] == [
        "elementwise"
    ]
    assert {group["second_moment"] for group in groups if group["rank"] is None} == {"rowwise"}
    optimizer = APOLLOMini(groups)
    assert optimizer.param_groups[0]["params"][0].shape == (50, 24)


@BETAS
def test_a_run_resumes_bit_for_bit(betas: tuple[float, float]):
    whole, resumed = (built(nn.Parameter(torch.ones(24, 40, dtype=torch.bfloat16)), betas=betas) for _ in range(2))
    weight = steps(whole, range(3))
    other = resumed.param_groups[0]["params"][0]
    other.data.copy_(weight.data)
    resumed.load_state_dict(whole.state_dict())
    assert bits(steps(whole, range(3, 5))) == bits(steps(resumed, range(3, 5)))


def test_a_checkpoint_of_another_kind_of_state_is_refused():
    rowwise = built(nn.Parameter(torch.ones(24, 40)))
    elementwise = APOLLO([{"params": [("embed.weight", nn.Parameter(torch.ones(24, 40)))], "rank": None}])
    for optimizer in (rowwise, elementwise):
        steps(optimizer, range(1))
    with pytest.raises(
        ValueError, match=r"embed.weight .*: second_moment is elementwise in the checkpoint, rowwise here"
    ):
        rowwise.load_state_dict(elementwise.state_dict())
    with pytest.raises(
        ValueError, match=r"embed.weight .*: second_moment is rowwise in the checkpoint, elementwise here"
    ):
        elementwise.load_state_dict(rowwise.state_dict())


def test_momentum_cannot_be_switched_on_later():
    optimizer = built(nn.Parameter(torch.ones(24, 40)), betas=(0.0, 0.999))
    steps(optimizer, range(2))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    with pytest.raises(ValueError, match=r"the group asks for exp_avg of \(24, 40\), its state has None"):
        steps(optimizer, range(1))


def test_momentum_that_is_switched_off_is_neither_kept_nor_saved():
    optimizer, fresh = built(nn.Parameter(torch.ones(24, 40))), built(nn.Parameter(torch.ones(24, 40)))
    weight = steps(optimizer, range(2))
    optimizer.param_groups[0]["betas"] = (0.0, 0.999)
    steps(optimizer, range(2, 3))
    assert "exp_avg" not in optimizer.state[weight]
    fresh.param_groups[0]["params"][0].data.copy_(weight.data)
    fresh.load_state_dict(optimizer.state_dict())
    assert bits(steps(optimizer, range(3, 5))) == bits(steps(fresh, range(3, 5)))


def test_what_cannot_be_is_refused():
    weight = nn.Parameter(torch.ones(24, 40))
    with pytest.raises(ValueError, match=r"second_moment must be one of .*'rowwise'.*, got 'by row'"):
        APOLLO([{"params": [weight], "rank": None, "second_moment": "by row"}])
    with pytest.raises(ValueError, match=r"second_moment='rowwise' is for weights that are not projected, got rank=4"):
        APOLLO([{"params": [weight], "rank": 4, "second_moment": "rowwise"}])


def test_rows_without_a_gradient_do_not_move_without_momentum():
    """As the words that a batch does not hold, of an int8 embedding too."""
    weight = nn.Parameter(Int8Weight.of(torch.randn(24, 40, generator=torch.Generator().manual_seed(0)), 16))
    optimizer = built(weight, betas=(0.0, 0.999), weight_decay=0.0)
    start = weight.dequantize()
    for _ in range(3):
        weight.grad = torch.ones(24, 40)
        weight.grad[5:] = 0
        optimizer.step()
    assert torch.equal(weight.dequantize()[5:], start[5:])
    assert not torch.equal(weight.dequantize()[:5], start[:5])
