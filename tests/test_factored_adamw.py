"""`FactoredAdamW`: its step is held to the papers by test_papers.py, its shards to the whole by test_sharded.py."""

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, Artemis, FactoredAdamW, Flora, optimizer_memory, param_groups, step_in_backward
from apollo_optim.quant import Int8Weight
from apollo_optim.state import matrices_of
from apollo_optim.variants import SharedOptions
from runs import bits, gradient, state_bytes_of

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
STATE_DTYPES = pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8", "nf4"])


def trained(weight: nn.Parameter, steps: int, **options: object) -> FactoredAdamW:
    """The optimizer once the weight has been stepped by gradients of which one is much larger, and a row is zero."""
    shared: SharedOptions = options  # pyrefly: ignore
    optimizer = FactoredAdamW([("weight", weight)], lr=0.01, weight_decay=0.1, **shared)
    for step in range(steps):
        grad = gradient("weight", step, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))
        grad[3] = 0
        weight.grad = grad * (30 if step == 2 else 1)
        optimizer.step()
    return optimizer


def weight_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> nn.Parameter:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    return nn.Parameter(Int8Weight.of(value, 128) if dtype == torch.int8 else value.to(dtype))


def value_of(weight: nn.Parameter) -> torch.Tensor:
    return (weight.dequantize() if isinstance(weight.data, Int8Weight) else weight).detach().float()


@pytest.mark.usefixtures("kernels")
@DEVICES
@STATE_DTYPES
# Rows of whole blocks, of one and a bit that is odd, fewer of them than columns, and a convolution.
@pytest.mark.parametrize("shape", [(24, 128), (40, 129), (9, 300), (8, 4, 3, 3)], ids=str)
def test_kernels_step_as_plain_pytorch(shape: tuple[int, ...], state_dtype: str, device: str):
    weights = [weight_of(shape, torch.float32, device) for _ in range(2)]
    fused, plain = (
        trained(weight, 4, state_dtype=state_dtype, fused=on) for weight, on in zip(weights, (True, False), strict=True)
    )
    ours, theirs = (dict(each.state[weight]) for each, weight in zip((fused, plain), weights, strict=True))
    # Sums in another order can take a number across the middle between two codes, and bend what follows by as much.
    codes, others = ours.pop("exp_avg"), theirs.pop("exp_avg")
    if state_dtype == "float32":
        torch.testing.assert_close(codes, others, rtol=1e-5, atol=1e-7)
    else:
        assert (codes != others).float().mean() < 0.002
    torch.testing.assert_close(value_of(weights[0]), value_of(weights[1]), rtol=1e-4, atol=2e-5)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=0, msg=name)


@pytest.mark.usefixtures("kernels")
@DEVICES
@pytest.mark.parametrize("state_dtype", ["float32", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_kernels_step_narrow_weights_as_plain_pytorch(dtype: torch.dtype, state_dtype: str, device: str):
    weights = [weight_of((36, 256), dtype, device) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        trained(weight, 3, state_dtype=state_dtype, fused=fused, capturable=True, maximize=True)
    ours, theirs = map(value_of, weights)
    assert (ours != theirs).float().mean() < 0.01
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("kernels")
@DEVICES
@pytest.mark.parametrize("columns", [208, 150])
def test_a_group_that_is_not_full_needs_no_eps(columns: int, device: str):
    """The step of what fills it up in thought is 0 / 0 then, of which its scale is not to become NaN."""
    weights = [weight_of((9, columns), torch.int8, device) for _ in range(2)]
    for weight, fused in zip(weights, (True, False), strict=True):
        optimizer = FactoredAdamW([weight], lr=0.01, eps=0.0, state_dtype="int8", fused=fused)
        weight.grad = gradient("weight", 0, value_of(weight))
        optimizer.step()
    torch.testing.assert_close(*map(value_of, weights), rtol=0.02, atol=0.03)  # one code of 127 up or down


@pytest.mark.usefixtures("kernels")
@DEVICES
@pytest.mark.parametrize("shape", [(600, 8), (5, 4200)], ids=str)
def test_sums_of_any_number_of_tiles_are_added_up(shape: tuple[int, int], device: str):
    """More than are added up at once: tiles are 64 x 512."""
    weights = [weight_of(shape, torch.float32, device) for _ in range(2)]
    ours, theirs = (
        trained(weight, 1, state_dtype="nf4", fused=on).state[weight]
        for weight, on in zip(weights, (True, False), strict=True)
    )
    for name in ("exp_avg_sq_side", "exp_avg_sq_channel"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=0)


@pytest.mark.usefixtures("kernels")
@DEVICES
@STATE_DTYPES
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(fused: bool, state_dtype: str, device: str):
    weight = weight_of((24, 40), torch.float32, device)
    optimizer = trained(weight, 2, state_dtype=state_dtype, fused=fused)
    before = [bits(weight), *(bits(value) for name, value in optimizer.state[weight].items() if name != "step")]
    weight.grad = torch.ones_like(weight)
    weight.grad[20, 30] = torch.nan
    optimizer.step()
    assert [bits(weight), *(bits(v) for n, v in optimizer.state[weight].items() if n != "step")] == before
    assert optimizer.skipped() == 1


def test_a_matrix_keeps_half_a_byte_a_number_and_what_stands_beside():
    weight = nn.Parameter(torch.ones(61, 300))
    optimizer = trained(weight, 1)
    kept = {name: (tuple(value.shape), value.dtype) for name, value in optimizer.state[weight].items()}
    assert kept == {
        "step": ((), torch.float32), "seed": ((), torch.int64),
        "exp_avg": ((61, 150), torch.uint8), "exp_avg_scale": ((61, 3), torch.float32),
        "exp_avg_sq_side": ((61,), torch.float32), "exp_avg_sq_channel": ((300,), torch.float32),
    }  # fmt: skip
    assert optimizer_memory([weight], FactoredAdamW) == state_bytes_of(optimizer)
    layers = nn.Linear(4096, 11008, bias=False, device="meta")
    assert optimizer_memory(layers, FactoredAdamW) / optimizer_memory(layers, APOLLO, rank=None) < 0.07


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.body = nn.Linear(24, 32)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.body(self.embed(tokens))))


def test_what_a_model_has_beside_matrices_keeps_wide_moments():
    model = Words()
    optimizer = FactoredAdamW(param_groups(model))
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    kept = {name: optimizer.state[weight]["exp_avg"].dtype for name, weight in model.named_parameters()}
    assert kept.pop("body.weight") == torch.uint8
    assert set(kept.values()) == {torch.float32}
    factored = FactoredAdamW(model)
    model(torch.arange(9)).square().sum().backward()
    factored.step()
    assert "exp_avg" not in factored.state[model.embed.weight]
    assert optimizer_memory(model, FactoredAdamW) == state_bytes_of(factored)


@pytest.mark.parametrize("fused", [True, False])
def test_a_vocabulary_that_a_group_names_is_left_to_adamw(fused: bool):
    starts = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((300, 8), (8, 24))]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    group = {"params": ours, "vocabulary": (300,)}
    optimizer, adamw = (
        FactoredAdamW([group], lr=0.01, fused=fused),
        torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.98), weight_decay=0),
    )
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = gradient("weight", step, mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    kept = [set(optimizer.state[weight]) - {"step", "seed"} for weight in ours]
    assert kept == [{"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_scale", "exp_avg_sq_side", "exp_avg_sq_channel"}]
    assert optimizer_memory([dict(group)], FactoredAdamW) == state_bytes_of(optimizer)


@pytest.mark.parametrize("group", [{}, {"rank": 2}], ids=str)
def test_it_is_of_full_rank_whatever_a_group_says(group: dict[str, object]):
    """So that the host, which looks at a gradient where a basis is renewed, never waits for one."""
    optimizer = FactoredAdamW([{"params": [nn.Parameter(torch.ones(24, 40))], **group}])
    shape = matrices_of((24, 40), optimizer.param_groups[0])
    assert shape is not None
    assert shape.full_rank


def test_a_rank_of_a_group_changes_nothing():
    ends = []
    for options in ({}, {"rank": 2, "refresh_every": 3}):
        weight = weight_of((24, 40), torch.float32, "cpu")
        optimizer = FactoredAdamW([{"params": [weight], **options}])
        weight.grad = gradient("weight", 0, weight)
        optimizer.step()
        ends.append(bits(weight))
    assert ends[0] == ends[1]


def test_stepping_in_backward_and_resuming_are_the_same_steps(tmp_path):
    ends = []
    for way in ("whole", "in backward", "resumed"):
        torch.manual_seed(0)
        model = Words()
        optimizer = FactoredAdamW(model, lr=0.01)
        if way == "in backward":
            step_in_backward(model, optimizer)
        for step in range(4):
            if way == "resumed" and step == 2:
                torch.save(optimizer.state_dict(), tmp_path / "state.pt")
                optimizer = FactoredAdamW(model, lr=0.01)
                optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            model(torch.arange(step, 9 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([bits(weight) for weight in model.parameters()])
    assert ends[0] == ends[1] == ends[2]


def test_scales_and_four_bits_are_refused_where_they_mean_nothing():
    weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"scale=2.0 cannot go with second_moment='factored'.* Use scale=1.0"):
        Flora([weight], projection="identity", scale=2.0)
    with pytest.raises(ValueError, match="state_dtype='nf4' is for the momentum of Artemis and FactoredAdamW"):
        APOLLO([weight], projection="identity", granularity="element", state_dtype="nf4")
    for options, told in (
        ({"scale": 2.0}, r"scale=2.0 cannot go with .* as FactoredAdamW has them.* Use scale=1.0, and lr"),
        ({"second_moment": "elementwise"}, r"projection='identity', second_moment='elementwise', where 4 bits are"),
        ({"granularity": "channel"}, r"got granularity='channel', projection='identity', second_moment='factored'"),
    ):
        with pytest.raises(ValueError, match=told):
            FactoredAdamW([{"params": [weight], **options}])


def test_the_checkpoint_of_another_optimizer_is_refused_by_what_tells_them_apart():
    weight = nn.Parameter(torch.ones(24, 40))
    optimizer, others = FactoredAdamW([weight]), (APOLLO([weight], rank=4), Flora([weight], rank=4), Artemis([weight]))
    told = "projection is gaussian", "projection is gaussian", "granularity is spectral"
    for other, option in zip(others, told, strict=True):
        with pytest.raises(
            ValueError, match=rf"parameter 0 \(24, 40\): {option} in the checkpoint, (identity|element) here"
        ):
            optimizer.load_state_dict(other.state_dict())
