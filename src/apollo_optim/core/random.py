"""Counter-based random numbers: the same integers on every device, in every tile, on every shard.

All words are uint32 values held in int64 tensors, because torch has no full uint32 arithmetic.

    normals  a 16-bit number picks an entry of a table of normal quantiles in bfloat16, so no logarithm or
             cosine can differ between devices; Philox 4x32-10 supplies eight such numbers per counter.
    bits     stochastic rounding needs one 16-bit number per weight element. Philox makes two words per weight
             and step, and a cheap 32-bit hash spreads them over its elements.
"""

from functools import cache

import torch
from torch import Tensor

MASK = 0xFFFFFFFF

# Each use of the generator has its own stream, so that no two ever share a number.
BASIS, ROUND_WEIGHT, ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, ROUND_SCALE = range(5)
STREAM_STRIDE = 0x9E3779B9

PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_INCREMENTS = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10

NORMALS_PER_COUNTER = 8

Word = Tensor | int
"""A uint32: an int64 tensor of them, or a Python integer that broadcasts."""
RoundingKey = tuple[Word, Word]
"""The key of one tensor's rounding at one step: by it a resumed or sharded run rounds alike."""


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Four uint32 words per counter: Philox 4x32-10 (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # A product of two uint32 wraps in int64 exactly as it would in uint64: both halves survive the masks.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & MASK, product0 & MASK
        high1, low1 = (product1 >> 32) & MASK, product1 & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + PHILOX_KEY_INCREMENTS[0]) & MASK
        k1 = (k1 + PHILOX_KEY_INCREMENTS[1]) & MASK
    return c0, c1, c2, c3


def key_words(seed: Word, stream: int) -> tuple[Word, Word]:
    """The Philox key of one weight's seed and one use of it."""
    return (seed ^ (stream * STREAM_STRIDE)) & MASK, (seed >> 32) & MASK


@cache
def normal_quantiles() -> Tensor:
    """The positive half of the standard normal: entry i is the quantile (i + 1/2) / 2**15 of |z|, in bfloat16."""
    probability = (torch.arange(2**15, dtype=torch.float64, device="cpu") + 0.5) / 2**15
    return (torch.special.erfinv(probability) * 2**0.5).to(torch.bfloat16)


@cache
def normal_table(device: torch.device) -> Tensor:
    """Standard normals in bfloat16 by 16-bit number: the top bit is the sign, the rest picks the quantile."""
    positive = normal_quantiles()
    return torch.cat([positive, -positive]).to(device)


def normals(
    seed: Word, refresh: Word, expert: Word, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
) -> Tensor:
    """The bfloat16 standard normals of rows x columns, both half-open ranges of the whole basis.

    `expert` as a tensor [E, 1, 1] makes one such block per expert. One counter yields the eight rows 8k .. 8k+7 of a
    column, so that a kernel's tile stores them side by side.
    """
    if device.type == "meta":  # only the shape is asked for, and torch would work it out operation by operation
        batch = expert.shape[:-2] if isinstance(expert, Tensor) else ()
        return torch.empty(*batch, rows[1] - rows[0], columns[1] - columns[0], dtype=torch.bfloat16, device=device)
    first_block, last_block = rows[0] // NORMALS_PER_COUNTER, -(-rows[1] // NORMALS_PER_COUNTER)
    block_B1 = torch.arange(first_block, last_block, device=device).unsqueeze(-1)
    column_S = torch.arange(*columns, device=device)
    words_BS = torch.broadcast_tensors(*philox((column_S, block_B1, refresh, expert), key_words(seed, BASIS)))
    halves_BS = [half for word in words_BS for half in (word & 0xFFFF, word >> 16)]
    index_RS = torch.stack(halves_BS, dim=-2).flatten(-3, -2)
    offset = first_block * NORMALS_PER_COUNTER
    return normal_table(device)[index_RS[..., rows[0] - offset : rows[1] - offset, :]]


def rounding_key(seed: Word, step: Word, stream: int) -> RoundingKey:
    """The key of one use (`stream`) of a weight's seed at one step."""
    return philox((step, 0, 0, 0), key_words(seed, stream))[:2]


def rounding_bits(key: RoundingKey, element: Tensor) -> Tensor:
    """Uniform 16-bit numbers for stochastic rounding, by global position in the flattened tensor.

    A hash with full avalanche (the lowbias32 constants, keyed between its two multiplications). Elements that differ
    only in bit 10 of their position share a hash, one taking each half: a kernel's tile draws once for two rows of
    1024, without shuffling numbers between threads.
    """
    word = (element >> 11 << 10) | (element & 1023)
    x = (word & MASK) ^ key[0]
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = x ^ (x >> 15) ^ ((key[1] + (word >> 32)) & MASK)
    x = (x * 0x846CA68B) & MASK
    x = x ^ (x >> 16)
    return (x >> ((element >> 10 & 1) * 16)) & 0xFFFF
