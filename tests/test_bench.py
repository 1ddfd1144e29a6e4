"""`apollo bench`: steps and bytes of a model of one's own."""

import csv
import json
from pathlib import Path

import pytest

from apollo_optim.cli import main


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


def test_steps_are_timed_for_every_method(config, tmp_path):
    rows = measured("step", config, tmp_path, "--repeats", "3")
    assert [row["method"] for row in rows] == ["sgd", "adamw-torch", "adamw", "apollo", "apollo-mini"]
    assert all(0 < float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"]) for row in rows)


def test_every_step_is_told_where_some_decompose_gradients(config, tmp_path):
    rows = measured("svd", config, tmp_path, "--methods", "galore:refresh_every=2,apollo", "--repeats", "4")
    assert [(row["method"], row["step"]) for row in rows] == [
        (method, str(step)) for method in ("galore-refresh_every-2", "apollo") for step in (2, 3, 4, 5)
    ]


def test_bytes_are_those_of_the_numbers_that_are_kept(config, tmp_path):
    rows = {row["method"]: row for row in measured("memory", config, tmp_path, "--methods", "sgd,adamw,apollo:rank=4")}
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["stp"], "did you mean 'step'"),
        (["step", "--repeats", "0"], "--repeats must be at least 1"),
        (["step", "--methods", "adamw:rank=4"], "--rank has no effect on --method adamw"),
        (["step", "--model", "nothing.json"], "nothing.json"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_any_work(given, message, tmp_path, capsys):
    assert main(["bench", *given, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
