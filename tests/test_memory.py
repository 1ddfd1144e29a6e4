"""The promise of bytes: what `optimizer_memory` says is what the state takes."""

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, APOLLOMini, GaLore, optimizer_memory, param_groups
from apollo_optim.llama import SMALL, VOCABULARY
from apollo_optim.memory import held_bytes, state_bytes
from apollo_optim.param_groups import VOCABULARY_OPTIONS
from apollo_optim.planner.models import llama_parameters
from apollo_optim.planner.paper_figures import Kept, Shapes, memory_rows
from apollo_optim.train.metrics import _state_bytes
from family import DISTINCT, FAMILY, partly_slow
from runs import state_bytes_of

SHAPES = [(), (7,), (1, 1), (1, 9), (9, 1), (9, 40), (40, 9), (16, 16), (3, 10, 24), (3, 24, 10), (8, 4, 3, 3), (0, 5)]
WEIGHTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
STATES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]

every_optimizer = pytest.mark.parametrize("member", partly_slow(FAMILY, quick=DISTINCT), ids=str)


def stepped(optimizer):
    """The optimizer after its first step, when all of its state is there."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@every_optimizer
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_state_takes_the_bytes_we_promise(member, dtype, state_dtype):
    options = member.options | {"state_dtype": state_dtype}
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    promised = optimizer_memory(SHAPES, member.optimizer, dtype=dtype, **options)
    assert promised == optimizer_memory(params, member.optimizer, **options)
    optimizer = stepped(member.optimizer(params, **options))
    assert promised == state_bytes_of(optimizer)
    by_weight = state_bytes(SHAPES, member.optimizer, dtype=dtype, **options)
    for index, weight in enumerate(params):
        kinds = {name: value.numel() * value.element_size() for name, value in optimizer.state.get(weight, {}).items()}
        assert by_weight.get(f"parameter {index}", {}) == kinds


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.conv = nn.Conv1d(12, 24, 3)
        self.norm = nn.LayerNorm(12)
        self.body = nn.Linear(12, 40)
        self.frozen = nn.Linear(40, 12).requires_grad_(False)
        self.experts = nn.Parameter(torch.ones(3, 12, 20))
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embed.weight


@every_optimizer
def test_the_promise_holds_for_a_model_and_needs_none_of_its_memory(member):
    model = Model()
    with torch.device("meta"):
        promised = optimizer_memory(member.grouped(Model()), member.optimizer, **member.options)
    assert promised == optimizer_memory(member.grouped(model), member.optimizer, **member.options)
    optimizer = member.build(model)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    optimizer.step()
    assert promised == state_bytes_of(optimizer)


@every_optimizer
def test_the_promise_holds_for_groups_and_named_parameters(member):
    rank = None if member.group else 2
    groups = [
        {"params": [nn.Parameter(torch.ones(9, 40))], "rank": rank, "state_dtype": torch.bfloat16},
        {"params": [nn.Parameter(torch.ones(9, 40))], "rank": None},
        {"params": [nn.Parameter(torch.ones(6, 10, 3))], "flatten": True},
    ]
    promised = optimizer_memory(member.grouped([dict(group) for group in groups]), member.optimizer, **member.options)
    assert promised == state_bytes_of(stepped(member.build(groups)))
    named = [("one", nn.Parameter(torch.ones(9, 40))), ("two", nn.Parameter(torch.ones(40)))]
    assert set(state_bytes(named, member.optimizer, **member.options)) == {"one", "two"}


def test_the_numbers_of_the_paper():
    # Table 1 for a weight of m x n at rank r: APOLLO 2nr + 2, GaLore 2nr + mr, Mini 2n + 2, where the paper's constant
    # counts a seed and a norm; here they take 8 and 4 bytes, and the step count 4 more.
    m, n, r = 64, 256, 16
    assert optimizer_memory([(m, n)], APOLLO, rank=r) == 4 * 2 * n * r + 8 + 4 + 4
    assert optimizer_memory([(n, m)], APOLLO, rank=r) == 4 * 2 * n * r + 8 + 4 + 4
    assert optimizer_memory([(m, n)], APOLLOMini) == 4 * 2 * n + 8 + 4 + 4
    assert optimizer_memory([(m, n)], GaLore, rank=r) == 4 * (2 * n * r + m * r) + 8 + 4
    assert optimizer_memory([(m, n)], rank=None) == 4 * 2 * m * n + 8 + 4


def test_frozen_weights_are_promised_nothing():
    assert state_bytes([nn.Parameter(torch.ones(9, 40), requires_grad=False)]) == {}


@pytest.mark.parametrize("int8", [None, "layers", "all"])
@pytest.mark.parametrize("vocabulary", VOCABULARY_OPTIONS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=str)
def test_the_command_counts_what_an_int8_model_and_its_state_take(int8, vocabulary, state_dtype):
    pytest.importorskip("transformers")
    from apollo_optim.train.model import Model as Config
    from apollo_optim.train.model import built_model

    small = SMALL["1m"]  # its rows of 344 end in a shorter group
    kept = Kept(torch.bfloat16, state_dtype, int8, vocabulary)
    shapes = Shapes(llama_parameters(small), VOCABULARY, small.hidden)
    (row,) = memory_rows({"60m": shapes}, ["apollo-mini"], None, kept)
    model = built_model(Config(model="1m", dtype="bf16", int8=int8), SMALL["1m"].vocabulary, "cpu", seed=0)
    held = model.state_dict().values()
    assert row.weights == sum(tensor.numel() * tensor.element_size() for tensor in held)
    groups = param_groups(model, rank=1, vocabulary=vocabulary)
    assert row.state["adamw"] == state_bytes_of(stepped(APOLLOMini(groups, state_dtype=state_dtype)))
    assert row.paper == ()


def test_state_that_others_keep_in_8_bits_is_counted_so():
    """torchao's calls itself float32."""
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    weight = nn.Parameter(torch.ones(64, 256))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"exp_avg": subclass.OptimState8bit.zeros((64, 256), block_size=256)}
    codes, scales, values = 64 * 256, 4 * 64, 4 * 256
    assert held_bytes(optimizer) == _state_bytes(optimizer) == codes + scales + values
