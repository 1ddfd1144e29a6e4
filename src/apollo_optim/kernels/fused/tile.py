"""The tile of a projection on the tensor cores, from a weight's shape and the card."""

import math
from typing import NamedTuple

import torch

from .matrix import Kind

REGISTERS = 65536
"""Of one multiprocessor."""

MOST_REGISTERS, UPDATE_REGISTERS = 216, 40
"""Of a thread: eight warps of the one leave room for two programs, of four warps, of the other."""

SMALL_SIDE = 1024
"""Contracted elements up to which small tiles are faster, on one H200."""


class Block(NamedTuple):
    """Rank, channels and contracted side of one projection tile, and how it is compiled."""

    rank: int
    channels: int
    side: int
    warps: int
    stages: int
    resident: int = 1
    """Programs that share a multiprocessor, so that one computes while another waits for memory."""

    @property
    def options(self) -> dict[str, int]:
        """How Triton compiles it: programs on one multiprocessor share its registers."""
        registers = min(MOST_REGISTERS, REGISTERS // (32 * self.warps * self.resident))
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": registers}


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have on this card, or none where there is no card."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute] (not in torch's stubs)


def gemm_block(rank: int, side: int, kind: Kind) -> Block:
    """The projection's tile: as tall as the rank allows, within the registers and shared memory of the card.

    It follows from the whole weight's own shape, so that no result depends on the company or the part that it is in.
    """
    tall = min(128, max(16, 2 ** math.ceil(math.log2(rank))))
    if kind.grad == torch.float32:
        # Moments in 8 bits need whole blocks of channels.
        return Block(min(tall, 32), 128, 32, 4, 2) if kind.moments == torch.int8 else Block(min(tall, 64), 64, 32, 4, 2)
    shared = shared_memory(kind.device)
    if side <= SMALL_SIDE and shared > 200 * 1024 and kind.moments != torch.int8:
        # The product of a tile is soon done and its moments are not, so that many programs must have something to do.
        return Block(min(tall, 64), 64, 64, 4, 3, resident=4)
    if rank >= 256 and shared > 200 * 1024:
        # A larger tile reads the gradient from the L2 cache less often, which is what bounds the smaller ones.
        return Block(256, 128, 64, 8, 4)
    warps = 8 if tall == 128 else 4
    if shared > 200 * 1024:
        return Block(tall, 128, 64, warps, 3, resident=2)
    return Block(tall, 128, 64, warps, 4 if shared > 128 * 1024 else 2)
