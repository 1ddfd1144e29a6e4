"""Stepping in backward by the Triton kernels: interpreted everywhere, compiled and captured on a GPU."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from apollo_optim import APOLLO, APOLLOMini, step_in_backward
from apollo_optim.fused.tables import HyperRows
from apollo_optim.optimizer import ProjectedOptimizer
from family import Member
from runs import gradient, snapshot, weights
from twins import RULES, cuda, each_kernel, on_both

# Beyond the last channel the kernels divide zero by zero, to no effect, but numpy reports it.
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

# The interpreter takes a tenth of a second per matrix and step.
FEW = {"wide": (24, 40), "seldom": (9, 16), "vector": (5,)}
MORE = {"wide": (64, 96), "tall": (80, 48), "experts": (2, 16, 32), "seldom": (37, 61), "vector": (3000,)}

on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=cuda)])


class Distance(nn.Module):
    """The squared distance of every weight from a target; of one of them twice over.

    Its arithmetic is element-wise, so that a graph and the host get the same gradients to the last bit.
    """

    def __init__(self, device: str, dtype: torch.dtype):
        super().__init__()
        made = weights(FEW if device == "cpu" else MORE, dtype)
        self.weights = nn.ParameterDict({name: weight.detach().to(device) for name, weight in made.items()})
        self.targets = {name: gradient(name, 99, weight).float() for name, weight in self.weights.items()}

    def forward(self, number: int) -> Tensor:
        used = {name: weight.float() for name, weight in self.weights.items() if name != "seldom" or number != 1}
        losses = [(weight - self.targets[name]).square().sum() for name, weight in used.items()]
        twice = (used["wide"] / 2 + self.targets["wide"] * number).square().sum()
        return torch.stack([*losses, twice]).sum()


class Run:
    """A model under an optimizer whose bases are renewed every second step."""

    def __init__(self, member: Member, device: str, dtype: torch.dtype = torch.float32, **options: Any):
        self.model = Distance(device, dtype)
        group = {"params": list(self.model.weights.items()), "refresh_every": 2}
        options = {"lr": 0.01, "weight_decay": 0.1} | options
        self.optimizer: ProjectedOptimizer = member.build([group], fused=True, **options)

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.model(number).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def runs(*arguments: Any, clip_norm: float | None = None, **options: Any) -> tuple[Run, Run]:
    """An ordinary run, and the same one stepped in backward."""
    ordinary, in_backward = (Run(*arguments, **options) for _ in range(2))
    step_in_backward(in_backward.model, in_backward.optimizer, clip_norm=clip_norm)
    return ordinary, in_backward


@each_kernel(["mini", "apollo-4", "apollo-4-svd", "structured", "adamw"], half=[])
def test_the_kernels_numbers_are_the_ordinary_modes(member: Member, device: str, dtype: torch.dtype):
    ordinary, in_backward = runs(member, device, dtype)
    for run in (ordinary, in_backward):
        run.steps(range(3))
    assert snapshot(in_backward.optimizer) == snapshot(ordinary.optimizer)
    assert in_backward.optimizer.statistics() == pytest.approx(ordinary.optimizer.statistics())


@each_kernel(["apollo-4"], half=[])
def test_where_the_device_counts_as_well(member: Member, device: str, dtype: torch.dtype):
    ordinary, in_backward = runs(member, device, dtype, capturable=True)
    for run in (ordinary, in_backward):
        run.steps(range(3))
    assert snapshot(in_backward.optimizer) == snapshot(ordinary.optimizer)


@each_kernel(["mini"], half=[])
def test_the_modes_can_take_turns(member: Member, device: str, dtype: torch.dtype):
    """Each of them counts steps on the host, and must notice those of the other."""
    ordinary, mixed = (Run(member, device, dtype) for _ in range(2))
    ordinary.steps(range(4))
    for number in range(4):
        if number % 2 == 1:
            handle = step_in_backward(mixed.model, mixed.optimizer)
        mixed.steps(range(number, number + 1))
        if number % 2 == 1:
            handle.remove()
    assert snapshot(mixed.optimizer) == snapshot(ordinary.optimizer)


@on_both
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernels"])
def test_a_weight_that_is_still_needed_when_it_is_stepped_is_an_error(fused: bool, device: str):
    """The graph knows the weight under another name too, by which no gradient comes that it would wait for."""
    first, second = (nn.Linear(16, 16, bias=False, device=device) for _ in range(2))
    model = nn.Sequential(first, second)
    optimizer = APOLLO(model, rank=4, fused=fused)
    handle = step_in_backward(model, optimizer)
    x = torch.ones(2, 16, device=device)

    def loss() -> Tensor:
        return second(linear(first(x), second.weight.detach())).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss().backward()
    handle.remove()
    loss().backward()


@on_both
def test_weights_that_step_by_the_same_numbers_have_them_sent_once(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", -1)  # a recording has rows of its own
    run = Run(RULES["mini"], device)
    step_in_backward(run.model, run.optimizer)
    run.steps(range(2))  # the first shows which weights come together
    (rows,) = (shared for shared in run.optimizer._plans.pool.values() if isinstance(shared, HyperRows))
    assert rows._ring.sent == 1
    run.steps(range(2, 3))
    # The weight that the second batch skipped steps in the third by the second's, which are still there.
    assert rows._ring.sent == 2


def exchanged_state(optimizer: ProjectedOptimizer, weight: nn.Parameter) -> None:
    state = optimizer.state[weight]
    state |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}


def exchanged_weight(_: ProjectedOptimizer, weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def exchanged_dict(optimizer: ProjectedOptimizer, weight: nn.Parameter) -> None:
    optimizer.state[weight] = dict(optimizer.state[weight])


Exchange = Callable[[ProjectedOptimizer, nn.Parameter], None]


@on_both
@pytest.mark.parametrize("exchange", [exchanged_state, exchanged_weight, exchanged_dict])
def test_what_is_exchanged_during_a_backward_is_noticed(device: str, exchange: Exchange):
    """As by somebody who keeps state on the host, and brings it back layer by layer."""

    def trained(exchange: Exchange | None) -> ProjectedOptimizer:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))).to(device)
        first = model[0].weight
        optimizer = APOLLO([{"params": list(model.parameters()), "rank": 4}], fused=True)
        step_in_backward(model, optimizer)
        for number in range(5):
            if exchange is not None and number == 3:
                model[2].register_full_backward_hook(lambda *_: exchange(optimizer, first))
            model(torch.ones(4, 16, device=device)).square().mean().backward()
            optimizer.step()
        return optimizer

    assert snapshot(trained(exchange)) == snapshot(trained(None))


# What only a GPU can show.


@on_a_gpu
def test_a_bucket_waits_for_a_gradient_of_the_default_stream(device: str):
    """Where the last of its gradients comes on another, and the first takes long."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(_, grad: Tensor) -> Tensor:
            torch.cuda._sleep(50_000_000)
            return grad.clone()

    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        # The third is not used: it lets a bucket hold the other two.
        model = nn.ParameterList([nn.Parameter(torch.randn(size, 64, device=device)) for size in (64, 64, 128)])
        early, late, _ = model
        optimizer = APOLLO([{"params": list(model), "rank": 4}])
        if in_backward:
            step_in_backward(model, optimizer)
        side = torch.cuda.Stream()
        for _ in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x = torch.ones(4, 64, device=device) @ late
            torch.cuda.current_stream().wait_stream(side)
            (x @ Slow.apply(early)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
        ends.append(snapshot(optimizer))
    assert ends[0] == ends[1]


@pytest.fixture(autouse=True)
def _tidy(device: str) -> Iterator[None]:
    """Leave the memory to the next test."""
    yield
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@on_a_gpu
@pytest.mark.parametrize("capturable", [False, True], ids=["host counts", "device counts"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_no_hook_waits_for_the_device(clip_norm: float | None, capturable: bool, device: str):
    """Nor where every gradient lies elsewhere than the last, nor at a refresh."""
    _, run = runs(RULES["apollo-4"], device, torch.bfloat16, capturable=capturable, clip_norm=clip_norm)
    run.steps(range(3))
    kept = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3, 7):
            run.steps(range(number, number + 1))
            kept.append(torch.empty(64 * number, device=device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.optimizer.skipped() == 0
    assert float(run.optimizer.state[run.model.weights["wide"]]["step"]) == 7


@on_a_gpu
def test_a_backward_on_another_stream_steps_the_same(device: str):
    ordinary, in_backward = runs(RULES["mini"], device, torch.bfloat16)
    ordinary.steps(range(4))
    in_backward.steps(range(1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        in_backward.steps(range(1, 3))
    torch.cuda.current_stream().wait_stream(stream)
    in_backward.steps(range(3, 4))
    assert snapshot(in_backward.optimizer) == snapshot(ordinary.optimizer)


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """Forward, backward and step as a graph, after two of them on another stream, as torch's documentation advises."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run.steps(range(2, 3))
        run.steps(range(2, 3))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.steps(range(2, 3))
    return graph


@on_a_gpu
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("name", ["apollo-4", "mini", "structured", "adamw"])
def test_a_graph_of_a_step_in_backward_does_what_the_steps_do(name: str, clip_norm: float | None, device: str):
    """Across refreshes, with a learning rate that changes between replays, and with ordinary steps in between."""
    made = []
    for graphed in (False, True):
        lr = torch.tensor(0.01, device=device)
        _, run = runs(RULES[name], device, torch.bfloat16, capturable=True, lr=lr, clip_norm=clip_norm)
        graph = captured(run) if graphed else None
        if graph is None:
            run.steps(range(2, 3))
            run.steps(range(2, 3))
        for rate in (0.02, 0.005, 0.01, 0.03):
            lr.fill_(rate)
            if graph is None or rate == 0.01:
                run.steps(range(2, 3))
            else:
                graph.replay()
        torch.cuda.synchronize()
        assert float(run.optimizer.state[run.model.weights["wide"]]["step"]) == 6
        made.append(snapshot(run.optimizer)[:2])
    assert made[0] == made[1]


@on_a_gpu
def test_a_backward_that_steps_holds_few_gradients(device: str):
    sizes = 24 * [2048]
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes)).to(device, torch.bfloat16)
    optimizer = APOLLOMini(model, fused=True)
    step_in_backward(model, optimizer)
    x = torch.randn(4, 2048, device=device, dtype=torch.bfloat16)
    peaks = []
    for _ in range(3):
        loss = model(x).square().mean()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # One gradient; 4 MiB for sums, activations and the tables of 24 weights.
    assert max(peaks[1:]) <= 2048 * 2048 * 2 + 4 * 2**20
