"""The launches of weights that are spread over ranks, where those of whole weights do not serve."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import layout as at
from .launch import Bound, Launch, Launches, Scratch
from .plan import COMBINE_BLOCK, Batch
from .share import kept_kernel, moments_kernel, scaled_kernel, share_kernel

MOMENTS_BLOCK = 64
"""Channels per program that steps moments."""


class SharedScratch(Scratch):
    """The same for a batch that is spread over ranks."""

    def __init__(self, batch: Batch):
        super().__init__(batch)
        device = batch.kind.device
        # Where ranks keep some channels each, rows for blocks of those follow; and last a row that stays zero.
        rows = batch.blocks_size * (2 if batch.exchanges_lows else 1) + 1
        self.blocks = torch.zeros(rows, at.BLOCK_WIDTH.value, dtype=torch.float32, device=device)
        self.kept_gains = torch.zeros(batch.kept_gains_size, dtype=torch.float32, device=device)
        self.low_sums: Tensor | None = None
        """Low-rank gradients of the channels that this rank keeps, once ranks have added them up."""
        self.all_gains: Tensor | None = None
        """What all ranks have kept, once they have exchanged it."""

    def end_sums_(self) -> None:
        """Give back what only sums over channels are made of."""
        self.end_projection_()
        self.parts = self.low_sums = self.all_gains = None


SharedLaunch = Callable[[Tensor, SharedScratch], None]


class SharedLaunches(Launches):
    """Makes the launches of one batch of which each rank has a part, in the order of what waits for other ranks."""

    def projections(self) -> list[Launch]:
        """What reads the gradients; where ranks have shares in low-rank gradients, those shares are left."""
        launches = super().projections()
        if self.batch.exchanges_lows and self.batch.kind.mode == "rank1":
            launches.append(self._share())
        return launches

    def sums(self) -> list[SharedLaunch]:
        """What sums up over channels, once their gains are known where other ranks keep some of them."""
        if self.batch.kind.mode == "adamw":
            return []
        return [self._scaled()] if self.batch.exchanges_lows else [self._combine()]

    def updates(self) -> list[Launch]:
        """What steps the weights once ranks have added up those sums."""
        return super().updates() if self.batch.kind.mode == "adamw" else [self._decide(), *self._applies()]

    def moments(self) -> list[SharedLaunch]:
        """What waits for the sum of low-rank gradients, where ranks have shares in them."""
        return [self._moments(), self._kept()] if self.batch.exchanges_lows else []

    @property
    def _rows(self) -> int:
        """Of a block whose moments one program steps; not more blocks than a projection has."""
        return self.batch.block.rank if self.batch.kind.mode == "gemm" else 1

    def _share(self) -> Launch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = Bound(share_kernel, len(tiles), {"BLOCK": COMBINE_BLOCK})
        metas, planes, length = self.batch.metas, self.batch.parts_size, self.batch.shares_length
        return lambda hypers, scratch: kernel(tiles, metas, hypers, scratch.parts, planes, scratch.shares, length)

    def _moments(self) -> SharedLaunch:
        rows = self._rows
        tiles = self._tiles(
            self._everything(), lambda matrix: -(-matrix.kept // MOMENTS_BLOCK) * -(-matrix.rank // rows)
        )
        constants = {"M": self.types["M"], "BLOCK_R": rows, "BLOCK_C": MOMENTS_BLOCK}
        kernel = Bound(moments_kernel, len(tiles), constants)
        metas, planes = self.batch.metas, self.batch.parts_size
        return lambda hypers, scratch: kernel(tiles, metas, hypers, scratch.low_sums, scratch.parts, planes)

    def _kept(self) -> SharedLaunch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.kept // COMBINE_BLOCK))
        kernel = Bound(kept_kernel, len(tiles), {"BLOCK_R": self._rows, "BLOCK": COMBINE_BLOCK})
        metas, planes, first = self.batch.metas, self.batch.parts_size, self.batch.blocks_size
        return lambda hypers, scratch: kernel(
            tiles, metas, scratch.parts, planes, scratch.kept_gains, scratch.blocks[first:]
        )

    def _scaled(self) -> SharedLaunch:
        tiles = self._tiles(self._everything(), lambda matrix: -(-matrix.channels // COMBINE_BLOCK))
        kernel = Bound(scaled_kernel, len(tiles), {"CHANNEL": self.batch.kind.channel, "BLOCK": COMBINE_BLOCK})
        metas, planes, length = self.batch.metas, self.batch.parts_size, self.batch.kept_gains_size
        return lambda hypers, scratch: kernel(
            tiles, metas, scratch.parts, planes, scratch.all_gains, length, scratch.gains, scratch.blocks
        )
