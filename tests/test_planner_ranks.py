"""The planner against real runs on four processes: what each rank holds, keeps and sends."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from apollo_optim import APOLLO, Artemis, param_groups
from apollo_optim.planner.activations import Batch
from apollo_optim.planner.collectives import Traffic
from apollo_optim.planner.layout import Layout, layout_of
from apollo_optim.planner.models import Transformer
from apollo_optim.planner.optimizers import Planned, _requests, planned
from apollo_optim.planner.paper_figures import LISTED
from apollo_optim.planner.plan import model_plan, optimizer_plan
from family import partly_slow
from planned import DENSE, MIXTURE, Collectives, Live, bytes_of, hugging_face, local
from ranks import device_mesh

pytest.importorskip("transformers")

BATCH = Batch(sequences=2, sequence=24, checkpointing=False, loss="plain")
FP32 = torch.float32, torch.float32
"""Dtypes of weights, and of what is computed."""
FAMILY = list(LISTED)
FACTORED = "apollo-mini with a factored vocabulary"
NARROW = "apollo with 8-bit state"
PLANNED = [*FAMILY, FACTORED, NARROW]
RANK = 4
REFRESH = 2
"""Steps between bases: of three, the second begins none."""

# One layer of each kind has every shape.
assert MIXTURE.experts is not None
SHORT = replace(DENSE, layers=1)
EXPERTS = replace(MIXTURE, layers=1, experts=replace(MIXTURE.experts, dense_layers=0))
FEW_EXPERTS = replace(EXPERTS, experts=replace(MIXTURE.experts, dense_layers=0, count=2, active=1))

CASES: dict[str, tuple[Transformer, Layout]] = {
    "fsdp": (SHORT, layout_of(SHORT, 4, "fsdp")),
    "fsdp by channels": (SHORT, layout_of(SHORT, 4, "fsdp", split="channels")),
    "hsdp": (SHORT, layout_of(SHORT, 4, "hsdp", replicas=2)),
    "fsdp+tp": (SHORT, layout_of(SHORT, 4, "fsdp+tp", tensor=2)),
    "fsdp of experts": (EXPERTS, layout_of(EXPERTS, 4, "fsdp")),
    "fsdp+ep": (EXPERTS, layout_of(EXPERTS, 4, "fsdp+ep", expert=2)),
    "fsdp+ep inside experts": (FEW_EXPERTS, layout_of(FEW_EXPERTS, 4, "fsdp+ep", expert=2)),
}


def meshes(layout: Layout) -> tuple[DeviceMesh, DeviceMesh]:
    """The meshes of experts and of everything else, their axes named as the planner's."""
    if layout.expert > 1:
        both = device_mesh(expert_shard=layout.shard // layout.expert, expert=layout.expert)
        return both, device_mesh(shard=layout.shard)
    sizes = {"replicate": layout.replicas, "shard": layout.shard, "tensor": layout.tensor}
    mesh = device_mesh(**{name: size for name, size in sizes.items() if size > 1})
    return mesh, mesh


def sharded(model: Transformer, layout: Layout, dtype: torch.dtype = torch.float32) -> Any:
    """A real model laid out so."""
    real = hugging_face(model, dtype)
    expert_mesh, mesh = meshes(layout)
    if layout.tensor > 1:
        styles = {"rows": ColwiseParallel, "columns": RowwiseParallel}
        plan: dict[str, Any] = {
            weight.name.removesuffix(".weight"): styles[weight.cut]()
            for weight in model.weights()
            if weight.cut != "none"
        }
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(real, mesh["tensor"], plan)
    names = [name for name in ("replicate", "shard") if name in (mesh.mesh_dim_names or ())]
    over = mesh[tuple(names)]
    for layer in real.model.layers:
        if layout.expert > 1 and hasattr(layer.mlp, "experts"):
            _deal_out(layer.mlp.experts, layout, expert_mesh)
        fully_shard(layer, mesh=over, shard_placement_fn=placement(layout))
    fully_shard(real, mesh=over, shard_placement_fn=placement(layout))
    return real


def placement(layout: Layout) -> Any:
    """What FSDP2 is told to split of a weight, as a user would tell it."""

    def dim(weight: Tensor) -> Shard | None:
        wide = weight.ndim >= 2 and weight.shape[-1] > weight.shape[-2]
        return Shard(weight.ndim - 1) if wide and weight.shape[-1] % layout.shard == 0 else None

    return dim if layout.split == "channels" else None


def _deal_out(experts: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Some experts on each rank of one axis, shared by FSDP2 along the other."""
    for name, weight in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["expert"], [Shard(0)])))
    many = local(next(experts.parameters())).shape[0] >= mesh.size(0)
    fully_shard(experts, mesh=mesh["expert_shard"], shard_placement_fn=lambda weight: Shard(0 if many else 1))


class Measured(NamedTuple):
    """Of one rank."""

    weights: int
    gradients: int
    state: dict[str, int]
    """By optimizer."""
    step: dict[str, dict[str, tuple[int, int]]]
    """Collectives of an ordinary step, by optimizer and kind: how many, and bytes. Of the ranks that watch them."""
    refresh: dict[str, dict[str, tuple[int, int]]]
    """Of a step that begins new bases."""


def measured(case: str) -> Measured:
    """Take real steps on this rank's gradients."""
    model, layout = CASES[case]
    real = sharded(model, layout)
    weights = list(real.parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    kept, step, refresh = {}, {}, {}
    for name in PLANNED:
        candidate = LISTED[name.partition(" ")[0]]
        rank = RANK if candidate.takes_rank else candidate.ranks[0]
        optimizer: Any = candidate.optimizer
        groups = param_groups(real, rank=rank, vocabulary="factored") if name == FACTORED else real
        options = {"rank": rank, "state_dtype": state_dtype_of(name), "refresh_every": REFRESH}
        own = {"factored-adamw": (), "artemis": (), "artemis-mini": ("rank", "state_dtype")}.get(name, options)
        built = optimizer(groups, lr=0.0, **{option: options[option] for option in own})
        try:
            built.step()
        except ValueError:  # what is in 4 bits cannot be split everywhere, which the planner must say, too
            continue
        kept[name] = sum(bytes_of(value) for state in built.state.values() for value in state.values())
        for found in (step, refresh):
            # Watching takes longer than stepping, and all but those that deal matrices out send alike on all ranks.
            watches = dist.get_rank() == 0 or name in DEALT
            with Collectives() if watches else nullcontext() as collectives:
                built.step()
            found[name] = collectives.seen if collectives else {}
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return Measured(sum(map(bytes_of, weights)), sum(map(bytes_of, gradients)), kept, step, refresh)


def state_dtype_of(name: str) -> torch.dtype:
    return torch.int8 if name == NARROW else torch.float32


def plan_of(name: str) -> Planned:
    vocabulary = "factored" if name == FACTORED else None
    return planned(name.partition(" ")[0], RANK, torch.float32, state_dtype_of(name), vocabulary)


def by_kind(traffic: Sequence[Traffic]) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in traffic:
        counts[each.kind] += each.count
        sizes[each.kind] += each.bytes
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


DEALT = "artemis", "artemis-mini"
"""Optimizers that deal matrices out to be orthogonalised."""

# Copies send what their parts do, and the passes of hybrid sharding are planned below.
QUICK = "fsdp", "fsdp+tp"


@pytest.fixture(scope="module", params=partly_slow(CASES, quick=QUICK))
def case(request, ranks) -> tuple[Transformer, Layout, list[Measured]]:
    return (*CASES[request.param], ranks.run(measured, request.param))


def test_the_first_rank_holds_the_weights_gradients_and_state_that_were_planned_and_none_holds_more(case):
    model, layout, found = case
    plan = model_plan(model, layout, BATCH, *FP32)
    assert (plan.weights, plan.gradients) == (found[0].weights, found[0].gradients)
    assert plan.weights == max(rank.weights for rank in found)
    for name in found[0].state:
        held = optimizer_plan(model, layout, plan_of(name)).state
        assert held == found[0].state[name] == max(rank.state[name] for rank in found), name
    for name in set(PLANNED) - set(found[0].state):
        with pytest.raises(ValueError, match=r"columns of its exp_avg are split among \d ranks"):
            optimizer_plan(model, layout, plan_of(name))


@pytest.fixture
def wide_products(monkeypatch):
    """Directions are sent as they are multiplied: on the GPUs that are planned in bfloat16, here in float32."""
    _requests.cache_clear()
    for module in ("spectral", "sharded"):
        monkeypatch.setattr(f"apollo_optim.stepping.{module}.product_dtype", lambda dtype, device: torch.float32)
    yield
    _requests.cache_clear()


@pytest.mark.usefixtures("wide_products")
def test_a_step_sends_what_was_planned(case):
    model, layout, found = case
    for name in found[0].step:
        plan = optimizer_plan(model, layout, plan_of(name))
        seen, renewed = found[0].step[name], found[0].refresh[name]
        if "all-to-all" in seen:
            # A rank has one matrix more than another: what is planned is their mean.
            counts, sizes = zip(*(rank.step[name]["all-to-all"] for rank in found), strict=True)
            assert len(set(counts)) == 1
            seen = renewed = seen | {"all-to-all": (counts[0], sum(sizes) // len(sizes))}
        assert by_kind(plan.traffic) == seen, name
        assert by_kind(plan.refresh_traffic) == renewed, name


def test_directions_are_planned_to_travel_as_a_gpu_multiplies_them():
    model, layout = CASES["fsdp"]
    requests = [each for weight in model.weights() for each in plan_of("artemis").requests(weight, layout, False)]
    assert {each.tensor.dtype for each in requests if each.kind in ("deal", "return")} == {torch.bfloat16}


def touch(tensors: Iterable[Tensor]) -> None:
    """Let whoever watches see these."""
    for tensor in tensors:
        local(tensor.detach()).mul_(1)


def passes(case: str, checkpointing: bool) -> tuple[dict[str, tuple[int, int]], int]:
    """Collectives of a forward and a backward pass, and the most bytes that they hold, gradients being there before."""
    _, layout = CASES[case]
    real = sharded(DENSE, layout)
    if checkpointing:
        real.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(DENSE.vocabulary, (BATCH.sequences, BATCH.sequence))

    def run() -> None:
        logits = real(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens.flatten())
        del logits
        loss.backward()

    run()
    with Collectives() as collectives:
        run()
    with Live() as live:
        touch(real.parameters())
        touch(weight.grad for weight in real.parameters())
        run()
    return collectives.seen, live.peak


@pytest.mark.parametrize(
    ("case", "checkpointing"),
    partly_slow(
        [(case, recomputed) for case in ("fsdp", "hsdp", "fsdp by channels") for recomputed in (False, True)],
        quick=[("fsdp", True), ("hsdp", False), ("fsdp by channels", False)],
    ),
)
def test_forward_and_backward_send_what_was_planned_and_hold_it_to_a_tenth(ranks, case, checkpointing):
    _, layout = CASES[case]
    plan = model_plan(DENSE, layout, replace(BATCH, checkpointing=checkpointing), *FP32)
    for seen, peak in ranks.run(passes, case, checkpointing):
        assert by_kind(plan.traffic) == seen
        assert plan.weights + plan.gradients + plan.activations + plan.buffers == pytest.approx(peak, rel=0.1)


def peak_of_step(optimizer: torch.optim.Optimizer) -> int:
    """The most bytes that a step holds beside weights, gradients and state."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    with Live() as live:
        touch(weights)
        touch(weight.grad for weight in weights)
        touch(value for state in optimizer.state.values() for value in state.values())
        before = live.now()
        optimizer.step()
    return live.peak - before


def held_by_steps(case: str) -> dict[str, int]:
    """The most bytes that the first rank's ordinary step holds beside weights, gradients and state, by optimizer."""
    model, layout = CASES[case]
    real = sharded(model, layout, torch.bfloat16)
    found = {}
    for weight in real.parameters():
        weight.grad = torch.ones_like(weight)
    for name in FAMILY:
        candidate = LISTED[name]
        build: Any = candidate.optimizer
        optimizer = build(
            real, lr=0.0, **({"rank": candidate.ranks[0]} if name not in ("factored-adamw", "artemis") else {})
        )
        optimizer.step()
        if dist.get_rank() > 0:
            optimizer.step()
            continue
        found[name] = peak_of_step(optimizer)
    return found


def test_a_step_holds_what_was_planned_to_a_factor_of_two(ranks):
    model, layout = CASES["fsdp"]
    measured, *_ = ranks.run(held_by_steps, "fsdp")
    for name in FAMILY:
        step = optimizer_plan(model, layout, planned(name, None, torch.bfloat16, torch.float32)).step
        assert 0.5 < step / measured[name] < 2, name


def held_by_many(count: int) -> int:
    """The most bytes that a step holds beside so many weights of bfloat16, 1,536 numbers on each rank."""
    mesh = device_mesh(shard=4)
    weights = [nn.Parameter(distribute_tensor(torch.ones(96, 64).bfloat16(), mesh, [Shard(0)])) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = APOLLO(weights, rank=4)
    optimizer.step()
    return peak_of_step(optimizer)


def test_gradients_do_not_wait_for_norms_in_float32(ranks):
    """What one more weight adds to the peak is its low-rank gradient and norms, not a wide copy of its gradient."""
    for few, many in zip(ranks.run(held_by_many, 5), ranks.run(held_by_many, 10), strict=True):
        assert (many - few) / 5 < 0.5 * 4 * 1536


def held_by_dealt(split: int) -> float:
    """The most bytes that Artemis' step holds beside its state, in whole matrices."""
    mesh, shape = device_mesh(shard=4), (64, 4096)
    weights = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(split)])) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = Artemis(weights)
    optimizer.step()
    return peak_of_step(optimizer) / (4 * 64 * 4096)


@pytest.mark.parametrize("split", [0, 1])
def test_a_rank_holds_one_matrix_at_a_time_of_those_that_are_dealt_out(ranks, split):
    """As it came, put together, and multiplied; of three that wait a quarter each, and products of the smaller side."""
    assert max(ranks.run(held_by_dealt, split)) < 3 + 3 / 4 + 0.1
