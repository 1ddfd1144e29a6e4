"""Weights that are not projected by Adafactor: a second moment per row and one per column, no momentum."""

import copy
import math

import pytest
import torch
from torch import nn

import papers
from apollo_optim import (
    APOLLO,
    APOLLOMini,
    Artemis,
    ArtemisMini,
    FactoredAdamW,
    Flora,
    optimizer_memory,
    param_groups,
    step_in_backward,
)
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.param_groups import Vocabulary
from apollo_optim.quant import Int8Weight
from runs import bits, gradient, state_bytes_of, steps

BETAS = pytest.mark.parametrize("betas", [(0.0, 0.98), (0.9, 0.98)], ids=["no momentum", "momentum"])
SHAPE = 24, 40


def built(weight: nn.Parameter, optimizer: type[ProjectedOptimizer] = APOLLOMini, **options: object):
    """Mini, because its scale is far from 1, and must not be applied."""
    own = {name: options.pop(name) for name in ("betas",) if name in options}
    group = {"params": [("embed.weight", weight)], "rank": None, "second_moment": "factored", **own}
    return optimizer([group], **({"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.98)} | options))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


class Words(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.norm = nn.LayerNorm(24)
        self.body = nn.Linear(24, 24)
        self.lm_head = nn.Linear(24, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.norm(self.embed(tokens))))


@BETAS
@pytest.mark.parametrize("shape", [(24, 40), (61, 21), (3, 9, 14), (8, 4, 3, 3)], ids=str)
def test_every_step_is_the_papers_also_where_it_is_clipped(betas: tuple[float, float], shape: tuple[int, ...]):
    weight = nn.Parameter(normal(*shape, dtype=torch.float64))
    optimizer = built(weight, betas=betas)
    settings = papers.Settings(betas=betas)
    theirs = papers.Weight(weight.detach(), lambda _: papers.Adafactor(settings), lr=0.01, weight_decay=0.1)
    for step in range(8):
        # The sixth has ten times the size of what its averages know.
        weight.grad = gradient("embed", step, weight) * (10.0 if step == 5 else 1.0)
        optimizer.step()
        theirs.step(weight.grad)
        torch.testing.assert_close(weight.detach(), theirs.value, rtol=1e-10, atol=0)


def test_an_update_is_no_larger_than_one():
    weight = nn.Parameter(torch.zeros(SHAPE))
    optimizer = built(weight, lr=1.0, weight_decay=0.0)
    for step in range(6):
        before = weight.detach().clone()
        weight.grad = gradient("embed", step, weight) * 10.0**step
        optimizer.step()
        size = float((weight.detach() - before).square().mean().sqrt())
        assert size == pytest.approx(1.0, rel=1e-5) if step > 0 else size <= 1 + 1e-5


def test_state_is_a_number_for_each_row_and_column():
    group = {"params": [nn.Parameter(torch.ones(SHAPE)), nn.Parameter(torch.ones(40))], "rank": None}
    group["second_moment"] = "factored"
    for state_dtype in (torch.float32, torch.bfloat16, torch.int8):
        promised = optimizer_memory([dict(group)], APOLLO, state_dtype=state_dtype)
        optimizer = APOLLO([copy.deepcopy(group)], state_dtype=state_dtype)
        matrix, vector = optimizer.param_groups[0]["params"]
        matrix.grad, vector.grad = torch.ones(SHAPE), torch.ones(40)
        optimizer.step()
        assert promised == state_bytes_of(optimizer)
        kept = {name: (tuple(value.shape), value.dtype) for name, value in optimizer.state[matrix].items()}
        assert kept.keys() == {"step", "seed", "exp_avg_sq_side", "exp_avg_sq_channel"}
        assert kept["exp_avg_sq_side"] == ((24,), torch.float32)
        assert kept["exp_avg_sq_channel"] == ((40,), torch.float32)
        assert optimizer.state[vector]["exp_avg_sq"].shape == (40,)  # a vector has no rows and columns: AdamW


def test_a_vocabulary_that_a_group_without_rank_names_is_factored_like_the_rest_of_it():
    weight = nn.Parameter(torch.ones(SHAPE))
    group = {"params": [("embed", weight)], "rank": None, "second_moment": "factored", "vocabulary": (40,)}
    optimizer = APOLLO([group])
    steps(optimizer, range(1))
    assert optimizer.state[weight].keys() == {"step", "seed", "exp_avg_sq_side", "exp_avg_sq_channel"}


def test_a_group_with_betas_of_its_own_has_momentum():
    weight = nn.Parameter(torch.ones(SHAPE))
    optimizer = built(weight, betas=(0.9, 0.98))
    steps(optimizer, range(1))
    assert optimizer.state[weight]["exp_avg"].shape == SHAPE
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)
    assert built(nn.Parameter(torch.ones(SHAPE))).param_groups[0]["betas"] == (0.0, 0.98)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_rows_that_never_get_a_gradient_stay_as_they_were(dtype: torch.dtype):
    """As the padding of a vocabulary, with the smallest eps that there is; and columns likewise."""
    value = normal(*SHAPE)
    weight = nn.Parameter(Int8Weight.of(value, 16) if dtype == torch.int8 else value.to(dtype))
    optimizer = built(weight, weight_decay=0.0, eps=0.0)
    start = (weight.dequantize() if dtype == torch.int8 else weight).detach().clone()
    for step in range(4):
        weight.grad = gradient("embed", step, start).to(weight.dtype)
        weight.grad[5:] = 0
        weight.grad[:, :16] = 0
        optimizer.step()
    end = (weight.dequantize() if dtype == torch.int8 else weight).detach()
    assert torch.equal(end[5:], start[5:])
    assert torch.equal(end[:, :16], start[:, :16])
    assert (end[:5, 16:] != start[:5, 16:]).float().mean() > 0.9


def test_zeros_move_nothing_before_and_after_gradients():
    weight = nn.Parameter(normal(*SHAPE))
    optimizer = built(weight, weight_decay=0.0, eps=0.0)
    for number, grad in enumerate([torch.zeros(SHAPE), torch.ones(SHAPE), torch.zeros(SHAPE)]):
        before = weight.detach().clone()
        weight.grad = grad
        optimizer.step()
        assert torch.equal(weight.detach(), before) == (number != 1)
    assert bool(weight.isfinite().all())


@BETAS
@pytest.mark.parametrize("second_moment", ["factored", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_gradient_that_is_not_finite_leaves_weight_and_state_as_they_were(
    betas: tuple[float, float], dtype: torch.dtype, second_moment: str
):
    weight = nn.Parameter(Int8Weight.of(normal(*SHAPE), 16) if dtype == torch.int8 else normal(*SHAPE).to(dtype))
    optimizer = APOLLO([{"params": [weight], "rank": None, "betas": betas, "second_moment": second_moment}])
    weight.grad = torch.ones(SHAPE, dtype=weight.dtype)
    optimizer.step()
    before = bits(weight.dequantize() if dtype == torch.int8 else weight)
    state = {name: bits(value) for name, value in optimizer.state[weight].items()}
    weight.grad[3, 4] = math.nan
    optimizer.step()
    assert bits(weight.dequantize() if dtype == torch.int8 else weight) == before
    assert {name: bits(value) for name, value in optimizer.state[weight].items()} == state
    assert optimizer.skipped() == 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_vocabulary_of_a_model_has_groups_of_its_own(tied: bool):
    model = Words(tied)
    groups = param_groups(model, rank=4, lr=0.01, adamw_lr=0.003, vocabulary="factored", vocabulary_lr=0.002)
    by_name = {name: group for group in groups for name, _ in group["params"]}
    words = {"embed.weight"} if tied else {"embed.weight", "lm_head.weight"}
    assert {name for name, group in by_name.items() if group.get("second_moment") == "factored"} == words
    assert {group["lr"] for name, group in by_name.items() if name in words} == {0.002}
    assert by_name["norm.weight"]["lr"] == 0.003
    assert by_name["body.weight"]["lr"] == 0.01
    optimizer = APOLLO(groups, betas=(0.8, 0.95))
    assert {group["betas"] for group in optimizer.param_groups if group["lr"] == 0.002} == {(0.0, 0.95)}
    assert {group["betas"] for group in optimizer.param_groups if group["lr"] != 0.002} == {(0.8, 0.95)}
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    assert optimizer.state[model.embed.weight].keys() == {"step", "seed", "exp_avg_sq_side", "exp_avg_sq_channel"}
    assert "exp_avg_sq" in optimizer.state[model.norm.weight]


OURS = pytest.mark.parametrize(("member", "ratio"), [(FactoredAdamW, 1.6), (Artemis, 0.4), (ArtemisMini, 0.4)])


@OURS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_our_own_members_factor_the_vocabulary_of_a_model(member: type[ProjectedOptimizer], ratio: float, tied: bool):
    models = Words(tied), Words(tied)
    models[1].load_state_dict(models[0].state_dict())
    groups = param_groups(models[1], vocabulary="factored", vocabulary_lr=ratio * 0.02)
    for model, optimizer in zip(models, (member(models[0], lr=0.02), member(groups, lr=0.02)), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(7)).square().sum().backward()
            optimizer.step()
        assert "exp_avg_sq_side" in optimizer.state[model.embed.weight]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@OURS
def test_what_is_said_of_the_vocabulary_comes_before_a_members_own(member: type[ProjectedOptimizer], ratio: float):
    def words(**grouping: object) -> tuple[object, object]:
        (group,) = (
            group for group in member.groups_of(Words(), 0.02, **grouping) if "embed.weight" in dict(group["params"])
        )
        return group.get("second_moment"), group.get("lr")

    assert words() == ("factored", ratio * 0.02)
    assert words(vocabulary_lr=0.001) == ("factored", 0.001)
    assert words(adamw_lr=0.003) == ("factored", 0.003)
    assert words(vocabulary="adamw") == (None, None)
    assert words(adamw_second_moment="rowwise", adamw_lr=0.003) == ("rowwise", 0.003)


@OURS
def test_a_model_without_a_vocabulary_is_not_asked_for_one(member: type[ProjectedOptimizer], ratio: float):
    frozen = Words()
    frozen.embed.requires_grad_(False)
    frozen.lm_head.requires_grad_(False)
    for model in (nn.Linear(24, 40), frozen):
        assert len(member(model).param_groups) == len(member(param_groups(model)).param_groups)
    with pytest.raises(ValueError, match="no trainable embedding or head that is not projected"):
        member.groups_of(frozen, 0.02, vocabulary_lr=0.001)
    with pytest.raises(ValueError, match=r"^lr must be a number >= 0.*, got 'fast'"):
        member.groups_of(Words(), "fast")


def test_a_model_given_to_the_papers_members_leaves_its_vocabulary_to_adamw():
    for member in (APOLLO, APOLLOMini, Flora):
        assert {group["second_moment"] for group in member(Words()).param_groups if group["rank"] is None} == {
            "elementwise"
        }


def test_betas_of_all_groups_give_the_vocabulary_the_second():
    groups = param_groups(Words(), rank=4, vocabulary="factored", betas=(0.9, 0.95))
    assert {group["betas"] for group in groups} == {(0.0, 0.95), (0.9, 0.95)}


def test_other_options_of_a_vocabulary():
    rowwise = {g.get("second_moment") for g in param_groups(Words(), rank=4, vocabulary="rowwise") if g["rank"] is None}
    assert rowwise == {None, "rowwise"}
    own_rate = [group for group in param_groups(Words(), lr=0.01, vocabulary_lr=0.002) if group.get("lr") == 0.002]
    assert [name for group in own_rate for name, _ in group["params"]] == ["embed.weight", "lm_head.weight"]
    assert "second_moment" not in own_rate[0]
    whole = param_groups(Words(), rank=None, vocabulary="factored")  # AdamW on all else
    factored = [name for g in whole if g.get("second_moment") == "factored" for name, _ in g["params"]]
    assert factored == ["embed.weight", "lm_head.weight"]


def test_a_convolution_that_is_not_projected_is_one_matrix():
    (group,) = param_groups(nn.Conv1d(4, 8, 3, bias=False), rank=None, adamw_second_moment="factored")
    optimizer = APOLLO([group])
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq_side"].shape == (8,)
    assert optimizer.state[weight]["exp_avg_sq_channel"].shape == (12,)


def test_a_vocabulary_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"vocabulary must be one of .*'factored'.*, got 'by rows'"):
        param_groups(Words(), vocabulary="by rows")
    with pytest.raises(ValueError, match="no trainable embedding or head that is not projected"):
        param_groups(nn.Linear(24, 40), vocabulary="factored")
    with pytest.raises(ValueError, match="no trainable embedding or head that is not projected"):
        param_groups(Words(), exclude=(), vocabulary_lr=0.1)
    with pytest.raises(ValueError, match=r"vocabulary_lr must be a number >= 0.*, got -1"):
        param_groups(Words(), vocabulary_lr=-1.0)
    with pytest.raises(ValueError, match=r"adamw_second_moment must be one of .*'factored'.*, got 'by rows'"):
        param_groups(Words(), adamw_second_moment="by rows")


def test_flora_steps_what_it_does_not_project_by_adamw():
    """Its own second moment is factored, too."""
    model = Words()
    optimizer = Flora(model, rank=4)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    assert "exp_avg_sq_side" in optimizer.state[model.body.weight]
    assert optimizer.state[model.embed.weight].keys() == {"step", "seed", "exp_avg", "exp_avg_sq"}
    (mine,) = [group for group in optimizer.param_groups if model.embed.weight in set(group["params"])]
    assert mine["second_moment"] == "elementwise"


def test_a_checkpoint_of_flora_from_before_goes_on_as_adamw():
    """Its groups that are not projected were said to be factored."""
    torch.manual_seed(0)
    model = Words()
    first = Flora(model, rank=4)
    model(torch.arange(7)).square().sum().backward()
    first.step()
    twin = copy.deepcopy(model)
    second = Flora(twin, rank=4)
    saved = first.state_dict()
    for group in saved["param_groups"]:
        group["second_moment"] = "factored"
    second.load_state_dict(saved)
    for each, optimizer in ((model, first), (twin, second)):
        optimizer.zero_grad()
        each(torch.arange(7)).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(first._weights(), second._weights(), strict=True):
        assert bits(ours) == bits(theirs)


def test_a_checkpoint_from_before_the_first_step_stays_factored():
    saved, optimizer = (built(nn.Parameter(torch.ones(SHAPE))) for _ in range(2))
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["second_moment"] == "factored"


@BETAS
def test_a_run_resumes_bit_for_bit(betas: tuple[float, float]):
    whole, resumed = (built(nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16)), betas=betas) for _ in range(2))
    weight = steps(whole, range(3))
    resumed.param_groups[0]["params"][0].data.copy_(weight.data)
    resumed.load_state_dict(whole.state_dict())
    assert bits(steps(whole, range(3, 5))) == bits(steps(resumed, range(3, 5)))


def test_a_checkpoint_of_another_kind_of_state_is_refused():
    factored = built(nn.Parameter(torch.ones(SHAPE)))
    elementwise = APOLLOMini([{"params": [("embed.weight", nn.Parameter(torch.ones(SHAPE)))], "rank": None}])
    for optimizer in (factored, elementwise):
        steps(optimizer, range(1))
    with pytest.raises(ValueError, match=r"embed.weight .*: second_moment is elementwise in the checkpoint, factored"):
        factored.load_state_dict(elementwise.state_dict())
    with pytest.raises(ValueError, match=r"embed.weight .*: second_moment is factored in the checkpoint, elementwise"):
        elementwise.load_state_dict(factored.state_dict())


def test_it_may_be_captured_and_steps_as_on_the_host():
    host, device = (built(nn.Parameter(normal(*SHAPE)), capturable=capturable) for capturable in (False, True))
    assert bits(steps(host, range(5))) == bits(steps(device, range(5)))


@pytest.mark.parametrize("vocabulary", ["factored", "factored-adamw"])
def test_stepping_in_backward_is_the_same_step(vocabulary: Vocabulary):
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = Words(tied=True)
        optimizer = APOLLO(param_groups(model, rank=4, vocabulary=vocabulary), lr=0.01)
        if in_backward:
            step_in_backward(model, optimizer)
        for step in range(3):
            model(torch.arange(step, 9 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([bits(weight) for weight in model.parameters()])
    assert ends[0] == ends[1]


class Pair:
    """A weight that kernels step, and its twin in plain PyTorch."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, **options: object):
        self.optimizers: list[ProjectedOptimizer] = []
        self.weights: list[nn.Parameter] = []
        for fused in (True, False):
            value = normal(*shape).to(device)
            weight = nn.Parameter(Int8Weight.of(value, 128) if dtype == torch.int8 else value.to(dtype))
            group = {"params": [("embed.weight", weight)], "rank": None, "second_moment": "factored"}
            self.weights.append(weight)
            self.optimizers.append(APOLLOMini([group], **({"lr": 0.01, "weight_decay": 0.1, "fused": fused} | options)))

    def step(self, grad: torch.Tensor) -> None:
        for weight, optimizer in zip(self.weights, self.optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [(w.dequantize() if isinstance(w.data, Int8Weight) else w).detach().float() for w in self.weights]

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [optimizer.state[weight] for optimizer, weight in zip(self.optimizers, self.weights, strict=True)]

    def assert_same(self, most_apart: float) -> None:
        """Sums in another order err by 1e-6 at most; a narrow weight may fall to the other side in a few places."""
        ours, theirs = self.values()
        near = (ours - theirs).abs() <= 1e-5 * (1 + theirs.abs())
        assert (~near).float().mean() <= most_apart
        for name, value in self.states()[1].items():
            torch.testing.assert_close(self.states()[0][name], value, rtol=1e-5, atol=0, msg=name)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
# One tile; several down and across, the last ones short; and a convolution.
TILES = pytest.mark.parametrize("shape", [(37, 53), (130, 40), (9, 1040), (8, 4, 3, 3)], ids=str)


@pytest.mark.usefixtures("kernels")
@DEVICES
@TILES
def test_kernels_step_as_plain_pytorch(device: str, shape: tuple[int, ...]):
    pair = Pair(shape, torch.float32, device, eps=0.1)
    for step in range(4):
        grad = gradient("embed", step, pair.weights[0]) * (30.0 if step == 2 else 1.0)
        grad[3] = 0
        pair.step(grad)
    pair.assert_same(0.0)


@pytest.mark.usefixtures("kernels")
@DEVICES
def test_kernels_add_up_sums_of_many_blocks(device: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("batches", "launches"):
        monkeypatch.setattr(f"apollo_optim.fused.{module}.COMBINE_BLOCK", 2)
    pair = Pair((130, 5), torch.float32, device)
    grad = gradient("embed", 0, pair.weights[0])
    grad[100, 3] = 300  # by which all others are clipped
    pair.step(grad)
    pair.assert_same(0.0)


@pytest.mark.usefixtures("kernels")
@DEVICES
def test_kernels_move_nothing_by_zeros_before_and_after_gradients(device: str):
    pair = Pair((12, 24), torch.float32, device, weight_decay=0.0, eps=0.0)
    start = pair.values()[0].clone()
    for number, factor in enumerate((0, 0, 1, 0)):
        before = pair.values()[0].clone()
        pair.step(gradient("embed", number, start) * factor)
        assert torch.equal(pair.values()[0], before) == (factor == 0)
    pair.assert_same(0.0)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_kernels_step_narrow_weights_as_plain_pytorch(device: str, dtype: torch.dtype):
    pair = Pair((70, 256), dtype, device, capturable=True, maximize=True)
    for step in range(3):
        pair.step(gradient("embed", step, pair.values()[0]).to(pair.weights[0].dtype))
    pair.assert_same(0.01)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy reports what is made of such squares
@DEVICES
@pytest.mark.parametrize(("rest", "one"), [(1.0, math.inf), (1.8e18, 1.8e18)], ids=["one", "all squares together"])
def test_kernels_leave_all_as_it_was_where_a_gradient_is_not_finite(device: str, rest: float, one: float):
    pair = Pair((70, 24), torch.float32, device)
    pair.step(torch.ones(70, 24, device=device))
    before = [bits(pair.weights[0]), *(bits(value) for name, value in pair.states()[0].items() if name != "step")]
    bad = torch.full((70, 24), rest, device=device)
    bad[66, 20] = one
    pair.step(bad)
    assert [bits(pair.weights[0]), *(bits(v) for n, v in pair.states()[0].items() if n != "step")] == before
    assert pair.optimizers[0].skipped() == 1


@pytest.mark.usefixtures("kernels")
@DEVICES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("member", [APOLLO, APOLLOMini, Artemis, ArtemisMini, Flora])
def test_a_vocabulary_by_factored_adamw_is_stepped_as_by_that(
    member: type[ProjectedOptimizer], fused: bool, device: str
):
    """Bit for bit, whatever the rule beside it; FactoredAdamW itself is held against the papers."""
    model, twin = (Words().to(device, torch.bfloat16) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    words, same = ([(f"{n}.weight", getattr(each, n).weight) for n in ("embed", "lm_head")] for each in (model, twin))
    groups = param_groups(model, vocabulary="factored-adamw", vocabulary_lr=0.03)
    pair = (
        member(groups, lr=0.02, weight_decay=0.1, fused=fused),
        FactoredAdamW(same, lr=0.03, weight_decay=0.1, fused=fused),
    )
    for step in range(3):
        for (name, weight), (_, other) in zip(words, same, strict=True):
            weight.grad = gradient(name, step, weight)
            other.grad = weight.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for (_, weight), (_, other) in zip(words, same, strict=True):
        assert bits(weight) == bits(other)
        held, expected = (
            {n: bits(v) for n, v in o.state[w].items()} for o, w in zip(pair, (weight, other), strict=True)
        )
        assert held == expected
        assert "exp_avg_scale" in held  # of codes in 4 bits


def test_what_is_said_of_all_groups_is_said_of_a_vocabulary_by_factored_adamw():
    groups = param_groups(Words(), vocabulary="factored-adamw", betas=(0.8, 0.95), state_dtype=torch.int8)
    assert {(group["betas"], group["state_dtype"]) for group in groups} == {((0.8, 0.95), torch.int8)}
    (words,) = (group for group in groups if group.get("second_moment") == "factored")
    assert [name for name, _ in words["params"]] == ["embed.weight", "lm_head.weight"]


def test_4_bits_are_too_few_for_moments_of_adamw():
    with pytest.raises(ValueError, match="state_dtype='nf4' is for the momentum of Artemis and FactoredAdamW"):
        APOLLO([{"params": Words().parameters(), "rank": None, "state_dtype": "nf4"}])


def test_what_has_no_kernel_says_so():
    weight = nn.Parameter(torch.ones(3, 9, 14))
    optimizer = built(weight, fused=True)
    weight.grad = torch.ones(3, 9, 14)
    with pytest.raises(RuntimeError, match="no kernel for second_moment='factored' on experts"):
        optimizer.step()
