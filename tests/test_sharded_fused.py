"""DTensors that a rank holds whole are stepped by the kernels, as ordinary weights are, and without a collective."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from runs import bits, gradient
from twins import RULES, on_both


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
@pytest.mark.parametrize("name", ["apollo-4", "mini"])
@pytest.mark.usefixtures("kernels", "one_process")
def test_fsdp_on_one_rank_takes_the_fused_step_bit_for_bit(name, device):
    plain, sharded = model(device), model(device)
    fully_shard(sharded, mesh=init_device_mesh(device, (1,)))
    ends = []
    for each in (plain, sharded):
        group = {"params": list(each.named_parameters()), "refresh_every": 2}
        optimizer = RULES[name].build([group], lr=0.01, fused=True)
        for step in range(3):
            for key, weight in each.named_parameters():
                grad = gradient(key, step, local(weight))
                weight.grad = (
                    DTensor.from_local(grad, weight.device_mesh, weight.placements) if each is sharded else grad
                )
            with CommDebugMode() as seen:
                optimizer.step()
            assert seen.get_total_counts() == 0
        state = [value for entries in optimizer.state.values() for value in entries.values()]
        ends.append([bits(local(tensor)) for tensor in (*each.parameters(), *state)])
    assert ends[0] == ends[1]
    assert any(isinstance(value, DTensor) for value in state)
