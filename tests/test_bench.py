"""`apollo bench`: steps and bytes of a model of one's own."""

import argparse
import csv
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apollo_optim.cli import main
from apollo_optim.evidence import analyses, benches, throughput, timing
from apollo_optim.evidence.throughput import Attempt, largest, throughput_here
from apollo_optim.evidence.workload import PEAK_KINDS
from apollo_optim.train.methods import METHODS
from apollo_optim.train.model import Model


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A Hugging Face configuration: 2 layers of width 32."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **heads}))
    return file


def measured(what: str, config: Path, out: Path, *more: str) -> list[dict[str, str]]:
    assert main(["bench", what, "--model", str(config), "--device", "cpu", "--out", str(out), *more]) == 0
    assert (out / f"{what}.html").exists()
    return list(csv.DictReader((out / f"{what}.csv").open()))


@pytest.mark.parametrize("together", [2**32, 0])
def test_steps_are_timed_for_every_method_in_turns_or_one_by_one(config, tmp_path, monkeypatch, together):
    monkeypatch.setattr(benches, "TOGETHER_BYTES", together)
    monkeypatch.setattr(timing, "TURNS", 2)
    monkeypatch.setattr(timing, "LEAST_MS", 1)
    rows = measured("step", config, tmp_path, "--repeats", "3", "--methods", "sgd,adamw-torch,apollo")
    assert [row["method"] for row in rows] == ["sgd", "adamw-torch", "apollo"]
    assert all(0 < float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"]) for row in rows)
    assert [int(row["state_bytes"]) > 0 for row in rows] == [True] * 3


def test_steps_are_repeated_as_long_as_they_are_quick():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones_like(weight)
    calls = []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    for once, counts in ((1000.0, 5), (100.0, 3 + 30), (5.0, 3 + 100)):
        timed = timing.TimedStep(optimizer, "cpu")
        timed._once = once
        calls.clear()
        timing.time_in_turns_([timed], warmup=3, repeats=30)
        assert len(calls) == counts
        assert timed.row()["state_bytes"] == 0


def test_a_slow_step_is_not_timed_in_every_turn():
    timed, calls = [], {}
    for name, once in {"slow": 1000.0, "quick": 50.0, "quicker": 50.0, "long": 9000.0, "endless": 21000.0}.items():
        weight = torch.nn.Parameter(torch.ones(3, 2))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        timed.append(timing.TimedStep(optimizer, "cpu"))
        timed[-1]._once = once
        calls[name] = 0
        optimizer.register_step_post_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    timing.time_in_turns_(timed, warmup=1, repeats=30)
    assert calls == {"slow": 5, "quick": 20 * (1 + 2), "quicker": 20 * (1 + 2), "long": 1, "endless": 0}
    assert timed[-1].row()["median_ms"] == 21000.0


def test_a_step_that_takes_long_on_a_cpu_is_not_taken_after_the_second(monkeypatch):
    monkeypatch.setattr(timing, "LONG_MS", 5)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones_like(weight)
    calls = []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append(time.sleep(0.15)))
    ((name, row),) = timing.step_rows({"long": lambda: optimizer}, "cpu", True, warmup=3, repeats=30)
    assert (name, len(calls)) == ("long", 2)
    assert row["median_ms"] >= 150


def test_peers_are_timed_as_far_as_they_are_installed(monkeypatch):
    monkeypatch.setattr(benches, "installed", lambda package: package == "torchao")
    methods = [choice.label for choice in benches.Bench(what="step").choices()]
    assert methods == ["sgd", "adamw-torch", "adam8bit", "muon", "adamw", "apollo", "apollo-mini"]


def test_a_peer_that_cannot_run_is_left_out_unless_it_was_asked_for(config, tmp_path, monkeypatch, capsys):
    def broken(model, values):
        raise RuntimeError("no compiler")

    monkeypatch.setitem(METHODS, "adam8bit", replace(METHODS["adam8bit"], build=broken, needs=("torch",)))
    monkeypatch.setitem(benches.BENCHES, "step", (benches.step_times, ("adam8bit", "adamw")))
    monkeypatch.setattr(timing, "LEAST_MS", 1)
    assert [row["method"] for row in measured("step", config, tmp_path, "--repeats", "1")] == ["adamw"]
    assert "adam8bit cannot run here: RuntimeError: no compiler" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no compiler"):
        measured("step", config, tmp_path, "--repeats", "1", "--methods", "adam8bit")


def test_a_gpu_shows_the_peak_and_the_process_of_each_method_by_itself(config, monkeypatch):
    monkeypatch.setattr(benches.Bench, "place", "cuda")
    monkeypatch.setattr(benches.Bench, "machine", "a GPU")
    monkeypatch.setattr(
        benches, "process_memory", lambda: {"reserved": 1, "process": 3 * 10**9, "process_by": "a test"}
    )
    calls = []
    monkeypatch.setattr(benches, "apart", lambda call, *given: calls.append(given[1].label) or call(*given))
    monkeypatch.setattr(benches.Bench, "training", _on_the_cpu(benches.Bench.training))
    options = benches.Bench(what="memory", methods=("adamw", "apollo"), model=Model(model=str(config)))
    found = benches.memory_kinds_of(options)
    assert calls == ["adamw", "apollo"]
    assert [row["whole process"] for row in found.table] == ["3.00 GB"] * 2
    assert all({*PEAK_KINDS, "peak", "peak_in", "process", "process_by"} <= row.keys() for row in found.rows)
    assert all(row["weights"] == row["weight_bytes"] and row["state_bytes"] > 0 for row in found.rows)


def _on_the_cpu(training):
    def on_the_cpu(self, choice):
        made = training(self, choice)
        return replace(made, run=replace(made.run, device="cpu"))

    return on_the_cpu


def test_every_step_is_told_where_some_decompose_gradients(config, tmp_path):
    rows = measured("svd", config, tmp_path, "--methods", "galore:refresh_every=2,apollo,adamw", "--repeats", "4")
    assert [(row["method"], row["step"]) for row in rows] == [
        (method, str(step)) for method in ("galore-refresh_every-2", "apollo", "adamw") for step in (2, 3, 4, 5)
    ]
    assert [row["step"] for row in rows if row["refreshed"] == "True"] == ["3", "5"]  # apollo's are 200 steps apart
    page = (tmp_path / "svd.html").read_text()
    assert re.search(r"takes so many times as long as others: galore-refresh_every-2 [\d.e+]+\.</p>", page)


def test_bytes_are_those_of_the_numbers_that_are_kept(config, tmp_path):
    methods = "sgd,adamw,apollo:rank=4,apollo:int8=all,step_in_backward=true"
    rows = {row["method"]: row for row in measured("memory", config, tmp_path, "--methods", methods)}
    page = (tmp_path / "memory.html").read_text()
    share = int(rows["sgd"]["state_bytes"]) / int(rows["adamw"]["state_bytes"])
    assert f"times that, sgd {share:.3g}, apollo-rank-4 " in page
    assert all(f'data-kind="{kind}"' in page for kind in benches.KINDS), "what colours stand for is said"
    narrow = rows.pop("apollo-int8-all-step_in_backward-true")
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 88)
    numbers = matrices + 2 * 300 * 32 + 5 * 32  # vocabulary and norms
    assert {row["weight_bytes"] for row in rows.values()} == {str(4 * numbers)}
    assert {row["gradient_bytes"] for row in rows.values()} == {str(4 * numbers)}
    momentum, two = 4 * numbers, 8 * numbers
    assert int(rows["sgd"]["state_bytes"]) == momentum
    # Beside the moments, a few counters for each of the 21 weights.
    assert two <= int(rows["adamw"]["state_bytes"]) < two + 21 * 32
    projected = 8 * 4 * 2 * (4 * 32 + 3 * 88) + 8 * (numbers - matrices)
    assert projected <= int(rows["apollo-rank-4"]["state_bytes"]) < projected + 21 * 32

    assert narrow["gradient_bytes"] == "0"
    # A byte each, a scale of four for a group of at most 128, of which the width of 32 makes one; norms stay wide.
    assert numbers < int(narrow["weight_bytes"]) < numbers + 4 * (numbers // 32 + 5 * 32) + 4 * 2 * 32


def test_values_are_told_as_shares_of_adamws_or_of_the_first_that_is_not_nothing():
    assert benches._of_adamw({"sgd": 1, "adamw": 4, "apollo": 2}, str) == "adamw 4; times that, sgd 0.25, apollo 0.5"
    assert benches._of_adamw({"sgd-momentum-0": 0, "apollo": 5}, str) == "apollo 5; times that, sgd-momentum-0 0"
    assert benches._of_adamw({"sgd-momentum-0": 0}, str) == "none"


def test_activations_are_what_backward_keeps(config, tmp_path):
    whole, again = (
        measured("memory", config, tmp_path, "--methods", "adamw", "--sequence", "16", *more)[0]
        for more in ([], ["--activation-checkpointing"])
    )
    tokens, layers, width, inner = 16, 2, 32, 88
    # Inputs of the layers' seven products, in float32, and of their gate: at least these are kept.
    assert int(whole["activation_bytes"]) > 4 * tokens * layers * (3 * width + 2 * inner)
    assert tokens * layers * width * 4 <= int(again["activation_bytes"]) < int(whole["activation_bytes"])


@pytest.fixture
def in_this_process(monkeypatch):
    """Throughput is measured without a process for each method, which imports everything anew."""
    monkeypatch.setattr(benches, "throughput", throughput_here)


@pytest.mark.slow
def test_each_method_has_a_process_whose_memory_is_its_own(config, tmp_path):
    ballast = torch.ones(2**28)  # a gigabyte of this process
    rows = measured("throughput", config, tmp_path, "--methods", "adamw,apollo", "--sequence", "16", "--batch", "2")
    assert all(2**20 < int(row["peak"]) < ballast.nbytes for row in rows)


@pytest.mark.usefixtures("in_this_process")
def test_throughput_is_measured_at_the_largest_micro_batch_under_a_cap(config, tmp_path):
    given = "--methods", "adamw,apollo-mini:int8=all,step_in_backward=true", "--sequence", "16", "--batch", "4"
    rows = measured("throughput", config, tmp_path, *given, "--cap-gb", "20")
    assert [(row["micro_batch"], row["batch"]) for row in rows] == [("4", "4")] * 2
    assert all(float(row["tokens_per_s"]) > 0 and int(row["peak"]) > 2**20 for row in rows)
    (row,) = measured("throughput", config, tmp_path, "--methods", "adamw", "--cap-gb", "0.001")
    assert (row["micro_batch"], row["tokens_per_s"]) == ("0", "0.0")
    assert "does not fit" in (tmp_path / "throughput.html").read_text()


def test_a_cap_that_other_processes_have_taken_is_refused(monkeypatch):
    """Rather than told as methods that do not fit."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr(throughput, "context_bytes", lambda: 50 * 10**9)
    with pytest.raises(ValueError, match=r"--cap-gb 8: 50\.0 GB of the device are taken .* by other processes"):
        throughput.capped("cuda", 8 * 10**9)


@pytest.mark.parametrize(("slowest", "said"), [(12.0, ""), (19.0, "up to 1.9 times as long")])
def test_a_busy_machine_is_told_of(config, tmp_path, monkeypatch, slowest, said):
    passes = {"pass_median_ms": 11.0, "pass_low_ms": 10.0, "pass_high_ms": slowest}
    row = {"micro_batch": 4, "batch": 4, "tokens_per_s": 9.0, "step_ms": 1.0, "room": 2**30, "peak": 2**20, **passes}
    monkeypatch.setattr(benches, "throughput", lambda *_: row)
    measured("throughput", config, tmp_path, "--methods", "adamw,apollo")
    page = (tmp_path / "throughput.html").read_text()
    assert ("the machine is busy" in page) == bool(said)
    assert said in page


class Device:
    """Passes that take memory by a rule, on a device that has 1000 of it."""

    def __init__(self, rule):
        self.rule, self.tried = rule, []

    def attempt(self, size):
        self.tried.append(size)
        return Attempt(2.0 * size, self.rule(size)) if self.rule(size) <= 1000 else None


@pytest.mark.parametrize(
    ("rule", "most", "tried"),
    [
        (lambda size: 100 + 10 * size, 512, [9, 18, 88]),
        (lambda size: 100 + 10 * size, 50, [9, 18, 50]),
        (lambda size: 100 + 10 * size, 4, [4]),
        # Fuller than its peak says: it does not fit, and a little less does.
        (lambda size: 100 + (10 if size < 80 else 10.4) * size, 512, [9, 18, 88, 82]),
        # The small ones grow faster than the large: 52 is where the last two lead.
        (lambda size: 200 + 20 * min(size, 30) + 2 * max(0, size - 30), 512, [9, 18, 39, 52]),
        (lambda size: 150 * size, 512, [9, 8, 7, 6]),
        (lambda size: 60 * size, 512, [9, 18, 17, 15]),
    ],
)
def test_the_largest_micro_batch_is_computed_and_then_seen_to_fit(rule, most, tried):
    device = Device(rule)
    found, fitted = largest(device.attempt, (9, 18), 1000, most)
    assert device.tried == tried
    assert found == tried[-1]
    assert fitted[found] == (2.0 * found, rule(found))


def test_a_device_without_room_for_one_sequence_is_an_error():
    with pytest.raises(torch.OutOfMemoryError, match="not even one sequence"):
        largest(Device(lambda size: 10**6 * size).attempt, (9, 18), 1000, 512)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_the_script_for_7b_keeps_its_columns(tmp_path, monkeypatch):
    bench = Path(__file__).parents[1] / "bench"
    monkeypatch.syspath_prepend(str(bench))
    import micro_batch

    out = tmp_path / "rows.csv"
    given = ["--device", "cpu", "--model", "1m", "--sequence", "8", "--methods", "adamw", "--out", str(out)]
    given += ["--cap-gb", "20"]
    monkeypatch.setattr(sys, "argv", ["micro_batch.py", *given])
    assert micro_batch.main() == 0
    (row,), before = (list(csv.DictReader(path.open())) for path in (out, bench / "results" / "micro-batch-h200.csv"))
    assert set(row) | {"cuda", "triton"} == set(before[0])
    assert (row["micro_batch"], row["vs_adamw"]) == ("32", "1.0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["stp"], "did you mean 'step'"),
        (["step", "--repeats", "0"], "--repeats must be at least 1"),
        (["throughput", "--cap-gb", "0"], "--cap-gb must be above 0"),
        (["throughput", "--cap-gb", "nan"], "--cap-gb must be above 0, got nan"),
        (["throughput", "--batch", "0"], "--batch must be at least 1"),
        (["memory", "--methods", "adamw-torch:int8=all"], "--int8 all is for the optimizers of this library"),
        (["step", "--methods", "adamw:rank=4"], "--rank has no effect on --method adamw"),
        (["step", "--model", "nothing.json"], "nothing.json"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_any_work(given, message, tmp_path, capsys):
    assert main(["bench", *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["bench", "step"], ["analyze", "ratio"]], ids=str)
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(benches.BENCHES, "step", (lambda options: pytest.fail("measured"), ("sgd",)))
    monkeypatch.setitem(analyses.WATCHED, "ratio", (lambda *runs: pytest.fail("measured"), ("apollo",), 1))
    (tmp_path / "file").touch()
    assert main([*words, "--model", "1m", "--device", "cpu", "--out", str(tmp_path / "file" / "out")]) == 2
    assert f"--out {tmp_path / 'file' / 'out'} cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "step"], ["analyze", "ratio"], ["pretrain"], ["eval", "run"]], ids=str)
def test_a_gpu_that_is_not_there_is_refused_before_the_work(words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*words, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "apollo: --device cuda: PyTorch finds no GPU here; use --device cpu\n"


def test_training_in_backward_is_that_of_pretrain_and_clips_where_it_is_asked_to(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    from in_backward import MODES, Training

    given = {"model": "1m", "dtype": "float32", "checkpointing": False, "compile": False, "device": "cpu"}
    losses, stepped, clips = [], [], []
    for mode in MODES:
        training = Training(mode, argparse.Namespace(**given, sequence=[8]))
        step = training.on(2, 8)
        losses.append([float(step()) for _ in range(2)])
        stepped.append(training.weights_stepped)
        clips.append("previous_norm" in training.optimizer.param_groups[0])
    weights = len(list(training.model.parameters()))
    assert losses[0] == losses[1]
    assert stepped == [0, 2 * weights, 2 * weights]
    assert clips == [False, False, True]
