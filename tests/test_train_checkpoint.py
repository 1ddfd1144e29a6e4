"""Checkpoints on the disk: whole or not there, the right ones kept, and everything in them brought back."""

import errno
import json
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from apollo_optim import APOLLO
from apollo_optim.train import atomic
from apollo_optim.train.atomic import damage_of, replace_folder_, replace_text_
from apollo_optim.train.checkpoint import (
    Checkpointer,
    Checkpoints,
    Position,
    random_states,
    restore_,
    saved_position,
    seed_generators,
    set_random_states,
    write_files,
)
from apollo_optim.train.methods import Method, prepared_method
from apollo_optim.train.metrics import DivergedError
from apollo_optim.train.model import Model, built_model
from apollo_optim.train.ranks import Ranks
from pretraining import flattened, resized
from small_training import TINY, VOCABULARY, needed

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world=1, device=CPU)


def texts(**files):
    """A writer of these files."""
    return lambda folder: [(folder / name).write_text(text) for name, text in files.items()]


def saved(folder, *steps, keep=2, scores=()):
    checkpoints = Checkpoints(folder, keep)
    for step, score in zip(steps, [*scores, *[None] * len(steps)], strict=False):
        checkpoints.save(step, texts(a="one", b="two"), score)
    return checkpoints


def test_the_newest_are_kept_and_the_best(tmp_path):
    assert saved(tmp_path / "plain", 1, 2, 3, 4).steps() == [3, 4]
    best = saved(tmp_path / "scored", 1, 2, 3, 4, 5, scores=(3.0, 1.0, 2.0, None, 4.0))
    assert best.steps() == [2, 4, 5]
    assert best.best() == 2


def test_a_better_one_takes_the_place_of_the_best(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=1, scores=(2.0, 3.0, 1.0))
    assert checkpoints.steps() == [3]


def test_a_checkpoint_lists_its_files_with_sizes_and_hashes(tmp_path):
    folder = saved(tmp_path, 7).path(7)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["files"]["a"] == {
        "bytes": 3,
        "sha256": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    }
    assert damage_of(folder) is None


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "a").write_text("on"), "a has 2 bytes of 3"),
        (lambda folder: (folder / "a").write_text("ond"), "a is not what was written"),
        (lambda folder: (folder / "a").unlink(), "a is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, harm, said):
    checkpoints = saved(tmp_path, 1, 2)
    harm(checkpoints.path(2))
    assert damage_of(checkpoints.path(2)) == said
    warnings = []
    assert checkpoints.latest(warnings.append, ALONE) == 1
    assert len(warnings) == 1
    assert said in warnings[0]


def test_each_of_several_readers_reads_a_share_of_the_files(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, texts(a="one", b="two", c="three", d="four", e="five"), None)
    read = []
    monkeypatch.setattr(atomic, "digest", lambda path, digest=atomic.digest: (read.append(path.name), digest(path))[1])
    (checkpoints.path(1) / "d").write_text("fuor")
    found = [damage_of(checkpoints.path(1), reader, 3) for reader in range(3)]
    assert sorted(read) == ["a", "b", "c", "d", "e"]
    assert [each for each in found if each is not None] == ["d is not what was written"]


class OfTwo(Ranks):
    """The first of two ranks, of which the other passes what is given here."""

    def any(self, flag):
        return flag or self.host["any"]

    def shared(self, value):
        return value

    def gathered(self, value):
        return [value, self.host["gathered"]]


def test_damage_that_another_rank_has_found_counts(tmp_path):
    warnings = []
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        saved(tmp_path, 1).latest(warnings.append, OfTwo(0, 2, CPU, {"gathered": "b is missing"}))
    assert "is damaged (b is missing)" in warnings[0]


def test_weights_that_are_not_finite_on_another_rank_are_saved_on_none(tmp_path):
    checkpointer = Checkpointer(Checkpoints(tmp_path, 1), *trained(0), OfTwo(0, 2, CPU, {"any": True}), pytest.fail)
    with pytest.raises(DivergedError, match=r"step 3 left weights that are not finite \(on another rank\)"):
        checkpointer.save(POSITION, None)
    assert checkpointer.checkpoints.steps() == []


def test_a_checkpoint_that_was_written_makes_up_for_one_that_was_not(tmp_path):
    warnings = []
    checkpointer = Checkpointer(Checkpoints(tmp_path, 1), *trained(0), ALONE, warnings.append)
    with resized(2000):
        checkpointer.save(POSITION, None)
    assert checkpointer.failed
    assert "could not be written" in warnings[0]
    checkpointer.save(POSITION, None)
    assert not checkpointer.failed


def test_there_may_be_none(tmp_path):
    assert Checkpoints(tmp_path / "nowhere", 1).latest(pytest.fail, ALONE) is None


def test_a_damaged_one_is_replaced_by_saving_its_step_again(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    (checkpoints.path(2) / "a").unlink()
    checkpoints.save(2, texts(a="three"))
    assert checkpoints.latest(pytest.fail, ALONE) == 2
    assert (checkpoints.path(2) / "a").read_text() == "three"


def test_a_save_that_fails_leaves_everything_as_it_was(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("flush", "flush_folder", "digest"):
        with monkeypatch.context() as patch:
            patch.setattr(atomic, function, full)
            with pytest.raises(OSError, match="No space"):
                checkpoints.save(2, texts(a="one"))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.latest(pytest.fail, ALONE) == 1


def test_a_file_that_a_rank_wrote_elsewhere_is_missed(tmp_path):
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(OSError, match=r"shards/__1_0.distcp is not in .*: all ranks must write to one file system"):
        checkpoints.save(2, texts(a="one"), None, {"shards/__1_0.distcp": {"bytes": 1, "sha256": "0"}})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_leftovers_of_a_kill_are_cleared_and_never_taken_for_a_checkpoint(tmp_path):
    checkpoints = saved(tmp_path, 1)
    for name in (".unfinished-00000002", ".unwanted-step-00000000"):
        (tmp_path / name).mkdir()
    assert checkpoints.latest(pytest.fail, ALONE) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_somebody_put_beside_or_into_checkpoints_is_never_removed(tmp_path):
    (tmp_path / ".undo-list").mkdir()
    checkpoints = saved(tmp_path, 1)
    (checkpoints.path(1) / "notes.txt").write_text("mine")
    (saved(tmp_path, 1).path(1) / "notes.txt").write_text("mine too")
    checkpoints = saved(tmp_path, 2, 3)
    assert checkpoints.latest(pytest.fail, ALONE) == 3
    assert checkpoints.steps() == [2, 3]
    assert (tmp_path / ".undo-list").exists()
    assert (tmp_path / "step-00000001.kept-1" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-00000001.kept-2" / "notes.txt").read_text() == "mine too"


def test_a_file_and_a_folder_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    replace_text_(tmp_path / "file", "old")
    replace_folder_(tmp_path / "folder", lambda folder: (folder / "x").write_text("old"))

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            replace_text_(tmp_path / "file", "new")
        with pytest.raises(OSError, match="No space"):
            replace_folder_(tmp_path / "folder", lambda folder: (folder / "x").write_text("new"))
    assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "folder" / "x").read_text() == "old"


class Tied(nn.Module):
    """Two names for one weight, a buffer that is kept and one that is not."""

    def __init__(self, width=20):
        super().__init__()
        self.embedding = nn.Embedding(30, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("made", torch.randn(3), persistent=False)

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))


def trained(seed):
    torch.manual_seed(seed)
    model = Tied().bfloat16()
    optimizer = APOLLO(model, lr=0.01, rank=4)
    for _ in range(3):
        model(torch.randint(30, (4, 5))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


POSITION = Position(step=3, micro_batch=4, world=1, window=(0.1, 1 / 3))


def test_everything_in_a_checkpoint_comes_back(tmp_path):
    model, optimizer = trained(0)
    states = random_states(CPU)
    checkpoints = Checkpoints(tmp_path, 1)
    folder = checkpoints.save(3, partial(write_files, model, optimizer, [states], POSITION))
    drawn = torch.rand(3), random.random(), np.random.rand()
    other, other_optimizer = trained(1)
    made = other.made.clone()
    restore_(other, other_optimizer, folder, rank=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.made, made)
    assert flattened(other_optimizer.state_dict()) == flattened(optimizer.state_dict())
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]
    assert saved_position(folder) == POSITION


def test_a_rank_that_was_not_there_keeps_its_own_numbers(tmp_path):
    model, optimizer = trained(0)
    folder = Checkpoints(tmp_path, 1).save(3, partial(write_files, model, optimizer, [random_states(CPU)], POSITION))
    seed_generators(5)
    restore_(*trained(1), folder, rank=0)
    seed_generators(5)
    expected = torch.rand(2)
    seed_generators(5)
    restore_(model, optimizer, folder, rank=1)
    assert torch.equal(torch.rand(2), expected)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model, optimizer = trained(0)
    folder = Checkpoints(tmp_path, 1).save(3, partial(write_files, model, optimizer, [random_states(CPU)], POSITION))
    with pytest.raises(ValueError, match=r"embedding.weight is \(30, 20\), the model's \(30, 24\)"):
        restore_(Tied(24), optimizer, folder, 0)
    with pytest.raises(ValueError, match="is of another model: it lacks"):
        restore_(nn.Linear(3, 3), optimizer, folder, 0)


@pytest.mark.parametrize(("room", "file"), [(2_000, "model.safetensors"), (6_000, "optimizer.pt")])
def test_a_full_disk_is_an_os_error_whichever_library_meets_it(tmp_path, room, file):
    model, optimizer = trained(0)
    files = partial(write_files, model, optimizer, [random_states(CPU)], POSITION)
    checkpoints = Checkpoints(tmp_path, 1)
    sizes = {path.name: path.stat().st_size for path in checkpoints.save(1, files).iterdir()}
    assert sizes[file] > room  # and the files before it are smaller
    with resized(room), pytest.raises(OSError, match="File too large"):
        checkpoints.save(2, files)
    assert checkpoints.steps() == [1]


def test_an_error_that_is_not_the_disks_is_raised_as_it_is(tmp_path):
    def broken(path):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        Checkpoints(tmp_path, 1).save(1, broken)


def test_seeds_decide_every_generator():
    def draws():
        return torch.rand(1).item(), random.random(), np.random.randn()  # of which numpy makes two at a time

    seed_generators(3)
    first = draws()
    states = random_states(CPU)
    second = draws()
    seed_generators(3)
    assert draws() == first
    set_random_states(states)
    assert draws() == second


@pytest.mark.parametrize(
    "written",
    [
        "{", "7", "[" * 10**6, "{}", "\ud800", '{"step": 4}',
        '{"step": "4", "micro_batch": 2, "world": 1, "window": []}',
        '{"step": 4, "micro_batch": 0, "world": 1, "window": []}',
        '{"step": 4, "micro_batch": 2, "world": 1, "window": ["2.0"]}',
        '{"step": 4, "micro_batch": 2, "world": 1, "window": [Infinity]}',
        '{"step": 4, "micro_batch": 2, "world": 1, "window": [], "more": 1}',
    ],
    ids=range(11),
)  # fmt: skip
def test_a_position_that_cannot_be_is_named(tmp_path, written):
    (tmp_path / "position.json").write_text(written, errors="surrogatepass")
    with pytest.raises(ValueError, match=rf"{tmp_path}/position\.json is not what a run saves .*remove"):
        saved_position(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "random.pt"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"PK\x03\x04 no archive"], ids=["empty", "ones", "archive"])
def test_a_file_that_holds_no_tensors_is_named(tmp_path, file, content):
    model = Tied()
    optimizer = APOLLO(model.parameters(), rank=4)
    position = Position(step=1, micro_batch=1, world=1)
    write_files(model, optimizer, [random_states(CPU)], position, tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file} is not what a run saves"):
        restore_(model, optimizer, tmp_path, rank=0)


@pytest.mark.parametrize(
    "manifest",
    ["[]", "[" * 10**6, '{"files": 7}', '{"files": {"a": 7}}', '{"files": {"a": {}}}'],
    ids=["list", "deep", "number", "no facts", "no hash"],
)
def test_a_manifest_that_cannot_be_is_damage(tmp_path, manifest):
    checkpoints = saved(tmp_path, 1, 2)
    (checkpoints.path(2) / "manifest.json").write_text(manifest)
    warnings = []
    assert checkpoints.latest(warnings.append, ALONE) == 1
    assert "step-00000002 is damaged" in warnings[0]
    assert checkpoints.best() is None


def saved_run(folder, method="apollo", **model_options):
    """A checkpoint of a tiny LLaMA, and the model."""
    built = built_model(Model(model=TINY, dtype="bf16", **model_options), VOCABULARY, "cpu", 0)
    prepared = prepared_method(Method(method=needed(method)), built, 1)
    position = Position(step=1, micro_batch=1, world=1)
    files = partial(write_files, prepared.model, prepared.optimizer, [random_states(CPU)], position)
    return Checkpoints(folder, keep=1).save(1, files), prepared.model


def test_transformers_loads_a_checkpoint_as_it_is(tmp_path):
    checkpoint, model = saved_run(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert loaded.dtype == model.dtype
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize(("method", "int8"), [("lora", None), ("low-rank", None), ("apollo", "layers")])
def test_transformers_refuses_a_checkpoint_whose_weights_it_would_not_find(tmp_path, method, int8):
    checkpoint, _ = saved_run(tmp_path, method, int8=int8)
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
