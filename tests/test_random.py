"""The generator: Philox as published, normals as tabulated, and numbers that know nothing of each other.

Every draw is fixed by its seed, so a bound at n sigma is met forever once it is met; n says how unlikely a false alarm
was when the seed was chosen.
"""

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from apollo_optim.core.projection import gaussian_basis
from apollo_optim.core.random import BASIS, ROUND_EXP_AVG, ROUND_WEIGHT, key_words, normal_quantiles, normals, philox
from apollo_optim.core.shape import matrix_shape

CPU = torch.device("cpu")
SEED = 0x5EED_0123_4567_89AB
WORD = 0xFFFFFFFF

# A pair of long independent vectors correlates by 1 / sqrt(n) at one sigma. The largest of 1e5 pairs passes six sigma
# with probability 1e5 * 2e-9.
SIGMAS = 6


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 on Python's integers, from Salmon et al. (SC 2011), section 5.3."""
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(right >> 32) ^ counter[1] ^ key[0], right & WORD, (left >> 32) ^ counter[3] ^ key[1], left & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


def basis(rows: int, columns: int, seed: int = SEED, refresh: int = 0, expert: int = 0) -> Tensor:
    """Standard normals in float64, for statistics."""
    return normals(seed, refresh, expert, (0, rows), (0, columns), CPU).double()


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Of every row of one matrix with every row of the other, in sigmas of independent rows."""
    a, b = ((m - m.mean(dim=1, keepdim=True)) / m.std(dim=1, keepdim=True) for m in (a, b))
    return a @ b.T / math.sqrt(a.shape[1])


# Random123's kat_vectors.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]):
    assert list(philox(tuple(counter), tuple(key))) == expected
    tensors = philox(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert [int(word) for word in tensors] == expected
    assert philox_by_hand(counter, key) == expected


def test_a_basis_is_philox_looked_up_in_a_table_of_normal_quantiles():
    """Column, block of eight rows, refresh and expert count; the seed is the key; each word picks two rows."""
    expert, refresh, rank, side = 2, 7, 13, 21
    made = gaussian_basis(matrix_shape((3, side, 40), rank=rank), SEED, refresh, torch.float64, CPU)[expert]
    for row in range(rank):
        for column in range(side):
            words = philox_by_hand([column, row // 8, refresh, expert], [SEED & WORD, SEED >> 32])
            number = words[row % 8 // 2] >> 16 * (row % 2) & 0xFFFF
            # |z| has density on one side only, so its quantile p is the quantile (1 + p) / 2 of z.
            quantile = NormalDist().inv_cdf((1 + (number % 2**15 + 0.5) / 2**15) / 2)
            narrowed = float(torch.tensor(-quantile if number >> 15 else quantile, dtype=torch.float64).bfloat16())
            assert float(made[row, column]) == narrowed * rank**-0.5


def test_the_table_is_the_same_on_every_platform():
    """Pinned to the bit: a library whose erfinv moved one entry would change every basis without a word."""
    table = normal_quantiles()
    expected = [NormalDist().inv_cdf((1 + (i + 0.5) / 2**15) / 2) for i in range(2**15)]
    assert torch.equal(table, torch.tensor(expected, dtype=torch.float64).bfloat16())
    digest = hashlib.sha256(table.view(torch.int16).numpy().astype("<i2").tobytes()).hexdigest()
    assert digest == "ab4778c0c11681cde7fbe9cc51deeede5db7894e56db2e7ae638021e7f4016b4"


def test_a_basis_is_the_same_on_every_platform():
    block = normals(SEED, 3, 1, (0, 37), (0, 61), CPU)
    digest = hashlib.sha256(block.view(torch.int16).numpy().astype("<i2").tobytes()).hexdigest()
    assert digest == "ce202c12e4e67daa2f61f29c427022b8996726290281805b846fe7eff0a83948"


@pytest.mark.parametrize("rows", [(0, 5), (3, 29), (8, 16), (15, 17), (28, 29)])
@pytest.mark.parametrize("columns", [(0, 61), (7, 8), (13, 40)])
def test_a_tile_is_that_slice_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]):
    whole = normals(SEED, 4, 0, (0, 29), (0, 61), CPU)
    tile = normals(SEED, 4, 0, rows, columns, CPU)
    assert torch.equal(tile, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("experts", [None, 5])
def test_on_the_meta_device_only_the_values_are_missing(experts):
    def block(device: torch.device) -> Tensor:
        expert = 2 if experts is None else torch.arange(experts, device=device)[:, None, None]
        return normals(SEED, 4, expert, (3, 29), (5, 61), device)

    there, made = block(torch.device("meta")), block(CPU)
    assert (there.shape, there.dtype) == (made.shape, made.dtype)


def test_experts_together_are_the_experts_one_by_one():
    together = normals(SEED, 4, torch.arange(5)[:, None, None], (0, 11), (0, 17), CPU)
    assert together.shape == (5, 11, 17)
    for expert in range(5):
        assert torch.equal(together[expert], normals(SEED, 4, expert, (0, 11), (0, 17), CPU))


def test_the_seed_and_refresh_may_live_on_a_device():
    """As tensors they are the same numbers, and no host has to read them."""
    as_tensors = normals(torch.tensor(SEED), torch.tensor(4), 0, (0, 11), (0, 17), CPU)
    assert torch.equal(as_tensors, normals(SEED, 4, 0, (0, 11), (0, 17), CPU))


def test_a_basis_has_variance_one_over_rank():
    made = gaussian_basis(matrix_shape((400, 1000), rank=64), SEED, 0, torch.float64, CPU)
    assert made.shape == (64, 400)
    # The variance of z^2 is 2.
    assert abs(float((made**2).mean()) * 64 - 1) < SIGMAS * math.sqrt(2 / made.numel())


def test_moments_are_those_of_a_standard_normal():
    z = basis(1000, 1000)
    n = z.numel()
    # E z^(2k) = (2k - 1)!!, so the variances of z, z^2, z^3 and z^4 are 1, 2, 15 and 96.
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((z**power).mean()) - expected) < SIGMAS * math.sqrt(variance / n), power


def test_the_table_itself_has_unit_variance():
    """What 16 bits cut off the tails, and bfloat16 rounds, is below what a million draws would show."""
    table = normal_quantiles().double()
    assert abs(float((table**2).mean()) - 1) < math.sqrt(2 / 1e6)


def test_distribution_is_normal_to_the_kolmogorov_smirnov_bound():
    z = basis(1000, 1000).flatten().sort().values
    n = len(z)
    below, upto = torch.arange(n) / n, torch.arange(1, n + 1) / n
    theory = torch.special.ndtr(z)
    # Equal values are one step of the empirical distribution: only its ends are compared.
    first, last = (
        torch.cat([torch.ones(1, dtype=torch.bool), z.diff() > 0]),
        torch.cat([z.diff() > 0, torch.ones(1, dtype=torch.bool)]),
    )
    distance = max(float((theory - below)[first].max()), float((upto - theory)[last].max()))
    # Massart: P(D > d) <= 2 exp(-2 n d^2), here 1e-9. bfloat16 moves z by half an ulp, at most 2^-8 where the density
    # is highest for the spacing: just above 1.
    chance = math.sqrt(math.log(2 / 1e-9) / (2 * n))
    narrowing = NormalDist().pdf(1) * 2**-8
    assert distance < chance + narrowing


def test_rows_and_columns_are_independent():
    """Rows of one Philox counter and of different ones; the same for magnitudes, which a sign could hide."""
    z = basis(256, 4096)
    for matrix in (z, z**2, z[:, :256].T, z[:, :256].T ** 2):
        sigmas = correlations(matrix, matrix).fill_diagonal_(0)
        assert sigmas.abs().max() < SIGMAS
        # And no more spread than chance: the mean square of n(n - 1) / 2 unit variables.
        pairs = len(matrix) * (len(matrix) - 1) / 2
        assert abs(float((sigmas**2).sum()) / (2 * pairs) - 1) < SIGMAS * math.sqrt(2 / pairs)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": SEED + 1},
        {"seed": SEED ^ (1 << 62)},
        {"seed": SEED ^ (1 << 32)},
        {"refresh": 1},
        {"refresh": 2**20},
        {"expert": 1},
        {"expert": 127},
    ],
    ids=str,
)
def test_weights_refreshes_and_experts_are_independent(other: dict[str, int]):
    a, b = basis(256, 1024), basis(256, 1024, **other)
    assert correlations(a, b).abs().max() < SIGMAS
    whole = correlations(a.reshape(1, -1), b.reshape(1, -1))
    assert whole.abs().max() < SIGMAS
    assert correlations((a**2).reshape(1, -1), (b**2).reshape(1, -1)).abs().max() < SIGMAS


def test_uses_of_one_seed_have_keys_of_their_own():
    keys = {key_words(SEED, stream) for stream in (BASIS, ROUND_WEIGHT, ROUND_EXP_AVG)}
    assert len(keys) == 3
