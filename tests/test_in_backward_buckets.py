"""Stepping in backward: which weights are stepped together, and how many gradients wait for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.fused.launches import Scratch
from apollo_optim.in_backward.buckets import MOST_WAITING, Buckets, gradient_bytes
from apollo_optim.in_backward.clipping import PREVIOUS_NORM
from apollo_optim.optimizer import ProjectedOptimizer
from apollo_optim.quant import quantize_weights_
from apollo_optim.step_plan import StepPlan
from runs import bits, snapshot
from twins import on_both

LARGEST = 4 * 40 * 16
"""Bytes of the embedding's gradient: those of four or five matrices of a layer."""
LAYERS = 6


class Deep(nn.Module):
    """A table that is tied to the head, and layers that can be gone through in any order, or left out."""

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 16)) for _ in range(layers))

    def forward(self, seed: int, layers: Sequence[int] = range(LAYERS)) -> Tensor:
        tokens = torch.randint(40, (5,), generator=torch.Generator().manual_seed(seed))
        tokens = tokens.to(self.embed.weight.device)
        x = self.embed(tokens)
        for number in layers:
            x = x + self.layers[number](x.tanh())
        return nn.functional.cross_entropy(x @ self.embed.weight.T, tokens)


Run = tuple[Deep, ProjectedOptimizer]


def run_of(device: str = "cpu", **options: bool) -> Run:
    model = Deep().to(device)
    return model, APOLLO([{"params": list(model.named_parameters()), "refresh_every": 2}], rank=4, lr=0.01, **options)


def step(run: Run, seed: int, layers: Sequence[int] = range(LAYERS)) -> None:
    model, optimizer = run
    model(seed, layers).backward()
    optimizer.step()
    optimizer.zero_grad()


def names_of(model: nn.Module, weights: Sequence[Tensor]) -> list[str]:
    named = {weight: name for name, weight in model.named_parameters()}
    return [named[weight] for weight in weights]


def parts_of(run: Run, action: Callable[[], object]) -> list[list[str]]:
    """What is stepped together meanwhile."""
    model, optimizer = run
    parts: list[list[str]] = []
    step_part_ = optimizer._step_part_

    def noted(weights: list[Tensor]) -> None:
        parts.append(names_of(model, weights))
        step_part_(weights)

    optimizer._step_part_ = noted
    action()
    optimizer._step_part_ = step_part_
    return parts


class Watch:
    """Counts the bytes of gradients that are alive. Made before the handle, so that it sees them come."""

    def __init__(self, model: nn.Module):
        self._seen: list[tuple[StorageWeakRef, int]] = []
        self._most = 0
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(self._count)

    def _count(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._seen.append((StorageWeakRef(weight.grad.untyped_storage()), gradient_bytes(weight)))
        self._most = max(self._most, sum(size for gradient, size in self._seen if not gradient.expired()))

    def most(self) -> int:
        """Since the last time that it was asked; with the one that came."""
        found, self._most, self._seen = self._most, 0, []
        return found


def test_weights_are_stepped_together_in_the_order_of_backward():
    """From the second batch on; in the first, which shows the order, each by itself."""
    run = run_of()
    model, optimizer = run
    handle = step_in_backward(model, optimizer)
    first, second, third = [parts_of(run, lambda number=number: step(run, number)) for number in range(3)]
    backwards = ["1.bias", "1.weight", "0.bias", "0.weight"]
    arrived = [f"layers.{layer}.{name}" for layer in reversed(range(LAYERS)) for name in backwards]
    assert first == [[name] for name in (*arrived, "embed.weight")]
    assert list(chain(*second)) == list(chain(*first))
    sizes = {name: gradient_bytes(weight) for name, weight in model.named_parameters()}
    for part, after in pairwise(second):
        size = sum(sizes[name] for name in part)
        assert size <= LARGEST < size + sizes[after[0]], "a bucket holds as much as may be, and no more"
    assert third == second
    assert len(optimizer._plans._parts) == len(second), "plans of single weights are not kept"
    handle.remove()
    assert optimizer._plans._parts == {}, "no step of the ordinary mode needs them"


def test_few_gradients_wait_at_a_time():
    """Those that are there take no more than the largest one."""
    run = run_of()
    model, optimizer = run
    watch = Watch(model)
    step(run, 0)
    assert watch.most() == sum(map(gradient_bytes, model.parameters())) > 3 * LARGEST
    step_in_backward(model, optimizer)
    for number in range(3):
        step(run, number)
        assert watch.most() <= LARGEST


def test_a_frozen_weight_has_no_gradient_to_make_room_for():
    run = run_of()
    model, optimizer = run
    model.embed.weight.requires_grad_(False)
    watch = Watch(nn.ModuleList(model.layers))
    step_in_backward(model, optimizer)
    for number in range(3):
        step(run, number)
        assert watch.most() == gradient_bytes(model.layers[0][0].weight)


def test_gradients_of_llama_7b_take_what_the_heads_does():
    """At any time, the first batch included; and two buckets take those of a layer."""
    hidden, inner, vocabulary, layers = 4096, 11008, 32000, 3
    of_layer = [(hidden, inner), *[(inner, hidden)] * 2, (hidden,), *[(hidden, hidden)] * 4, (hidden,)]
    shapes = [(vocabulary, hidden), (hidden,), *of_layer * layers, (vocabulary, hidden)]
    weights = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]
    there: list[int] = []
    steps: list[int] = []

    def step_(part: list[Tensor]) -> None:
        steps[-1] += 1
        for weight in part:
            there.remove(gradient_bytes(weight))
            weight.grad = None

    buckets = Buckets(torch.device("meta"), gradient_bytes(weights[0]), step_)
    for _ in range(3):
        steps.append(0)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
            there.append(gradient_bytes(weight))
            assert sum(there) <= 2 * vocabulary * hidden
            buckets.add(weight)
        buckets.flush()
        assert there == []
    assert steps == [len(weights), 2 + 2 * layers, 2 + 2 * layers]


def test_after_backward_no_gradient_waits():
    """Though the last buckets lack the layers that were left out."""
    run = run_of()
    model, optimizer = run
    step_in_backward(model, optimizer)
    step(run, 0)
    model(1, [0, 2, 5]).backward()
    assert all(weight.grad is None for weight in model.parameters())
    steps = [float(optimizer.state[layer[0].weight]["step"]) for layer in model.layers]
    assert steps == [2, 1, 2, 1, 1, 2]


BATCHES = {
    "a layer that comes seldom": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5]],
    "layers that come late": [[0, 1], [0, 1, 2, 3], [4, 5], [0, 1, 2, 3, 4, 5]],
    "other layers every time": [[0, 2, 4], [1, 3, 5], [0, 1, 5], [4, 3, 2]],
    "another order": [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2], [2, 4, 1, 5, 0, 3]],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_batches_that_go_other_ways_have_the_ordinary_modes_numbers(batches: list[list[int]]):
    """And few gradients at a time, though buckets wait for what does not come."""
    ordinary, in_backward = (run_of() for _ in range(2))
    watch = Watch(in_backward[0])
    step_in_backward(*in_backward)
    for number, layers in enumerate(batches):
        for run in (ordinary, in_backward):
            step(run, number, layers)
        assert watch.most() <= (MOST_WAITING + 1) * LARGEST
        assert snapshot(in_backward[1]) == snapshot(ordinary[1])


@on_both
@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_scratch_of_weights_by_themselves_is_not_kept(device: str):
    """That of the first batch: there is only so much scratch that is kept, and buckets are to have it."""
    run = run_of(device, fused=True)
    step_in_backward(*run)
    for number in range(2):
        step(run, number)
    plans = run[1]._plans
    fused = [each for plan in plans._parts.values() for each in plan.fused]
    used = {id(launches.scratch) for each in fused for launches in (*each._elementwise, *each._projected)}
    kept = {id(each) for each in plans.pool.values() if isinstance(each, Scratch)}
    assert kept == used


@on_both
@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_parts_of_buckets_have_the_ordinary_modes_numbers_by_kernels(device: str):
    """Each counts the steps of its weights by itself."""
    ordinary, in_backward = (run_of(device, fused=True) for _ in range(2))
    step_in_backward(*in_backward)
    for number, layers in enumerate([[0, 1], [1], [0, 1], [2]]):
        for run in (ordinary, in_backward):
            step(run, number, layers)
        assert snapshot(in_backward[1]) == snapshot(ordinary[1])


def test_buckets_that_come_in_part_are_parted_once(monkeypatch: pytest.MonkeyPatch):
    run = run_of()
    step_in_backward(*run)
    made = []
    construct = StepPlan.__init__
    monkeypatch.setattr(StepPlan, "__init__", lambda self, *args: (made.append(args), construct(self, *args))[1])
    ways = [range(LAYERS), [0, 1, 2, 4, 5], [0, 1, 2, 3, 5]]
    for number, layers in enumerate([*ways, *ways]):
        step(run, number, layers)
    made.clear()
    for number, layers in enumerate([*ways, *reversed(ways)]):
        parts = parts_of(run, lambda number=number, layers=layers: step(run, number, layers))
        assert max(map(len, parts)) > 1
    assert made == []


def test_a_bucket_never_holds_weights_of_two_devices():
    model = nn.ModuleList(nn.Linear(4, size, device=device) for device in ("cpu", "meta") for size in (4, 2))
    optimizer = APOLLO(model, rank=None)
    optimizer._step_part_ = lambda weights: None  # on "meta" there is nothing to step
    handle = step_in_backward(model, optimizer)
    for weight in model.parameters():
        handle._gather_(weight)
    handle._flush()
    for layer in (model[0], model[2]):
        layer.bias.grad = torch.ones_like(layer.bias)
        handle._gather_(layer.bias)
    waiting = {device.type: buckets.waiting() for device, buckets in handle._buckets.items()}
    assert {device: names_of(model, weights) for device, weights in waiting.items()} == {
        "cpu": ["0.bias"],
        "meta": ["2.bias"],
    }


def test_a_bucket_is_filled_up_to_the_bytes_of_the_largest_gradient():
    stepped: list[int] = []
    weights = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    buckets = Buckets(torch.device("cpu"), 2 * gradient_bytes(weights[0]), lambda each: stepped.append(len(each)))
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones(4)
            buckets.add(weight)
        buckets.flush()
    assert stepped == [1, 1, 1, 2, 1]


def test_as_much_as_two_buckets_hold_may_wait():
    stepped: list[int] = []
    weights = [nn.Parameter(torch.ones(4)) for _ in range(10)]
    buckets = Buckets(torch.device("cpu"), 2 * gradient_bytes(weights[0]), lambda each: stepped.append(len(each)))

    def add(chosen: Sequence[Tensor]) -> list[int]:
        stepped.clear()
        for weight in chosen:
            weight.grad = torch.ones(4)
            buckets.add(weight)
        return list(stepped)

    add(weights)
    buckets.flush()
    half_of_each = weights[::2]
    assert add(half_of_each[: 2 * MOST_WAITING]) == []
    assert add(half_of_each[2 * MOST_WAITING :]) == [1]


# A backward that fails.


def fail(_: Tensor) -> None:
    raise RuntimeError("no more")


def failed(run: Run, seed: int, layer: int = 3) -> None:
    """Backward, up to this layer."""
    model, _ = run
    hook = model.layers[layer][0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        model(seed).backward()
    hook.remove()


def test_a_step_after_a_backward_that_failed_applies_what_it_had_reached():
    """As in the ordinary mode; the next batch then is like any other."""
    ordinary, in_backward = (run_of() for _ in range(2))
    step_in_backward(*in_backward)
    for run in (ordinary, in_backward):
        step(run, 0)
        failed(run, 1)
        run[1].step()
        run[1].zero_grad()
        step(run, 2)
    assert snapshot(in_backward[1]) == snapshot(ordinary[1])


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_of_a_backward_that_failed_can_be_thrown_away(clip_norm: float | None):
    """Those that waited; the others are applied."""
    run = run_of()
    model, optimizer = run
    step_in_backward(*run, clip_norm=clip_norm)
    step(run, 0)
    failed(run, 1)
    waited = [weight for weight in model.parameters() if weight.grad is not None]
    assert waited
    optimizer.zero_grad()
    optimizer.step()
    assert all(float(optimizer.state[weight]["step"]) == 1 for weight in waited)
    step(run, 2)
    assert all(float(optimizer.state[weight]["step"]) == 2 for weight in waited)
    assert float(optimizer.state[model.layers[5][0].weight]["step"]) == 3


def test_a_batch_may_follow_one_that_failed_as_after_a_step_without_its_gradients():
    """As a trainer that halves its batch has it: nobody calls `step` in between."""
    stepped, left = (run_of() for _ in range(2))
    for run in (stepped, left):
        step_in_backward(*run)
        step(run, 0)
        failed(run, 1)
        run[1].zero_grad()
        if run is stepped:
            run[1].step()
        for seed in range(2, 4):
            step(run, seed)
    assert snapshot(left[1]) == snapshot(stepped[1])


def test_a_gradient_that_waited_is_added_to_by_a_backward_after_one_that_failed():
    """As in the ordinary mode."""
    ordinary, in_backward = (run_of() for _ in range(2))
    step_in_backward(*in_backward)
    for run in (ordinary, in_backward):
        model, optimizer = run
        step(run, 0)
        before = snapshot(optimizer)
        failed(run, 1, LAYERS - 1)
        assert model.layers[-1][1].bias.grad is not None
        assert snapshot(optimizer) == before
        model(2).backward()
        optimizer.step()
    assert snapshot(in_backward[1]) == snapshot(ordinary[1])


def test_the_norm_of_a_batch_that_failed_clips_nothing():
    """Not even where weights that it had reached are left out of the next."""
    through, left = (run_of() for _ in range(2))
    for run in (through, left):
        step_in_backward(*run, clip_norm=1.0)
        step(run, 0)
        if run is left:
            failed(run, 1)
            run[1].zero_grad()
        step(run, 2, range(3))
    assert 0 < left[1].param_groups[0][PREVIOUS_NORM] == through[1].param_groups[0][PREVIOUS_NORM]


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_batch_may_follow_wherever_the_step_of_another_failed(accumulating: bool):
    """In backward, at its end, where half-filled buckets are stepped, or in `optimizer.step()`."""
    run = run_of()
    model, optimizer = run
    handle = step_in_backward(*run)
    step(run, 0)

    def some() -> None:
        if accumulating:
            with handle.accumulate():
                model(3, range(1, LAYERS, 2)).backward()
        model(1, range(0, LAYERS, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    parts = parts_of(run, some)
    for fails in range(len(parts)):
        with raising(optimizer, fails), pytest.raises(torch.OutOfMemoryError):
            some()
        optimizer.zero_grad()
        before = {weight: int(optimizer.state[weight]["step"]) for weight in model.parameters()}
        step(run, 2)
        assert {weight: int(optimizer.state[weight]["step"]) for weight in before} == {
            weight: steps + 1 for weight, steps in before.items()
        }


@contextmanager
def raising(optimizer: ProjectedOptimizer, number: int) -> Iterator[None]:
    """Run out of memory in the step of this part."""
    step_part_ = optimizer._step_part_
    numbers = count()

    def step_or_fail_(weights: list[Tensor]) -> None:
        if next(numbers) == number:
            raise torch.OutOfMemoryError("no memory")
        step_part_(weights)

    optimizer._step_part_ = step_or_fail_
    yield
    optimizer._step_part_ = step_part_


# Weights of other kinds.


def test_int8_weights_are_stepped_together():
    made = []
    for in_backward in (False, True):
        model = quantize_weights_(Deep(), group_size=8)
        run = model, APOLLO(list(model.named_parameters()), rank=4, lr=0.01)
        if in_backward:
            step_in_backward(*run)
        parts = parts_of(run, lambda run=run: [step(run, number) for number in range(3)])
        made.append({name: bits(tensor) for name, tensor in model.state_dict().items()})
    assert made[0] == made[1]
    assert 0 < len(parts) < 3 * len(list(model.parameters())) / 2


def test_an_empty_weight_keeps_nobody_waiting():
    model = nn.ParameterList([nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(3, 4))])
    optimizer = APOLLO(model, rank=None)
    step_in_backward(model, optimizer)
    for number in range(2):
        (model[0].sum() + model[1].sum()).backward()
        assert [weight.grad for weight in model] == [None, None]
        optimizer.step()
        assert float(optimizer.state[model[1]]["step"]) == number + 1
