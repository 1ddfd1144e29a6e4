"""Optimizer state that is kept on the host and visits the device while its weights are stepped.

Weights are stepped in blocks. The state of a block is copied to one of two buffers on the device while the block before
it is stepped from the other, and back to the host while the next one is. All copies go over one stream beside the
step's, in the order in which they are asked for: a buffer is filled only after it was emptied.
"""

from collections.abc import Mapping, MutableMapping, Sequence, Set
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
    """Whether the state of a weight is kept away from it."""
    return group["state_device"] == "cpu" and weight.device.type in VISITING


def kept_on_host(tensor: Tensor, weight: Tensor) -> Tensor:
    """A state tensor in memory that a GPU copies to and from by itself."""
    return tensor.pin_memory() if weight.is_cuda and not tensor.is_pinned() else tensor


class VisitingState(StateView):
    """A weight's state in a buffer on the device."""

    def __init__(self, state: MutableMapping[str, Tensor], names: Set[str], buffer: Tensor, offset: int):
        """Of these `names`: users may keep other things in the state, which there is no room for."""
        super().__init__(state)
        self.places: dict[str, Tensor] = {}
        for name in [name for name in state if name in names and name not in STAYS]:
            kept = state[name]
            self.places[name] = buffer[offset : offset + kept.nbytes].view(kept.dtype).view(kept.shape)
            offset += _aligned(kept.nbytes)

    def __getitem__(self, name: str) -> Tensor:
        return self.places.get(name, self.state[name])


def visiting_bytes(entries: Mapping[str, Any]) -> int:
    """Bytes of a buffer that the state of a weight takes while it visits, by its `state_entries`."""
    return sum(_aligned(entry.bytes) for name, entry in entries.items() if entry.on_host and name not in STAYS)


def blocks_of(sizes: Sequence[int]) -> list[list[int]]:
    """The numbers of weights with so many visiting bytes, in blocks of neighbours that fit into a buffer together."""
    blocks: list[list[int]] = []
    held = 0
    for number, size in enumerate(sizes):
        if not blocks or held + size > BLOCK_BYTES:
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
    """The two buffers of a device, and the stream that fills and empties them."""

    def __init__(self, device: torch.device, sizes: Sequence[int]):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        if self.stream is not None:
            # What the step's stream still reads may lie where the allocator has put the buffers.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.block, self.offset = 0, 0

    def begin(self, block: int) -> None:
        """Have `placed` fill the buffer of the block of this number from its beginning."""
        self.block, self.offset = block, 0

    def placed(self, state: MutableMapping[str, Tensor], names: Set[str]) -> VisitingState:
        """A weight's state with a place in the buffer for these `names`, behind that of the weight before."""
        visitor = VisitingState(state, names, self.buffers[self.block % 2], self.offset)
        self.offset += sum(_aligned(place.nbytes) for place in visitor.places.values())
        return visitor

    def bring_(self, states: Sequence[Any]) -> None:
        """Copy state to the device, beside whatever that does."""
        with self._beside():
            for state in states:
                for name, place in state.places.items():
                    place.copy_(state.state[name], non_blocking=True)

    def arrival(self) -> Any:
        """Marks the copies asked for so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait_for(self, arrival: Any) -> None:
        """Have the step that comes next wait for copies."""
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)

    def take_back_(self, states: Sequence[Any]) -> None:
        """Copy state to the host once it is stepped."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._beside():
            for state in states:
                for name, place in state.places.items():
                    state.state[name].copy_(place, non_blocking=True)

    def wait(self) -> None:
        """Wait until the host has all of its state."""
        if self.stream is not None:
            self.stream.synchronize()

    def run(self, plans: Sequence[Any]) -> None:
        """Take the steps of blocks, each with its state on the device."""
        visitors = [[step.state for step in plan.steps] for plan in plans]
        self.bring_(visitors[0])
        arrival = self.arrival()
        for number, plan in enumerate(plans):
            arrived = arrival
            if number + 1 < len(plans):
                self.bring_(visitors[number + 1])
                arrival = self.arrival()
            self.wait_for(arrived)
            plan.run()
            self.take_back_(visitors[number])

    def _beside(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
