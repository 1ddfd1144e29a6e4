"""What only a GPU can show of the kernels: no waiting, graphs, compilers, large tensors, many draws, little memory."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, Fira, Flora, GaLore
from apollo_optim.core.random import ROUND_WEIGHT, normals, rounding_bits, rounding_key
from apollo_optim.fused.launches import BatchLaunches
from apollo_optim.fused.step import FusedStep
from apollo_optim.quant import rounding
from family import Member
from runs import bits, gradient, snapshot
from twins import RULES, Run, assert_close_or_neighbour, started

pytestmark = pytest.mark.cuda

SHAPES = {"wide": (64, 96), "tall": (80, 48), "experts": (2, 16, 32), "vector": (96,)}
NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def rules(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("member", [RULES[name] for name in names], ids=str)


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    """Leave the memory to the next test."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_kernels_are_the_default():
    default, fused, plain = (
        started(RULES["mini"], "cuda", shapes=SHAPES, fused=choice).steps(2) for choice in (None, True, False)
    )
    assert snapshot(default.optimizer)[:2] == snapshot(fused.optimizer)[:2]
    # Sums in another order: a few last bits among thousands.
    assert snapshot(default.optimizer)[:2] != snapshot(plain.optimizer)[:2]


@NARROW
@pytest.mark.parametrize("cls", [GaLore, Fira, Flora])
def test_what_no_kernel_steps_is_rounded_by_one_bit_for_bit(
    cls: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    matrices = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}
    member = Member(cls.__name__, cls, {"rank": 4, "refresh_every": 2})
    plain = started(member, "cuda", dtype, matrices, fused=False).steps(5)
    monkeypatch.setattr(rounding, "rounded", None)
    by_kernel = started(member, "cuda", dtype, matrices, fused=None).steps(5)
    assert snapshot(by_kernel.optimizer)[:2] == snapshot(plain.optimizer)[:2]


# The host does not wait.


@pytest.mark.parametrize("capturable", [False, True], ids=["host counts", "device counts"])
@rules("apollo-4", "mini", "structured", "adamw")
def test_a_step_does_not_wait_for_the_device(member: Member, capturable: bool):
    """Nor where every gradient lies elsewhere than the last, nor at a refresh."""
    run = started(member, "cuda", torch.bfloat16, SHAPES, capturable=capturable).steps(3)
    kept = [weight.grad for weight in run.named.values()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            for weight in run.named.values():
                weight.grad = torch.randn_like(weight)
                kept.append(weight.grad)
            run.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.optimizer.skipped() == 0
    assert all(float(run.state(name)["step"]) == 7 for name in SHAPES)


@rules("apollo-4-svd", "mini-svd")
def test_a_step_that_decomposes_no_gradient_does_not_wait_either(member: Member):
    """Recorded or not: a recording is made after two steps."""
    run = started(member, "cuda", torch.bfloat16, SHAPES)
    run.optimizer.param_groups[0]["refresh_every"] = 100
    run.steps(1)
    grads = [{name: gradient(name, step, weight) for name, weight in run.named.items()} for step in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in grads:
            for name, weight in run.named.items():
                weight.grad = each[name]
            run.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.optimizer.skipped() == 0


class Training:
    """Steps whose gradients come from a loss, the squared distance of every weight from a target.

    Its arithmetic is element-wise, so that a graph and the host get the same gradients to the last bit.
    """

    def __init__(self, member: Member, shapes: dict[str, tuple[int, ...]] = SHAPES):
        self.lr = torch.tensor(0.01, device="cuda")
        self.run: Run = started(member, "cuda", torch.bfloat16, shapes, capturable=True, lr=self.lr)
        self.targets = {name: gradient(name, 99, weight).float() for name, weight in self.run.named.items()}

    def step(self) -> None:
        self.run.optimizer.zero_grad()
        losses = [(weight.float() - self.targets[name]).square().sum() for name, weight in self.run.named.items()]
        torch.stack(losses).sum().backward()
        self.run.optimizer.step()

    def captured(self) -> torch.cuda.CUDAGraph:
        """The step as a graph, after two steps on another stream, as torch's documentation advises."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


@rules("apollo-4", "mini", "structured")
def test_a_graph_of_a_training_step_does_what_the_steps_do(member: Member):
    check_graph(Training(member), Training(member))


def check_graph(ordinary: Training, replayed: Training) -> None:
    """Across refreshes, with a learning rate that changes between replays."""
    rates = [0.02, 0.005, 0.01, 0.03]
    ordinary.step()
    ordinary.step()
    graph = replayed.captured()
    for rate in rates:
        ordinary.lr.fill_(rate)
        ordinary.step()
        replayed.lr.fill_(rate)
        graph.replay()
    torch.cuda.synchronize()
    assert all(float(state["step"]) == 2 + len(rates) for state in replayed.run.optimizer.state.values())
    assert snapshot(replayed.run.optimizer)[:2] == snapshot(ordinary.run.optimizer)[:2]


def test_a_graph_and_ordinary_steps_can_take_turns():
    """As at the end of an epoch, where a last batch does not fit the graph."""
    ordinary, mixed = Training(RULES["mini"]), Training(RULES["mini"])
    graph = mixed.captured()
    for _ in range(3):
        graph.replay()
        mixed.step()
    for _ in range(2 + 6):
        ordinary.step()
    torch.cuda.synchronize()
    assert snapshot(mixed.run.optimizer)[:2] == snapshot(ordinary.run.optimizer)[:2]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_step_that_the_host_counts_refuses_to_be_captured():
    run = started(RULES["mini"], "cuda", shapes=SHAPES).steps(1)
    before = snapshot(run.optimizer)
    with (
        pytest.raises(RuntimeError, match=r"a CUDA graph cannot capture this step.* set capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run.optimizer.step()
    torch.cuda.synchronize()
    assert snapshot(run.optimizer) == before


def test_a_compiled_training_step_trains_as_an_ordinary_one():
    def trained(compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).cuda()
        inputs = torch.randn(32, 64).cuda()
        start = [weight.detach().clone() for weight in model.parameters()]
        optimizer = APOLLO(model, lr=0.01, rank=8, fused=True)

        def train() -> Tensor:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = torch.compile(train) if compiled else train
        losses = [float(step().detach()) for _ in range(3)]
        assert losses[2] < losses[0]
        return start, [weight.detach() for weight in model.parameters()]

    start, ordinary = trained(False)
    _, compiled = trained(True)
    # Fused forward and backward kernels give gradients within 1e-6 of the largest. AdamW divides by an element's own
    # size, which for one in a few hundred is a hundredth of that or less.
    for first, one, other in zip(start, ordinary, compiled, strict=True):
        assert float((one - other).abs().max()) <= 1e-2 * float((one - first).abs().max())


# Size.

BIG = 2**15 + 8, 2**16
ROWS = 0, 1, 2**14 + 3, 2**15 - 1, 2**15, 2**15 + 7
"""Of a matrix that passes 2^31 elements at row 2^15."""


def rows_of(tensor: Tensor) -> Tensor:
    return torch.stack([tensor.detach()[row].double() for row in ROWS])


def low_norms(grad: Tensor, seed: int) -> tuple[float, float]:
    """|step| and |low| of a first step at rank 1, in float64."""
    z = normals(seed, 0, 0, (0, 1), (0, BIG[0]), grad.device).double()
    low = torch.zeros(1, BIG[1], dtype=torch.float64, device=grad.device)
    for start in range(0, BIG[0], 1024):
        low += z[:, start : start + 1024] @ grad[start : start + 1024].double()
    return float((low / (low.abs() + 1e-8)).norm()), float(low.norm())


@rules("mini", "adamw")
def test_a_weight_of_more_than_2_31_elements(member: Member):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(BIG, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.randn(BIG, device="cuda", dtype=torch.bfloat16)
    before, grad = rows_of(weight), rows_of(weight.grad)
    # With a rank of its own, or a weight of this size would be taken for a vocabulary.
    group = {"params": [("weight", weight)], "rank": 1 if member.name == "mini" else None}
    optimizer = member.build([group], lr=0.05, weight_decay=0.1, fused=True)
    optimizer.step()
    assert optimizer.skipped() == 0
    seed = int(optimizer.state[weight]["seed"])
    if member.name == "mini":
        step_norm, low_norm = low_norms(weight.grad, seed)
        update = math.sqrt(128) * step_norm / low_norm * grad
    else:
        update = grad / (grad.abs() + 1e-8)
    moved = ((1 - 0.05 * 0.1) * before - 0.05 * update).float()
    element = torch.tensor(ROWS, device="cuda")[:, None] * BIG[1] + torch.arange(BIG[1], device="cuda")
    draws = rounding_bits(rounding_key(seed, 1, ROUND_WEIGHT), element)
    expected = ((moved.view(torch.int32) + draws.int()) & ~0xFFFF).view(torch.float32).bfloat16()
    # float32 arithmetic is off by 1e-7 of a weight, whose spacing is 2^-8 of it: few of the draws fall in between.
    assert_close_or_neighbour(rows_of(weight).bfloat16(), expected, 0.0, 1e-3, "rows")


LARGE = {"tall": (2100, 2048), "taller": (4200, 4096), "wide": (272, 1024), "wider": (2048, 4096)}
"""Pairs for which the kernels would choose different blocks, each by itself."""


@rules("apollo-1", "structured")
def test_a_large_weight_steps_alone_as_it_does_in_larger_company(member: Member):
    def stepped(names: list[str]) -> dict[str, bytes]:
        named = {}
        for name in names:
            torch.manual_seed(len(name))
            named[name] = nn.Parameter(torch.randn(LARGE[name], device="cuda", dtype=torch.bfloat16))
            named[name].grad = torch.randn_like(named[name])
        optimizer = member.build(list(named.items()), lr=0.01, fused=True)
        optimizer.step()
        return {name: bits(weight) + bits(optimizer.state[weight]["exp_avg"]) for name, weight in named.items()}

    company = stepped(list(LARGE))
    for name in ("tall", "wide"):
        assert stepped([name])[name] == company[name], name


# Many draws.


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between the two numbers of `dtype` around each value."""
    precision, least = (8, -133) if dtype == torch.bfloat16 else (11, -24)
    exponent = torch.frexp(value).exponent.sub(precision).clamp_min(least)
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent)


@NARROW
@rules("mini", "adamw")
def test_stochastic_rounding_is_right_on_average(member: Member, dtype: torch.dtype):
    """Over 2^22 weights of all sizes, against the same step on float32 weights."""
    torch.manual_seed(0)
    start = torch.randn(2048, 2048, device="cuda").to(dtype)
    grad = torch.randn(2048, 2048, device="cuda").to(dtype)
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    for weight in (narrow, wide):
        weight.grad = grad.to(weight.dtype)
        member.build([("weight", weight)], lr=0.013, weight_decay=0.1, fused=True).step()
    exact = wide.detach()
    error = (narrow.detach().double() - exact.double()) / spacing(exact, dtype)
    # The two float32 results may be a rounding apart, which only beside the spacing of a tiny weight is much.
    assert float((error.abs() > 1.01).double().mean()) < 1e-4
    assert float((narrow != exact.to(dtype)).double().mean()) > 0.1, "nothing was rounded at random"
    # A draw has a variance of at most 1/4 spacing^2; six sigma. Signed by the value, a bias away from zero shows too.
    bound = 6 * 0.5 / math.sqrt(error.numel())
    assert abs(float(error.mean())) < bound
    assert abs(float((error * exact.sign()).mean())) < bound


# Memory.


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_cuda)


@pytest.mark.parametrize("member", [RULES["mini"], Member("apollo-256", APOLLO, {"rank": 256})], ids=str)
def test_a_step_takes_little_memory_beyond_weights_gradients_and_state(member: Member):
    shapes = [(4096, 4096), (11008, 4096), (4096, 11008), (4096, 4096), (11008, 4096)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    weights = [nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = member.build(weights, lr=0.01, fused=True)
    optimizer.step()
    state = [entry for entries in optimizer.state.values() for entry in entries.values()]
    kept = bytes_of(*weights, *(weight.grad for weight in weights), *state)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before - kept <= 64 * 2**20


# Small models are recorded.


@rules("apollo-4", "mini", "apollo-4-svd", "mini-svd", "structured", "adamw")
def test_a_recorded_step_is_the_step_that_was_recorded(member: Member, monkeypatch: pytest.MonkeyPatch):
    """Over refreshes, with another learning rate, with gradients elsewhere, and with one that is not finite."""

    def trained(kept_bytes: int) -> Run:
        monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", kept_bytes)
        run = started(member, "cuda", torch.bfloat16, SHAPES)
        for step in range(12):
            for group in run.optimizer.param_groups:
                group |= {"lr": 1e-2 / (step + 1), "refresh_every": 4}
            for name, weight in run.named.items():
                weight.grad = gradient(name, step, weight)
            if step == 7:
                run.named["wide"].grad[0, 0] = math.nan
            run.optimizer.step()
        return run

    recorded, launched = trained(2**25), trained(-1)
    (step,) = recorded.optimizer._plans.whole.fused
    # Bases of an SVD are copied at every step, and so in every recording.
    renews_bases = member.name in ("apollo-4", "mini")
    assert step._recordings.keys() == ({False, True} if renews_bases else {False})
    assert not launched.optimizer._plans.whole.fused[0]._recordings
    assert snapshot(recorded.optimizer) == snapshot(launched.optimizer)
    assert recorded.optimizer.skipped() == launched.optimizer.skipped() == 1


# Large ones are stepped in batches, of which one is projected while another is updated.


HIGH_RANK = Member("", APOLLO, {"rank": 256})
MANY_BATCHES = {f"square {n}": (1152, 1152) for n in range(4)} | {"tall": (1376, 1152), "vector": (96,)}


def check_overlap(run: Run, keeps_scratch: bool) -> None:
    """That there was something to overlap."""
    (step,) = run.optimizer._plans.whole.fused
    assert step._overlaps
    assert step._elementwise
    assert len(step._projected) > 3
    assert all((launches.scratch is not None) == keeps_scratch for launches in step._projected)


@pytest.mark.parametrize("kept_bytes", [-1, 2**30], ids=["scratch taken anew", "scratch kept"])
def test_a_graph_of_batches_that_overlap_does_what_the_steps_do(kept_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("apollo_optim.fused.batches.SCRATCH_BYTES", 2**20)
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", kept_bytes)
    replayed = Training(HIGH_RANK, MANY_BATCHES)
    check_graph(Training(HIGH_RANK, MANY_BATCHES), replayed)
    check_overlap(replayed.run, keeps_scratch=kept_bytes > 0)


@pytest.mark.parametrize("capturable", [False, True], ids=["host counts", "device counts"])
@pytest.mark.parametrize("kept_bytes", [-1, 2**30], ids=["scratch taken anew", "scratch kept"])
def test_batches_that_overlap_do_what_one_after_another_does(
    capturable: bool, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Where updates are late, and streams of both priorities write over whatever memory they can take."""
    monkeypatch.setattr("apollo_optim.fused.batches.SCRATCH_BYTES", 2**20)
    monkeypatch.setattr("apollo_optim.fused.step.KEPT_BYTES", kept_bytes)
    update = BatchLaunches.update

    def late_update(self: BatchLaunches, *given: Any) -> None:
        torch.cuda._sleep(100_000)
        update(self, *given)

    def one_after_another(self: FusedStep, side: torch.cuda.Stream, *given: Any) -> None:
        for launches in (*self._elementwise, *self._projected):
            self._step_batch(launches, *given)

    def trained() -> Run:
        run = started(HIGH_RANK, "cuda", torch.bfloat16, MANY_BATCHES, capturable=capturable)
        for number in range(8):
            run.step(number)
            for priority in (0, -1):
                for _ in range(32):
                    with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                        for size in (2**8, 2**10, 2**12, 2**20):
                            torch.full((size,), math.nan, device="cuda")
        check_overlap(run, keeps_scratch=kept_bytes > 0)
        return run

    monkeypatch.setattr(BatchLaunches, "update", late_update)
    overlapped = trained()
    monkeypatch.setattr(FusedStep, "_step_overlapped", one_after_another)
    assert snapshot(overlapped.optimizer) == snapshot(trained().optimizer)


@pytest.mark.parametrize("side", [512, 1152])
@pytest.mark.parametrize("projection", ["gaussian", "svd"])
def test_products_are_not_overtaken_by_later_loads(projection: str, side: int):
    """Programs share a multiprocessor at this rank, four or two of them by the side: one delays what another loads."""
    shapes = {"square": (side, side), "wide": (side, 1376), "tall": (1376, side)}
    member = Member("", APOLLO, {"rank": 128, "projection": projection})
    plain = started(member, "cuda", torch.bfloat16, shapes, fused=False).steps(4)
    for _ in range(8):
        fused = started(member, "cuda", torch.bfloat16, shapes).steps(4)
        for name in shapes:
            # Sums of products in float32, taken in another order; where one was overtaken it is off by as much.
            expected = plain.state(name)["exp_avg_sq"]
            torch.testing.assert_close(
                fused.state(name)["exp_avg_sq"], expected, rtol=2e-3, atol=1e-4 * expected.max().item()
            )
