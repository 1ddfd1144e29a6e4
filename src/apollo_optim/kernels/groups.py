"""Tiles that are runs of groups: 1024 elements, seen as [K, N / 8, 8], K groups of N, eight neighbours to a thread.

Rows are cut into groups one after the other. A row that N does not divide is filled up in thought.

Where rows begin at whole vectors (FLAT), a place is that of each element [K, N]: the compiler makes vectors of them,
and gives those that follow each other in memory to threads that do. Elsewhere it is that of the first of eight
[K, N / 8], which are read and written one by one, at distances that take no instruction.
"""

import triton
import triton.language as tl

from . import columns as at
from .apply import HALF_TILE
from .device import MASK, element_bits, hashed


@triton.jit
def in_group(N: tl.constexpr, FLAT: tl.constexpr):
    """Places in a group. [1, N] or [1, N / 8]"""
    if FLAT:
        place = tl.arange(0, N)[None, :]
    else:
        place = tl.arange(0, N // 8)[None, :] * 8
    return place


@triton.jit
def within(N: tl.constexpr, FLAT: tl.constexpr):
    """Places in 1024 elements."""
    return tl.arange(0, HALF_TILE // N)[:, None] * N + in_group(N, FLAT)


@triton.jit
def groups_of(run, rows, columns, N: tl.constexpr):
    """(number, whether it is there, row, number in its row) of the groups of one run of 1024 elements. [K]"""
    number, to_a_row = run * (HALF_TILE // N) + tl.arange(0, HALF_TILE // N), tl.cdiv(columns, N)
    there = number < rows * to_a_row
    # Fewer than 2^31, so that no division takes 64 bits; and a part of a weight may have rows without columns.
    low, to_a_row = number.to(tl.uint32), tl.maximum(to_a_row, 1).to(tl.uint32)
    return number, there, (low // to_a_row).to(tl.int32), (low % to_a_row).to(tl.int32)


@triton.jit
def elements_of(begin, row, column, columns, N: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr):
    """Places in the matrix, of a run of groups from `begin` on. SHARED says that rows are whole groups."""
    if SHARED:
        element = begin + within(N, FLAT)
    else:
        element = row[:, None].to(tl.int64) * columns + column
    return element


@triton.jit
def room(there, column, columns, SHARED: tl.constexpr, FLAT: tl.constexpr):
    """A mask of places in these columns, of groups that are there; if not FLAT, how many elements are from there on."""
    if FLAT and SHARED:
        inside = there[:, None]
    elif FLAT:
        inside = there[:, None] & (column < columns)
    elif SHARED:  # in rows of any length, whose columns int32 need not hold
        inside = tl.where(there[:, None], tl.full(column.shape, 8, tl.int32), 0)
    else:
        inside = tl.where(there[:, None], columns.to(tl.int32) - column, 0)
    return inside


@triton.jit
def everywhere(FLAT: tl.constexpr):
    """The `room` of places that are all there; the compiler leaves such a mask away."""
    if FLAT:
        inside = tl.full([1, 1], True, tl.int1)
    else:
        inside = tl.full([1, 1], 8, tl.int32)
    return inside


@triton.jit
def by_eights(x):
    """[K, N] as [K, N / 8, 8]."""
    return x.reshape(x.shape[0], x.shape[1] // 8, 8)


@triton.jit
def every_place(place, FLAT: tl.constexpr):
    """The place of each element. [K, N / 8, 8]"""
    if FLAT:
        places = by_eights(place)
    else:
        places = place[:, :, None] + tl.arange(0, 8)[None, None, :]
    return places


@triton.jit
def every_room(inside, FLAT: tl.constexpr):
    """True for each element that is there, by the `room` of rows that are no whole groups. [K, N / 8, 8]"""
    if FLAT:
        there = by_eights(inside)
    else:
        there = inside[:, :, None] > tl.arange(0, 8)[None, None, :]
    return there


@triton.jit
def global_places(
    meta, start, begin, row, column, element,
    N: tl.constexpr, SHARED: tl.constexpr, PART: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Places of elements in the whole weight, as `draws_of` has it; PART says that other ranks hold the rest of it."""
    if SHARED:
        place = start
    elif PART:
        place = elements_of(begin, row, column, tl.load(meta + at.PITCH), N, SHARED, FLAT)
    else:
        place = element
    if PART:
        place += tl.load(meta + at.FIRST)
    return place


@triton.jit
def first_group(meta, columns, N: tl.constexpr, PART: tl.constexpr):
    """The number in the whole weight of the first group, where ranks hold whole rows."""
    first = tl.zeros((), tl.int64)
    if PART:
        first += tl.load(meta + at.FIRST) // columns * tl.cdiv(columns, N)
    return first


@triton.jit
def draws_of(place, half: tl.constexpr, key0, key1, N: tl.constexpr, SHARED: tl.constexpr, FLAT: tl.constexpr):
    """16 uniform bits for each element, by its place in the whole weight.

    Where rows are whole groups (SHARED), two halves of a tile share their words, and the place is the tile's.
    """
    if SHARED:
        word, in_tile = place >> 1, every_place(within(N, FLAT), FLAT).to(tl.uint32)
        low = (word & MASK).to(tl.uint32) + (in_tile & 0x3F8)
        bits = (hashed(low, word >> 32, key0, key1, in_tile & 7) >> (16 * half)) & 0xFFFF
    else:
        bits = element_bits(every_place(place, FLAT), key0, key1)
    return bits


@triton.jit
def load_groups(pointers, inside, FLAT: tl.constexpr):
    """Load what is at the places of groups, 0 where nothing is. [K, N / 8, 8]"""
    if FLAT:
        value = by_eights(tl.load(pointers, mask=inside, other=0))
    else:
        first, left = in_line(pointers), in_line(inside)
        even = tl.join(_two(first, left, 0), _two(first, left, 2))
        odd = tl.join(_two(first, left, 1), _two(first, left, 3))
        value = tl.join(even, odd).reshape(pointers.shape[0], pointers.shape[1], 8)
    return value


@triton.jit
def in_line(x):
    """In one dimension, along which threads follow each other."""
    return x.reshape(x.shape[0] * x.shape[1])


@triton.jit
def _two(first, left, NUMBER: tl.constexpr):
    """An element of eight, and the fourth after it."""
    return tl.join(
        tl.load(first + NUMBER, mask=left > NUMBER, other=0),
        tl.load(first + NUMBER + 4, mask=left > NUMBER + 4, other=0),
    )


@triton.jit
def store_groups(pointers, value, inside, FLAT: tl.constexpr):
    """Leave values [K, N / 8, 8] at places."""
    if FLAT:
        tl.store(pointers, value.reshape(pointers.shape), mask=inside)
    else:
        first, left = in_line(pointers), in_line(inside)
        even, odd = tl.split(value.reshape(first.shape[0], 2, 2, 2))
        from_0, from_2 = tl.split(even)
        from_1, from_3 = tl.split(odd)
        _store_two(first, from_0, left, 0)
        _store_two(first, from_1, left, 1)
        _store_two(first, from_2, left, 2)
        _store_two(first, from_3, left, 3)


@triton.jit
def _store_two(first, pair, left, NUMBER: tl.constexpr):
    low, high = tl.split(pair)
    tl.store(first + NUMBER, low, mask=left > NUMBER)
    tl.store(first + NUMBER + 4, high, mask=left > NUMBER + 4)
