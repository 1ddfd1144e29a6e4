"""Symmetric products by a kernel that computes one half of them."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import orthogonal
from ..core.orthogonal import Polynomial
from ..kernels.product import symmetric_kernel
from .streams import CompiledLaunch

BAND = 8
"""Rows of tiles that are worked on together, so that the L2 cache has what they share."""


class ProductTile(NamedTuple):
    """Rows, columns and contracted elements of a tile, and how it is compiled."""

    rows: int
    columns: int
    contracted: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


COMPILED = ProductTile(128, 128, 64, 4, 3)
"""For any card: 64 KiB of its shared memory, or 96 on Hopper, and nearly all registers of a thread."""
INTERPRETED = ProductTile(32, 64, 32, 4, 1)


def product_tile(device: torch.device) -> ProductTile:
    return COMPILED if device.type == "cuda" else INTERPRETED


def symmetric_product(x_NSK: Tensor, y_NSK: Tensor, polynomial: Polynomial | None = None) -> Tensor:
    """As `core.orthogonal.symmetric_product`, with half the work. Factors lie alike, each without gaps."""
    if x_NSK.dtype == torch.float64:  # which no tensor core of ours multiplies
        return orthogonal.symmetric_product(x_NSK, y_NSK, polynomial)
    count, side, contracted = x_NSK.shape
    result_NSS = torch.empty(count, side, side, dtype=x_NSK.dtype, device=x_NSK.device)
    transposed = not x_NSK.is_contiguous()
    assert polynomial is None or not transposed
    for factor in (x_NSK, y_NSK):
        assert (factor.mT if transposed else factor).is_contiguous()
    tile = product_tile(x_NSK.device)
    kernel, tiles = _launch(tile, x_NSK.shape, transposed, polynomial is not None, x_NSK.dtype, x_NSK.device)
    kernel(tiles, x_NSK, y_NSK, result_NSS, *(polynomial or (0.0, 0.0, 1.0)), side, contracted, len(tiles))
    return result_NSS


@cache
def _launch(
    tile: ProductTile, shape: torch.Size, transposed: bool, polynomial: bool, dtype: torch.dtype, device: torch.device
) -> tuple[CompiledLaunch, Tensor]:
    """The launch of products of this shape, and their tiles."""
    count, side, contracted = shape
    tiles = triangle(side, tile.rows, tile.columns, device)
    constants = {
        "POLYNOMIAL": polynomial, "TRANSPOSED": transposed,
        "EVEN": contracted % tile.contracted == 0, "ALIGNED": side % 16 == 0,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.contracted,
    }  # fmt: skip
    return CompiledLaunch(symmetric_kernel, count * len(tiles), constants, **tile.options), tiles


@cache
def triangle(side: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Two int32 for every tile: its row and its column, of those that begin on or below the diagonal.

    `rows` divides `columns`, so that these and the mirror images of those wholly below it are the whole square.
    """
    down, across = -(-side // rows), -(-side // columns)
    found: list[tuple[int, int]] = []
    for band in range(0, down, BAND):
        for column in range(across):
            within = range(band, min(band + BAND, down))
            found += [(row, column) for row in within if column * columns <= row * rows]
    return torch.tensor(found, dtype=torch.int32, device="cpu").to(device)
