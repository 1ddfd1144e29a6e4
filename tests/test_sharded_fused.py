"""DTensors by the kernels in one process: what it holds whole, and the first of two parts without the other."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from apollo_optim.quant import Int8Weight
from apollo_optim.stepping import collectives
from layouts import part as part_of
from planned import Collectives
from runs import bits, gradient
from twins import MEMBERS, Run, assert_close_or_neighbour, each_kernel, gain_error_of, on_both, started


@pytest.fixture
def one_process(tmp_path: Path, device: str) -> Iterator[None]:
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 37), nn.LayerNorm(37), nn.Linear(37, 9)).to(device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@on_both
@pytest.mark.parametrize("name", ["apollo-4", "apollo-4-svd", "mini", "factored-adamw"])
@pytest.mark.usefixtures("kernels", "one_process")
def test_fsdp_on_one_rank_takes_the_fused_step_bit_for_bit(name, device):
    plain, sharded = model(device), model(device)
    fully_shard(sharded, mesh=init_device_mesh(device, (1,)))
    ends = []
    for each in (plain, sharded):
        group = {"params": list(each.named_parameters()), "refresh_every": 2}
        optimizer = MEMBERS[name].build([group], lr=0.01, fused=True)
        for step in range(3):
            for key, weight in each.named_parameters():
                grad = gradient(key, step, local(weight))
                weight.grad = (
                    DTensor.from_local(grad, weight.device_mesh, weight.placements) if each is sharded else grad
                )
            with Collectives() as sent:
                optimizer.step()
            assert sent.seen == {}
        state = [value for entries in optimizer.state.values() for value in entries.values()]
        ends.append([bits(local(tensor)) for tensor in (*each.parameters(), *state)])
    assert ends[0] == ends[1]
    assert any(isinstance(value, DTensor) for value in state)


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first rank of two. What the other would send is what this one has: wrong, but the same for every step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    answers = {
        "scatter": lambda packed, axis: packed.view(axis.size, -1)[0].clone(),
        "reduce": lambda packed, axis: packed,
        "gather": lambda packed, axis: packed.repeat(axis.size, 1),
        "sum": lambda packed, axis: packed,
    }
    alike = {kind: partial(collectives._packed, send) for kind, send in answers.items()}
    monkeypatch.setattr(collectives, "COLLECTIVES", alike)
    yield
    dist.destroy_process_group()


def first_part(whole: torch.Tensor, dim: int, device: str) -> DTensor:
    part = whole.detach().chunk(2, dim)[0].contiguous()
    mesh = init_device_mesh(device, (2,))
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def one_of_two_parts(run: Run, device: str) -> None:
    """Replace every weight by this rank's part, matrices split on both dimensions in turn."""
    for number, (name, weight) in enumerate(run.named.items()):
        dim = number % 2 if weight.dim() == 2 else 0
        replace(run, name, first_part(weight, dim, device))


def replace(run: Run, name: str, weight: torch.Tensor) -> None:
    (group,) = run.optimizer.param_groups
    group["params"][list(run.named).index(name)] = run.named[name] = nn.Parameter(weight)


def placed_gradient(name: str, step: int, weight: torch.Tensor) -> torch.Tensor:
    grad = gradient(name, step, local(weight))
    return DTensor.from_local(
        grad, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


@each_kernel(names=["apollo-20", "mini", "adamw", "adafactor", "adafactor-without-momentum", "factored-adamw"], half=())
@pytest.mark.usefixtures("kernels", "first_of_two")
def test_the_kernels_step_one_of_two_parts_as_the_plain_step_does(member, device, dtype):
    # Wide and tall come twice, so that each is split on either dimension.
    wide, tall = ((37, 53), (53, 37)) if device == "cpu" else ((300, 704), (704, 300))
    if member.in_4_bits:  # whose blocks must not be shared
        wide, tall = ((16, 256), (32, 256)) if device == "cpu" else ((256, 768), (768, 256))
    shapes = {"tall": tall, "tall too": tall, "wide": wide, "wide too": wide, "vector": (70,)}
    fused, plain = (started(member, device, dtype, shapes=shapes, fused=fused) for fused in (True, False))
    for run in (fused, plain):
        one_of_two_parts(run, device)
        run.steps(3, placed_gradient)
    for name, weight in plain.named.items():
        state, expected = fused.state(name), plain.state(name)
        pairs = {"weight": (fused.named[name], weight)} | {key: (state[key], expected[key]) for key in expected}
        for key, (ours, theirs) in pairs.items():
            largest = float(local(theirs).detach().double().abs().max())
            tolerance = gain_error_of(plain.optimizer) * largest
            assert_close_or_neighbour(local(ours), local(theirs), tolerance, 1e-2, f"{name} {key}")


@on_both
@pytest.mark.parametrize(
    ("rule", "dims", "options"),
    [
        ("adamw", (0, 1), {"state_dtype": torch.bfloat16}),
        ("adamw", (0, 1), {"state_dtype": torch.int8}),
        ("adamw", (0,), {"group_size": 128}),
        ("rowwise", (0,), {"state_dtype": torch.bfloat16}),
        ("rowwise", (0,), {"state_dtype": torch.int8}),
    ],
    ids=["moments-of-16-bits", "moments-of-8-bits", "weights-of-8-bits", "rowwise", "rowwise-of-8-bits"],
)
@pytest.mark.usefixtures("kernels", "first_of_two")
def test_what_sums_nothing_over_ranks_steps_a_part_bit_for_bit_as_the_whole(rule, dims, options, device):
    wide, tall = ((9, 512), (41, 256)) if device == "cpu" else ((300, 1024), (1024, 256))
    shapes = {f"{name} {dim}": shape for name, shape in {"wide": wide, "tall": tall}.items() for dim in dims}
    group_size = options.get("group_size")
    options = {name: value for name, value in options.items() if name != "group_size"}
    whole, part = (started(MEMBERS[rule], device, torch.bfloat16, shapes=shapes, **options) for _ in range(2))
    dim_of = {name: int(name[-1]) for name in shapes}
    for name, weight in whole.named.items():
        if group_size is not None:
            replace(whole, name, Int8Weight.of(weight.detach(), group_size))
        replace(part, name, first_part(whole.named[name], dim_of[name], device))

    def grad(name: str, step: int, _: torch.Tensor) -> torch.Tensor:
        return gradient(name, step, torch.empty(shapes[name], dtype=torch.bfloat16, device=device))

    whole.steps(3, grad)
    part.steps(3, lambda *place: first_part(grad(*place), dim_of[place[0]], device))
    for name, weight in whole.named.items():
        assert part.state(name).keys() == whole.state(name).keys()
        pairs = {"weight": (part.named[name], weight)}
        pairs |= {key: (part.state(name)[key], whole.state(name)[key]) for key in whole.state(name)}
        for key, (ours, theirs) in pairs.items():
            expected = part_of(theirs, ours.device_mesh, ours.placements) if isinstance(ours, DTensor) else theirs
            assert not bool((local(ours) != expected).any()), f"{name} {key}"
