"""Checkpoints: which are there and whole, what is in one, and how all ranks save and restore together.

A checkpoint is a folder `step-00001000`: weights as safetensors, optimizer and random states as tensors, the position
as JSON, and a manifest with the size and hash of each file. It is written under another name, and renamed when it is
whole.
"""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..distributed import fill_, is_sharded, local, whole
from ..quant import Int8Weight
from . import atomic
from .atomic import Writer
from .metrics import DivergedError
from .ranks import Ranks

MODEL, OPTIMIZER, RANDOM, POSITION = "model.safetensors", "optimizer.pt", "random.pt", "position.json"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands, beside its tensors."""

    step: int
    """Optimizer steps taken; the rows they read come before every row still to be read."""
    micro_batch: int
    """Rows of a forward pass: another number would add up gradients in another order."""
    world: int
    """Ranks that shared a batch."""
    window: tuple[float, ...] = ()
    """The losses of the steps since the last line of the log."""


class Checkpoints:
    """The checkpoints of a run, a folder each. A step that is listed was saved in full; `latest` also reads it back."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return sorted(int(match[1]) for path in found if (match := re.fullmatch(r"step-(\d{8,})", path.name)))

    def save(self, step: int, writers: Mapping[str, Writer], validation: float | None = None) -> Path:
        """The new checkpoint's folder. OSError, with nothing changed, where it cannot be written."""
        unfinished = self.folder / f"{atomic.UNFINISHED}{step:08d}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            for name, write in writers.items():
                atomic.write_file(unfinished / name, write)
            atomic.write_manifest(unfinished, {"step": step, "validation": validation})
            self._forget(self.path(step), writers.keys())  # one that a resumed run found damaged
            os.replace(unfinished, self.path(step))
            atomic.flush_folder(self.folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._prune(writers.keys())
        return self.path(step)

    def latest(self, warn: Callable[[str], None]) -> int | None:
        """The last step that reads back as it was written; None without any.

        Damaged ones are passed over, with a warning. ValueError where all of them are damaged.
        """
        self.clear_leftovers()
        steps = self.steps()
        for step in reversed(steps):
            damage = atomic.damage_of(self.path(step))
            if damage is None:
                return step
            warn(f"{self.path(step)} is damaged ({damage}); falling back to the one before it")
        if steps:
            raise ValueError(f"every checkpoint in {self.folder} is damaged; remove the folder to begin anew")
        return None

    def best(self) -> int | None:
        """The step with the lowest validation loss of those that were evaluated when they were saved."""
        scores = {step: atomic.read_manifest(self.path(step)).get("validation") for step in self.steps()}
        known = {step: score for step, score in scores.items() if isinstance(score, (int, float))}
        return min(known, key=lambda step: known[step]) if known else None

    def clear_leftovers(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        for path in self.folder.glob(".*"):
            if path.name.startswith((atomic.UNFINISHED, atomic.UNWANTED)):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, ours: Collection[str]) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best()}:
            self._forget(self.path(step), ours)

    def _forget(self, path: Path, ours: Collection[str]) -> None:
        """Remove a checkpoint so that at no moment half of it carries its name; one with other files than `ours` is
        kept, under another name.
        """
        if not path.exists():
            return
        if atomic.file_names(path) - {*ours, *atomic.listed_files(path), atomic.MANIFEST}:
            os.replace(path, atomic.kept_name(path))
        else:
            atomic.remove_folder_(path)


class Checkpointer:
    """Saves a model with its optimizer, and brings them back."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        warn: Callable[[str], None],
    ):
        self.checkpoints, self.model, self.optimizer, self.ranks, self.warn = checkpoints, model, optimizer, ranks, warn
        self.failed = False
        """Whether the last checkpoint could not be written; the first rank knows."""

    def last(self) -> Position | None:
        """Where the last whole checkpoint stands; None where there is none."""
        step = self.ranks.shared(self.checkpoints.latest(self.warn) if self.ranks.first else None)
        return None if step is None else saved_position(self.checkpoints.path(step))

    def restore_(self, position: Position) -> None:
        """Bring model, optimizer and random states back to where they were at a position."""
        restore_(self.model, self.optimizer, self.checkpoints.path(position.step), self.ranks.rank)

    def save(self, position: Position, validation: float | None) -> None:
        """Save all of it. A disk that is full costs this checkpoint and a warning, not the run.

        DivergedError, and no earlier checkpoint is given up, where the weights are not finite.
        """
        self._check_weights(position.step)
        randoms = self.ranks.gathered(random_states(self.ranks.device))
        files = writers(self.model, self.optimizer, randoms, position, self.ranks.first)
        if not self.ranks.first:
            return
        try:
            self.checkpoints.save(position.step, files, validation)
            self.failed = False
        except OSError as error:
            self.failed = True
            steps = self.checkpoints.steps()
            instead = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
            self.warn(f"the checkpoint of step {position.step} could not be written ({error}); {instead}")

    def _check_weights(self, step: int) -> None:
        """The loss of the last step was of the weights before it."""
        bad = next((name for name, weight in self.model.named_parameters() if not _is_finite(weight)), None)
        if self.ranks.any(bad is not None):
            raise DivergedError(step, f"step {step} left weights that are not finite ({bad or 'on another rank'})")


def writers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    randoms: Sequence[Mapping[str, Any]],
    position: Position,
    writes: bool = True,
) -> dict[str, Writer]:
    """A writer for each file of a checkpoint; `randoms` are the `random_states` of every rank.

    Called by all ranks, because what is split among them is brought together here, on the host of the rank that
    `writes`; the others keep nothing of it.
    """
    tensors = {name: _gathered(tensor.detach(), writes).contiguous() for name, tensor in _tensors(model)}
    state = tree_map_only(Tensor, partial(_gathered, kept=writes), optimizer.state_dict())
    return {
        MODEL: lambda path: save_file(tensors, path),
        OPTIMIZER: lambda path: _save(state, path),
        RANDOM: lambda path: _save(list(randoms), path),
        POSITION: lambda path: _save_json(asdict(position), path),
    }


def saved_position(folder: Path) -> Position:
    """Where the run stood when the checkpoint in `folder` was saved."""
    with _named(folder / POSITION):
        saved: dict[str, Any] = json.loads((folder / POSITION).read_text(encoding="utf-8"))
        saved["window"] = tuple(saved["window"])
        position = Position(**saved)
        counts = position.step, position.micro_batch, position.world
        finite = all(map(math.isfinite, position.window))
        if not finite or not all(type(count) is int and count >= 1 for count in counts):
            raise ValueError(f"it holds {saved}")
    return position


def restore_(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Bring model, optimizer and the random states of this process back to what a checkpoint holds."""
    load_weights_(model, folder)
    with _named(folder / OPTIMIZER):
        state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state)
    with _named(folder / RANDOM):
        randoms = torch.load(folder / RANDOM, map_location="cpu", weights_only=True)
        # With more ranks than were saved there is no state to continue: a run is exact on as many ranks as before.
        if rank < len(randoms):
            set_random_states(randoms[rank])


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    with _named(folder / MODEL):
        return load_file(folder / MODEL)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns what libraries raise over a file of a checkpoint, of any kind, into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise ValueError(
            f"{path} is not what a run saves ({type(error).__name__}: {said}): bring it back, or remove {path.parent}, "
            "and --resume goes on from the checkpoint before"
        ) from error


@torch.no_grad()
def load_weights_(model: nn.Module, folder: Path) -> None:
    """Fill a model with the weights of a checkpoint."""
    saved = saved_weights(folder)
    own = dict(_tensors(model))
    if saved.keys() != own.keys():
        raise ValueError(
            f"{folder / MODEL} is of another model: it lacks {sorted(own.keys() - saved.keys())[:3]} and has "
            f"{sorted(saved.keys() - own.keys())[:3]} beside"
        )
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{folder / MODEL}: {name} is {tuple(saved[name].shape)}, the model's {tuple(tensor.shape)}"
            )
        fill_(tensor, saved[name])


def _gathered(tensor: Tensor, kept: bool) -> Tensor:
    """The whole of a tensor: itself, or on the host where ranks hold parts of it; nothing where it is not `kept`."""
    if not is_sharded(tensor):
        return tensor
    together = whole(tensor)
    return together.cpu() if kept else torch.empty(0)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a state dict of the model holds; tied ones once, under their first name."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in model.state_dict().items():
        place = local(tensor).data_ptr(), tensor.shape, tensor.dtype
        if local(tensor).numel() == 0 or place not in seen:
            seen.add(place)
            yield name, tensor


def seed_generators(seed: int) -> None:
    """Begin every generator that training may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of every generator that training may draw from, as `torch.load(weights_only=True)` takes them."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue every generator from where `random_states` found it."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _save(value: Any, path: Path) -> None:
    # Through a file of Python's, so that a full disk is an OSError.
    with path.open("wb") as file:
        torch.save(value, file)


def _save_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _is_finite(weight: Tensor) -> bool:
    held = weight.scale if isinstance(weight, Int8Weight) else local(weight.detach())
    return bool(held.isfinite().all())
