"""Symmetric products by a kernel that computes one half of them, and inverse factors of small Gram matrices."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..core import orthogonal, projection
from ..core.orthogonal import Polynomial
from ..kernels.product import symmetric_kernel
from ..kernels.triangular import inverse_factor_kernel
from .streams import CompiledLaunch

BAND = 8
"""Rows of tiles that are worked on together, so that the L2 cache has what they share."""


class ProductTile(NamedTuple):
    """Rows and columns of a square tile, the elements that it contracts at a time, and how it is compiled."""

    side: int
    contracted: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


COMPILED = ProductTile(128, 64, 4, 3)
"""For any card: 64 KiB of its shared memory, or 96 on Hopper, and nearly all registers of a thread."""
INTERPRETED = ProductTile(32, 32, 4, 1)


def product_tile(device: torch.device) -> ProductTile:
    return COMPILED if device.type == "cuda" else INTERPRETED


def reads_by_descriptors(device: torch.device) -> bool:
    """True if a card copies whole tiles by itself: Hopper and later. For others that compiles to code that spills."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def symmetric_product(x_NSK: Tensor, y_NSK: Tensor, polynomial: Polynomial | None = None) -> Tensor:
    """As `core.orthogonal.symmetric_product`, with half the work. Factors lie alike, each without gaps."""
    if x_NSK.dtype == torch.float64:  # which no tensor core of ours multiplies
        return orthogonal.symmetric_product(x_NSK, y_NSK, polynomial)
    transposed = not x_NSK.is_contiguous()
    assert polynomial is None or not transposed
    factors = (x_NSK.mT, y_NSK.mT) if transposed else (x_NSK, y_NSK)
    assert all(factor.is_contiguous() for factor in factors)
    count, side, contracted = x_NSK.shape
    result_NSS = torch.empty(count, side, side, dtype=x_NSK.dtype, device=x_NSK.device)
    tile = product_tile(x_NSK.device)
    # A descriptor's rows begin at multiples of 16 bytes.
    described = reads_by_descriptors(x_NSK.device) and factors[0].shape[-1] * x_NSK.itemsize % 16 == 0
    kernel, tiles = _launch(tile, x_NSK.shape, transposed, polynomial is not None, described, x_NSK.dtype, x_NSK.device)
    if described:
        strip = [1, tile.contracted, tile.side] if transposed else [1, tile.side, tile.contracted]
        factors = tuple(TensorDescriptor.from_tensor(factor, strip) for factor in factors)
    kernel(tiles, *factors, x_NSK, result_NSS, *(polynomial or (0.0, 0.0, 1.0)), side, contracted, len(tiles))
    return result_NSS


@cache
def _launch(
    tile: ProductTile, shape: torch.Size, transposed: bool, polynomial: bool, described: bool,
    dtype: torch.dtype, device: torch.device,
) -> tuple[CompiledLaunch, Tensor]:  # fmt: skip
    """The launch of products of this shape, and their tiles."""
    count, side, contracted = shape
    tiles = triangle(side, tile.side, device)
    constants = {
        "POLYNOMIAL": polynomial, "TRANSPOSED": transposed, "DESCRIBED": described,
        "EVEN": contracted % tile.contracted == 0, "ALIGNED": side % 16 == 0,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "BLOCK": tile.side, "BLOCK_K": tile.contracted,
    }  # fmt: skip
    return CompiledLaunch(symmetric_kernel, count * len(tiles), constants, **tile.options), tiles


@cache
def triangle(side: int, tile: int, device: torch.device) -> Tensor:
    """Two int32 for every tile on or below the diagonal: its row and its column."""
    down = -(-side // tile)
    found: list[tuple[int, int]] = []
    for band in range(0, down, BAND):
        within = range(band, min(band + BAND, down))
        found += [(row, column) for column in range(down) for row in within if column <= row]
    return torch.tensor(found, dtype=torch.int32, device="cpu").to(device)


MOST_ROWS = 128
"""Rows of a matrix that a program can keep in registers."""


def inverse_factor(gram_NRR: Tensor, least: float) -> Tensor:
    """As `core.projection.inverse_factor`, in one launch."""
    rank = gram_NRR.shape[-1]
    if rank > MOST_ROWS:
        return projection.inverse_factor(gram_NRR, least)
    inverse_NRR = torch.empty_like(gram_NRR, memory_format=torch.contiguous_format)
    launch = _inverse_launch(gram_NRR.numel() // rank**2, rank, gram_NRR.device)
    launch(gram_NRR.contiguous(), inverse_NRR, least, rank)
    return inverse_NRR


@cache
def _inverse_launch(count: int, rank: int, device: torch.device) -> CompiledLaunch:
    """The launch of so many inverses. What is compiled is loaded on one device, so that each has its own."""
    block = max(16, 1 << (rank - 1).bit_length())
    return CompiledLaunch(inverse_factor_kernel, count, {"BLOCK": block}, num_warps=max(4, block // 8))
