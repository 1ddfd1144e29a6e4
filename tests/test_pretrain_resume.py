"""A run that is interrupted, however, and resumed ends as if it had never been interrupted: bit for bit."""

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors import SafetensorError

from apollo_optim.cli import main
from apollo_optim.train import atomic, checkpoint, export, loop
from apollo_optim.train.loop import ONE_PRESS, Stop, Trainer
from apollo_optim.train.metrics import MetricsFile
from apollo_optim.train.recipes import RECIPES
from apollo_optim.train.run import STOPPED, RunFolder, _locked
from family import partly_slow
from kills import KINDS, killed_runs
from pretraining import ROWS, SEQUENCE, STEPS, advancing, in_children, killed, log, outcome, resized

METHODS = {
    "apollo": ("--method", "apollo", "--rank", "4", "--refresh-every", "5"),
    # Dropout draws from the global generator, which a resumed run must find where it was.
    "lora": ("--method", "lora", "--rank", "4", "--dropout", "0.1"),
}

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def whole(ground, tmp_path_factory):
    """What each method's run ends with when nothing happens to it."""

    def run(method):
        folder = tmp_path_factory.mktemp(method) / "run"
        assert ground.run(folder, *METHODS[method]) == 0
        return outcome(folder)

    return {method: run(method) for method in METHODS}


def after_step(monkeypatch, step, act):
    """Call `act` when a step has been taken, before anything is saved of it."""
    monkeypatch.setattr(Trainer, "advance", advancing(step, act))


# Before the first checkpoint, after it, one that is due for a line of the log, an evaluation and a checkpoint, and any.
@pytest.mark.parametrize(
    ("method", "step"),
    partly_slow(
        [(method, step) for method in METHODS for step in (3, 9, STEPS, None)],
        quick=[("apollo", 3), ("lora", 9), ("apollo", STEPS), ("lora", None)],
    ),
)
def test_killed_at_a_step_and_resumed_is_as_uninterrupted(ground, whole, tmp_path, monkeypatch, method, step):
    step = step or random.Random().randint(1, STEPS)
    print(f"killed at step {step}")

    def work():
        after_step(monkeypatch, step, killed)
        return ground.run(tmp_path / "run", *METHODS[method])

    assert in_children(work) == [-signal.SIGKILL]
    assert ground.run(tmp_path / "run", *METHODS[method], "--resume") == 0
    assert outcome(tmp_path / "run") == whole[method]


# Of the functions that a save calls: while files are written, before the rename, after it, and while pruning.
@pytest.mark.parametrize(("function", "call"), [("digest", 6), ("flush", 7), ("flush_folder", 4), ("read_manifest", 3)])
def test_killed_inside_a_save_and_resumed_is_as_uninterrupted(ground, whole, tmp_path, monkeypatch, function, call):
    original, calls = getattr(atomic, function), []

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            killed()
        return original(*arguments)

    def work():
        monkeypatch.setattr(atomic, function, counted)
        return ground.run(tmp_path / "run", *METHODS["apollo"])

    assert in_children(work) == [-signal.SIGKILL]
    assert ground.run(tmp_path / "run", *METHODS["apollo"], "--resume") == 0
    assert outcome(tmp_path / "run") == whole["apollo"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("kind", "kills"),
    [("pretrain", 5), *(pytest.param(kind, 75, marks=pytest.mark.slow) for kind in KINDS)],
)
def test_killed_at_random_moments_and_resumed_is_as_uninterrupted(tmp_path, kind, kills):
    """Moments of preparing data, training, saving and exporting; `tests/kills.py` does the same from a command line.

    Fine-tuning, whose loop is the same, is killed at a step in test_finetune.py.
    """
    ground = KINDS[kind].make_ground(tmp_path / "ground")
    stages = killed_runs(kind, ground, tmp_path, kills, seed=random.Random().randrange(10**6))
    print(dict(stages))
    assert stages.total() == kills


@pytest.mark.parametrize(("name", "step"), [("SIGTERM", 5), ("SIGINT", 6)])
def test_a_signal_saves_the_step_it_came_in_and_exits_with_a_status_of_its_own(
    ground, whole, tmp_path, monkeypatch, capsys, name, step
):
    with monkeypatch.context() as patch:
        after_step(patch, step, lambda: os.kill(os.getpid(), getattr(signal, name)))
        assert ground.run(tmp_path / "run", *METHODS["lora"]) == STOPPED == 75
    assert f"stopped by {name} and saved" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").exists()
    # Step 6 was due for an evaluation, which a signal does not wait for.
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert outcome(tmp_path / "run") == whole["lora"]


def test_resumed_twice_and_with_other_rhythms_learns_the_same(ground, whole, tmp_path, monkeypatch):
    for step in (2, 7):
        with monkeypatch.context() as patch:
            after_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
            more = ("--resume", "--save-every", "100", "--log-every", "1") if step == 7 else ()
            assert ground.run(tmp_path / "run", *METHODS["apollo"], *more) == STOPPED
    assert ground.run(tmp_path / "run", *METHODS["apollo"], "--resume", "--log-every", "2") == 0
    result = outcome(tmp_path / "run")
    assert {key: result[key] for key in ("exported", "optimizer")} == {
        key: whole["apollo"][key] for key in ("exported", "optimizer")
    }
    steps = [(line["kind"], line["step"]) for line in log(tmp_path / "run")]
    assert len(steps) == len(set(steps))
    assert [step for kind, step in steps if kind == "train"] == [3, 4, 5, 6, 7, 8, 10, 12]


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(ground, whole, tmp_path, monkeypatch, capsys, damage):
    with monkeypatch.context() as patch:
        after_step(patch, 10, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert ground.run(tmp_path / "run", *METHODS["apollo"]) == STOPPED
    last = tmp_path / "run" / "checkpoints" / "step-00000010"
    if damage == "missing":
        (last / "optimizer.pt").unlink()
    elif damage == "no manifest":
        (last / "manifest.json").unlink()
    else:
        content = (last / "model.safetensors").read_bytes()
        content = content[:-9] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
        (last / "model.safetensors").write_bytes(content)
    capsys.readouterr()
    assert ground.run(tmp_path / "run", *METHODS["apollo"], "--resume") == 0
    told = capsys.readouterr().err
    assert f"{last} is damaged" in told
    assert "resumed after step 8 of 12" in told
    assert outcome(tmp_path / "run") == whole["apollo"]


def test_only_damaged_checkpoints_are_an_error(ground, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        after_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert ground.run(tmp_path / "run") == STOPPED
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"")
    assert ground.run(tmp_path / "run", "--resume") == 2
    assert "every checkpoint in" in capsys.readouterr().err


def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(ground, whole, tmp_path, monkeypatch, capsys):
    save = checkpoint.Checkpoints.save

    def saved(self, step, *arguments):
        with resized(20_000 if step == 8 else None):
            return save(self, step, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", saved)
    assert ground.run(tmp_path / "run", *METHODS["apollo"]) == 0
    told = capsys.readouterr().err
    assert "the checkpoint of step 8 could not be written" in told
    assert "the last one is of step 4" in told
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000012",
    ]
    assert outcome(tmp_path / "run") == whole["apollo"]


@pytest.mark.parametrize("fails", ["save_settings", "replace_text_"])
def test_a_disk_that_is_full_when_a_run_begins_is_named(ground, tmp_path, monkeypatch, capsys, fails):
    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"apollo_optim.train.run.{fails}", no_space)
    assert ground.run(tmp_path / "run") == 2
    assert f"--out {tmp_path / 'run'} cannot be written to: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{bad", "run.json cannot be read as JSON"),
        ("run.json", "[]", "run.json no longer holds facts about a run"),
        ("run.json", "[" * 10**6, "run.json cannot be read as JSON"),
        ("config.yaml", "", "config.yaml no longer holds the options of a run"),
    ],
    ids=["not JSON", "a list", "too deep", "empty"],
)
def test_a_damaged_file_beside_the_checkpoints_is_named(ground, tmp_path, capsys, file, content, message):
    assert ground.run(tmp_path / "run", "--steps", "2") == 0
    (tmp_path / "run" / file).write_text(content)
    assert ground.run(tmp_path / "run", "--steps", "2", "--resume") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing"),
        Exception("No space left on device (os error 28)"),  # of tokenizers
    ],
)
def test_a_model_that_cannot_be_exported_is_exported_by_resuming(ground, whole, tmp_path, monkeypatch, capsys, error):
    from transformers import PreTrainedModel

    def no_space(*arguments, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", no_space)
        assert ground.run(tmp_path / "run", *METHODS["apollo"]) == 74
    assert "could not be exported" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert outcome(tmp_path / "run") == whole["apollo"]


def test_a_summary_that_nobody_reads_is_not_taken_for_a_model_that_is_not_exported(
    ground, tmp_path, monkeypatch, capfd
):
    def unread(*arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("apollo_optim.train.export.print_summary", unread)
    with pytest.raises(BrokenPipeError):  # which the command ends by without a word, as others of its own do
        ground.run(tmp_path / "run", "--steps", "2")
    assert "could not be exported" not in capfd.readouterr().err
    assert (tmp_path / "run" / "model").exists()


def test_a_disk_that_is_full_for_the_line_of_the_only_evaluation_costs_the_summary_alone(
    ground, tmp_path, monkeypatch, capsys
):
    write = MetricsFile.write

    def no_space(self, record):
        if record["kind"] == "validation":
            raise OSError(28, "No space left on device")
        write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", no_space)
        assert ground.run(tmp_path / "run", "--eval-every", "99") == 0
    assert "metrics.jsonl has lost the lines of this run: the model is exported" in capsys.readouterr().err
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert RunFolder(tmp_path / "run").result(STEPS)["validation_loss"] > 0


def test_a_run_that_cannot_be_saved_when_it_is_stopped_says_so(ground, whole, tmp_path, monkeypatch, capsys):
    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        after_step(patch, 6, lambda: (patch.setattr(atomic, "flush", no_space), signal.raise_signal(signal.SIGTERM)))
        assert ground.run(tmp_path / "run", *METHODS["apollo"]) == STOPPED
    told = capsys.readouterr().err
    assert "stopped by SIGTERM and not saved" in told
    assert "goes on from the checkpoint before" in told
    with monkeypatch.context() as patch:
        after_step(patch, 2, lambda: (patch.setattr(atomic, "flush", no_space), signal.raise_signal(signal.SIGTERM)))
        assert ground.run(tmp_path / "first", "--save-every", "9") == STOPPED
    assert "and not saved: the same command with --resume begins anew" in capsys.readouterr().err
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert outcome(tmp_path / "run") == whole["apollo"]


def test_two_processes_do_not_train_in_one_folder(ground, tmp_path):
    def together():
        return ground.run(tmp_path / "run", "--auto-resume")

    with RunFolder(tmp_path / "run").locked():
        assert in_children(together) == [2]
    assert ground.run(tmp_path / "run", "--steps", "2") == 0


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_where_there_are_no_locks_a_killed_run_is_resumed_on_another_machine(tmp_path, monkeypatch, error):
    def refused(file, how):
        raise OSError(error, os.strerror(error))

    def trained(host):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        with RunFolder(tmp_path).locked():
            killed()

    monkeypatch.setattr(fcntl, "flock", refused)
    for host in ("first", "second"):
        assert in_children(partial(trained, host)) == [-signal.SIGKILL]


def test_a_folder_that_is_taken_away_meanwhile_is_left_without_a_word(tmp_path):
    with RunFolder(tmp_path / "run").locked():
        shutil.rmtree(tmp_path / "run")


def test_only_a_folder_that_was_made_for_nothing_goes_again(tmp_path):
    folders = [tmp_path / name for name in ("made", "own", "used")]
    folders[1].mkdir()
    for folder in folders:
        with RunFolder(folder).locked():
            if folder.name == "used":
                (folder / "log").touch()
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert {path.name for path in folders[2].iterdir()} == {".lock", "log"}


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_that_is_taken_away_before_it_is_locked_is_none(tmp_path, monkeypatch, made_again):
    def late(file):
        os.unlink(file.name)
        if made_again:
            Path(file.name).touch()
        return _locked(file)

    monkeypatch.setattr("apollo_optim.train.run._locked", late)
    with pytest.raises(ValueError, match="another process trains in"), RunFolder(tmp_path).locked():
        pass


def test_a_lock_that_cannot_be_opened_is_no_lock_that_is_missing(ground, tmp_path, capsys):
    """As that of another user, or on a full disk."""
    (tmp_path / ".lock").mkdir()
    assert ground.run(tmp_path) == 2
    assert f"--out {tmp_path} cannot be written to: Is a directory" in capsys.readouterr().err


def test_a_run_that_another_process_began_meanwhile_is_left_as_it_is(ground, tmp_path, monkeypatch, capsys):
    """The second of two that are started together may check the folder before the first has locked it."""
    locked = RunFolder.locked

    def behind(self):
        monkeypatch.setattr(RunFolder, "locked", locked)
        assert ground.run(tmp_path / "run", "--steps", "2") == 0
        return locked(self)

    monkeypatch.setattr(RunFolder, "locked", behind)
    settings = tmp_path / "run" / "config.yaml"
    assert ground.run(tmp_path / "run", "--steps", "2", "--lr", "0.5", "--seed", "7") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert "seed: 0\n" in settings.read_text()


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "one after the other"])
def test_a_finished_run_that_is_resumed_always_has_a_whole_model(ground, tmp_path, monkeypatch, at_once):
    """Killed at each call of the export that could leave it without one."""
    run, model = tmp_path / "run", tmp_path / "run" / "model"
    assert ground.run(run, "--steps", "2") == 0
    exported = {path.name: path.read_bytes() for path in model.iterdir()}
    if not at_once:
        monkeypatch.setattr(atomic, "_swapped", lambda one, other: False)
    replace_folder_, replace, remove = export.replace_folder_, os.replace, shutil.rmtree

    def killed_at(call):
        calls = []

        def counted(function, *arguments, **options):
            calls.append(function)
            if len(calls) == call:
                killed()
            return function(*arguments, **options)

        def watched(folder, write):
            monkeypatch.setattr(os, "replace", partial(counted, replace))
            monkeypatch.setattr(shutil, "rmtree", partial(counted, remove))
            return replace_folder_(folder, write)

        monkeypatch.setattr(export, "replace_folder_", watched)
        return main(["pretrain", "--out", str(run), "--resume"])

    call, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        call += 1
        (ended,) = in_children(partial(killed_at, call))
        if not at_once and not model.exists():
            atomic.finish_exchange_(model)  # as the next resume does first of all
        assert {path.name: path.read_bytes() for path in model.iterdir()} == exported
    assert ended == 0
    assert call > 4
    assert not list(run.glob(".un*")) + list(run.glob(".replaced*")) + list(run.glob("*.kept*"))


def test_files_that_somebody_put_into_an_exported_model_are_kept(ground, tmp_path, capsys):
    run = tmp_path / "run"
    assert ground.run(run, "--steps", "2") == 0
    (run / "model" / "NOTES.md").write_text("mine")
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert f"all that it held is now in {run / 'model.kept-1'}" in capsys.readouterr().err
    assert (run / "model.kept-1" / "NOTES.md").read_text() == "mine"
    assert not (run / "model" / "NOTES.md").exists()
    (run / "model" / "config.json").write_text("{}")
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert (run / "model.kept-2" / "config.json").read_text() == "{}"
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert not (run / "model.kept-3").exists()


def test_a_finished_run_says_how_to_go_on_and_can_be_made_longer(ground, tmp_path, capsys):
    run = tmp_path / "run"
    assert ground.run(run, "--steps", "4") == 0
    again = ["pretrain", "--out", str(run), "--resume"]
    assert main(again) == 0
    assert "all 4 steps were taken before" in (told := capsys.readouterr().err)
    assert "To train on, give --resume and more --steps" in told
    assert main([*again, "--tokens", str(6 * SEQUENCE * ROWS)]) == 0
    assert "resumed after step 4 of 6" in capsys.readouterr().err
    assert main([*again, "--steps", "8"]) == 0
    assert [line["step"] for line in log(run) if line["kind"] == "train"] == [3, 4, 6, 8]
    assert [line["step"] for line in log(run) if line["kind"] == "validation"] == [4, 6, 8]
    rates = {line["step"]: line["lr"] for line in log(run) if line["kind"] == "train"}
    assert rates[8] == pytest.approx(0.1 * 5e-3)  # --final-lr of the recipe's
    assert yaml.safe_load((run / "config.yaml").read_text())["recipe"] == "short-run"  # however long it gets
    assert json.loads((run / "run.json").read_text())["result"]["steps"] == 8
    assert main([*again, "--steps", "7"]) == 2
    assert "--steps is 7, and the run began with 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "recipes", "option"), [("adamw", "short-run", "embedding_lr"), ("lora", "paper", "alpha")]
)
def test_a_resumed_run_keeps_its_recipe_whatever_that_says_now(ground, tmp_path, monkeypatch, method, recipes, option):
    """In what it trains by, in its facts, and on the model's card."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        assert ground.run(folder, "--steps", "4", "--method", method) == 0
    before = json.loads((run / "run.json").read_text())
    assert main(["pretrain", "--out", str(other), "--resume", "--steps", "6"]) == 0
    changed = tuple(replace(row, source="another", **{option: 0.5}) for row in RECIPES[recipes])
    monkeypatch.setitem(RECIPES, recipes, changed)
    assert main(["pretrain", "--out", str(run), "--resume", "--steps", "6"]) == 0
    assert outcome(run) == outcome(other)
    after = json.loads((run / "run.json").read_text())
    assert all(after[name] == before[name] for name in ("method", "groups", "recipe", "recipe_options"))
    assert "another" not in (run / "model" / "README.md").read_text()


def test_a_run_without_a_checkpoint_says_that_it_begins_again(ground, tmp_path, capsys):
    run = tmp_path / "run"
    assert ground.run(run, "--steps", "4") == 0
    before = [line["loss"] for line in log(run) if line["kind"] == "train"]
    shutil.rmtree(run / "checkpoints")
    again = "the run has no checkpoint yet, and begins at its first step again"
    assert again not in capsys.readouterr().err
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert again in capsys.readouterr().err
    assert [line["loss"] for line in log(run) if line["kind"] == "train"] == before


def test_a_run_finds_its_data_from_another_folder(ground, tmp_path, monkeypatch, capsys):
    for part in ("text", "tiny"):
        shutil.copytree(ground.data.parent / part, tmp_path / "here" / part)
    (tmp_path / "elsewhere" / "text").mkdir(parents=True)
    (tmp_path / "elsewhere" / "text" / "first.jsonl").write_text('{"text": "another text of the same name"}\n')
    monkeypatch.chdir(tmp_path / "here")
    places = ["--data", "text/first.jsonl, text/second.jsonl", "--model", "tiny", "--cache", "cache"]
    assert ground.run(Path("runs/one"), "--steps", "4", "--eval-tokens", "100000", *places) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "here" / "runs" / "one"
    assert "data: text/first.jsonl, text/second.jsonl\n" in (run / "config.yaml").read_text()
    assert main(["pretrain", "--out", str(run), "--resume", "--steps", "5"]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]
    assert found["all"]["loss"] == pytest.approx(log(run)[-1]["loss"], rel=1e-4)
    assert not (tmp_path / "elsewhere" / "cache").exists()
    # What has moved together is found from its new place.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert main(["pretrain", "--out", "runs/one", "--resume", "--steps", "6"]) == 0


def test_files_that_have_moved_are_named_where_they_are_and_compared_with_those_that_were(ground, tmp_path, capsys):
    for part in ("text", "tiny"):
        shutil.copytree(ground.data.parent / part, tmp_path / "old" / part)
    shutil.copytree(tmp_path / "old", tmp_path / "other")
    with (tmp_path / "other" / "text" / "first.jsonl").open("a") as file:
        file.write('{"text": "one line more"}\n')

    def resumed(folder, steps):
        named = "--data", str(tmp_path / folder / "text"), "--model", str(tmp_path / folder / "tiny")
        return main(["pretrain", "--out", str(tmp_path / "run"), "--resume", "--steps", steps, *named])

    first = "--data", str(tmp_path / "old" / "text"), "--model", str(tmp_path / "old" / "tiny")
    assert ground.run(tmp_path / "run", "--steps", "4", *first) == 0
    assert resumed("other", "5") == 2
    assert "and the run began with" in capsys.readouterr().err  # for the files that it began with are still there
    (tmp_path / "old").rename(tmp_path / "new")
    assert resumed("other", "5") == 2
    assert "the corpus is not the one that the run" in capsys.readouterr().err
    configuration = tmp_path / "new" / "tiny" / "config.json"
    before = configuration.read_text()
    configuration.write_text(json.dumps(json.loads(before) | {"rope_theta": 100.0}))
    assert resumed("new", "5") == 2
    assert "the model is not the one that the run" in capsys.readouterr().err
    configuration.write_text(before)
    assert resumed("new", "5") == 0
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--resume", "--steps", "6"]) == 0


def test_a_tilde_in_a_file_of_options_is_the_home_folder(ground, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ground.run(tmp_path / "one", "--steps", "1") == 0
    (tmp_path / "further.yaml").write_text("model: ~/one/model\nout: ~/two\n")
    given = ["--data", str(ground.data), "--sequence", "8", "--batch-tokens", "16", "--steps", "1", "--device", "cpu"]
    assert main(["pretrain", "--config", str(tmp_path / "further.yaml"), *given, "--cache", str(ground.cache)]) == 0
    assert (tmp_path / "two" / "model" / "tokenizer.json").exists()


def test_a_model_is_trained_further_with_its_own_tokenizer(ground, tmp_path, capsys):
    assert ground.run(tmp_path / "first", "--steps", "2") == 0
    model = tmp_path / "first" / "model"
    text = tmp_path / "other.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"quite another text, number {n}"}) for n in range(400)))
    further = ["--steps", "2", "--model", str(model), "--data", str(text)]
    assert ground.run(tmp_path / "second", *further) == 2
    assert f"--vocabulary 300 has no effect beside the tokenizer {model}" in capsys.readouterr().err
    further += ["--vocabulary", "4096"]  # the default, as if it were not given
    assert ground.run(tmp_path / "second", *further) == 0
    told = [(tmp_path / run / "model" / "tokenizer.json").read_text() for run in ("first", "second")]
    assert told[0] == told[1]
    assert f"tokenizer: {model}\n" in (tmp_path / "second" / "config.yaml").read_text()
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert ground.run(tmp_path / "third", *further) == 2
    assert f"--model {model} has weights and no tokenizer: name the one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        (["--lr", "0"], "note: --lr 0 leaves every weight as it is"),
        (["--lr", "0", "--embedding-lr", "1"], "note: --lr 0 leaves every weight but embedding and head as it is"),
        (["--rank", "5000"], "note: --rank 5000 is no less than the smaller side of 7 of the 7 matrices"),
        (["--rank", "4"], None),
        (["--method", "lora", "--rank", "5000"], None),
    ],
)
def test_options_that_are_hardly_meant_are_remarked_on(ground, tmp_path, capsys, flags, remark):
    assert ground.run(tmp_path / "run", "--steps", "1", *flags) == 0
    told = capsys.readouterr().err
    assert remark in told if remark else "note:" not in told


def test_a_second_ctrl_c_interrupts_at_once_but_not_the_launchers_copy_of_the_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)  # a shell starts what runs in the background without one
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGINT"
        now[0] += ONE_PRESS / 2
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        now[0] += ONE_PRESS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def busy(seconds):
    """Keep the main thread inside one call of C, as a backward pass does: no handler of Python's runs meanwhile."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000_000)


def test_signals_are_acknowledged_while_a_backward_pass_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "ONE_PRESS", 0.1)
    monkeypatch.setattr(loop, "GRACE", 0.1)
    said = tmp_path / "said"

    def say(text):
        with said.open("a") as file:
            file.write(text + "\n")

    def interrupted():
        with Stop(say):
            for wait in (0.2, 0.6):
                threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
            busy(60)
        return 0

    assert in_children(interrupted) == [130]
    assert said.read_text().splitlines() == [
        "Ctrl-C: finishing this step, then saving; again to quit at once",
        "quitting at once: steps since the last checkpoint are lost; --resume goes on from there",
    ]
