"""The parts of the loop: learning rates, micro-batches, what is measured, and what a person sees of it."""

import io
import itertools
import json
import math
import sys
import types

import pytest
import torch
from torch import nn

from apollo_optim import APOLLO, step_in_backward
from apollo_optim.terminal import counted, duration, in_bytes
from apollo_optim.train import display as display_module
from apollo_optim.train import micro_batch
from apollo_optim.train.display import Display, TrainingDisplay
from apollo_optim.train.loop import Plan, Trainer
from apollo_optim.train.metrics import DivergedError, Meter, MetricsFile, draw_curves, perplexity, records
from apollo_optim.train.micro_batch import largest_micro_batch, largest_that_fits, parts
from apollo_optim.train.ranks import Ranks
from apollo_optim.train.schedule import Schedule
from apollo_optim.train.sinks import MLflow, Recorder, TrackedRun, run_name, scalars

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"))


@pytest.mark.parametrize(("total", "warmup", "final"), [(100, 0.1, 0.1), (7, 0.3, 0.0), (10, 0.0, 0.5), (1, 0.1, 0.1)])
def test_the_learning_rate_rises_to_one_and_falls_to_its_end(total, warmup, final):
    schedule = Schedule(warmup=warmup, final_lr=final)
    factors = [schedule.lr_factor(step, total) for step in range(total)]
    rise = round(warmup * total)
    assert factors[:rise] == pytest.approx([(step + 1) / rise for step in range(rise)])
    assert factors[max(rise - 1, 0) :] == sorted(factors[max(rise - 1, 0) :], reverse=True)
    assert factors[-1] == pytest.approx(final)
    middle = rise + (total - rise) // 2 - 1
    if (total - rise) % 2 == 0:
        assert factors[middle] == pytest.approx((1 + final) / 2)  # a cosine is half way down in the middle


def test_tokens_are_rounded_up_to_whole_steps():
    assert Schedule(tokens=1, batch_tokens=512).total_steps(None) == 1
    assert Schedule(tokens=1025, batch_tokens=512).total_steps(7) == 3
    assert Schedule().total_steps(7) == 7
    assert Schedule(steps=9).total_steps(7) == 9


class Rows:
    """Row n is n, and only its first n % 3 + 1 numbers are to be predicted."""

    def batch(self, first, count):
        rows = torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, 3)
        return rows, torch.arange(3) <= rows % 3

    def targets(self, first, count):
        return sum(row % 3 + 1 for row in range(first, first + count))


class Mean(nn.Module):
    """Mean over the targets of weight * row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, rows, targets):
        return (self.weight * rows * targets).sum() / targets.sum()


@pytest.mark.parametrize("rows", [1, 2, 4, 12])
def test_a_batch_means_the_same_in_micro_batches_of_any_size(rows):
    # Rows have different numbers of targets, so that a mean of means would be another number.
    examples, objective = Rows(), Mean()
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.5)
    plan = Plan(batch_rows=12, micro_batch=rows, clip=None, lr_factor=lambda step: 1.0)
    trainer = Trainer(objective, optimizer, examples, plan, ALONE, step=2)
    firsts = [plan.first_row(2, micro, ALONE) for micro in range(plan.micro_batches(ALONE))]
    assert firsts == list(range(24, 36, rows))
    batches = (examples.batch(first, rows) for first in firsts)
    loss, norm = trainer.advance(batches, measure=True)
    expected = sum(row * (row % 3 + 1) for row in range(24, 36)) / 24
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert objective.weight.item() == pytest.approx(1 - 0.5 * expected, rel=1e-6)
    assert trainer.step == 3


def test_ranks_read_every_row_of_a_batch_once():
    plan = Plan(batch_rows=12, micro_batch=2, clip=None, lr_factor=lambda step: 1.0)
    ranks = [Ranks(rank=rank, world=3, device=torch.device("cpu")) for rank in range(3)]
    for step in range(3):
        firsts = [plan.first_row(step, micro, rank) for rank in ranks for micro in range(plan.micro_batches(rank))]
        assert sorted(firsts) == list(range(step * 12, step * 12 + 12, 2))


def test_every_group_keeps_its_own_learning_rate_and_a_clipped_gradient_its_direction():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    groups = [{"params": first.parameters(), "lr": 1.0}, {"params": second.parameters(), "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    plan = Plan(batch_rows=1, micro_batch=1, clip=2.0, lr_factor=lambda step: 1 / (step + 1))
    trainer = Trainer(nn.Module(), optimizer, Rows(), plan, ALONE)
    trainer.step = 3
    trainer.set_lr()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.25, 0.025])
    for weight in (first.weight, second.weight):
        weight.grad = torch.full((2, 2), 3.0)
    assert trainer._clipped_norm(measure=False).item() == pytest.approx(3 * math.sqrt(8))
    assert first.weight.grad.tolist() == [[pytest.approx(2 / math.sqrt(8))] * 2] * 2


def meter(**options):
    return Meter(ALONE, **({"step": 0, "tokens": lambda step, steps: 100 * steps, "flops": 0.0} | options))


def test_a_line_is_the_mean_of_its_steps_and_read_once():
    measured = meter(step=4, seconds=10.0, flops=1e-9)
    for loss in (1.0, 2.0, 6.0):
        measured.add(torch.tensor(loss))
        assert measured.line() is None
    measured.close(lr=0.5, norm=torch.tensor(7.0))
    measured.add(torch.tensor(100.0))
    line = measured.line()
    assert measured.line() is None
    assert (line["step"], line["tokens"], line["loss"], line["grad_norm"], line["lr"]) == (7, 700, 3.0, 7.0, 0.5)
    assert line["perplexity"] == pytest.approx(math.exp(3.0))
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 1e-9)
    assert line["seconds"] == pytest.approx(10.0 + 300 / line["tokens_per_second"])
    assert line["memory"] > 1e6


def test_what_was_read_before_a_save_is_part_of_the_next_line():
    measured = meter()
    measured.add(torch.tensor(1.0))
    measured.read()
    assert measured.losses == [1.0]
    measured.add(torch.tensor(3.0))
    measured.close(0.1, torch.tensor(0.0))
    assert measured.losses == []
    assert measured.line()["loss"] == 2.0


@pytest.mark.parametrize("read", ["line", "read"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_very_step_of_a_loss_that_is_not_finite_is_named(read, bad):
    measured = meter(step=10)
    for loss in (1.0, 1.0, bad, math.nan):
        measured.add(torch.tensor(loss))
    if read == "line":
        measured.close(0.1, torch.tensor(0.0))
    with pytest.raises(DivergedError, match=f"the loss of step 13 is {bad}"):
        getattr(measured, read)()


def test_time_that_is_not_training_is_not_counted(monkeypatch):
    now = itertools.count(step=10.0)  # ten seconds pass between any two looks at the clock
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    measured = meter()
    with measured.paused():
        pass
    measured.add(torch.tensor(1.0))
    measured.close(0.1, torch.tensor(0.0))
    assert measured.line()["seconds"] == 20.0


def test_a_perplexity_beyond_numbers_is_infinite():
    assert perplexity(2.0) == pytest.approx(math.e**2)
    assert perplexity(1e4) == math.inf


def test_the_log_goes_on_after_the_step_that_was_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    one, two, three = (json.dumps({**LINE, "step": step}) for step in (1, 2, 3))
    path.write_text(f'{one}\n{two}\n{three}\n{{"ste')  # cut off by a crash
    assert [record["step"] for record in records(path)] == [1, 2, 3]
    file = MetricsFile(path, step=2)
    file.write({"step": 3, "again": True})
    file.close()
    assert path.read_text().splitlines() == [one, two, '{"step": 3, "again": true}']
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert records(tmp_path / "nowhere") == []


LINE = {
    "kind": "train", "step": 2, "tokens": 64, "lr": 0.1, "tokens_per_second": 7.0, "mfu": None, "memory": 9,
    "seconds": 1.5, "loss": 2.0, "perplexity": math.inf, "grad_norm": math.inf,
}  # fmt: skip
EVALUATION = {"kind": "validation", "step": 2, "loss": 2.0, "perplexity": 7.4, "perplexity_by_source": {"web": 7.4}}


def changed(line, **values):
    return json.dumps({**line, **values}).encode()


@pytest.mark.parametrize(
    "strange",
    [
        b'{"st',
        b"7",
        b'{"note": 1}',
        b"[" * 10**6,
        b"\xff" + json.dumps(LINE).encode(),
        json.dumps({name: value for name, value in LINE.items() if name != "seconds"}).encode(),
        changed(LINE, seconds="1.5"),
        changed(LINE, seconds=math.inf),
        changed(LINE, loss=math.nan),
        changed(LINE, step=10**30),
        changed(LINE, step="2"),
        changed(LINE, tokens=None),
        changed(LINE, mfu="much"),
        changed(LINE, kind=["train"]),
        changed(EVALUATION, perplexity_by_source=[1]),
        changed(EVALUATION, perplexity_by_source={"web": "7"}),
        changed(EVALUATION, loss=None),
    ],
    ids=range(17),
)
def test_a_line_that_no_run_has_written_is_left_out_and_kept_elsewhere(tmp_path, strange):
    path = tmp_path / "metrics.jsonl"
    good = f"{json.dumps(LINE)}\n{json.dumps(EVALUATION)}\n".encode()
    path.write_bytes(strange + b"\n" + good)
    assert records(path) == [LINE, EVALUATION]
    MetricsFile(path, step=2).close()
    assert path.read_bytes() == good
    assert (tmp_path / "metrics.jsonl.kept-1").read_bytes() == strange + b"\n" + good


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (512, [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
        (12, [12, 6, 3, 1]),
        (45, [45, 15, 5, 1]),
        (7, [7, 1]),
        (1, [1]),
        (2**31 - 1, [2**31 - 1, 1]),  # a prime, whose halves are too many to be tried one by one
    ],
)
def test_parts_of_a_batch_divide_it_and_halve(rows, expected):
    assert parts(rows) == expected


def test_the_largest_that_does_not_run_out_of_memory_is_found():
    tried, cleared = [], []

    def attempt(size):
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError

    assert largest_that_fits([12, 6, 3, 1], attempt, lambda: cleared.append(True)) == 3
    assert tried == [12, 6, 3]
    assert len(cleared) == 3
    with pytest.raises(ValueError, match="not even one sequence fits"):
        largest_that_fits([12, 6], attempt, lambda: None)


def test_on_a_cpu_micro_batches_are_of_a_few_thousand_tokens():
    assert largest_micro_batch(nn.Module(), None, rows=512, length=256, ranks=ALONE) == 16
    assert largest_micro_batch(nn.Module(), None, rows=6, length=10_000, ranks=ALONE) == 1


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(4)))

    def forward(self, tokens, labels):
        return self.body(tokens.float()).square().mean()


@pytest.mark.parametrize(
    ("build", "trial"),
    [
        *((build, "ordinary") for build in (APOLLO, torch.optim.AdamW, torch.optim.SGD)),
        *((APOLLO, trial) for trial in ("in backward", "in backward, accumulated")),
    ],
)
def test_trying_a_size_changes_neither_weights_nor_optimizer(monkeypatch, build, trial):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    objective = Toy()
    optimizer = build(objective.parameters(), lr=0.1, weight_decay=0.1)
    before = {name: weight.clone() for name, weight in objective.state_dict().items()}
    fresh = optimizer.state_dict()
    gradients_at_forward, gradients_at_arrival = [], []

    def present():
        return sum(weight.grad is not None for weight in objective.parameters())

    objective.register_forward_pre_hook(lambda *_: gradients_at_forward.append(present()))
    for weight in objective.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: gradients_at_arrival.append(present()))
    tokens = torch.ones(3, 12, dtype=torch.long)
    handle = None if trial == "ordinary" else step_in_backward(objective, optimizer, clip_norm=1.0)
    micro_batch.trial(objective, optimizer, tokens, handle, accumulates="accumulated" in trial)
    assert max(gradients_at_forward) == (0 if trial == "in backward" else 4), "a later micro-batch finds gradients"
    assert max(gradients_at_arrival) == (1 if trial == "in backward" else 4)
    micro_batch._clear(objective, optimizer, fresh)
    assert all(torch.equal(weight, before[name]) for name, weight in objective.state_dict().items())
    assert optimizer.state_dict() == fresh
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(weight.grad is None for weight in objective.parameters())


TRAIN = {
    "kind": "train", "step": 50, "tokens": 5000, "loss": 2.0, "perplexity": 7.389, "lr": 0.01, "grad_norm": 1.0,
    "tokens_per_second": 1_234_567.0, "mfu": 0.4321, "memory": 12_345_678_901, "seconds": 9.0,
}  # fmt: skip
VALIDATION = {
    "kind": "validation", "step": 50, "loss": 3.0, "perplexity": 20.0855,
    "perplexity_by_source": {"a": 19.0, "b": 21.0},
}  # fmt: skip


def shown(step=0, steps=100, compiles=False, quiet=False):
    return TrainingDisplay(Display(quiet), step, steps, compiles)


def test_a_pipe_gets_a_line_for_each_record(capsys):
    run = shown()
    run.record(TRAIN)
    run.record({**TRAIN, "mfu": None})
    run.record(VALIDATION)
    run.screen.close()
    train, unknown, validation = capsys.readouterr().err.splitlines()
    assert train == "step 50/100  loss 2.0000  ppl 7.39  lr 1.00e-02  1.23M tok/s  mfu 43.2%  12.35 GB"
    assert "mfu" not in unknown
    assert validation == "step 50/100  validation loss 3.0000  ppl 20.09  (a 19.00  b 21.00)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def in_terminal(monkeypatch, width):
    """Standard error from now on: a terminal of this width."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(display_module, "width_of", lambda stream: width)
    return made


def test_a_terminal_gets_a_live_line_and_evaluations_above_it(monkeypatch):
    terminal = in_terminal(monkeypatch, 160)
    run = shown(step=10)
    run.record(TRAIN)
    run.record(VALIDATION)
    run.screen.note("something [bold] happened")
    run.screen.close()
    seen = terminal.getvalue()
    for text in ("50/100", "loss 2.0000", "ppl 7.39", "1.23M tok/s", "mfu 43.2%", "12.35 GB"):
        assert text in seen
    assert "\r\x1b[Kstep 50/100  validation loss 3.0000" in seen
    assert "\x1b[Ksomething [bold] happened\n" in seen
    assert seen.endswith("\r\x1b[K")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_live_line_keeps_the_step_and_the_time_left(monkeypatch, clock, width):
    terminal = in_terminal(monkeypatch, width)
    run = shown(steps=150_000)
    run.reached(0)
    clock(3600)
    run.reached(0.5)
    run.record({**TRAIN, "step": 123_456})
    line = terminal.getvalue().rpartition("\x1b[K")[2]
    assert len(line) < width
    assert line.startswith("step 123456/150000")
    assert line.endswith("left 2212d00h")
    assert ("lr 1.00e-02" in line) == (width == 120)
    assert ("loss 2.0000" in line) == (width >= 80)


@pytest.fixture
def clock(monkeypatch):
    """Moves the time on."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_the_time_left_is_known_from_the_first_micro_batch_on(capsys, clock):
    run = shown(steps=10)
    run.reached(0)
    assert capsys.readouterr().err == ""
    clock(30)
    run.reached(0.25)
    assert capsys.readouterr().err == "step 0/10  left 19m30s (2%)\n"
    clock(5)
    run.reached(0.5)
    assert capsys.readouterr().err == "", "a line in ten seconds at most"


def test_the_first_step_of_a_compiled_run_is_no_measure_of_the_others(capsys, clock):
    run = shown(steps=100, compiles=True)
    for done, seconds in ((0, 60), (1, 20), (2, 0)):
        run.reached(done)
        clock(seconds)
    assert capsys.readouterr().err == "step 2/100  left 32m40s (2%)\n"


def test_a_quiet_run_shows_notes_only(monkeypatch):
    terminal = in_terminal(monkeypatch, 80)
    run = shown(quiet=True)
    run.reached(0)
    run.record(TRAIN)
    run.record(VALIDATION)
    run.screen("about to begin")
    run.screen.advance(0.5, "tokenising")
    run.screen.note("a warning")
    run.screen.close()
    assert terminal.getvalue() == "a warning\n"


def test_numbers_are_short():
    assert [duration(seconds) for seconds in (4.4, 245, 11520, 1e6)] == ["4s", "4m05s", "3h12m", "11d13h"]
    assert [counted(number) for number in (7, 1234, 999_600, 2.5e9, 3e12)] == ["7", "1.23K", "1M", "2.5B", "3T"]
    assert [in_bytes(size) for size in (4321, 12e6, 3.2e9)] == ["4 kB", "12 MB", "3.20 GB"]


def test_a_record_is_numbers_by_name_for_other_tools():
    assert scalars(VALIDATION) == {
        "validation/loss": 3.0,
        "validation/perplexity": 20.0855,
        "validation/perplexity/a": 19.0,
        "validation/perplexity/b": 21.0,
    }
    assert "train/step" not in scalars(TRAIN)


@pytest.mark.parametrize(("library", "named"), [("trackio", "name"), ("wandb", "id")])
def test_a_tracker_gets_one_run_with_its_options_and_numbers(tmp_path, monkeypatch, library, named):
    calls = []

    class FakeRun:
        def log(self, numbers, step):
            calls.append((numbers["train/loss"], numbers["train/optimizer/gain/mean"], step))

        def finish(self):
            calls.append("finished")

    def init(**options):
        calls.append((options["project"], options[named], options["config"]["lr"], options["resume"]))
        return FakeRun()

    monkeypatch.setitem(sys.modules, library, types.SimpleNamespace(init=init))
    sink = TrackedRun(library, "project", tmp_path / "my-run", {"lr": 1})
    sink.write(TRAIN | {"optimizer/gain/mean": 3.0})
    sink.close()
    (project, name, lr, resume), *rest = calls
    assert (project, lr, resume) == ("project", 1, "allow")
    assert name.startswith("my-run-")
    assert rest == [(2.0, 3.0, 50), "finished"]


def test_a_tracker_that_fails_costs_its_line_and_not_the_run(capsys):
    class Gone:
        def write(self, record):
            raise RuntimeError("no server")

        def close(self):
            raise RuntimeError("still none")

    recorder = Recorder([Gone()], TrainingDisplay(Display(), 0, 2, compiles=False))
    recorder.record({"kind": "validation", "step": 2, "loss": 1.0, "perplexity": 2.7, "perplexity_by_source": {}})
    recorder.close()
    told = capsys.readouterr().err
    assert "line of step 2 not kept (no server)" in told
    assert "the log may have lost its last lines (still none)" in told


def test_of_its_own_log_only_what_the_disk_does_is_a_note(tmp_path, capsys):
    log = MetricsFile(tmp_path / "metrics.jsonl", 0)
    recorder = Recorder([log], TrainingDisplay(Display(), 0, 2, compiles=False))
    line = {"kind": "validation", "step": 2, "loss": 1.0, "perplexity": 2.7, "perplexity_by_source": {}}
    with pytest.raises(TypeError, match="not JSON serializable"):
        recorder.record(line | {"bug": object()})
    log._file.close()
    log._file = open("/dev/full", "a")  # noqa: SIM115
    recorder.record(line)
    assert "line of step 2 not kept ([Errno 28]" in capsys.readouterr().err


@pytest.mark.parametrize("resumed", [False, True])
def test_mlflow_gets_one_run_with_its_options_and_numbers(tmp_path, monkeypatch, resumed):
    calls = []
    earlier = [types.SimpleNamespace(info=types.SimpleNamespace(run_id="17"))] if resumed else []

    def search_runs(experiment_names, filter_string, **options):
        assert (experiment_names, options["output_format"]) == (["experiment"], "list")
        calls.append(filter_string)
        return earlier

    fake = types.SimpleNamespace(
        set_experiment=calls.append,
        search_runs=search_runs,
        start_run=lambda run_id, run_name: calls.append((run_id, run_name)),
        log_params=calls.append,
        log_metrics=lambda numbers, step: calls.append((numbers["train/loss"], step)),
        end_run=lambda: calls.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    sink = MLflow("experiment", tmp_path / "my-run", {"lr": 1})
    sink.write(TRAIN)
    sink.close()
    name = run_name(tmp_path / "my-run")
    begun = ["experiment", f"attributes.run_name = '{name}'", ("17" if resumed else None, name)]
    assert calls == [*begun, *([] if resumed else [{"lr": "1"}]), (2.0, 50), "ended"]


def test_curves_are_drawn_of_runs_that_have_only_begun(tmp_path):
    draw_curves({"one": [TRAIN], "two": [TRAIN, VALIDATION], "none": []}, tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes()[:4] == b"\x89PNG"
