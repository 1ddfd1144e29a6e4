"""Adam moments where the kernels meet them."""

import triton
import triton.language as tl

from .layout import (
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    EXPERT,
    RANK,
    ROWS,
    SEED,
    STEP_BITS,
)
from .numbers import adam_step, int_bits, is_finite, pointer, store_moments


@triton.jit
def load_moments(meta, element, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """(m, v) at `element` of this matrix, zero outside."""
    m = tl.load(pointer(tl.load(meta + EXP_AVG), M, ALIGNED) + element, mask=inside, other=0.0)
    v = tl.load(pointer(tl.load(meta + EXP_AVG_SQ), M, ALIGNED) + element, mask=inside, other=0.0)
    return m.to(tl.float32), v.to(tl.float32)


@triton.jit
def step_moments(meta, hyper, low, old_m, old_v, element, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Write the moments after taking in `low`; (step, v), zero outside. A bad gradient leaves them as they were."""
    m, v, step = adam_step(old_m, old_v, low, hyper)
    # A square beyond float32 would stay in v for good, so such a gradient is as bad as an infinite one.
    good = is_finite(low * low)
    m, v = tl.where(good, m, old_m), tl.where(good, v, old_v)
    m_ptr = pointer(tl.load(meta + EXP_AVG), M, ALIGNED) + element
    v_ptr = pointer(tl.load(meta + EXP_AVG_SQ), M, ALIGNED) + element
    # Experts share one rounding sequence, so that an element's place in the whole tensor picks its bits.
    size = tl.load(meta + RANK) * tl.maximum(tl.load(meta + ROWS), tl.load(meta + COLUMNS))
    position = tl.load(meta + EXPERT) * size + element
    step_count = int_bits(tl.load(hyper + STEP_BITS))
    store_moments(m_ptr, v_ptr, m, v, position, tl.load(meta + SEED), step_count, inside, M)
    return tl.where(inside & good, step, 0.0), tl.where(inside, v, 0.0)


@triton.jit
def moments_of(meta, hyper, low, element, inside, M: tl.constexpr, ALIGNED: tl.constexpr):
    """Step the moments at `element` of this matrix by `low`; (step, v), zero outside."""
    m, v = load_moments(meta, element, inside, M, ALIGNED)
    return step_moments(meta, hyper, low, m, v, element, inside, M, ALIGNED)
