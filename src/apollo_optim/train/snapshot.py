"""What a checkpoint holds: weights as safetensors, optimizer and random states as tensors, the position as JSON."""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
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
from .checkpoint import Writer

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
