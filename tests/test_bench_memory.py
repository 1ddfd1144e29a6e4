"""The script that measures memory: it trains what it says, and takes apart a peak rightly."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from family import partly_slow

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import machine
import memory
from apollo_optim.evidence.workload import PEAK_KINDS, PeakWatch, parsed_processes


class Counted(PeakWatch):
    """Of memory as a test says it is."""

    now = most = 0

    def allocated(self) -> int:
        return self.now

    def highest(self) -> int:
        return self.most


def test_a_peak_is_taken_apart_where_it_was():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights, last = 4 * (32 + 8), 4 * 8
    metered = Counted(model, optimizer)
    metered.now = metered.most = weights + 5
    metered.begin()
    loss = model(torch.ones(3, 8)).sum()
    metered.now, metered.most = weights + 5 + 1000, weights + 5 + 1100
    with metered.stretches():
        loss.backward()
    metered.most = 0
    metered.mark("backward")
    # The last layer's gradient is the first to be complete: nothing is in its place yet, and no stretch was higher.
    kinds = {"weights": weights, "state": 0, "gradients": last, "activations": 1000 - last, "rest": 105}
    assert metered.found == {"peak": sum(kinds.values()), **kinds, "peak_in": "backward to 1.weight"}
    optimizer.step()
    metered.now = metered.most = 10000
    metered.mark("optimizer step")
    assert metered.found["state"] == weights
    assert metered.found["gradients"] == weights


def test_processes_are_read_from_lists_with_gaps():
    lines = ["123, 9000", "7, [N/A]", "", "No running processes found"]
    assert parsed_processes(lines) == {123: 9000 * 2**20}


@pytest.mark.parametrize(
    "name", partly_slow(["7b-int8-mini", "13b-bf16-mini-ddp", "7b-bf16-adamw-ordinary"], quick=["7b-int8-mini"])
)
def test_each_kind_of_run_trains_on_a_cpu(name, monkeypatch):
    monkeypatch.setattr(memory, "VOCABULARY", 300)
    rows = torch.randint(300, (1, 5), generator=torch.Generator().manual_seed(0))
    setting = memory.replace(memory.RUNS[name], model="1m")
    result = {"run": name} | memory.trained(setting, lambda step: rows, 12, "cpu")
    assert memory.check(setting, result) == []
    assert result["weights"] > 0
    assert set(PEAK_KINDS) <= set(result)


def test_limits_and_a_loss_that_does_not_fall_are_told():
    result = {"run": "7b-int8-mini", "peak": 2**33, "process": 10 * 2**30, "loss_first": 9.0, "loss_last": 8.9}
    peak = {"run": "7b-int8-mini", "peak": 2**33 + 2**28, "loss_first": 9.0, "loss_last": 8.0}
    setting = memory.RUNS["7b-int8-mini"]
    assert [line.split(": ")[1] for line in memory.check(setting, result)] == [
        "process of 10.00 GiB, above 9.0",
        "the loss went from 9.00 to 8.90",
    ]
    assert [line.split(": ")[1] for line in memory.check(setting, peak)] == ["peak of 8.25 GiB, above 8.0"]


def test_measurements_are_appended_and_none_is_replaced(tmp_path):
    path = tmp_path / "memory.csv"
    for peak, commit in ((1, "a"), (2, "b"), (3, "b")):
        machine.record_rows(path, [{"peak": peak, "commit": commit}])
    assert path.read_text().split() == ["peak,commit", "1,a", "2,b", "3,b"]
    assert [row["peak"] for row in machine.recorded(path)] == ["1", "2", "3"]
