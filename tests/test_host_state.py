"""State that is kept on the host steps as state that stays with its weights, bit for bit."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from apollo_optim import APOLLO, optimizer_memory, step_in_backward
from apollo_optim.host_state import blocks_of, buffer_sizes
from apollo_optim.optimizer import ProjectedOptimizer
from family import BY_NAME, Member
from runs import state_bytes_of
from training import batch, model_of


@pytest.fixture
def visiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, and in many blocks."""
    monkeypatch.setattr("apollo_optim.host_state.VISITING", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr("apollo_optim.host_state.BLOCK_BYTES", 2**11)


def started(member: Member, device: str, **options: object) -> tuple[nn.Module, ProjectedOptimizer]:
    model = model_of()
    if member.is_spectral and device == "cuda":
        # No two weights of one shape: a library's product of a matrix may have other last bits beside another one's,
        # and blocks of state part weights that are multiplied together where state stays.
        model.seldom = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 12))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    group = {"params": list(model.named_parameters()), "refresh_every": 3}
    return model, member.build([group], lr=0.01, weight_decay=0.1, **options)


def trained(model: nn.Module, optimizer: ProjectedOptimizer, steps: range, device: str) -> None:
    for number in steps:
        model(batch(number).to(device), all_of_it=number % 3 > 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(model: nn.Module, optimizer: ProjectedOptimizer) -> Iterator[torch.Tensor]:
    """All weights and all state, on the host."""
    yield from (weight.detach().cpu() for weight in model.parameters())
    for _, entries in sorted(optimizer.state_dict()["state"].items()):
        yield from (entries[name].cpu() for name in sorted(entries))


MEMBERS = [
    "apollo",
    "mini",
    "galore",
    "fira",
    "flora",
    "artemis",
    "artemis-mini",
    "factored-adamw",
    "structured-channel",
    "adamw",
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.usefixtures("visiting")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", MEMBERS)
def test_no_bit_depends_on_where_state_is_kept(name: str, state_dtype: torch.dtype, device: str):
    ends = []
    for state_device in (None, "cpu"):
        model, optimizer = started(BY_NAME[name], device, state_dtype=state_dtype, state_device=state_device)
        trained(model, optimizer, range(5), device)
        ends.append(list(tensors(model, optimizer)))
        if state_device is not None:
            kept = [tensor for entries in optimizer.state.values() for tensor in entries.values()]
            assert all(tensor.device.type == "cpu" for tensor in kept)
            assert sum(len(visit.blocks) for visit in optimizer._visits.values()) > 2
    assert all(map(torch.equal, *ends))


@pytest.mark.usefixtures("visiting")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [None, "cpu"])
def test_a_checkpoint_goes_on_wherever_state_is_kept(first: str | None, device: str):
    model, optimizer = started(BY_NAME["apollo"], device, state_device=first)
    trained(model, optimizer, range(3), device)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    trained(model, optimizer, range(3, 5), device)
    other, resumed = started(BY_NAME["apollo"], device, state_device="cpu" if first is None else None)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    trained(other, resumed, range(3, 5), device)
    assert all(map(torch.equal, tensors(model, optimizer), tensors(other, resumed)))
    assert resumed.param_groups[0]["state_device"] != first


@pytest.mark.usefixtures("visiting")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
def test_what_device_and_host_hold_is_predicted_apart(state_dtype: torch.dtype):
    model, optimizer = started(BY_NAME["apollo"], "cpu", state_dtype=state_dtype, state_device="cpu")
    model(batch(1), all_of_it=True).backward()
    optimizer.step()
    options = {"optimizer": APOLLO, "state_dtype": state_dtype, "rank": 4}
    weights = list(model.named_parameters())
    buffers = sum(buffer.nbytes for visits in optimizer._visits.values() for buffer in visits.buffers)
    assert optimizer_memory(weights, on="device", state_device="cpu", **options) == buffers
    assert optimizer_memory(weights, on="host", state_device="cpu", **options) == state_bytes_of(optimizer)
    # Without it, the host has the step and the seed of each weight.
    scalars = (4 + 8) * len(list(model.parameters()))
    assert optimizer_memory(weights, on="host", **options) == scalars
    assert optimizer_memory(weights, on="device", **options) == optimizer_memory(weights, **options) - scalars
    with pytest.raises(ValueError, match='on must be "device", "host", or None for both, got \'cpu\''):
        optimizer_memory(weights, on="cpu", **options)


def test_blocks_fit_into_buffers_that_they_take_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apollo_optim.host_state.BLOCK_BYTES", 10)
    sizes = [6, 4, 6, 3, 20, 1]
    assert blocks_of(sizes) == [[0, 1], [2, 3], [4], [5]]
    assert buffer_sizes(sizes) == [20, 9]
    # What has nothing to visit makes no difference.
    assert blocks_of([0, 20, 0, 12, 0]) == [[0, 1, 2], [3, 4]]


def test_state_visits_the_device_that_its_weights_were_moved_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apollo_optim.host_state.VISITING", frozenset({"cpu", "meta"}))
    weight = nn.Parameter(torch.randn(6, 20))
    optimizer = APOLLO([weight], rank=2, state_device="cpu")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.empty_like(weight, device="meta")))
    weight.grad = torch.ones_like(weight)
    # Meta tensors can be stepped, and have nothing that could be taken back to the host.
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        optimizer.step()
    assert {(visit.device.type, visit.buffers[0].device.type) for visit in optimizer._visits.values()} == {
        ("meta",) * 2
    }


@pytest.mark.usefixtures("visiting")
@pytest.mark.parametrize("limits", [(None, 1.01), (1.01, None)], ids=["on", "off"])
def test_the_limiter_is_switched_on_and_off_wherever_its_norm_is_kept(limits: tuple[float | None, float | None]):
    ends = []
    for state_device in (None, "cpu"):
        model, optimizer = started(BY_NAME["apollo"], "cpu", state_device=state_device, growth_limit=limits[0])
        trained(model, optimizer, range(2), "cpu")
        optimizer.param_groups[0]["growth_limit"] = limits[1]
        trained(model, optimizer, range(2, 5), "cpu")
        ends.append(list(tensors(model, optimizer)))
    assert all(map(torch.equal, *ends))


@pytest.mark.usefixtures("visiting")
def test_the_dtype_of_state_is_changed_by_its_name_wherever_it_is_kept():
    ends = []
    for state_device in (None, "cpu"):
        model, optimizer = started(BY_NAME["apollo"], "cpu", state_device=state_device)
        trained(model, optimizer, range(2), "cpu")
        optimizer.param_groups[0]["state_dtype"] = "bfloat16"
        trained(model, optimizer, range(2, 5), "cpu")
        ends.append(list(tensors(model, optimizer)))
    assert all(map(torch.equal, *ends))


@pytest.mark.usefixtures("visiting")
def test_an_option_that_cannot_be_is_named_before_state_visits():
    model, optimizer = started(BY_NAME["apollo"], "cpu", state_device="cpu")
    trained(model, optimizer, range(1), "cpu")
    optimizer.param_groups[0]["rank"] = "many"
    with pytest.raises(ValueError, match=r"rank must be .*, got 'many'"):
        trained(model, optimizer, range(1, 2), "cpu")


@pytest.mark.usefixtures("visiting")
def test_a_step_that_found_no_memory_has_stepped_nothing_and_can_be_taken_again(monkeypatch: pytest.MonkeyPatch):
    weights = [nn.Parameter(torch.randn(6, 20)) for _ in range(2)]
    before = copy.deepcopy(weights)
    groups = [{"params": weights[:1], "state_device": None}, {"params": weights[1:]}]
    optimizer = APOLLO(groups, rank=2, state_device="cpu")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with monkeypatch.context() as short:
        short.setattr("apollo_optim.host_state.buffer_sizes", _no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert all(map(torch.equal, weights, before))
    optimizer.step()
    assert not any(map(torch.equal, weights, before))
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [1, 1]


def _no_memory(sizes: list[int]) -> list[int]:
    raise torch.OutOfMemoryError(f"no room for {sum(sizes)} bytes")


@pytest.mark.cuda
def test_state_follows_a_model_to_the_host_and_back():
    model, optimizer = started(BY_NAME["apollo"], "cuda", state_device="cpu")
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        trained(model, optimizer, range(2), device)
        assert {visit.device.type for visit in optimizer._visits.values()} == {device} - {"cpu"}


@pytest.mark.usefixtures("visiting")
def test_a_users_own_tensors_beside_the_state_stay_where_they_are():
    mine = torch.ones(1000)
    (model, optimizer), (other, usual) = (started(BY_NAME["apollo"], "cpu", state_device="cpu") for _ in range(2))
    for weight in model.parameters():
        optimizer.state[weight] = {"mine": mine}
    trained(model, optimizer, range(3), "cpu")
    trained(other, usual, range(3), "cpu")
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(optimizer.state[weight]["mine"] is mine for weight in model.parameters())
    assert torch.equal(mine, torch.ones(1000))


def test_what_it_does_not_go_with_is_refused_by_name():
    model = nn.Linear(8, 24)
    with pytest.raises(ValueError, match=r"state_device must be None, .* or \"cpu\", got 'disk'"):
        APOLLO(model, state_device="disk")
    with pytest.raises(ValueError, match="capturable=True cannot go with state_device='cpu'"):
        APOLLO(model, state_device="cpu", capturable=True)
    with pytest.raises(ValueError, match="state_device='cpu' is for steps after backward"):
        step_in_backward(model, APOLLO(model, state_device="cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = APOLLO(model, state_device="cpu")
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(ValueError, match="weight is sharded, which state_device='cpu' does not support"):
            optimizer.step()
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
def test_a_gpu_holds_two_blocks_of_state_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apollo_optim.host_state.BLOCK_BYTES", 2**22)
    weights = [nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(16)]
    optimizer = APOLLO([{"params": weights, "rank": None}], state_device="cpu")
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    # 2 MiB of state for each of the 16: two at a time in each of two buffers, and tables.
    assert torch.cuda.memory_allocated() - before < 2 * 2**22 + 2**21
    assert all(state["exp_avg"].is_pinned() for state in optimizer.state.values())
