"""`apollo finetune`: every method, what is trained and saved, presets, several learning rates, and resuming."""

import copy
import json
import math
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertLMHeadModel

from apollo_optim.cli import main
from apollo_optim.train.adapters import Targets
from apollo_optim.train.attention import reads_all
from apollo_optim.train.config import Run, save_settings
from apollo_optim.train.loop import Trainer
from apollo_optim.train.methods import METHODS, prepared_method
from apollo_optim.train.pretrain import PretrainOptions
from apollo_optim.train.ranks import is_first
from apollo_optim.train.recipes import recipe
from apollo_optim.train.run import DIVERGED, STOPPED
from apollo_optim.train.tuning import sweep
from apollo_optim.train.tuning.config import FinetuneOptions, TuningMethod, TuningSchedule
from apollo_optim.train.tuning.presets import TUNING_PRESETS, TUNING_RECIPES
from family import partly_slow
from finetuning import BATCH, CHATML, STEPS, make_tuning_ground, questions, tiny_model, write_gguf, write_lines
from pretraining import advancing, in_children, killed, log, outcome, torchrun

pytestmark = pytest.mark.usefixtures("no_picture")

TRAINED = "q_proj", "k_proj", "v_proj", "up_proj", "down_proj"


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    """A model and questions that runs may share."""
    return make_tuning_ground(tmp_path_factory.mktemp("tuning"))


def weights(folder: Path):
    return load_file(folder / "model.safetensors")


def changed(before: Path, after: Path) -> set[str]:
    """The last parts of the names of weights that differ."""
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name.split(".")[-2] for name in old if not torch.equal(old[name], new[name])}


def result(run: Path):
    return json.loads((run / "run.json").read_text())["result"]


FULL = [name for name in METHODS if name not in ("low-rank", "lora", "dora", "relora")]


@pytest.mark.parametrize("method", partly_slow(FULL, quick=["apollo", "adamw", "muon"]))
def test_every_method_trains_the_targets_and_nothing_else(tuning, tmp_path, method):
    rank = ["--rank", "4"] if "rank" in METHODS[method].takes and method != "apollo-mini" else ["--rank", "none"]
    assert tuning.run(tmp_path / "run", "--method", method, *rank, "--lr", "1e-2", "--steps", "3") == 0
    assert changed(tuning.model, tmp_path / "run" / "model") == set(TRAINED)
    losses = [line["loss"] for line in log(tmp_path / "run") if line["kind"] == "train"]
    assert all(map(math.isfinite, losses))


def test_a_run_learns_and_its_model_is_a_model_of_transformers(tuning, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert tuning.run(tmp_path / "run", "--lr", "2e-2", "--steps", "30", "--others", "adamw", "--dropout", "0.1") == 0
    lines = log(tmp_path / "run")
    assert lines[-1]["loss"] < 0.7 * next(line["loss"] for line in lines if line["kind"] == "validation")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.chat_template == CHATML
    assert model.config.attention_dropout == 0.0, "the dropout of fine-tuning is none of the model"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Prompts of several lengths go on together as they come, each as it would alone.
    prompts = ["the apple is", "which colour is the egg? the egg"]
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    search = {"max_new_tokens": 4, "do_sample": False}
    together = model.generate(**batch, **search)[:, batch["input_ids"].shape[1] :]
    for prompt, written in zip(prompts, together, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, **search)[0, ids.shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=True) == tokenizer.decode(alone, skip_special_tokens=True)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id is None, "its embedding would no longer be trained"


def test_the_perplexity_of_a_tuned_model_or_of_adapters_is_measured_on_text_that_is_named(tuning, tmp_path, capsys):
    assert tuning.run(tmp_path / "run", "--steps", "1") == 0
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "--data must name the text" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("the apple is red. " * 100)
    named = "--data", str(tmp_path / "text.txt"), "--sequence", "16", "--cache", str(tuning.cache), "--json"
    found = {}
    for name, options in (("adapters", ()), ("merged", ("--merge",))):
        assert tuning.run(tmp_path / name, "--method", "lora", "--lr", "3e-2", "--steps", "2", *options) == 0
        capsys.readouterr()
    for name in ("run", "adapters", "merged"):
        assert main(["eval", str(tmp_path / name), *named]) == 0
        measured = capsys.readouterr().out
        found[name] = json.loads(measured[measured.index("{") :])["sources"]["text"]["loss"]
    assert found["adapters"] == pytest.approx(found["merged"], rel=1e-5)  # float32, of weights that were merged here
    assert abs(found["adapters"] - found["run"]) > 1e-2


def test_others_are_trained_by_adamw_where_asked_for(tuning, tmp_path):
    run = tmp_path / "run"
    assert tuning.run(run, "--others", "adamw", "--targets", "q", "down", "--steps", "2") == 0
    assert changed(tuning.model, run / "model") >= {"q_proj", "o_proj", "gate_proj", "embed_tokens", "norm"}
    groups = json.loads((run / "run.json").read_text())["groups"]
    assert {group["rank"] for group in groups} == {4, None}


def test_projections_are_for_the_targets_alone():
    model = tiny_model()
    more = Targets(("q", "down"), "adamw").chosen_(model)
    left = {name.rpartition(".")[2] for name, module in model.named_modules() if module in more["not_projected"]}
    assert left == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
    with pytest.raises(ValueError, match=r"c_attn.*q_proj"):
        Targets(("c_attn",), "frozen").chosen_(model)
    assert Targets(("all",), "frozen").last_parts(model) == {*TRAINED, "o_proj", "gate_proj"}


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_are_saved_for_peft_and_merge_into_the_same_model(tuning, tmp_path, method):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    options = "--method", method, "--lr", "3e-2", "--steps", "4"
    assert tuning.run(tmp_path / "adapters", *options) == 0
    assert tuning.run(tmp_path / "merged", *options, "--merge") == 0
    assert changed(tuning.model, tmp_path / "merged" / "model") == set(TRAINED)
    base = AutoModelForCausalLM.from_pretrained(tuning.model)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters" / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = merged(ids).logits
        # Two sums in float32, of which one is of a merged weight.
        torch.testing.assert_close(adapted(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        if method == "lora":  # transformers 5.22 by itself looks for DoRA's magnitudes under another name than peft's
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters" / "model")
            torch.testing.assert_close(loaded(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        assert (wanted - AutoModelForCausalLM.from_pretrained(tuning.model)(ids).logits).abs().max() > 1e-3
    settings = json.loads((tmp_path / "adapters" / "model" / "adapter_config.json").read_text())
    assert set(settings["target_modules"]) == set(TRAINED)


def test_relora_merges_as_it_goes(tuning, tmp_path):
    pytest.importorskip("peft")
    assert tuning.run(tmp_path / "run", "--method", "relora", "--relora-every", "2", "--lr", "1e-2") == 0
    assert changed(tuning.model, tmp_path / "run" / "model") == set(TRAINED)


@pytest.mark.parametrize(
    "options",
    [("--int8", "layers"), ("--step-in-backward",), ("--int8", "layers", "--step-in-backward")],
    ids=" ".join,
)
def test_memory_is_saved_in_the_same_ways_as_in_pretraining(tuning, tmp_path, options):
    assert tuning.run(tmp_path / "run", "--method", "apollo-mini", "--rank", "none", "--steps", "3", *options) == 0
    if "--int8" not in options:
        assert tuning.run(tmp_path / "plain", "--method", "apollo-mini", "--rank", "none", "--steps", "3") == 0
        one, other = weights(tmp_path / "run" / "model"), weights(tmp_path / "plain" / "model")
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert set(TRAINED) <= changed(tuning.model, tmp_path / "run" / "model")


@pytest.mark.parametrize("options", [("--shard", "ddp"), ("--shard", "fsdp")], ids=["ddp", "fsdp"])
@pytest.mark.slow
def test_two_ranks_train_as_one_does(tuning, tmp_path, options):
    assert tuning.run(tmp_path / "one", "--lr", "1e-3") == 0
    assert torchrun(2, 0, main, tuning.flags(tmp_path / "two", "--lr", "1e-3", *options)) == 0
    one, two = weights(tmp_path / "one" / "model"), weights(tmp_path / "two" / "model")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)
    assert result(tmp_path / "two")["validation_loss"] == pytest.approx(result(tmp_path / "one")["validation_loss"])


@pytest.mark.parametrize(
    ("options", "step"),
    [(("--dropout", "0.2"), 3), (("--dropout", "0.2", "--no-packing", "--group-by-length"), 5)],
    ids=["packed", "grouped"],
)
def test_killed_and_resumed_is_as_uninterrupted(tuning, tmp_path, monkeypatch, options, step):
    assert tuning.run(tmp_path / "whole", *options) == 0

    def work():
        monkeypatch.setattr(Trainer, "advance", advancing(step, killed))
        return tuning.run(tmp_path / "run", *options)

    assert in_children(work) == [-signal.SIGKILL]
    assert tuning.run(tmp_path / "run", *options, "--resume") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_is_resumed_by_its_folder_alone_and_for_longer(tuning, tmp_path, monkeypatch):
    assert tuning.run(tmp_path / "run") == 0
    assert main(["finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", str(STEPS + 2)]) == 0
    assert result(tmp_path / "run")["steps"] == STEPS + 2
    assert tuning.run(tmp_path / "run", "--steps", "none", "--epochs", "1.4", "--sequence", "200", "--resume") == 2
    assert tuning.run(tmp_path / "run", "--steps", "none", "--epochs", "1.5", "--resume") == 0
    assert result(tmp_path / "run")["steps"] == math.ceil(1.5 * 54 / BATCH)
    write_lines(tmp_path / "other.jsonl", questions(59))
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", "--out", "run", "--resume", "--data", "other.jsonl"]) == 2


def test_examples_that_changed_meanwhile_are_refused(tuning, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    shutil.copy(tuning.data, data)
    assert tuning.run(tmp_path / "run", "--data", str(data), "--steps", "2") == 0
    write_lines(data, list(reversed(questions())))
    assert tuning.run(tmp_path / "run", "--data", str(data), "--steps", "4", "--resume") == 2
    assert "examples is not the one" in capsys.readouterr().err


@pytest.mark.parametrize("moved", ["data", "validation", "model"])
def test_files_that_have_moved_are_compared_with_those_that_were(tuning, tmp_path, capsys, moved):
    first, last, other = (str(tmp_path / name) for name in ("first", "last.jsonl", "other.jsonl"))
    if moved == "model":
        shutil.copytree(tuning.model, first)
        shutil.copytree(tuning.model, other)
        with torch.no_grad():
            model = tiny_model()
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.save_pretrained(other)
    else:
        write_lines(Path(first := f"{first}.jsonl"), questions())
        write_lines(Path(other), list(reversed(questions())))
    assert tuning.run(tmp_path / "run", f"--{moved}", first, "--method", "lora", "--steps", "2") == 0
    Path(first).rename(last)
    again = "finetune", "--out", str(tmp_path / "run"), "--resume", "--steps", "4", f"--{moved}"
    capsys.readouterr()
    assert main([*again, other]) == 2
    assert "is not the one that the run in" in capsys.readouterr().err
    assert main([*again, last]) == 0


def test_several_learning_rates_go_on_with_files_that_have_moved(tuning, tmp_path, capsys):
    first, last = tmp_path / "first.jsonl", tmp_path / "last.jsonl"
    write_lines(first, questions())
    assert tuning.run(tmp_path / "run", "--data", str(first), "--lr", "1e-4", "1e-3", "--steps", "2") == 0
    again = "finetune", "--out", str(tmp_path / "run"), "--resume", "--data", str(last), "--lr", "1e-4", "1e-3", "1e-2"
    shutil.copy(first, last)
    assert main(list(again)) == 2
    assert f"--data is {last}, and the run began with {first}" in capsys.readouterr().err
    first.unlink()
    assert main(list(again)) == 0
    assert len(json.loads((tmp_path / "run" / "sweep.json").read_text())["runs"]) == 3


def test_several_learning_rates_go_on_from_another_folder(tuning, tmp_path, monkeypatch):
    here, run = tmp_path / "here", tmp_path / "run"
    shutil.copytree(tuning.model, here / "model")
    shutil.copy(tuning.data, here / "data.jsonl")
    monkeypatch.chdir(here)
    named = "--model", "model", "--data", "data.jsonl", "--steps", "2"
    assert tuning.run(run, *named, "--lr", "1e-4", "1e-3") == 0
    monkeypatch.chdir(tmp_path)
    for rates in (("1e-4", "1e-3", "1e-2"), ("1e-4", "1e-3", "1e-2", "1e-5")):
        assert main(["finetune", "--out", str(run), "--resume", "--lr", *rates]) == 0
    assert len(json.loads((run / "sweep.json").read_text())["runs"]) == 4
    assert "data: data.jsonl\n" in (run / "lr-0.01" / "config.yaml").read_text()
    assert main(["finetune", "--out", str(run / "lr-0.01"), "--resume", "--steps", "3"]) == 0


def test_of_several_learning_rates_the_best_is_kept(tuning, tmp_path, capsys):
    run = tmp_path / "sweep"
    assert tuning.run(run, "--lr", "1e-5,3e-3", "1e-4") == 0
    told = json.loads((run / "sweep.json").read_text())
    losses = {row["lr"]: row["validation_loss"] for row in told["runs"]}
    assert list(losses) == [1e-5, 3e-3, 1e-4]
    assert told["best"] == min(losses, key=lambda lr: losses[lr])
    assert weights(run / "model").keys() == weights(tuning.model).keys()
    kept = [path.parent.name for path in run.glob("lr-*/model")]
    assert kept == [f"lr-{told['best']:g}"]
    printed = capsys.readouterr().out
    assert "validation loss" in printed
    assert "best" in printed
    logs = {path: path.read_bytes() for path in run.glob("lr-*/metrics.jsonl")}
    assert len(logs) == 3
    assert main(["finetune", "--out", str(run), "--resume"]) == 0
    assert {path: path.read_bytes() for path in run.glob("lr-*/metrics.jsonl")} == logs, "nothing is trained again"
    capsys.readouterr()
    assert main(["finetune", "--out", str(run), "--resume", "--lr", "1e-5", "3e-3"]) == 2
    assert f"--lr leaves out 0.0001, which {run} began with" in capsys.readouterr().err
    assert json.loads((run / "sweep.json").read_text()) == told
    assert tuning.run(run, "--lr", "1e-5", "3e-3") == 2, "without --resume"
    assert tuning.run(tmp_path / "none", "--lr", "1e-5", "3e-3", "--resume") == 2, "nothing to resume"


def test_learning_rates_of_a_recipe_are_those_that_the_run_began_with(tuning, tmp_path, monkeypatch):
    run, rows = tmp_path / "run", TUNING_RECIPES["commonsense"]
    assert tuning.run(run, "--method", "adamw", "--rank", "none", "--steps", "2") == 0
    rates = [row["lr"] for row in json.loads((run / "sweep.json").read_text())["runs"]]
    assert len(rates) > 1
    others = tuple(replace(row, lr_sweep=tuple(3 * lr for lr in row.lr_sweep)) for row in rows)
    monkeypatch.setitem(TUNING_RECIPES, "commonsense", others)
    assert main(["finetune", "--out", str(run), "--resume", "--steps", "3"]) == 0
    assert [row["lr"] for row in json.loads((run / "sweep.json").read_text())["runs"]] == rates


def test_a_run_of_one_learning_rate_is_not_made_one_of_several(tuning, tmp_path, capsys):
    run = tmp_path / "run"
    assert tuning.run(run, "--lr", "1e-3", "--steps", "1") == 0
    before = (run / "config.yaml").read_text()
    assert main(["finetune", "--out", str(run), "--resume", "--lr", "1e-3", "1e-4"]) == 2
    assert "holds a run of one learning rate, 0.001" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == before
    assert not (run / "lr-0.001").exists()


def test_several_learning_rates_go_on_where_they_were_killed(tuning, tmp_path, monkeypatch):
    rates = "--lr", "1e-4", "1e-3"
    assert tuning.run(tmp_path / "whole", *rates) == 0

    def work():
        advance, begun = Trainer.advance, []

        def advanced(self, *arguments, **options):
            found = advance(self, *arguments, **options)
            begun.append(self.step)
            if len(begun) == STEPS + 3:
                killed()
            return found

        monkeypatch.setattr(Trainer, "advance", advanced)
        return tuning.run(tmp_path / "run", *rates)

    assert in_children(work) == [-signal.SIGKILL]
    assert tuning.run(tmp_path / "run", *rates, "--resume") == 0
    assert outcome(tmp_path / "run" / "lr-0.001") == outcome(tmp_path / "whole" / "lr-0.001")
    assert weights(tmp_path / "run" / "model").keys() == weights(tmp_path / "whole" / "model").keys()


def test_two_ranks_try_several_learning_rates(tuning, tmp_path, monkeypatch):
    held = sweep.check_sweep

    def late(*arguments):
        if not is_first():
            time.sleep(0.5)  # by when the first would have written the settings
        held(*arguments)

    monkeypatch.setattr(sweep, "check_sweep", late)
    flags = tuning.flags(tmp_path / "run", "--lr", "1e-4", "1e-3", "--steps", "2")
    assert torchrun(2, 0, main, flags) == 0
    told = json.loads((tmp_path / "run" / "sweep.json").read_text())
    assert [row["lr"] for row in told["runs"]] == [1e-4, 1e-3]
    assert [row["steps"] for row in told["runs"]] == [2, 2]


def test_a_learning_rate_that_diverges_leaves_the_others(tuning, tmp_path, capsys):
    assert tuning.run(tmp_path / "run", "--method", "sgd", "--rank", "none", "--lr", "1e30", "1e-3") == 0
    assert json.loads((tmp_path / "run" / "sweep.json").read_text())["best"] == 1e-3
    assert "diverged" in capsys.readouterr().out
    assert tuning.run(tmp_path / "bad", "--method", "sgd", "--rank", "none", "--lr", "1e30") == DIVERGED


def test_a_signal_ends_several_learning_rates_at_once(tuning, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "advance", advancing(2, lambda: signal.raise_signal(signal.SIGTERM)))
    assert tuning.run(tmp_path / "run", "--lr", "1e-4", "1e-3") == STOPPED
    assert not (tmp_path / "run" / "lr-0.001").exists()


def test_most_examples_bad_is_refused_and_a_few_are_shown(tuning, tmp_path, capsys):
    bad = [{"instruction": "?", "output": ""}, {"question": 1}, {"instruction": "long " * 500, "output": "yes"}]
    write_lines(tmp_path / "most.jsonl", [*questions(2), *bad])
    assert tuning.run(tmp_path / "run", "--data", str(tmp_path / "most.jsonl")) == 2
    said = capsys.readouterr().err
    assert "3 of 5 examples" in said
    assert "most.jsonl:3: no answer" in said
    assert "most.jsonl:5: too long" in said
    assert not (tmp_path / "run").exists()
    write_lines(tmp_path / "few.jsonl", [*questions(20), *bad])
    assert tuning.run(tmp_path / "run", "--data", str(tmp_path / "few.jsonl"), "--steps", "1", "--quiet") == 0
    assert "3 of 23 examples are left out" in capsys.readouterr().err
    (tmp_path / "none.json").write_text("[]")
    assert tuning.run(tmp_path / "none", "--data", str(tmp_path / "none.json")) == 2
    assert "none.json holds no examples" in capsys.readouterr().err


def test_a_gguf_file_is_converted_once_and_trained(tuning, tmp_path):
    path = tmp_path / "tiny.gguf"
    original = write_gguf(path).state_dict()
    assert tuning.run(tmp_path / "run", "--model", str(path), "--steps", "1", "--cache", str(tmp_path / "cache")) == 0
    (folder,) = (path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir())
    converted = weights(folder)
    assert converted.keys() == original.keys()
    for name, weight in converted.items():
        if not name.endswith(("q_proj.weight", "k_proj.weight")):  # whose rows GGUF has in another order
            # Half a step of 127 to the largest of 32 numbers, whose own scale is in 16 bits.
            assert (weight - original[name]).abs().max() <= (0.5 / 127 + 2**-11) * original[name].abs().max(), name
    assert changed(folder, tmp_path / "run" / "model") == set(TRAINED)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    path.write_bytes(path.read_bytes()[:2000])
    assert tuning.run(tmp_path / "other", "--model", str(path)) == 2


@pytest.mark.parametrize("method", [name for name in METHODS if name != "low-rank"])
def test_every_method_is_ready_with_nothing_said_but_its_name(method):
    if METHODS[method].needs:
        pytest.importorskip(METHODS[method].needs[0])
    model = tiny_model(hidden_size=128, intermediate_size=144, num_hidden_layers=1)
    for name, preset in TUNING_PRESETS.items():
        one = TuningMethod(method=method, recipe=name, dropout=preset.dropout)
        prepared = prepared_method(
            one.at(one.rates[-1]), copy.deepcopy(model), 10, 0, Targets(preset.targets, "frozen")
        )
        assert prepared.optimizer.param_groups[0]["lr"] == one.rates[-1]
        assert prepared.described.startswith(f"lr {one.rates[-1]:g}")
        assert "as given" not in prepared.described, "all of it is the recipe's"


def test_presets_are_the_papers():
    def found(method, name):
        row = recipe(method, "1b", name=name, recipes=TUNING_RECIPES)
        return row.rank, row.scale, row.lr_sweep or row.lr

    # The paper's table of hyper-parameters for commonsense reasoning.
    assert found("galore", "commonsense") == found("fira", "commonsense") == (32, 0.25, 3e-4)
    assert found("apollo-svd", "commonsense") == (32, 1.0, 3e-4)
    assert found("apollo", "commonsense") == (32, 5**0.5, 3e-4)
    assert found("apollo-mini", "commonsense") == (1, 128**0.5, 3e-4)
    assert found("adamw", "commonsense") == (None, None, (2e-5, 5e-5))
    for method in ("lora", "dora"):
        assert found(method, "commonsense") == (32, None, 3e-4)
        assert recipe(method, "1b", name="commonsense", recipes=TUNING_RECIPES).alpha == 64
    preset = TUNING_PRESETS["commonsense"]
    assert (preset.targets, preset.dropout) == (("q", "k", "v", "up", "down"), 0.05)
    assert (preset.epochs, preset.batch, preset.warmup) == (3, 32, 100)
    # Its appendix on MMLU.
    rates = (5e-6, 7.5e-6, 1e-5, 2.5e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4)
    for method in ("galore", "fira", "apollo-svd", "apollo"):
        assert (found(method, "mmlu")[0], found(method, "mmlu")[2]) == (8, rates)
    assert found("apollo-mini", "mmlu") == (1, 2.0, rates)
    assert found("apollo-mini", "mmlu-gemma") == (1, 1.0, rates)
    known = {method for row in TUNING_RECIPES["commonsense"] for method in row.methods}
    assert known == METHODS.keys() - {"low-rank"}


def test_gemma_takes_its_own_scale(tuning, tmp_path):
    from transformers import GemmaConfig, GemmaForCausalLM

    model = tmp_path / "gemma"
    shutil.copytree(tuning.model, model, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(tuning.model / "tokenizer_config.json", model)
    config = tiny_model().config.to_dict() | {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}
    wanted = {name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    GemmaForCausalLM(GemmaConfig(**wanted, **heads)).save_pretrained(model)
    options = "--recipe", "mmlu", "--method", "apollo-mini", "--rank", "none", "--lr", "1e-5", "--steps", "1"
    assert tuning.run(tmp_path / "run", "--model", str(model), *options) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["method"]["scale"] == 1.0


def test_a_model_that_also_sees_is_trained_on_text(tuning, tmp_path):
    """Sizes of its text are in a configuration of their own, and its windows, too, which attention must keep to."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    model = tmp_path / "gemma"
    shutil.copytree(tuning.model, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = small | {"vocab_size": 320, "hidden_size": 32, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}
    sight = small | {"hidden_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4, image_token_index=319)
    assert not reads_all(config)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    assert tuning.run(tmp_path / "run", "--model", str(model), "--steps", "2") == 0
    old, new = weights(model), weights(tmp_path / "run" / "model")
    differ = {name for name in old if not torch.equal(old[name], new[name])}
    assert {name.split(".")[-2] for name in differ} == set(TRAINED)
    assert not any("vision" in name for name in differ)


def test_the_learning_rate_rises_and_falls_in_straight_lines():
    schedule = TuningSchedule(warmup=4, batch=1)
    factors = [schedule.lr_factor(step, 10) for step in range(10)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(("steps", "given", "warmup"), [(17, None, 1), (199, None, 19), (200, None, 100), (17, 50, 50)])
def test_a_short_run_warms_up_for_a_tenth_of_it_unless_told_otherwise(steps, given, warmup):
    """A hundred steps, as the paper has, would be most of it, or all."""
    options = FinetuneOptions(schedule=TuningSchedule(steps=steps, warmup=given))
    assert options.resolved(resuming=False).of_examples(count=500, longest=64).schedule.warmup == warmup


def test_epochs_decide_the_steps(tuning, tmp_path):
    assert tuning.run(tmp_path / "run", "--steps", "none", "--epochs", "1.5", "--held-out", "4") == 0
    assert result(tmp_path / "run")["steps"] == math.ceil(1.5 * 56 / BATCH)
    tokens = [line["tokens"] for line in log(tmp_path / "run") if line["kind"] == "train"]
    assert tokens == sorted(tokens)
    assert tokens[-1] < 1.6 * 56 * 60


def test_the_recipe_alone_gives_the_rates():
    assert TuningMethod(method="adamw").rates == (2e-5, 5e-5)
    assert TuningMethod(method="apollo").rates == (3e-4,)
    assert TuningMethod(recipe="mmlu").rates == TUNING_RECIPES["mmlu"][2].lr_sweep


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", ""), "--model is missing"),
        (("--model", "nowhere/at/all"), "is not there"),
        (("--data", ""), "--data is missing"),
        (("--data", "nothing.jsonl"), "no file matches"),
        (("--lr", "1e-3", "1e-3"), "there twice"),
        (("--lr", "1e-3", "0.00100000001"), "there twice"),
        (("--lr", "-1"), "lr"),
        (("--lr", "1e-3", "much"), "--lr must be one or more numbers, got 1e-3 much"),
        (("--batch", "0"), "--batch must be from 1 to 16,777,216, got 0"),
        (("--batch", "1e30"), "--batch must be from 1 to 16,777,216, got 1000000000000000019884624838656"),
        (("--steps", "1e30"), "--steps must be above 0 and at most 1,000,000,000,000,000, got 1000"),
        (
            ("--steps", "none", "--epochs", "1e30"),
            "--epochs must be above 0 and at most 1,000,000,000,000,000, got 1e+30",
        ),
        (("--steps", "none", "--epochs", "inf"), "--epochs must be above 0 and at most 1,000,000,000,000,000, got inf"),
        (("--merge",), "--merge has no effect"),
        (("--method", "apolo"), "did you mean 'apollo'"),
        (("--method", "low-rank"), "has nothing for low-rank"),
        (("--targets", "c_attn"), "no linear layers of that name"),
        (("--packing", "--group-by-length"), "leave one of them out"),
        (("--steps", "3", "--epochs", "2"), "say the same thing"),
        (("--micro-batch", "3"), "does not divide"),
        (("--positions", "64"), "--positions is unknown"),  # a model that has its weights says that itself
        (("--sequence", "9999"), "longer than the 256 positions"),
        (("--bad-examples", "2"), "between 0 and 1"),
        (("--recipe", "mmlo"), "did you mean 'mmlu'"),
        (("--batch-size", "3"), "did you mean --batch?"),
        (("--epoch", "3"), "did you mean --epochs?"),
        (("--chat-template", "nowhere.jinja"), "there is no such file"),
        (("--others", "sgd"), "--others"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_said_before_any_work(tuning, tmp_path, capsys, flags, said):
    assert tuning.run(tmp_path / "run", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_a_kill_left_of_the_checkpoints_of_a_worse_rate_is_removed(tmp_path):
    runs = [sweep.Outcome(lr, tmp_path / f"lr-{lr:g}", {"validation_loss": 1 / lr}) for lr in (1e-4, 3e-4)]
    left = runs[0].folder / ".unwanted-checkpoints" / "step-00000003"
    left.mkdir(parents=True)
    sweep._keep_best(FinetuneOptions(run=Run(out=str(tmp_path))), runs)
    assert not left.parent.exists()


def test_a_file_of_options_that_an_earlier_version_wrote_says_which_line_to_delete(tuning, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("epochs: 3\npositions: 2048\n")
    assert tuning.run(tmp_path / "run", "--config", str(tmp_path / "config.yaml")) == 2
    assert "config.yaml: positions is no option of this command any more" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [("caf\xe9", "is not UTF-8"), (" \n", "is empty")])
def test_a_template_that_can_be_none_is_named(tuning, tmp_path, capsys, text, said):
    template = tmp_path / "chat.jinja"
    template.write_bytes(text.encode("latin1"))
    assert tuning.run(tmp_path / "run", "--chat-template", str(template)) == 2
    assert f"--chat-template {template} {said}" in capsys.readouterr().err


def test_a_run_is_tuned_further_by_its_folder_as_by_that_of_its_model(tuning, tmp_path):
    assert tuning.run(tmp_path / "first", "--steps", "2") == 0
    for name, model in (("by-run", tmp_path / "first"), ("by-model", tmp_path / "first" / "model")):
        flags = "--model", str(model), "--warmup", "1"
        assert tuning.run(tmp_path / name, *flags, "--steps", "2") == 0
        assert tuning.run(tmp_path / name, *flags, "--steps", "4", "--resume") == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("by-run", "by-model")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("{}", "has no model yet: it is exported when the run ends; --resume the run to finish it"),
        ('{"diverged": true}', "has no model: the run diverged, and none is exported then"),
    ],
)
def test_a_run_without_a_model_is_no_model(tuning, tmp_path, capsys, facts, said):
    run = tmp_path / "other"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / "run.json").write_text(facts)
    assert tuning.run(tmp_path / "run", "--model", str(run)) == 2
    assert f"--model {run} {said}" in capsys.readouterr().err


def test_adapters_or_an_empty_folder_in_place_of_a_model_are_told_what_to_name(tuning, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert tuning.run(tmp_path / "run", "--model", str(tmp_path / "empty")) == 2
    assert "has no weights (*.safetensors); accepted is the folder of a finished run" in capsys.readouterr().err
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    (adapters / "adapter_model.safetensors").touch()
    assert tuning.run(tmp_path / "run", "--model", str(adapters)) == 2
    assert f"--model {adapters} holds adapters for a model" in capsys.readouterr().err


def test_a_checkpoint_of_a_finished_run_writes_and_is_tuned_with_the_runs_tokenizer(
    tuning, tmp_path, capsys, monkeypatch
):
    run, flags = tmp_path / "run", ["the boat is", "--temperature", "0", "--length", "5", "--device", "cpu"]
    assert tuning.run(run) == 0
    capsys.readouterr()
    texts = []
    place = run / "checkpoints" / f"step-{STEPS:08d}"
    monkeypatch.chdir(place.parent)
    for each in (run, place, place.name):
        assert main(["write", str(each), *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == 3 * texts[:1]
    assert tuning.run(tmp_path / "further", "--model", str(place)) == 0
    shutil.rmtree(run / "model")
    assert main(["write", str(place), *flags]) == 2
    assert f"MODEL {place} is a checkpoint, which has no tokenizer, and {run}/model" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--tokenizer", "--data", "--validation"])
def test_what_is_not_in_a_folder_that_is_here_is_asked_of_the_hub(tuning, tmp_path, capsys, monkeypatch, option):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert tuning.run(tmp_path / "run", option, "here/nothing") == 2
    said = capsys.readouterr().err
    assert f"apollo: {option} " in said
    assert "is no file or folder here, was not fetched before, and the Hugging Face hub cannot be reached" in said
    assert tuning.run(tmp_path / "run", option, "here/nothing.json") == 2, "no repository is named so"
    said = capsys.readouterr().err
    assert "is not there" in said or "no file matches" in said


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_a_run_of_pretraining_is_refused_as_such(tuning, tmp_path, capsys, flags):
    save_settings(tmp_path / "config.yaml", PretrainOptions())
    assert tuning.run(tmp_path, *flags) == 2
    assert f"{tmp_path}/config.yaml is of a run by `apollo pretrain`" in capsys.readouterr().err


def test_an_encoder_is_neither_tuned_nor_measured(tuning, tmp_path, capsys):
    folder, text = tmp_path / "bert", tmp_path / "text.txt"
    shutil.copytree(tuning.model, folder)
    text.write_text("the boat is red. " * 200)
    config = BertConfig(
        vocab_size=400, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    BertLMHeadModel(config).save_pretrained(folder)
    said = f'{folder} has "model_type": "bert", an encoder'
    assert tuning.run(tmp_path / "run", "--model", str(folder)) == 2
    assert f"--model {said}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["eval", str(folder), "--data", str(text)]) == 2
    assert f"MODEL {said}" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_a_gpu_trains_compiled_as_the_cpu_does(tuning, tmp_path, packing):
    assert tuning.run(tmp_path / "cpu", packing) == 0
    assert tuning.run(tmp_path / "gpu", packing, "--device", "cuda", "--dtype", "fp32") == 0
    losses = [[line["loss"] for line in log(tmp_path / name)] for name in ("cpu", "gpu")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # float32 in other orders, a few steps long


@pytest.mark.cuda
def test_packed_examples_train_compiled_in_16_bits_as_they_do_without(tuning, tmp_path):
    """By boundaries, where this torch can: without dropout there is no mask."""
    same = "--packing", "--dropout", "0", "--device", "cuda", "--dtype", "bf16"
    for name in ("true", "false"):
        assert tuning.run(tmp_path / name, *same, "--compile", name) == 0
    losses = [[line["loss"] for line in log(tmp_path / name)] for name in ("true", "false")]
    assert losses[0] == pytest.approx(losses[1], rel=2**-6)  # a few roundings of bf16, 2^-8, in other orders
