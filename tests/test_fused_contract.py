"""What the Triton kernels must not depend on, and what happens where there are none."""

import warnings
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from apollo_optim import APOLLO, Fira, GaLore
from apollo_optim.optimizer import ProjectedOptimizer
from family import Member, partly_slow
from runs import bits, gradient, snapshot
from twins import RULES, Run, assert_same_run, each_kernel, on_both, started, twins

# Beyond the last channel the kernels divide zero by zero, to no effect, but numpy reports it.
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]


@on_both
@pytest.mark.parametrize("capturable", partly_slow([False, True], quick=[False]), ids=["host counts", "device counts"])
def test_weights_that_come_and_go_are_planned_once_for_all_their_company(
    capturable: bool, device: str, monkeypatch: pytest.MonkeyPatch
):
    """As experts do, dropped layers, and heads that take turns."""
    shapes = {"wide": (24, 40), "tall": (40, 24), "up": (24, 48), "down": (48, 24), "head": (16, 24), "vector": (5,)}
    sets = [{"wide", "tall", "vector"} | come for come in ({"up", "down"}, {"head"}, set())]
    made: list[object] = []
    weight_steps = ProjectedOptimizer._weight_steps
    monkeypatch.setattr(ProjectedOptimizer, "_weight_steps", lambda *given: made.append(0) or weight_steps(*given))

    def trained(together: bool) -> Run:
        run = started(RULES["mini"], device, shapes=shapes, capturable=capturable)
        for number in range(9):
            if not together:
                run.optimizer._plans.forget()
            for name, weight in run.named.items():
                weight.grad = gradient(name, number, weight) if name in sets[number % 3] else None
            run.optimizer.step()
            if number == 5:
                made.clear()
        return run

    kept = trained(True)
    assert len(kept.optimizer._plans.blocks) == 3
    assert made == []
    assert snapshot(kept.optimizer) == snapshot(trained(False).optimizer)


@on_both
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_fails_for_a_weight_that_comes_and_goes_is_not_taken_for_others(fused: bool, device: str):
    run = started(RULES["mini"], device, shapes={"wide": (24, 40), "tall": (40, 24)}, fused=fused)
    for number in range(4):
        for name, weight in run.named.items():
            weight.grad = gradient(name, number, weight) if name == "wide" or number % 2 else None
        run.optimizer.step()
    assert len(run.optimizer._plans.blocks) == 2
    run.optimizer.param_groups[0]["refresh_every"] = 7
    run.state("tall")["exp_avg"] = torch.zeros(3, 3, device=device)
    before = snapshot(run.optimizer)
    with pytest.raises(ValueError, match=r"tall \(40, 24\): the group asks for exp_avg"):
        run.step(4)
    assert snapshot(run.optimizer)[:2] == before[:2]


@each_kernel(["mini", "apollo-4"], half=[])
def test_capturable_makes_no_difference(member: Member, device: str, dtype: torch.dtype):
    shapes = {"wide": (24, 40), "vector": (5,)} if device == "cpu" else None
    host, ours = (started(member, device, dtype, shapes, capturable=choice).steps(3) for choice in (False, True))
    assert ours.state("wide")["step"].device == ours.named["wide"].device
    assert snapshot(ours.optimizer)[:2] == snapshot(host.optimizer)[:2]


@on_both
@pytest.mark.parametrize("capturable", [False, True], ids=["host counts", "device counts"])
def test_a_step_count_that_was_replaced_counts(device: str, capturable: bool):
    """And it goes on counting: the next checkpoint must have it. One that was written to needs no other plan."""
    shapes = {"wide": (24, 40), "tall": (40, 24), "vector": (5,)}
    ours, theirs = (started(RULES["mini"], device, shapes=shapes, capturable=capturable).steps(2) for _ in range(2))
    plan = theirs.optimizer._plans.whole
    for name in ("wide", "vector"):
        ours.state(name)["step"] = torch.full_like(ours.state(name)["step"], 7)
        theirs.state(name)["step"].fill_(7)
    for number in (2, 3):
        for run in (ours, theirs):
            run.step(number)
        assert [int(theirs.state(name)["step"]) for name in shapes] == [6 + number, 1 + number, 6 + number]
    assert theirs.optimizer._plans.whole is plan
    assert snapshot(ours.optimizer)[:2] == snapshot(theirs.optimizer)[:2]


@on_both
def test_what_others_keep_in_the_state_is_left_alone(device: str):
    """torch has room for it, under keys that are no weights, and it may change at every step."""
    run = started(RULES["mini"], device, shapes={"wide": (24, 40)}).steps(2)
    plans = []
    for step in range(2, 5):
        run.optimizer.state["ema"], run.optimizer.state["tokens"] = torch.full((3,), step), step
        run.step(step)
        plans.append(run.optimizer._plans.whole)
    assert plans[1] is plans[2]


def swapped(optimizer: ProjectedOptimizer, a: Tensor, b: Tensor) -> None:
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def swapped_in_order(optimizer: ProjectedOptimizer, a: Tensor, b: Tensor) -> None:
    """The values of the mapping stay in the same order."""
    optimizer.state = defaultdict(dict, {b: optimizer.state[a], a: optimizer.state[b]})


@on_both
@pytest.mark.parametrize("swap", [swapped, swapped_in_order])
def test_states_that_change_places_are_noticed(device: str, swap: Callable[[ProjectedOptimizer, Tensor, Tensor], None]):
    shapes = {"a": (24, 40), "b": (24, 40)}
    ours, anew = (started(RULES["apollo-4"], device, shapes=shapes).steps(2) for _ in range(2))
    for run in (ours, anew):
        swap(run.optimizer, run.named["a"], run.named["b"])
    anew.load_(anew)  # nothing that was kept is trusted after it
    for run in (ours, anew):
        run.step(2)
    assert snapshot(ours.optimizer)[:2] == snapshot(anew.optimizer)[:2]


@on_both
def test_a_weight_that_is_moved_to_another_group_takes_its_options(device: str):
    run = started(RULES["mini"], device, shapes={"a": (24, 40), "b": (24, 40)})
    optimizer = APOLLO(
        [{"params": [run.named["a"]], "rank": 1}, {"params": [run.named["b"]], "rank": None}], fused=True
    )
    for weight in run.named.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    second["param_shapes"].insert(0, first["param_shapes"].pop())
    with pytest.raises(ValueError, match="its state has"):
        optimizer.step()


@on_both
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernels"])
def test_a_weight_of_another_shape_than_before_is_refused(device: str, fused: bool):
    """Kernels would write beyond its end."""
    run = started(RULES["apollo-4"], device, shapes={"wide": (24, 40)}, fused=fused).steps(2)
    weight = run.named["wide"]
    weight.data = weight.data[:, :32].clone()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"wide was \(24, 40\) when the optimizer was built and is \(24, 32\) now"):
        run.optimizer.step()


@on_both
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "kernels"])
def test_a_gradient_of_another_shape_than_its_weight_is_refused(device: str, fused: bool):
    """What autograd would not let anybody set, but for a weight that changed after it."""
    run = started(RULES["apollo-4"], device, shapes={"wide": (24, 40)}, fused=fused)
    weight = run.named["wide"]
    weight.data, before = torch.ones(30, 40, device=device), weight.data
    weight.grad = torch.ones_like(weight)
    weight.data = before
    with pytest.raises(RuntimeError, match=r"wide is \(24, 40\), and its gradient \(30, 40\)"):
        run.optimizer.step()


@on_both
def test_a_weight_whose_step_count_joins_another_ones_takes_its_own_basis_of_that_step(device: str):
    """Though all bases that are kept are of steps that are counted still."""
    fused, plain = twins(RULES["mini"], device, shapes=dict.fromkeys("abc", (12, 20)))
    for run in (fused, plain):
        run.step(0)
        for name, count in {"a": 6, "b": 2, "c": 6}.items():
            run.state(name)["step"].fill_(count)
        run.step(1)
        run.state("c")["step"].fill_(3)
        run.step(2)
    assert_same_run(fused, plain)


@on_both
def test_a_weight_that_is_narrowed_after_backward_is_written_as_what_it_is(device: str):
    fused, plain = twins(RULES["adamw"], device, shapes={"wide": (24, 40)})
    for run in (fused, plain):
        run.step(0)
        weight = run.named["wide"]
        weight.grad = gradient("wide", 1, weight)
        weight.data = weight.data.bfloat16()
        run.optimizer.step()
    assert_same_run(fused, plain)


@on_both
@pytest.mark.parametrize("narrow_first", [False, True])
def test_gradients_of_another_dtype_at_the_same_address_are_read_as_what_they_are(device: str, narrow_first: bool):
    shape = 2, 12, 40
    fused, plain = twins(RULES["apollo-4"], device, torch.float16, shapes={"wide": shape})
    for run in (fused, plain):
        weight, memory = run.named["wide"], torch.zeros(shape, device=device)
        weight.grad_dtype = None
        wide, narrow = memory, memory.view(-1).view(torch.float16)[: memory.numel()].view(shape)
        for step, grad in enumerate([narrow, wide] if narrow_first else [wide, narrow]):
            weight.grad = None
            weight.grad = grad.copy_(gradient("wide", step, grad))
            run.optimizer.step()
    assert_same_run(fused, plain)


@on_both
@pytest.mark.parametrize("rule", ["mini", "apollo-4", "structured"])
def test_a_channel_that_never_had_a_gradient_needs_no_eps(rule: str, device: str):
    weight = nn.Parameter(torch.ones(24, 40, device=device))
    optimizer = RULES[rule].build([weight], eps=0.0, fused=True)
    for step in range(3):
        weight.grad = gradient("wide", step, weight)
        weight.grad[:, 3] = 0
        optimizer.step()
    assert weight.isfinite().all()


@on_both
@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch from 2.10 on lets gradients be wider than weights")
def test_a_gradient_that_no_kernel_reads_is_taken_by_plain_pytorch(device: str):
    weights = [nn.Parameter(torch.ones(24, 40, device=device)) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = torch.float64
        weight.grad = gradient("wide", 0, weight).double()
    RULES["mini"].build([weights[0]], fused=None).step()
    RULES["mini"].build([weights[1]], fused=False).step()
    assert torch.equal(*weights)
    with pytest.raises(RuntimeError, match=r"cannot be: there is no kernel for a gradient of torch.float64"):
        RULES["mini"].build([weights[0]], fused=True).step()


@on_both
def test_a_weight_that_was_transposed_where_it_is_has_no_kernel(device: str):
    run = started(RULES["adamw"], device, shapes={"square": (24, 24)}).steps(2)
    run.named["square"].data = run.named["square"].data.t()
    with pytest.raises(RuntimeError, match="the weight is not contiguous"):
        run.step(2)


@on_both
def test_other_things_may_be_kept_beside_the_state(device: str):
    fused, plain = twins(RULES["mini"], device, torch.float32, shapes={"wide": (24, 40), "vector": (5,)})
    for run in (fused, plain):
        run.steps(1).state("wide")["note"] = "mine"
        run.step(1)
        assert run.state("wide").pop("note") == "mine"
    assert_same_run(fused, plain)


@each_kernel(["apollo-1", "apollo-4", "structured"], half=[])
def test_a_weight_steps_alone_as_it_does_in_company(member: Member, device: str, dtype: torch.dtype):
    """Also where its company is larger, and would be cut into larger blocks."""
    shapes = {"tall": (50, 30), "taller": (70, 40), "experts": (2, 9, 24), "wide": (37, 53)}
    company = started(member, device, dtype, shapes).steps(1)
    for name in ("tall", "experts"):
        alone = started(member, device, dtype, shapes={name: tuple(company.start[name].shape)})
        alone.named[name].data.copy_(company.start[name])
        alone.steps(1)
        assert bits(alone.named[name]) == bits(company.named[name]), name
        for key, value in alone.state(name).items():
            assert bits(value) == bits(company.state(name)[key]), (name, key)


@each_kernel(["apollo-4", "apollo-4-svd"], half=[])
def test_options_gradients_and_groups_may_change_between_steps(member: Member, device: str, dtype: torch.dtype):
    shapes = {"wide": (24, 40), "tall": (40, 24)}
    fused, plain = twins(member, device, dtype, shapes=shapes)

    def coming_and_going(name: str, step: int, like: Tensor) -> Tensor | None:
        return None if (name, step) == ("wide", 2) else gradient(name, step, like)

    kept = []  # so that no gradient takes the memory of an earlier one
    for run in (fused, plain):
        group = run.optimizer.param_groups[0]
        for step in range(5):
            if step == 1:
                group.update(lr=0.02, weight_decay=0.0, betas=(0.8, 0.99), eps=1e-6)
            if step == 3:
                late = {"late": nn.Parameter(run.start["tall"].clone())}
                run.start["late"] = run.start["tall"]
                run.named.update(late)
                run.optimizer.add_param_group({"params": list(late.items()), "rank": None, "lr": 0.001})
                group.update(growth_limit=None, maximize=True)
            run.step(step, coming_and_going)
            kept.append([weight.grad for weight in run.named.values()])
        for weight in run.named.values():
            weight.grad.copy_(gradient("again", 5, weight))
        run.optimizer.step()
    assert fused.state("wide")["step"] == 5
    assert_same_run(fused, plain)


@each_kernel(["apollo-4", "apollo-4-svd"], half=[])
def test_state_may_move_between_steps(member: Member, device: str, dtype: torch.dtype):
    """As it does where a loop sends it to the host and back."""
    shapes = {"wide": (24, 40), "vector": (5,)}
    still, moved = (started(member, device, dtype, shapes=shapes).steps(1) for _ in range(2))
    for state in moved.optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()
            value.fill_(-1)
    still.step(1)
    moved.step(1)
    assert snapshot(moved.optimizer)[:2] == snapshot(still.optimizer)[:2]


@each_kernel(["apollo-4", "apollo-4-svd"], half=[])
def test_a_run_resumes_bit_for_bit(member: Member, device: str, dtype: torch.dtype):
    shapes = {"wide": (24, 40), "vector": (5,)}
    whole, resumed = (started(member, device, dtype, shapes=shapes) for _ in range(2))
    whole.step(0)
    resumed.load_(whole)
    for run in (whole, resumed):
        run.step(1)
    assert snapshot(resumed.optimizer)[:2] == snapshot(whole.optimizer)[:2]


@on_both
def test_torch_compile_of_a_training_step_leaves_the_step_alone(device: str):
    """Compiled without fusing anything, so that the gradients are the same to the last bit."""

    def trained(backend: str | None) -> list[bytes]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(24, 40).to(device)
        inputs = torch.randn(8, 24).to(device)
        optimizer = APOLLO(model, lr=0.01, rank=4, fused=True)

        def train() -> None:
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = train if backend is None else torch.compile(train, backend=backend)
        for _ in range(3):
            step()
        return snapshot(optimizer).weights

    assert trained("eager") == trained(None)


# Where there is no kernel.


def unfusable(device: str) -> dict[str, tuple[Member, Tensor, str]]:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).to(device)
    galore = Member("", GaLore, {"rank": 4, "projection": "gaussian"})
    return {
        "galore": (galore, matrix, "no kernel for projection='gaussian', granularity='element'"),
        "fira": (Member("", Fira, {"rank": 4}), matrix, "no kernel for projection='svd', granularity='element'"),
        "float64": (RULES["apollo-4"], matrix.double(), "the kernels compute in float32, not for .* torch.float64"),
        "strided": (RULES["apollo-4"], matrix.t(), "the weight is not contiguous"),
        "narrow": (RULES["apollo-4"], matrix[:, :5].contiguous(), "rows shorter than 8"),
    }


@on_both
@pytest.mark.parametrize("case", ["galore", "fira", "float64", "strided", "narrow"])
def test_where_there_is_no_kernel_fused_says_so_and_the_default_does_without(case: str, device: str):
    member, start, reason = unfusable(device)[case]

    def stepped(fused: bool | None) -> Tensor:
        weight = nn.Parameter(start.clone())
        optimizer = member.build([("layer.weight", weight)], fused=fused)
        weight.grad = gradient("layer", 0, weight)
        optimizer.step()
        return weight.detach()

    with pytest.raises(RuntimeError, match=rf"^fused=True, but layer.weight \(\d+, \d+\) cannot be: .*{reason}"):
        stepped(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(stepped(None), stepped(False))


@pytest.mark.parametrize("device", ["cpu"])
def test_a_recording_that_fails_leaves_no_bases(device: str, monkeypatch: pytest.MonkeyPatch):
    """Or the next step would take those of the last period for new ones."""
    run = started(RULES["mini"], device, shapes={"wide": (24, 40)}).steps(2)
    (step,) = run.optimizer._plans.whole.fused
    tables = step.tables
    monkeypatch.setattr(step, "_until_recorded", 0)  # as on a GPU, which alone can record

    def failing(launch: Callable[[Tensor], None], hypers: Tensor) -> None:
        launch(hypers)
        raise KeyboardInterrupt

    monkeypatch.setattr("apollo_optim.fused.step.Recording", failing)
    assert tables.kept_bases == [0]
    with pytest.raises(KeyboardInterrupt):
        run.step(2)
    assert tables.kept_bases is None


@pytest.mark.parametrize("device", ["cpu"])
def test_without_the_interpreter_a_cpu_has_no_kernels(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    run = started(RULES["mini"], device, shapes={"wide": (24, 40)})
    with pytest.raises(RuntimeError, match=r"^fused=True, but wide \(24, 40\) .* need a CUDA device, not cpu"):
        run.step(0)
    default, plain = (started(RULES["mini"], device, shapes={"wide": (24, 40)}, fused=fused) for fused in (None, False))
    default.step(0)
    plain.step(0)
    assert snapshot(default.optimizer).weights == snapshot(plain.optimizer).weights


@on_both
def test_a_rank_changed_between_steps_is_refused_and_not_written_past(device: str):
    weight = nn.Parameter(torch.randn(24, 40, device=device))
    optimizer = APOLLO([weight], rank=4, fused=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.param_groups[0]["rank"] = 8
    for _ in range(2):  # it must not step on with the old rank when asked again
        with pytest.raises(ValueError, match=r"parameter 0 \(24, 40\): the group asks for exp_avg of \(8, 40\)"):
            optimizer.step()
