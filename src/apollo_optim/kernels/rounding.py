"""Rounding at random of what plain PyTorch has computed."""

import triton
import triton.language as tl

from .device import element_bits, rounded


@triton.jit(do_not_specialize=["key0", "key1"])
def round_kernel(target, value, position, key0, key1, size, PLACED: tl.constexpr, BLOCK: tl.constexpr):
    """target <- value, each element by the draw of its position: if PLACED that is given, else where it lies."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    place = element
    if PLACED:
        place = tl.load(position + element, mask=inside, other=0)
    bits = element_bits(place, key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True))
    wide = tl.load(value + element, mask=inside, other=0.0)
    tl.store(target + element, rounded(wide, bits, target.dtype.element_ty), mask=inside)
