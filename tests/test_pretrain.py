"""`apollo pretrain` from end to end on a CPU: what it learns, what it leaves behind, and what reads that."""

import json
import math
import shlex
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from apollo_optim import quantize_weights_
from apollo_optim.cli import main
from apollo_optim.train import pretrain as module
from apollo_optim.train.loop import Loop, Trainer
from apollo_optim.train.losses import Objective
from apollo_optim.train.metrics import model_bytes
from apollo_optim.train.run import DIVERGED, RunFolder
from pretraining import EVAL_TOKENS, ROWS, SEQUENCE, log, make_ground

STEPS = 120


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture(scope="module")
def run(ground, tmp_path_factory):
    """A run of a hundred steps, as it is left at its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    rhythm = ("--log-every", "10", "--eval-every", "40", "--save-every", "40")
    assert ground.run(folder, "--steps", str(STEPS), "--lr", "0.02", "--rank", "4", *rhythm) == 0
    return folder


@pytest.fixture(scope="module")
def result(run):
    return json.loads((run / "run.json").read_text())["result"]


def test_perplexity_falls_far_below_what_needs_no_context(result):
    assert result["validation_perplexity"] < 0.6 * result["unigram_perplexity"]


def test_the_unigram_perplexity_is_that_of_the_counts(ground, result):
    # By hand: tokens of all training text, as often as they occur; validation is what was held out of it.
    counts = torch.zeros(300, dtype=torch.float64)
    for file in (ground.cache / "tokens").rglob("*train*.bin"):
        counts += torch.bincount(tokens(file), minlength=300)
    loss = -(counts / counts.sum() * (counts / counts.sum()).clamp(min=1e-12).log()).sum()
    # The validation text is other text of the same kind: its loss differs by how far two samples of words do.
    assert math.log(result["unigram_perplexity"]) == pytest.approx(loss.item(), abs=0.1)


def tokens(file: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint16).long()


def test_a_finished_run_leaves_its_log_curves_settings_and_facts(run, ground):
    lines = log(run)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(10, STEPS + 1, 10))
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [40, 80, 120]
    assert set(lines[0]) == {
        "kind", "step", "tokens", "loss", "perplexity", "lr", "grad_norm", "tokens_per_second", "mfu", "memory",
        "seconds",
    }  # fmt: skip
    assert lines[0]["tokens"] == 10 * ROWS * SEQUENCE
    assert set(lines[-1]["perplexity_by_source"]) == {"first", "second"}
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["data"] == str(ground.data)
    assert settings["dtype"] == "fp32"
    facts = json.loads((run / "run.json").read_text())
    assert facts["sessions"][0]["versions"]["torch"] == metadata.version("torch")
    assert facts["method"]["lr"] == 0.02
    assert facts["method"]["rank"] == 4
    assert facts["groups"][0]["betas"] == [0.9, 0.98]
    assert {"eps", "growth_limit", "scale", "weight_decay"} <= facts["groups"][0].keys()
    assert facts["weight_bytes"] == facts["gradient_bytes"] == 4 * facts["parameters"]


def test_the_log_has_the_learning_rate_that_was_given_and_not_the_vocabularys(ground, tmp_path):
    flags = "--lr", "0.004", "--embedding-lr", "0.5", "--warmup", "0", "--final-lr", "1"
    assert ground.run(tmp_path / "run", "--steps", "2", "--log-every", "1", *flags) == 0
    assert [line["lr"] for line in log(tmp_path / "run") if line["kind"] == "train"] == [0.004, 0.004]


def test_int8_weights_are_counted_as_they_are_kept():
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    quantize_weights_(layer, group_size=32)
    scales = 4 * 64 * 32 // 32
    assert model_bytes(layer, in_backward=False) == {"weight_bytes": 64 * 32 + scales, "gradient_bytes": 2 * 64 * 32}
    assert model_bytes(layer, in_backward=True)["gradient_bytes"] == 0


def test_the_newest_checkpoints_and_the_best_are_kept(run):
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000080", "step-00000120"]


def test_the_exported_model_loads_and_is_the_last_checkpoint(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    saved = load_file(run / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(tokenizer("a sentence")["input_ids"]) == "a sentence"


def test_eval_of_a_run_gives_the_perplexity_it_ended_with(run, result, capsys):
    # As many tokens, in the same windows; batches of another size round differently.
    assert main(["eval", str(run), "--json", "--tokens", str(EVAL_TOKENS), "--device", "cpu"]) == 0
    scores = json.loads(capsys.readouterr().out)["sources"]
    assert scores["all"]["loss"] == pytest.approx(result["validation_loss"], rel=1e-6)
    for source, value in result["perplexity_by_source"].items():
        assert scores[source]["perplexity"] == pytest.approx(value, rel=1e-6)
    assert scores["all"]["tokens"] == 2 * EVAL_TOKENS


def test_eval_of_a_run_keeps_tokens_where_it_is_told_to(run, result, tmp_path, capsys):
    arguments = ["--json", "--tokens", str(EVAL_TOKENS), "--device", "cpu", "--cache", str(tmp_path / "cache")]
    assert main(["eval", str(run), *arguments]) == 0
    scores = json.loads(capsys.readouterr().out)["sources"]
    assert scores["all"]["loss"] == pytest.approx(result["validation_loss"], rel=1e-6)
    assert any((tmp_path / "cache").rglob("*.bin"))


def test_eval_of_a_model_on_text_is_the_loss_that_transformers_computes(run, ground, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import enable_progress_bar

    lines = (ground.data / "first.jsonl").read_text().splitlines()[:3]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    arguments = ["--data", str(tmp_path / "text.jsonl"), "--sequence", "32", "--cache", str(tmp_path / "cache")]
    assert main(["eval", str(run / "model"), *arguments, "--json", "--device", "cpu"]) == 0
    score = json.loads(capsys.readouterr().out)["sources"]["all"]
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = [id for line in lines for id in [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // 33 * 33]).view(-1, 33)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert score["loss"] == pytest.approx(loss, rel=1e-5)  # float32 sums in another order
    assert score["tokens"] == rows.numel() - len(rows)
    enable_progress_bar()  # as transformers has it at first
    assert main(["eval", str(run / "model"), *arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "perplexity" in printed.out
    assert "Loading weights" not in printed.err


def test_eval_of_a_model_without_a_tokenizer_takes_the_one_that_is_given(run, ground, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    for path in (run / "model").iterdir():
        if not path.name.startswith("tokenizer"):
            shutil.copy(path, tmp_path / "bare")
    text = "--data", str(ground.data / "first.jsonl"), "--sequence", "32", "--cache", str(tmp_path / "cache")
    found = []
    for arguments in ([run / "model"], [tmp_path / "bare", "--tokenizer", run / "model"]):
        assert main(["eval", *map(str, arguments), *text, "--json", "--device", "cpu"]) == 0
        found.append(json.loads(capsys.readouterr().out)["sources"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{empty}",), "accepted is the folder of a finished run"),
        (("{unfinished}",), "has no model yet"),
        (("{run}/model",), "--data must name the text"),
        (("{run}", "--tokens", "0"), "--tokens must be at least 1"),
        (("{run}", "--sequence", "1"), "--sequence must be at least 2"),
        (("{run}", "--sequence", "100000"), "too little text"),
        (("{run}", "--tokenizer", "t5"), "--tokenizer t5 has no effect without --data"),
        (("{run}", "--source-field", "s"), "--source-field s has no effect without --data"),
        (("{damaged}",), "config.yaml no longer holds the options of a run"),
    ],
)
def test_eval_says_what_it_lacks(run, tmp_path, capsys, arguments, message):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "damaged" / "model").mkdir(parents=True)
    (tmp_path / "damaged" / "model" / "config.json").touch()
    (tmp_path / "damaged" / "config.yaml").touch()
    places = {"run": run, "empty": tmp_path} | {name: tmp_path / name for name in ("unfinished", "damaged")}
    assert main(["eval", *(argument.format(**places) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_plot_draws_runs_over_each_other(run, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    picture = tmp_path / "both.svg"
    assert main(["plot", str(run), str(tmp_path / "other"), "--out", str(picture)]) == 0
    drawn = picture.read_text()
    for text in (
        "other",
        "run",
        "loss",
        "validation perplexity",
        "learning rate",
        "memory",
        "thousand tokens per second",
    ):
        assert f"<!-- {text}" in drawn


def test_plot_of_what_is_no_run_is_an_error(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "is no run with a log" in capsys.readouterr().err
    assert main(["plot"]) == 2
    assert "RUNS is missing: Folders of runs" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_an_error(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["plot", str(run), "--out", str(tmp_path / "file" / "curves.png")]) == 2
    assert f"--out {tmp_path / 'file' / 'curves.png'} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_at_its_last_good_checkpoint(
    ground, tmp_path, monkeypatch, capsys, value
):
    # The second micro-batch of step 7; the log is read at step 9, and step 8 would be saved.
    forward, calls = Objective.forward, []

    def spoilt(self, *arguments):
        loss = forward(self, *arguments)
        if torch.is_grad_enabled():
            calls.append(loss)
            if len(calls) == 6 * 2 + 2:
                return loss * value
        return loss

    monkeypatch.setattr(Objective, "forward", spoilt)
    assert ground.run(tmp_path / "run") == DIVERGED == 76
    told = capsys.readouterr().err
    assert f"the loss of step 7 is {value}" in told
    assert f"sequences {6 * ROWS} to {7 * ROWS - 1}" in told
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step-00000004'}" in told
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert not (tmp_path / "run" / "model").exists()


def test_weights_that_are_not_finite_are_not_saved(ground, tmp_path, monkeypatch, capsys):
    """The loss of the step that made them was."""
    advance = Trainer.advance

    def spoilt(self, *arguments, **options):
        result = advance(self, *arguments, **options)
        if self.step == 8:
            self.optimizer.param_groups[0]["params"][0].data[0, 0] = math.inf
        return result

    monkeypatch.setattr(Trainer, "advance", spoilt)
    assert ground.run(tmp_path / "run") == DIVERGED
    assert "step 8 left weights that are not finite (model." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert not (tmp_path / "run" / "model").exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run(ground, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loop, "losses", lambda self: {"all": math.nan})
    assert ground.run(tmp_path / "run") == DIVERGED
    assert "the validation loss after step 6 is nan" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]
    run = RunFolder(tmp_path / "run")
    assert run.end(12) == "diverged"
    monkeypatch.undo()
    monkeypatch.setattr("apollo_optim.train.export.draw_curves", lambda lines, path: None)
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert (run.end(12), run.end(13)) == ("finished", None)


@pytest.mark.parametrize("out", ["file", "file/run"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_loaded(ground, tmp_path, capsys, monkeypatch, out):
    monkeypatch.setattr(module, "prepared_corpus", None)
    (tmp_path / "file").write_text("")
    assert ground.run(tmp_path / out) == 2
    assert f"--out {tmp_path / out} cannot be written to" in capsys.readouterr().err


def test_a_sequence_beyond_the_models_positions_is_refused(ground, tmp_path, capsys):
    assert ground.run(tmp_path / "run", "--sequence", "96", "--batch-tokens", "192", "--micro-batch", "1") == 2
    assert "--sequence 96 is longer than the 64 positions that the model knows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_exported_model_knows_what_ends_a_text(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (each.from_pretrained(run / "model") for each in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_prompts_of_several_lengths_go_on_together_as_an_export_comes(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (each.from_pretrained(run / "model") for each in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.pad_token_id is None  # an embedding with such a row would not train it
    prompts = ["aa", "bcd efg hij abc def"]
    written = model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    for prompt, text in zip(prompts, tokenizer.batch_decode(written, skip_special_tokens=True), strict=True):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
        assert text == tokenizer.decode(alone[0], skip_special_tokens=True)


def test_tensorboard_gets_the_numbers(ground, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert ground.run(tmp_path / "run", "--tensorboard", "--steps", "6") == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "validation/perplexity", "validation/perplexity/first"} <= tags
    assert {"train/optimizer/gain/mean", "train/optimizer/skipped", "train/optimizer/state_bytes"} <= tags
    assert [event.step for event in events.Scalars("train/loss")] == [3, 6]


def test_a_run_writes_a_sentence(run, capsys):
    assert main(["write", str(run), "aa", "--length", "30", "--seed", "0"]) == 0
    written = capsys.readouterr().out
    assert written.startswith("aa")
    assert len(written) > 20


def test_an_exported_model_has_a_card_with_its_figures_and_the_command_that_made_it(run, result):
    card = (run / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| validation perplexity | {result['validation_perplexity']:.2f} |" in card
    command = json.loads((run / "run.json").read_text())["sessions"][0]["command"]
    assert shlex.join(["apollo", *command[1:]]) in card
