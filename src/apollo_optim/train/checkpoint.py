"""Checkpoints: the folder they are in, what one contains, and how all ranks save and restore it.

A checkpoint is a folder `step-00001000`: weights as safetensors, optimizer and random states as tensors, the position
as JSON, and a manifest with the size and hash of each file. It is written under another name and renamed when it is
complete. With FSDP each rank writes its part by torch.distributed.checkpoint, in a thread, while training goes on; any
number of ranks can read it.
"""

import copy
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..distributed import fill_, is_sharded, local
from ..quant import int8_part
from ..state import part_of_weight, state_entries, zeros
from . import atomic
from .metrics import DivergedError
from .ranks import Ranks
from .troubles import troubles_named

if TYPE_CHECKING:
    from .distributed_checkpoint import ShardedSave

MODEL, OPTIMIZER, RANDOM, POSITION = "model.safetensors", "optimizer.pt", "random.pt", "position.json"
CONFIG = "config.json"
"""Lets `AutoModelForCausalLM` load the folder, if that finds all weights by their names."""
SHARDS, GROUPS = "shards", "groups.pt"
"""With FSDP, in place of model and optimizer: a folder of all tensors, and the optimizer's options."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """The state of a run beside its tensors."""

    step: int
    """Optimizer steps taken, which also says which rows were read."""
    micro_batch: int
    """Rows per forward pass; with another number, gradients are summed in another order."""
    world: int
    """Number of ranks."""
    window: tuple[float, ...] = ()
    """Losses of the steps since the last line of the log."""


class Checkpoints:
    """The checkpoints of a run, a folder each. Listed steps were saved in full; `latest` also reads the files back."""

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in ascending order."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return sorted(int(match[1]) for path in found if (match := re.fullmatch(r"step-(\d{8,})", path.name)))

    def unfinished(self, step: int) -> Path:
        """The folder of a step's checkpoint while it is being written."""
        return self.folder / f"{atomic.UNFINISHED}{step:08d}"

    def save(
        self,
        step: int,
        write: atomic.Writer,
        validation: float | None = None,
        written: Mapping[str, atomic.Fingerprint] | None = None,
    ) -> Path:
        """Save a checkpoint, whose folder `write` fills; returns that. On an OSError nothing is changed.

        `written` are files that the ranks have put into the unfinished folder already.
        """
        unfinished = self.unfinished(step)
        if written is None:
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            with atomic.os_errors(MODEL):  # only safetensors has errors of its own that do not name the file
                write(unfinished)
            atomic.write_manifest(unfinished, {"step": step, "validation": validation}, written)
            ours = atomic.file_names(unfinished)
            self._forget(self.path(step), ours)  # that of this step, if a resumed run found it damaged
            os.replace(unfinished, self.path(step))
            atomic.flush_folder(self.folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        steps = self.steps()
        for old in set(steps[: -self.keep]) - {self.best()}:
            self._forget(self.path(old), ours)
        return self.path(step)

    def latest(self, warn: Callable[[str], None], ranks: Ranks) -> int | None:
        """The last step whose files are undamaged; None if there is no checkpoint.

        Warns of damaged ones; ValueError if all are. Called by all ranks, each of which reads some of the files.
        """
        if ranks.first:
            self.clear_leftovers()
        steps = ranks.shared(self.steps() if ranks.first else [])
        for step in reversed(steps):
            found = ranks.gathered(atomic.damage_of(self.path(step), ranks.rank, ranks.world))
            damage = next((each for each in found if each is not None), None)
            if damage is None:
                return step
            if ranks.first:
                warn(f"{self.path(step)} is damaged ({damage}); falling back to the one before it")
        if steps:
            raise ValueError(f"every checkpoint in {self.folder} is damaged; remove the folder to begin anew")
        return None

    def best(self) -> int | None:
        """The step with the lowest validation loss, of those that were evaluated when saved."""
        scores = {step: atomic.read_manifest(self.path(step)).get("validation") for step in self.steps()}
        known = {step: score for step, score in scores.items() if isinstance(score, (int, float))}
        return min(known, key=lambda step: known[step]) if known else None

    def clear_leftovers(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        for path in self.folder.glob(".*"):
            if path.name.startswith((atomic.UNFINISHED, atomic.UNWANTED)):
                shutil.rmtree(path, ignore_errors=True)

    def _forget(self, path: Path, ours: Collection[str]) -> None:
        """Remove a checkpoint atomically; one with files that are not `ours` is renamed and kept."""
        if not path.exists():
            return
        if atomic.file_names(path) - {*ours, *atomic.listed_files(path)}:
            os.replace(path, atomic.kept_name(path))
        else:
            atomic.remove_folder_(path)


class Checkpointer:
    """Saves and restores a model with its optimizer. All methods are called by all ranks together."""

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
        """True if the last checkpoint could not be written; set on the first rank."""
        self._is_sharded = any(is_sharded(weight) for weight in model.parameters())
        # A group of its own, so that what the writing thread sends does not mix with what training sends.
        self._group = ranks.new_host_group() if self._is_sharded else None
        self._writing: ShardedSave | None = None

    def last(self) -> Position | None:
        """The position of the last undamaged checkpoint; None if there is none."""
        step = self.checkpoints.latest(self.warn, self.ranks)
        return None if step is None else saved_position(self.checkpoints.path(step))

    def restore_(self, position: Position) -> None:
        """Restore model, optimizer and random states."""
        restore_(self.model, self.optimizer, self.checkpoints.path(position.step), self.ranks.rank)

    def save(self, position: Position, validation: float | None) -> None:
        """Save a checkpoint. If the disk is full, there is a warning and no checkpoint, and the run goes on.

        With FSDP the tensors are copied to the host when this returns, and on the disk after `wait`, which the next
        save calls first. DivergedError if weights are not finite; earlier checkpoints are then kept.
        """
        self.wait()
        self._check_weights(position.step)
        if self.ranks.first:
            shutil.rmtree(self.checkpoints.unfinished(position.step), ignore_errors=True)
        # Gathering also makes the other ranks wait until the leftovers are gone.
        randoms = self.ranks.gathered(random_states(self.ranks.device))
        if self._is_sharded:
            self._begin_sharded_save(randoms, position, validation)
        elif self.ranks.first:
            try:
                write = partial(write_files, self.model, self.optimizer, randoms, position)
                self.checkpoints.save(position.step, write, validation)
                self.failed = False
            except OSError as error:
                self._warn_not_written(position.step, error)

    def _begin_sharded_save(
        self, randoms: Sequence[Mapping[str, Any]], position: Position, validation: float | None
    ) -> None:
        from .distributed_checkpoint import ShardedSave  # imports for a second or two

        state = self.optimizer.state_dict()
        groups = copy.deepcopy(state["param_groups"])  # the next steps change these

        def write(unfinished: Path) -> None:
            _save(groups, unfinished / GROUPS)
            _write_position(randoms, position, unfinished)

        finish = partial(self.checkpoints.save, position.step, write, validation)
        folder = self.checkpoints.unfinished(position.step) / SHARDS
        tensors = _named_tensors(self.model, state["state"])
        self._writing = ShardedSave(position.step, tensors, folder, self._group, finish)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last save is on the disk or has failed."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        writing.join()
        if isinstance(writing.error, OSError):
            self._warn_not_written(writing.step, writing.error)
        elif writing.error is not None:
            raise writing.error
        else:
            self.failed = False

    def _warn_not_written(self, step: int, error: OSError) -> None:
        self.failed = True
        steps = self.checkpoints.steps()
        instead = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
        self.warn(f"the checkpoint of step {step} could not be written ({error}); {instead}")

    def _check_weights(self, step: int) -> None:
        """Raise DivergedError for weights that are not finite; the last loss was computed before they were written."""
        bad = next((name for name, weight in self.model.named_parameters() if not _is_finite(weight)), None)
        if self.ranks.any(bad is not None):
            raise DivergedError(step, f"step {step} left weights that are not finite ({bad or 'on another rank'})")


def _named_tensors(model: nn.Module, state: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every tensor of a model and of its optimizer's state, by names that are the same on all ranks."""
    weights = {f"model.{name}": tensor.detach() for name, tensor in _tensors(model)}
    return weights | {
        f"optimizer.{index}.{name}": tensor for index, entries in state.items() for name, tensor in entries.items()
    }


def write_files(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    randoms: Sequence[Mapping[str, Any]],
    position: Position,
    folder: Path,
) -> None:
    """Write the files of a checkpoint; `randoms` are the `random_states` of every rank."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(model)}
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    _save(optimizer.state_dict(), folder / OPTIMIZER)
    _write_position(randoms, position, folder)
    if _has_ordinary_layers(model):
        config: Any = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], next(model.parameters()).dtype
        (folder / CONFIG).write_text(config.to_json_string(), encoding="utf-8")


def _has_ordinary_layers(model: nn.Module) -> bool:
    """True for a model of transformers without int8 layers and adapters."""
    known = "torch", "transformers", "transformers_modules"
    is_plain = all(type(module).__module__.partition(".")[0] in known for module in model.modules())
    return is_plain and hasattr(model, "config") and all(int8_part(weight) is None for weight in model.parameters())


def _write_position(randoms: Sequence[Mapping[str, Any]], position: Position, folder: Path) -> None:
    _save(list(randoms), folder / RANDOM)
    (folder / POSITION).write_text(json.dumps(asdict(position)), encoding="utf-8")


def saved_position(folder: Path) -> Position:
    """The position of the run when the checkpoint in `folder` was saved."""
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
    """Restore model, optimizer and the random states of this process from a checkpoint."""
    if (folder / SHARDS).is_dir():
        _restore_shards_(model, optimizer, folder)
    else:
        _restore_weights_(model, folder)
        optimizer.load_state_dict(_loaded(folder / OPTIMIZER))
    randoms = _loaded(folder / RANDOM)
    with _named(folder / RANDOM):
        # A run is exact on as many ranks as before; additional ranks have no saved state.
        if rank < len(randoms):
            set_random_states(randoms[rank])


def _loaded(path: Path) -> Any:
    with _named(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def _restore_shards_(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Restore a model and its optimizer, sharded in any way or not at all; each rank reads what it holds."""
    from .distributed_checkpoint import load_shards_, saved_shapes

    groups = _loaded(folder / GROUPS)
    with _named(folder / SHARDS):
        saved = saved_shapes(folder / SHARDS)
    state = _new_state(optimizer, saved.keys())
    own = _named_tensors(model, state)
    _check_same(folder / SHARDS, {name: entry.size for name, entry in saved.items()}, own)
    with torch.no_grad(), _named(folder / SHARDS):
        load_shards_(own, folder / SHARDS)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _new_state(optimizer: torch.optim.Optimizer, names: Collection[str]) -> dict[int, dict[str, Tensor]]:
    """Empty tensors for the saved state of every weight, on the devices and in the layout of the weights."""
    weights = [(weight, group) for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for index, (weight, group) in enumerate(weights):
        part = part_of_weight(f"weight {index}", weight, group)
        entries = state_entries(weight.shape, weight.dtype, group)
        kept = {name: entry for name, entry in entries.items() if f"optimizer.{index}.{name}" in names}
        state[index] = {name: zeros(name, entry, weight, part) for name, entry in kept.items()}
    return {index: entries for index, entries in state.items() if entries}


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, unsharded."""
    if (folder / SHARDS).is_dir():
        from .distributed_checkpoint import saved_tensors

        with _named(folder / SHARDS):
            tensors = saved_tensors(folder / SHARDS, "model.")
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    with _named(folder / MODEL):
        return load_file(folder / MODEL)


def _named(path: Path) -> AbstractContextManager[None]:
    advice = f": restore it, or remove {path.parent}, and --resume goes on from the checkpoint before"
    return troubles_named(str(path), "is not what a run saves", advice)


@torch.no_grad()
def _restore_weights_(model: nn.Module, folder: Path) -> None:
    saved = saved_weights(folder)
    own = dict(_tensors(model))
    _check_same(folder / MODEL, {name: tensor.shape for name, tensor in saved.items()}, own)
    for name, tensor in own.items():
        fill_(tensor, saved[name])


def _check_same(path: Path, saved: Mapping[str, Sequence[int]], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if names or shapes of saved tensors are not those of the model."""
    if saved.keys() != own.keys():
        lacks, beside = sorted(own.keys() - saved.keys())[:3], sorted(saved.keys() - own.keys())[:3]
        raise ValueError(f"{path} is of another model: it lacks {lacks} and has {beside} beside")
    for name, tensor in own.items():
        if tensor.shape != saved[name]:
            raise ValueError(f"{path}: {name} is {tuple(saved[name])}, the model's {tuple(tensor.shape)}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's state dict, with tied tensors only under their first name."""
    both = model.named_parameters, model.named_buffers
    names = {name for named in both for name, _ in named(remove_duplicate=False)}
    tied = names - {name for named in both for name, _ in named()}
    for name, tensor in model.state_dict().items():
        if not {name, name.rpartition(".")[0]} & tied:  # int8 weights are saved as WEIGHT.codes and WEIGHT.scale
            yield name, tensor


def seed_generators(seed: int) -> None:
    """Seed every generator that training may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of these generators, in types that `torch.load(weights_only=True)` accepts."""
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
    """Set the generators to the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _save(value: Any, path: Path) -> None:
    # Through a Python file, so that a full disk is an OSError.
    with path.open("wb") as file:
        torch.save(value, file)


def _is_finite(weight: Tensor) -> bool:
    narrow = int8_part(weight.detach())
    return bool((local(weight.detach()) if narrow is None else narrow.scale).isfinite().all())
