"""Small device functions: addresses, random bits, rounding, Adam."""

import triton
import triton.language as tl

from ..core.random import ROUND_EXP_AVG, ROUND_EXP_AVG_SQ, ROUND_SCALE, ROUND_WEIGHT, STREAM_STRIDE
from . import columns as at

MASK = tl.constexpr(0xFFFFFFFF)
STRIDE = tl.constexpr(STREAM_STRIDE)
M_STREAM = tl.constexpr(ROUND_EXP_AVG)
V_STREAM = tl.constexpr(ROUND_EXP_AVG_SQ)
W_STREAM = tl.constexpr(ROUND_WEIGHT)
S_STREAM = tl.constexpr(ROUND_SCALE)


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A typed pointer from an address in a table; ALIGNED promises 16 bytes, which lets loads be wide."""
    typed = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        # On the pointer, not on the address: the compiler forgets what it knew of an integer when it is cast.
        typed = tl.multiple_of(typed, 16)
    return typed


@triton.jit
def tile_of(tiles, number, matrix_table):
    """(matrix, its row of the table, tile of it) that the table of tiles has under this number."""
    matrix = tl.load(tiles + 2 * number).to(tl.int64)
    return matrix, matrix_table + matrix * at.MATRIX_WIDTH, tl.load(tiles + 2 * number + 1)


@triton.jit
def wide(x):
    """x in float32; a bfloat16 by its bits, because its conversion takes half an instruction more."""
    if x.dtype == tl.bfloat16:
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def int_bits(x):
    """The int32 that a float32 table entry carries."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_bits(word):
    """The float32 that an int64 table entry carries in its low half."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def rounding_key(seed, step, STREAM: tl.constexpr):
    """As `core.random.rounding_key`."""
    zero = step * 0
    key0, key1, _, _ = tl.philox(seed ^ ((STREAM * STRIDE) & MASK), step, zero, zero, zero)
    return key0, key1


@triton.jit
def store_keys(outcome, seed, step):
    """Leave the keys that round a weight in this step, and its scales where it is int8."""
    key0, key1 = rounding_key(seed, step, W_STREAM)
    tl.store(outcome + at.KEY0, key0.to(tl.float32, bitcast=True))
    tl.store(outcome + at.KEY1, key1.to(tl.float32, bitcast=True))
    key0, key1 = rounding_key(seed, step, S_STREAM)
    tl.store(outcome + at.SCALE_KEY0, key0.to(tl.float32, bitcast=True))
    tl.store(outcome + at.SCALE_KEY1, key1.to(tl.float32, bitcast=True))


@triton.jit
def load_keys(outcome):
    """The two words of a weight's key, and of its scales', that `store_keys` has left."""
    key0 = tl.load(outcome + at.KEY0).to(tl.uint32, bitcast=True)
    key1 = tl.load(outcome + at.KEY1).to(tl.uint32, bitcast=True)
    scale_key0 = tl.load(outcome + at.SCALE_KEY0).to(tl.uint32, bitcast=True)
    scale_key1 = tl.load(outcome + at.SCALE_KEY1).to(tl.uint32, bitcast=True)
    return key0, key1, scale_key0, scale_key1


@triton.jit
def hashed(word_low, word_high, key0, key1, last=0):
    """32 uniform bits per word of the rounding sequence: two elements' worth (`core.random.rounding_bits`).

    `last` are bits of a word's low half that `word_low` is without: neighbours that differ in these alone share what is
    computed before them.
    """
    x = word_low.to(tl.uint32) ^ key0
    x = (x ^ (x >> 16) ^ last) * 0x7FEB352D
    x = x ^ (x >> 15) ^ (key1 + word_high.to(tl.uint32))
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def element_bits(element, key0, key1):
    """16 uniform bits for each element, by its int64 position in the flattened tensor."""
    word = ((element >> 11) << 10) | (element & 1023)
    half = ((element >> 10) & 1).to(tl.uint32)
    return (hashed(word & MASK, word >> 32, key0, key1) >> (half * 16)) & 0xFFFF


@triton.jit
def rounded(value, bits, dtype: tl.constexpr, COMPUTED: tl.constexpr = False):
    """value in `dtype`, rounded up or down by 16 random bits (`quant.rounding`).

    COMPUTED says that its NaNs are those of arithmetic, whose bits make less work than any.
    """
    if dtype == tl.bfloat16 and COMPUTED:
        raw = int_bits(value)
        # Infinities do not carry. The NaN that a GPU makes, all ones behind its sign, would carry into that.
        carried = tl.maximum(raw + bits.to(tl.int32), raw)
        result = (carried >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.bfloat16:
        raw = value.to(tl.uint32, bitcast=True)
        carried = ((raw + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
        result = tl.where(is_finite(value), carried, value).to(tl.bfloat16)
    else:
        exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        power = tl.maximum(exponent, -14) - 10
        quantum = ((power + 127) << 23).to(tl.float32, bitcast=True)
        inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
        below = tl.floor(value * inverse)
        up = value * inverse - below >= 1 - bits.to(tl.float32) * (1.0 / 65536)
        # Not below + up, which would take the sign off a negative zero.
        result = (tl.where(up, below + 1.0, below) * quantum).to(tl.float16)
    return result


@triton.jit
def is_finite(x):
    # Not x - x == 0: where x is a product, a compiler may fuse the difference into the rounding error of x.
    return tl.abs(x) < float("inf")


@triton.jit
def quotient(x, y):
    """x / y of a y that is positive and no denormal, in a third of the instructions that a division takes.

    Division sees to the largest and smallest numbers. The root of an inverse does not, and leaves float32 for none.
    """
    root = tl.rsqrt(y)
    return x * root * root


@triton.jit
def adam_step(m, v, grad, hyper):
    """(m, v, m_hat / (sqrt(v_hat) + eps)) after taking in one gradient."""
    m = m + tl.load(hyper + at.ONE_MINUS_BETA1) * (grad - m)
    v = v * tl.load(hyper + at.BETA2) + tl.load(hyper + at.ONE_MINUS_BETA2) * grad * grad
    correction1 = tl.load(hyper + at.CORRECTION1)
    root = correction1 / tl.load(hyper + at.CORRECTION2_ROOT)
    return m, v, m / (tl.sqrt(v) * root + tl.load(hyper + at.EPS) * correction1)


@triton.jit
def count_outcome(meta, skipped, finite, CAPTURABLE: tl.constexpr):
    """Once per weight: count a refused gradient, and where the device keeps the step count, an accepted one."""
    tl.atomic_add(skipped, tl.where(finite, 0, 1).to(tl.int64))
    if CAPTURABLE:
        step_ptr = pointer(tl.load(meta + at.STEP), tl.float32, False)
        tl.store(step_ptr, tl.load(step_ptr) + tl.where(finite, 1.0, 0.0))
