"""Optimizer state that is kept on the host and visits the device while its weights are stepped.

Weights are stepped in blocks. The state of a block is copied to one of two buffers on the device while the block before
it is stepped from the other, and back to the host while the next one is. All copies go over one stream beside the
step's, in the order in which they are asked for: a buffer is filled only after it was emptied.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .stepping.weight import StateView

VISITING = frozenset({"cuda"})
"""Kinds of devices whose weights may have their state elsewhere."""

BLOCK_BYTES = 2**28
"""State that visits the device at a time, unless that of one weight is more: two such buffers are held there."""

ALIGNMENT = 256

STAYS = frozenset({"step", "seed"})
"""State that the host reads, and that therefore does not visit."""


def visits(weight: Tensor, group: Mapping[str, Any]) -> bool:
    """True if the state of a weight is kept away from it."""
    return group["state_device"] == "cpu" and weight.device.type in VISITING


def kept_on_host(tensor: Tensor, weight: Tensor) -> Tensor:
    """A state tensor in memory that a GPU copies to and from by itself."""
    return tensor.pin_memory() if weight.is_cuda and not tensor.is_pinned() else tensor


def visiting_bytes(entries: Mapping[str, Any]) -> int:
    """Bytes of a buffer that the state of a weight takes while it visits, by its `state_entries`."""
    return sum(_aligned(entry.bytes) for name, entry in entries.items() if entry.on_host and name not in STAYS)


def blocks_of(sizes: Sequence[int]) -> list[list[int]]:
    """The numbers of weights with so many visiting bytes, in blocks of neighbours that fit into a buffer together."""
    blocks: list[list[int]] = []
    held = 0
    for number, size in enumerate(sizes):
        # A weight without such bytes is in any block: it parts no others, which may be counted without it.
        if not blocks or (held > 0 and size > 0 and held + size > BLOCK_BYTES):
            blocks.append([])
            held = 0
        blocks[-1].append(number)
        held += size
    return blocks


def buffer_sizes(sizes: Sequence[int]) -> list[int]:
    """Bytes of the two buffers, which blocks of weights with so many visiting bytes take in turns."""
    blocks = [sum(sizes[number] for number in block) for block in blocks_of(sizes)]
    return [max(blocks[turn::2], default=0) for turn in range(2)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Visits:
    """The weights of a device whose state visits it: their blocks, two buffers, and the stream that fills these."""

    def __init__(self, device: torch.device, weights: Sequence[Tensor], sizes: Sequence[int]):
        """`sizes` are the visiting bytes of each weight."""
        blocks = blocks_of(sizes)
        self.blocks = [[weights[number] for number in block] for block in blocks]
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in buffer_sizes(sizes)]
        if self.stream is not None:
            # What the step's stream still reads may lie where the allocator has put the buffers.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._room: dict[Tensor, Tensor] = {}
        """The bytes of a buffer that each weight's state is copied to."""
        for number, block in enumerate(blocks):
            lengths = [sizes[each] for each in block]
            room = self.buffers[number % 2][: sum(lengths)].split(lengths)
            self._room.update(zip(self.blocks[number], room, strict=True))

    def placed(self, weight: Tensor, state: MutableMapping[str, Tensor], names: Set[str]) -> StateView:
        """A weight's state with copies on the device of these `names`: users may keep other things in it."""
        kept = {name: tensor for name, tensor in state.items() if name in names and name not in STAYS}
        room = self._room[weight].split([_aligned(tensor.nbytes) for tensor in kept.values()])
        pairs = zip(kept.items(), room, strict=True)
        return StateView(state, {name: own[: of.nbytes].view(of.dtype).view(of.shape) for (name, of), own in pairs})

    def step_(self, plan_for: Callable[[list[Tensor]], Any]) -> None:
        """Step all blocks, each with its state on the device, by plans which are all made before any is run."""
        plans = [plan_for(block) for block in self.blocks]
        visitors = [[step.state for step in plan.steps] for plan in plans]
        arrived = self._bring_(visitors[0])
        for number, plan in enumerate(plans):
            arriving = self._bring_(visitors[number + 1]) if number + 1 < len(plans) else None
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            plan.run()
            self._take_back_(visitors[number])
            arrived = arriving

    def _bring_(self, states: Sequence[Any]) -> torch.Event | None:
        """Copy state to the device, beside whatever that does; an event after the copies."""
        with self._beside():
            for state in states:
                for name, copy in state.copies.items():
                    copy.copy_(state.state[name], non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def _take_back_(self, states: Sequence[Any]) -> None:
        """Copy state to the host once it is stepped."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._beside():
            for state in states:
                for name, copy in state.copies.items():
                    state.state[name].copy_(copy, non_blocking=True)

    def wait(self) -> None:
        """Wait until the host has all of its state."""
        if self.stream is not None:
            self.stream.synchronize()

    def _beside(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
