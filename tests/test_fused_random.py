"""The random numbers of the kernels are the plain ones, bit for bit: bases, draws, and what a draw makes of a value."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from apollo_optim.core.random import ROUND_EXP_AVG, normal_table, normals, rounding_bits, rounding_key
from apollo_optim.fused.batches import tile_table
from apollo_optim.fused.launches import normals_kernel
from apollo_optim.fused.rounding import write_rounded_ as by_kernel_
from apollo_optim.kernels import columns as at
from apollo_optim.kernels import device as device_numbers
from apollo_optim.quant.rounding import rounded, write_rounded_
from twins import on_both

# The values include infinities, which reach numpy.
pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

SEED = 0x7654321089ABCDEF
SIZE = 4096
NORMALS_BLOCK = 32

device_key, device_bits = device_numbers.rounding_key, device_numbers.element_bits
device_rounded = device_numbers.rounded
STREAM = tl.constexpr(ROUND_EXP_AVG)


@triton.jit
def bits_kernel(seed, step, first, drawn, BLOCK: tl.constexpr):
    """drawn[i] <- the 16 random bits of element first + i"""
    i = tl.arange(0, BLOCK)
    key0, key1 = device_key(tl.load(seed), tl.load(step), STREAM)
    tl.store(drawn + i, device_bits(tl.load(first) + i, key0, key1).to(tl.int32))


def words(device: str, step: int) -> tuple[Tensor, Tensor]:
    """Seed and step as the kernels' tables hold them."""
    return torch.tensor([SEED], device=device), torch.tensor([step], dtype=torch.int32, device=device)


@on_both
@pytest.mark.parametrize("first", [0, 1000, 2**31 - 7, 2**43 + 5])
def test_an_element_draws_the_same_bits(first: int, device: str):
    """Also where its position, or the word it shares with another, passes 32 bits."""
    drawn = torch.empty(SIZE, dtype=torch.int32, device=device)
    bits_kernel[(1,)](*words(device, 7), torch.tensor([first], device=device), drawn, BLOCK=SIZE)
    expected = rounding_bits(rounding_key(SEED, 7, ROUND_EXP_AVG), first + torch.arange(SIZE))
    assert torch.equal(drawn.cpu().long(), expected)


def values_of_every_size(device: str) -> Tensor:
    """Numbers of every size, infinities and NaNs: all patterns of 32 bits are as likely."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (SIZE,), generator=generator).to(torch.int32).view(torch.float32)
    values[: SIZE // 2] = torch.randn(SIZE // 2, generator=generator) * 1e-3
    values[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    if device == "cpu":
        # The interpreter converts subnormal numbers to bfloat16 wrongly (seen in Triton 3.9).
        values[values.abs() < torch.finfo(torch.float32).tiny] = 0.0
    return values


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("first", [None, 1000, 2**43 + 5])
def test_a_value_is_rounded_the_same_way(first: int | None, dtype: torch.dtype, device: str):
    """Of a whole tensor, or of a part that says where in the whole its elements are; up to a part of a block."""
    values = values_of_every_size(device)[: SIZE - 5]
    position = None if first is None else 3 * torch.arange(SIZE - 5) + first
    expected, target = (torch.empty(SIZE, dtype=dtype, device=where).fill_(7) for where in ("cpu", device))
    for step in range(3, 7):  # their keys have either sign as int32
        key = rounding_key(SEED, step, ROUND_EXP_AVG)
        write_rounded_(expected[:-5], values, key, position)
        by_kernel_(target[:-5], values.to(device), key, None if position is None else position.to(device))
        torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def computed_kernel(target, value, draws, BLOCK: tl.constexpr):
    """target <- value, whose NaNs are those of arithmetic"""
    i = tl.arange(0, BLOCK)
    tl.store(target + i, device_rounded(tl.load(value + i), tl.load(draws + i), target.dtype.element_ty, True))


@on_both
def test_a_computed_value_is_rounded_the_same_way(device: str):
    values = values_of_every_size(device)
    values[values.isnan()] = values[4:1004] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    draws = torch.randint(0, 2**16, (SIZE,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    target = torch.empty(SIZE, dtype=torch.bfloat16, device=device)
    computed_kernel[(1,)](target, values.to(device), draws.to(device), BLOCK=SIZE)
    expected = rounded(values, draws, torch.bfloat16)
    torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@on_both
def test_what_does_not_lie_in_one_piece_is_rounded_the_same_way(device: str):
    """A weight with gaps, a value that is transposed, a key that is on the device, and nothing at all."""
    values, key = torch.randn(48, 32), rounding_key(SEED, 3, ROUND_EXP_AVG)
    expected = torch.empty(48, 32, dtype=torch.bfloat16)
    write_rounded_(expected, values, key)
    on_device = tuple(torch.tensor(word, device=device) for word in key)
    with_gaps = torch.empty(48, 64, dtype=torch.bfloat16, device=device)[:, :32]
    for target, used in ((with_gaps, key), (torch.empty_like(expected, device=device), on_device)):
        by_kernel_(target, values.to(device), used)
        assert torch.equal(target.cpu(), expected)
    whole = torch.empty_like(expected, device=device)
    by_kernel_(whole, values.T.contiguous().to(device).T, key)
    assert torch.equal(whole.cpu(), expected)
    by_kernel_(whole[:0], values[:0].to(device), key)


@on_both
@pytest.mark.parametrize(
    ("rank", "side", "first"), [(20, 37, 0), (1, 33, 0), (8, 40, 0), (20, 19, 18), (1, 33, 2**20)], ids=str
)
def test_a_basis_is_the_same(rank: int, side: int, first: int, device: str):
    """Of the second expert after five refreshes, and of the part of a side that begins at `first` of it.

    Rows beyond the rank, and what lies around the basis, are left alone.
    """
    expert, refresh, offset = 1, 5, 16
    row = {
        at.SEED: SEED, at.EXPERT: expert, at.SIDE: side, at.FIRST_SIDE: first,
        at.RANK: rank, at.HYPER: 0, at.BASIS: offset,
    }  # fmt: skip
    meta = torch.zeros(1, at.MATRIX_WIDTH.value, dtype=torch.int64)
    for column, value in row.items():
        meta[0, column.value] = value
    hyper = torch.zeros(1, at.HYPER_WIDTH.value)
    hyper.view(torch.int32)[0, at.REFRESH_BITS.value] = refresh
    tiles = tile_table([(0, -(-rank // 8) * -(-side // NORMALS_BLOCK))], torch.device(device))
    basis = torch.full((offset + rank * side + 64,), torch.nan, device=device)
    table = normal_table(torch.device(device)).float()
    normals_kernel[(len(tiles),)](tiles, meta.to(device), hyper.to(device), table, basis, BLOCK=NORMALS_BLOCK)
    made = basis[offset : offset + rank * side].view(rank, side)
    expected = normals(SEED, refresh, expert, (0, rank), (first, first + side), torch.device("cpu")).float()
    assert torch.equal(made.cpu(), expected)
    assert bool(basis[:offset].isnan().all())
    assert bool(basis[offset + rank * side :].isnan().all())
