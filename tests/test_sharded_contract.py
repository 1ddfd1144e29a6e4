"""What holds for sharded weights beside their values: refusals, rounding, bases, state, collectives and errors."""

import weakref
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from apollo_optim import APOLLO
from apollo_optim.core.orthogonal import orthogonalize_
from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.shape import matrix_shape
from apollo_optim.distributed import MeshAxis
from apollo_optim.state import part_of_weight, state_entries
from apollo_optim.stepping import plain, sharded
from apollo_optim.stepping.collectives import BUCKET_BYTES, Request, Step, in_lockstep
from family import BY_NAME, FAMILY, Member, partly_slow
from interpreted import hasten
from layouts import LAYOUTS, SHAPES, SOME_LAYOUTS, Case, Run, cases, mesh, part, whole_after
from planned import Collectives

FLOAT32 = (torch.float32,)
some_layouts = pytest.mark.parametrize(
    "layouts",
    [SOME_LAYOUTS, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)],
    ids=["some layouts", "every layout"],
)


def parts_of_state(run: Run) -> list[dict[str, torch.Tensor]]:
    """A copy of all that this rank holds of the state."""
    return [
        {name: (value.to_local() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}
        for state in run.optimizer.state.values()
    ]


def refused_by_masks(
    layouts: tuple[str, ...], member: Member, state_dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    """`refused` as on a GPU, where a step computes with copies, and does not ask whether its gradient is finite."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plain, "_wide", lambda tensor, dtype: tensor.to(dtype, copy=True))
        monkeypatch.setattr(plain, "_lie_flat", lambda job, grad: False)
        monkeypatch.setattr(plain, "refuses", lambda job, finite: plain.refresh_by_host(job) and not bool(finite))
        return refused(layouts, member, state_dtype, counted=True)


def refused(
    layouts: tuple[str, ...], member: Member, state_dtype: torch.dtype = torch.float32, counted: bool = False
) -> tuple[int, int]:
    """Take steps of which one has a NaN on one rank, and is `counted` or not; (gradients refused, weights)."""
    run = Run(member, cases(FLOAT32, layouts), state_dtype=state_dtype)
    run.step(0)
    before, state = [weight.to_local().clone() for weight in run.weights.values()], parts_of_state(run)
    run.step(1, spoilt=SHAPES)
    assert all(torch.equal(weight.to_local(), old) for weight, old in zip(run.weights.values(), before, strict=True))
    for new, old in zip(parts_of_state(run), state, strict=True):
        assert all(torch.equal(new[name], old[name]) for name in old if name != "step" or not counted)
    run.step(2)
    assert all(bool(weight.to_local().isfinite().all()) for weight in run.weights.values())
    moved = [
        not torch.equal(w.to_local(), old) for w, old in zip(run.weights.values(), before, strict=True) if old.numel()
    ]
    assert all(moved)
    return run.optimizer.skipped(), len(run.weights)


@pytest.mark.parametrize(
    "name",
    partly_slow(
        ["apollo", "mini-svd", "structured-channel", "galore", "fira", "flora", "adamw"],
        quick=["apollo", "fira", "adamw"],
    ),
)
@some_layouts
def test_a_nan_on_one_rank_refuses_the_weight_on_all_and_changes_nothing(ranks, name, layouts):
    for skipped, count in ranks.run(refused, layouts, BY_NAME[name]):
        assert skipped == count


@pytest.mark.parametrize(
    "name",
    partly_slow(
        ["apollo", "structured-channel", "galore", "flora", "factored-adamw", "artemis-wide", "artemis-mini"],
        quick=["galore", "flora", "factored-adamw", "artemis-wide", "artemis-mini"],
    ),
)
@some_layouts
def test_a_nan_on_one_rank_changes_nothing_where_the_device_is_not_asked(ranks, name, layouts):
    for skipped, count in ranks.run(refused_by_masks, layouts, BY_NAME[name]):
        assert skipped == count


@some_layouts
def test_a_nan_on_one_rank_leaves_codes_and_scales_that_cross_ranks_as_they_were(ranks, layouts):
    for skipped, count in ranks.run(refused_by_masks, layouts, BY_NAME["apollo"], torch.int8):
        assert skipped == count


def refused_as_too_large(member: Member, whole: bool) -> int:
    """How many gradients are refused of which no part is too large for float32, but the sum of all squares is."""
    placed = [Case(None if whole else "rows", name, torch.float32) for name in ("vector", "tall")]
    run = Run(member, placed)
    for case, weight in run.weights.items():
        weight.grad = case.placed(torch.full(case.shape, 1e19 if case.name == "vector" else 1.8e18))
    run.optimizer.step()
    return run.optimizer.skipped()


@pytest.mark.parametrize(
    ("name", "expected"),
    # Of the matrix the squares of a channel are not, and APOLLO has the norms of channels.
    [("adamw", 2), ("factored-adamw", 2), ("apollo-svd", 1)],
)
def test_what_is_too_large_for_one_process_is_for_several(ranks, name, expected):
    whole, parts = (ranks.run(refused_as_too_large, BY_NAME[name], whole) for whole in (True, False))
    assert whole == parts == [expected] * 4


def orthogonalised(name: str) -> tuple[int, int]:
    """How many matrices this rank orthogonalises in a step, and how many there are."""
    run = Run(BY_NAME[name], [Case("rows", "wide", torch.float32), *cases(FLOAT32, ("columns", "rows"))])
    counts: list[int] = []

    def counted(stack: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(stack))
        return orthogonalize_(stack, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sharded, "orthogonalize_", counted)
        run.step(0)
    return sum(counts), sum(
        weight.shape[0] if weight.dim() == 3 else weight.dim() > 1 for weight in run.weights.values()
    )


@pytest.mark.parametrize("name", ["artemis-wide", "artemis-mini"])
def test_each_matrix_is_orthogonalised_by_one_rank_and_each_rank_has_its_share(ranks, name):
    counts, totals = zip(*ranks.run(orthogonalised, name), strict=True)
    assert sum(counts) == totals[0]
    assert max(counts) - min(counts) <= 3  # the experts of a weight stay together


def directions(state_dtype: torch.dtype) -> list[bytes]:
    """What this rank keeps of momenta of low rank after steps of which one was refused, and others renewed them."""
    run = Run(BY_NAME["artemis-mini"], cases(FLOAT32, ("rows", "columns", "hybrid")), state_dtype=state_dtype)
    for step in range(4):
        run.step(step, spoilt=SHAPES if step == 2 else ())
    kept = [state for case, state in zip(run.weights, parts_of_state(run), strict=True) if len(case.shape) == 2]
    assert all({"basis", "exp_avg"} <= state.keys() for state in kept)
    return [value.view(torch.uint8).numpy().tobytes() for state in kept for value in state.values() if value.dim()]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_rank_keeps_the_directions_that_the_owner_of_a_matrix_has_found(ranks, state_dtype):
    first, *others = ranks.run(directions, state_dtype)
    assert len(first) >= 12
    assert others == [first] * 3


def wrong_below(eps: float) -> list[str]:
    """Weights whose limiter takes the root mean square of all of v to be on another side of `eps` than it is."""
    member, dtypes = BY_NAME["structured-channel"], (torch.float64,)
    run = Run(member, cases(dtypes), eps=eps)
    run.step(0)
    errors = run.errors(whole_after(1, member, dtypes, eps=eps))
    return [str(case) for case, error in errors.items() if not error < 1e-12]


@pytest.mark.parametrize("square", [0.7, 1.4])  # of gradients whose mean square is about 1
def test_what_eps_makes_small_is_measured_over_all_ranks(ranks, square):
    assert ranks.run(wrong_below, square**0.5) == [[]] * 4


def changed_by_zeros(layouts: tuple[str, ...], member: Member) -> list[str]:
    """Weights of this rank that are others after two steps because their first gradients, of three, were zeros."""
    options = {"weight_decay": 0.0, "refresh_every": 2}
    waited, begun = (Run(member, cases(FLOAT32, layouts), **options) for _ in range(2))
    for case, weight in waited.weights.items():
        weight.grad = case.placed(torch.zeros(case.shape, dtype=torch.float64))
    waited.optimizer.step()
    with_basis = {weight for weight, state in waited.optimizer.state.items() if "basis" in state}
    assert with_basis
    assert all(float(waited.optimizer.state[weight]["step"]) == 0 for weight in with_basis)
    for step in range(2):
        waited.step(step)
        begun.step(step)
    return [
        str(case)
        for case, weight in waited.weights.items()
        if weight in with_basis and not torch.equal(weight.to_local(), begun.weights[case].to_local())
    ]


@some_layouts
@pytest.mark.parametrize("name", partly_slow(["mini-svd", "galore", "fira", "flora-svd"], quick=["fira", "flora-svd"]))
def test_a_zero_gradient_begins_no_basis_on_any_rank(ranks, name, layouts):
    assert ranks.run(changed_by_zeros, layouts, BY_NAME[name]) == [[]] * 4


def seeds_that_differ() -> list[str]:
    """Weights without names whose parts have another seed than the whole."""
    starts = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
    whole = {name: nn.Parameter(start) for name, start in starts.items()}
    sharded = {case: nn.Parameter(case.placed(starts[case.name])) for case in cases(FLOAT32)}
    optimizer = APOLLO([*whole.values(), *sharded.values()], rank=2)
    for weight in (*whole.values(), *sharded.values()):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    seeds = {weight: int(state["seed"]) for weight, state in optimizer.state.items()}
    return [str(case) for case, weight in sharded.items() if seeds[weight] != seeds[whole[case.name]]]


def test_the_seed_of_a_weight_without_a_name_does_not_depend_on_the_mesh(ranks):
    assert ranks.run(seeds_that_differ) == [[]] * 4


def bf16_differences(layouts: tuple[str, ...], member: Member) -> dict[Case, float]:
    """The share of elements of this rank that are not, bit for bit, those of the ordinary run."""
    chosen = [case for case in cases((torch.bfloat16,), layouts) if case.name != "conv"]
    options = {"state_dtype": torch.bfloat16}
    whole, sharded = whole_after(2, member, (torch.bfloat16,), **options), Run(member, chosen, **options)
    for step in range(2):
        sharded.step(step)
    shares = {}
    for case, weight in sharded.weights.items():
        expected = part(whole[case._replace(layout=None)].weight, case.mesh, case.placements)
        different = weight.to_local() != expected
        shares[case] = float(different.double().mean()) if different.numel() else 0.0
    return shares


@some_layouts
def test_bfloat16_rounds_by_the_place_in_the_whole_weight(ranks, layouts):
    # AdamW sums nothing, so every bit agrees: weights, and moments that are rounded too.
    for shares in ranks.run(bf16_differences, layouts, BY_NAME["adamw"]):
        assert set(shares.values()) == {0.0}
    # A gain that is off by 1e-7 moves a value across its draw about once in 1e-7 / 2**-9 = 20,000 elements, and of
    # moments that a rank sums in another order as rarely; drawn by another place, half of them would differ.
    # GaLore keeps a basis besides.
    for name in ("apollo", "galore"):
        for shares in ranks.run(bf16_differences, layouts, BY_NAME[name]):
            assert max(shares.values()) < 0.02


def bases_differ() -> list[str]:
    """Layouts in which this rank's part of a basis is not that part of the whole one."""
    wrong = []
    for case in cases(FLOAT32):
        weight = nn.Parameter(case.placed(torch.zeros(case.shape)))
        shape = matrix_shape(case.shape, 4)
        if shape is None:
            continue
        held = part_of_weight("w", weight, Run(BY_NAME["apollo"], [case]).optimizer.param_groups[0])
        assert held is not None
        local = held.local_matrix
        basis = gaussian_basis(local, 1234, 5, torch.float32, torch.device("cpu"))
        whole = gaussian_basis(shape, 1234, 5, torch.float32, torch.device("cpu"))
        if local.experts is not None:
            whole = whole[local.first_expert : local.first_expert + local.experts]
        expected = whole[..., local.first_side : local.first_side + local.side]
        if not torch.equal(basis, expected):
            wrong.append(str(case))
    return wrong


def test_the_basis_does_not_depend_on_the_mesh(ranks):
    assert ranks.run(bases_differ) == [[]] * 4


def misplaced() -> list[str]:
    """Weights and state of which torch would say that this rank holds another part, or that all is of another shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    wrong = []
    for name in ("flora-svd", "structured-channel", "adamw"):
        run = Run(BY_NAME[name], cases(FLOAT32))
        run.step(0)
        group = run.optimizer.param_groups[0]
        for case, weight in run.weights.items():
            held, state = part_of_weight("w", weight, group), run.optimizer.state[weight]
            assert held is not None
            promised = {key: entry.shape for key, entry in state_entries(case.shape, case.dtype, group).items()}
            if promised != {key: tuple(value.shape) for key, value in state.items()}:
                wrong.append(f"{case} has state of other shapes than {promised}")
            for key, value in [("weight", weight), *state.items()]:
                if not isinstance(value, DTensor):
                    continue
                ranges = held.ranges if key == "weight" else held.state_ranges(key)
                lengths, offsets = tuple(stop - first for first, stop in ranges), tuple(first for first, _ in ranges)
                theirs = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
                same = (lengths, offsets) == theirs if 0 not in lengths else 0 in theirs[0]
                if not same or tuple(value.to_local().shape) != lengths:
                    wrong.append(f"{case} {key}: {lengths} at {offsets}, {theirs}")
    return wrong


def test_every_part_is_where_torch_says_it_is_and_state_has_the_shapes_of_the_whole_weight(ranks):
    assert ranks.run(misplaced) == [[]] * 4


def state_elements() -> dict[str, tuple[int, int]]:
    """By case, elements of this rank's moments and basis, and what a fair share of them would be."""
    run = Run(BY_NAME["apollo-svd"], cases(FLOAT32, ["rows", "columns", "fsdp and columns"]))
    run.step(0)
    found = {}
    for case, weight in run.weights.items():
        state = run.optimizer.state[weight]
        moments, ranks = state["exp_avg"], 4
        # Chunks are rounded up on each axis, of which there are at most two, and along one or two dimensions.
        fair = moments.numel() / ranks + 3 * moments.numel() / moments.shape[-1] + 12
        found[f"{case.layout} {case.name}"] = moments.to_local().numel(), int(fair)
    return found


def test_moments_are_split_over_all_ranks_that_split_the_weight(ranks):
    for found in ranks.run(state_elements):
        unfair = {case: pair for case, pair in found.items() if pair[0] > pair[1] and "experts" not in case}
        # Strided parts that do not divide evenly cannot be placed: those are split by the channels' axis alone.
        assert set(unfair) <= {"fsdp and columns wide"}


def traffic(
    member: Member, layout: str, names: tuple[str, ...], step: int, **options: Any
) -> dict[str, tuple[int, int]]:
    """By kind, how many collectives one step of these weights takes, and bytes of what they gather or add up."""
    run = Run(member, [Case(layout, name, torch.float32) for name in names], **options)
    for number in range(step):
        run.step(number)
    with Collectives() as collectives:
        run.step(step)
    return collectives.seen


# Sums are of float64: whether the gradient is finite, what the limiter measures, the second moment, and (channels
# being split) the gains, 4 numbers a matrix; one gain per tensor takes 5; AdamW 1.
PINNED = [
    ("apollo", "rows", ("tall", "vector"), {"all-reduce": (1, 8 * (4 + 1))}),
    ("apollo", "columns", ("wide",), {"all-reduce": (1, 8 * 4)}),
    # 9 rows are contracted: 4 x 41 (44 with what rounds it up to four ranks), and as many gains.
    (
        "apollo", "rows", ("wide", "tall", "vector"),
        {"reduce-scatter": (1, 4 * 4 * 44), "all-gather": (1, 4 * 44), "all-reduce": (1, 8 * (3 + 4 + 1))},
    ),
    ("mini", "rows", ("wide", "tall"), {"reduce-scatter": (1, 4 * 44), "all-reduce": (1, 8 * 10)}),
    ("apollo", "whole", ("wide", "vector"), {}),
    # One sum per axis of the mesh; a weight takes part in those that split it.
    ("apollo", "hybrid", ("tall", "vector"), {"all-reduce": (1, 8 * 5)}),
    ("apollo", "fsdp and columns", ("even",), {
        "reduce-scatter": (1, 4 * 4 * 16), "all-gather": (1, 4 * 16), "all-reduce": (2, 8 * 3 + 8 * 4)
    }),
    ("adamw", "rows", ("wide", "tall", "vector"), {"all-reduce": (1, 8 * 3)}),
    ("galore", "rows", ("wide", "tall"), {
        "reduce-scatter": (1, 4 * 4 * 44), "all-gather": (1, 4 * 4 * 44), "all-reduce": (1, 8 * 2)
    }),
    # Experts that are whole need to know of each other only that all are finite, and so do parts of AdamW's matrices.
    ("apollo", "rows", ("experts",), {"all-reduce": (1, 8)}),
    ("structured-element", "rows", ("wide",), {"all-reduce": (1, 8)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "weights", "expected"), PINNED)
def test_a_step_takes_these_collectives_and_bytes(ranks, name, layout, weights, expected):
    for seen in ranks.run(traffic, BY_NAME[name], layout, weights, 1):
        assert seen == expected


def traffic_of_kernels(member: Member, layout: str, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        hasten(monkeypatch)
        return traffic(member, layout, names, 1, fused=True)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "layout", "weights", "expected"),
    # Those that have every kind of collective, two axes, and AdamW. Two rules have no kernels.
    partly_slow(
        [case for case in PINNED if case[0] not in ("galore", "structured-element")],
        quick=[PINNED[2], PINNED[3], PINNED[6], PINNED[7]],
    ),
)
def test_the_kernels_take_the_same_collectives_and_bytes(ranks, device, name, layout, weights, expected):
    for seen in ranks.run(traffic_of_kernels, BY_NAME[name], layout, weights):
        assert seen == expected


@pytest.mark.parametrize(
    "name",
    partly_slow([member.name for member in FAMILY if member.uses_svd], quick=["apollo-svd-lowrank", "flora-svd"]),
)
def test_an_svd_gathers_the_gradient_at_a_refresh_only(ranks, name):
    # 41 x 9 in parts of at most 11 x 9: one gather more than at other steps, after a sum that says it is finite.
    of_step = partial(traffic, BY_NAME[name], "rows", ("tall",), refresh_every=2)
    at_refresh, *_ = ranks.run(partial(of_step, step=2))
    between, *_ = ranks.run(partial(of_step, step=3))
    assert "all-gather" not in between
    assert at_refresh["all-gather"] == (1, 4 * 44 * 9)
    assert at_refresh["all-reduce"][0] <= between["all-reduce"][0] + 1


def buckets(limit: int, layouts: tuple[str, ...]) -> tuple[dict[Case, float], int]:
    """A run whose requests are sent as soon as `limit` bytes wait: its errors, and its collectives at the last step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("apollo_optim.stepping.collectives.BUCKET_BYTES", limit)
        sharded = Run(BY_NAME["apollo"], cases(FLOAT32, layouts))
        for step in range(2):
            with Collectives() as collectives:
                sharded.step(step)
    whole = whole_after(2, BY_NAME["apollo"], FLOAT32)
    return sharded.errors(whole), sum(count for count, _ in collectives.seen.values())


@some_layouts
def test_large_requests_are_sent_in_several_collectives(ranks, layouts):
    few, many = (ranks.run(buckets, limit, layouts) for limit in (2**27, 2000))
    assert max(max(errors.values()) for errors, _ in many) < 1e-6
    assert {count for _, count in many} == {many[0][1]}
    assert many[0][1] > few[0][1]


def collectives_of_company() -> int:
    """Collectives of a step of two weights, of which one had no gradient at the step before."""
    run = Run(BY_NAME["adamw"], [Case("rows", name, torch.float32) for name in ("tall", "vector")])
    run.step(0)
    *_, vector = run.weights.values()
    vector.grad = None
    run.optimizer.step()
    with Collectives() as collectives:
        run.step(1)
    return sum(count for count, _ in collectives.seen.values())


def test_weights_that_come_and_go_still_talk_to_other_ranks_together(ranks):
    assert ranks.run(collectives_of_company) == [1] * 4


def counted(member: Member, state_dtype: torch.dtype) -> list[tuple[str, int]]:
    """Every request of a first step, in its order, with the bytes it is counted with."""
    found = []

    def noted(step: Step[Any]) -> Step[Any]:
        answer: Any = None
        while True:
            try:
                request = step.send(answer)
            except StopIteration as end:
                return end.value
            found.append((request.kind, request.cost))
            answer = yield request

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("apollo_optim.step_plan.in_lockstep", lambda steps: in_lockstep([*map(noted, steps)]))
        Run(member, cases(FLOAT32), state_dtype=state_dtype).step(0)
    return found


@pytest.mark.parametrize(
    ("name", "state_dtype"), [("galore", torch.float32), ("apollo", torch.int8), ("artemis-mini", torch.int8)]
)
def test_every_rank_counts_a_request_alike(ranks, name, state_dtype):
    """However unequal their parts: ranks that did not would send their requests in different companies."""
    first, *others = ranks.run(counted, BY_NAME[name], state_dtype)
    assert {cost for kind, cost in first if kind == "sum"} == {0}, "sums are short, and wait for those of all weights"
    costly = {
        "galore": {"scatter", "gather"},
        "apollo": {"scatter", "max"},
        "artemis-mini": {"deal", "return", "gather"},
    }
    assert {kind for kind, cost in first if cost > 0} >= costly[name]
    assert others == [first] * 3


def test_axes_of_a_mesh_without_names_are_in_its_order():
    nameless: Any = SimpleNamespace(mesh_dim_names=None)
    assert MeshAxis(nameless, 0).order < MeshAxis(nameless, 1).order


@pytest.mark.parametrize("cost", [0, BUCKET_BYTES], ids=["together", "each by itself"])
def test_nothing_that_was_sent_or_answered_is_held_while_the_next_is_sent(cost: int):
    axis: Any = SimpleNamespace(order=("", 0), group=SimpleNamespace(group_name="all"))
    before: list[weakref.ref[torch.Tensor]] = []

    def three_requests() -> Step[None]:
        for _ in range(3):
            yield Request("sum", axis, torch.zeros(5), cost)

    def answers(requests: Sequence[Request]) -> list[torch.Tensor]:
        assert all(tensor() is None for tensor in before)
        result = [torch.zeros(5) for _ in requests]
        before.extend(weakref.ref(tensor) for tensor in (*(request.tensor for request in requests), *result))
        return result

    in_lockstep([three_requests(), three_requests()], answers)
    assert len(before) == 12


def test_requests_are_sent_whenever_a_buckets_worth_of_them_waits():
    axis: Any = SimpleNamespace(order=("", 0), group=SimpleNamespace(group_name="all"))
    companies = []

    def one_request() -> Step[None]:
        yield Request("sum", axis, torch.zeros(5), BUCKET_BYTES // 2)

    def answers(requests: Sequence[Request]) -> list[torch.Tensor]:
        companies.append(len(requests))
        return [request.tensor for request in requests]

    in_lockstep([one_request() for _ in range(5)], answers)
    assert companies == [2, 2, 1]


def test_requests_are_sent_in_the_order_of_axes_and_answered_in_the_order_of_steps():
    """A rank that has other weights than another one sends what both take part in as that one does."""
    axes: list[Any] = [SimpleNamespace(order=("", n), group=SimpleNamespace(group_name=str(n))) for n in range(2)]
    sent, answered = [], []

    def one_request(number: int, axis: Any) -> Step[None]:
        yield Request("sum", axis, torch.zeros(1), 0)
        answered.append(number)

    def answers(requests: Sequence[Request]) -> list[torch.Tensor]:
        sent.append(requests[0].axis.order)
        return [request.tensor for request in requests]

    in_lockstep([one_request(number, axes[number < 2]) for number in range(4)], answers)
    assert sent == [axes[0].order, axes[1].order]
    assert answered == [2, 3, 0, 1]


def partial_gradient() -> float:
    """How far a weight is from the whole run's if every rank brings a quarter of its gradient."""
    on = mesh((4,))
    start, grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(1)), torch.ones(12, 20)
    ordinary = nn.Parameter(start.clone())
    ordinary.grad = grad.clone()
    weight = nn.Parameter(DTensor.from_local(start.clone(), on, [Replicate()], run_check=False))
    weight.grad = DTensor.from_local(grad / 4, on, [Partial()], run_check=False)
    for each in (ordinary, weight):
        APOLLO([each], rank=4).step()
    return float((weight.full_tensor() - ordinary).abs().max())


def test_gradients_that_ranks_have_yet_to_add_up_are_added_up(ranks):
    assert max(ranks.run(partial_gradient)) == 0


def refusal(shape: tuple[int, ...], dim: int, options: dict[str, Any], rows: tuple[int, ...] | None = None) -> str:
    """Why a weight is refused of which each rank holds its part, or so many rows."""
    whole = torch.zeros(shape)
    own = part(whole, mesh((4,)), [Shard(dim)]) if rows is None else whole[: rows[dist.get_rank()]]
    placed = DTensor.from_local(
        own, mesh((4,)), [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    weight = nn.Parameter(placed)
    weight.grad = placed.detach().clone()
    try:
        APOLLO([("kernel", weight)], rank=2, **options).step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_what_cannot_be_stepped_is_refused_by_name(ranks):
    (message, *_) = ranks.run(refusal, (8, 4, 4, 3), 2, {})
    assert message.startswith("kernel (8, 4, 4, 3) is stepped as a matrix of 8 x 48, and sharded inside its columns")
    (message, *_) = ranks.run(refusal, (8, 6, 2, 2), 1, {})
    assert "Shard it on dimension 0, or evenly on dimension 1" in message
    (message, *_) = ranks.run(refusal, (8, 4), 0, {"fused": True})
    assert message.startswith("fused=True, but kernel (")
    held = 4, 2, 2, 1  # where torch.chunk makes parts of 3, 3, 3 and 0
    for rows, message in zip(held, ranks.run(refusal, (9, 12), 0, {}, held), strict=True):
        assert message.startswith(f"kernel (9, 12): this rank holds ({rows}, 12) of it")


def changed_by_whoever_loaded_it() -> bool:
    """Whether the state of a run is another one after a step of a second run that was given its checkpoint."""
    first, second = (Run(BY_NAME["apollo"], cases(FLOAT32, ["rows"])) for _ in range(2))
    first.step(0)
    before = parts_of_state(first)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.step(1)
    pairs = zip(before, parts_of_state(first), strict=True)
    return any(not torch.equal(old[name], new[name]) for old, new in pairs for name in old)


def test_loaded_state_shares_no_memory_with_the_checkpoint(ranks):
    assert not any(ranks.run(changed_by_whoever_loaded_it))


def statistics(member: Member, layout: str | None) -> dict[str, float]:
    run = Run(member, [Case(layout, name, torch.float32) for name in ("wide", "tall")])
    run.step(0)
    run.step(1)
    if layout is not None:
        dist.barrier()
    return run.optimizer.statistics()


@pytest.mark.parametrize(
    ("member", "numbers"),
    [
        *((name, {"gain", "limiter", "skipped"}) for name in ("apollo", "mini", "structured-channel")),
        ("fira", {"limiter", "skipped"}),
    ],
)
def test_every_rank_reports_the_numbers_of_whole_weights(ranks, member, numbers):
    whole = statistics(BY_NAME[member], None)
    assert {name.partition("/")[0] for name in whole} == numbers
    for found in ranks.run(statistics, BY_NAME[member], "rows"):
        assert found == pytest.approx(whole, rel=1e-5)


def statistics_of_one_expert() -> dict[str, float]:
    run = Run(BY_NAME["apollo"], [Case("experts and inner", "experts", torch.float32)], {"experts": (1, 9, 14)})
    run.step(0)
    return run.optimizer.statistics()


def test_ranks_without_an_expert_have_no_numbers_of_it_to_report(ranks):
    first, second, third, last = ranks.run(statistics_of_one_expert)
    assert first == second
    assert third == last == {"skipped": 0}
