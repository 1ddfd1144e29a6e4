"""A run that is interrupted, however, and resumed ends as if it had never been interrupted: bit for bit."""

import hashlib
import os
import random
import signal
import threading
import time

import pytest
from safetensors import SafetensorError

from apollo_optim.train import checkpoint, signals
from apollo_optim.train.folder import RunFolder
from apollo_optim.train.runner import STOPPED
from apollo_optim.train.signals import ONE_PRESS, Stop
from apollo_optim.train.trainer import Trainer
from pretraining import STEPS, advancing, in_children, killed, log, outcome, resized

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
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [3, 9, STEPS, None], ids=["3", "9", "last", "random"])
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
@pytest.mark.parametrize(("function", "call"), [("_digest", 6), ("_flush", 7), ("_flush_folder", 4), ("_manifest", 3)])
def test_killed_inside_a_save_and_resumed_is_as_uninterrupted(ground, whole, tmp_path, monkeypatch, function, call):
    original, calls = getattr(checkpoint, function), []

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            killed()
        return original(*arguments)

    def work():
        monkeypatch.setattr(checkpoint, function, counted)
        return ground.run(tmp_path / "run", *METHODS["apollo"])

    assert in_children(work) == [-signal.SIGKILL]
    assert ground.run(tmp_path / "run", *METHODS["apollo"], "--resume") == 0
    assert outcome(tmp_path / "run") == whole["apollo"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


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

    monkeypatch.setattr(f"apollo_optim.train.folder.{fails}", no_space)
    assert ground.run(tmp_path / "run") == 2
    assert f"--out {tmp_path / 'run'} cannot be written to: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{bad", "run.json cannot be read as JSON"),
        ("run.json", "[]", "run.json no longer holds facts about a run"),
        ("config.yaml", "", "config.yaml no longer holds the options of a run"),
    ],
)
def test_a_damaged_file_beside_the_checkpoints_is_named(ground, tmp_path, capsys, file, content, message):
    assert ground.run(tmp_path / "run", "--steps", "2") == 0
    (tmp_path / "run" / file).write_text(content)
    assert ground.run(tmp_path / "run", "--steps", "2", "--resume") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("Error while serializing")])
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


def test_a_run_that_cannot_be_saved_when_it_is_stopped_says_so(ground, whole, tmp_path, monkeypatch, capsys):
    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        after_step(
            patch, 6, lambda: (patch.setattr(checkpoint, "_flush", no_space), signal.raise_signal(signal.SIGTERM))
        )
        assert ground.run(tmp_path / "run", *METHODS["apollo"]) == STOPPED
    told = capsys.readouterr().err
    assert "stopped by SIGTERM and not saved" in told
    assert "goes on from the checkpoint before" in told
    assert ground.run(tmp_path / "run", "--resume") == 0
    assert outcome(tmp_path / "run") == whole["apollo"]


def test_two_processes_do_not_train_in_one_folder(ground, tmp_path):
    def together():
        return ground.run(tmp_path / "run", "--resume")

    with RunFolder(tmp_path / "run").locked():
        assert in_children(together) == [2]
    assert ground.run(tmp_path / "run", "--steps", "2") == 0


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
    monkeypatch.setattr(signals, "ONE_PRESS", 0.1)
    monkeypatch.setattr(signals, "GRACE", 0.1)
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
