"""Symmetric products by a kernel that computes one half of them."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..core import orthogonal
from ..core.orthogonal import Polynomial
from ..kernels.product import described_kernel, symmetric_kernel
from . import batches
from .streams import CompiledLaunch

BAND = 8
"""Rows of tiles that are worked on together, so that the L2 cache has what they share."""

LARGE_SIDE = 2048
"""Sides from which on there are enough of the largest tiles for every multiprocessor."""


class ProductTile(NamedTuple):
    """Rows, columns and contracted elements of a tile, and how it is compiled."""

    rows: int
    columns: int
    contracted: int
    warps: int
    stages: int
    way: str = "pointers"
    """How factors are read: by "pointers", by "descriptors", or by descriptors in a "persistent" kernel."""

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


INTERPRETED = ProductTile(32, 64, 32, 4, 1)
SMALL = ProductTile(128, 128, 32, 4, 3)
MEDIUM = ProductTile(128, 128, 64, 8, 3)
LARGE = ProductTile(128, 256, 64, 8, 3)


def product_tile(side: int, device: torch.device) -> ProductTile:
    """The tile of a product with this side; small ones fit the shared memory of any card.

    Large ones are for Hopper and later, whose tensor cores read shared memory: before, registers have no room for them.
    """
    if device.type != "cuda":
        return INTERPRETED
    room = batches.shared_memory(device)
    if room < 160 * 1024:
        return SMALL
    return LARGE if side >= LARGE_SIDE and room >= 200 * 1024 else MEDIUM


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
    tile = product_tile(side, x_NSK.device)
    kind = tile, x_NSK.shape, transposed, polynomial is not None, x_NSK.dtype, x_NSK.device
    if tile.way != "pointers":
        kernel, tiles = _described_launch(*kind)
        described = []
        for factor, height in ((x_NSK, tile.rows), (y_NSK, tile.columns)):
            block = [1, tile.contracted, height] if transposed else [1, height, tile.contracted]
            described.append(TensorDescriptor.from_tensor(factor.mT if transposed else factor, block))
        sizes = side, contracted, len(tiles), count * len(tiles)
        kernel(tiles, *described, x_NSK, result_NSS, *(polynomial or (0.0, 0.0, 1.0)), *sizes)
        return result_NSS
    kernel, tiles = _launch(*kind)
    kernel(tiles, x_NSK, y_NSK, result_NSS, *(polynomial or (0.0, 0.0, 1.0)), side, contracted, len(tiles))
    return result_NSS


@cache
def _described_launch(
    tile: ProductTile, shape: torch.Size, transposed: bool, polynomial: bool, dtype: torch.dtype, device: torch.device
) -> tuple[CompiledLaunch, Tensor]:
    count, side, _ = shape
    tiles = triangle(side, tile.rows, tile.columns, device)
    programs = batches._multiprocessors(device) if tile.way == "persistent" else 0
    constants = {
        "POLYNOMIAL": polynomial, "TRANSPOSED": transposed, "PROGRAMS": programs,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.contracted,
    }  # fmt: skip
    return CompiledLaunch(described_kernel, programs or count * len(tiles), constants, **tile.options), tiles


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
