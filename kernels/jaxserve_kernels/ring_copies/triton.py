"""All copies in one launch. A program copies some bytes of one layer's part of a page."""

from __future__ import annotations

import math
from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_BYTES = 16384
"""Bytes that a program copies: each of its 128 threads has eight 16-byte loads in flight."""


@triton.jit
def _kernel(
    source_ptr, target_ptr, pairs_ptr,
    MOVES: tl.constexpr, OUTER: tl.constexpr, PAGES: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, FROM_RING: tl.constexpr,
):  # fmt: skip
    move = tl.program_id(2)
    outer = tl.program_id(1)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pairs_ptr + move).to(tl.int64)
    slot = tl.load(pairs_ptr + MOVES + move).to(tl.int64)
    in_pages = (outer * PAGES + page) * INNER + offset
    in_ring = (slot * OUTER + outer) * INNER + offset
    mask = offset < INNER
    if FROM_RING:
        tl.store(target_ptr + in_pages, tl.load(source_ptr + in_ring, mask=mask), mask=mask)
    else:
        tl.store(target_ptr + in_ring, tl.load(source_ptr + in_pages, mask=mask), mask=mask)


@triton.jit
def _within(
    pages_ptr, pair_ptr,
    PAGES: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = pages_ptr + tl.program_id(1).to(tl.int64) * (PAGES * INNER)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < INNER
    source = first + tl.load(pair_ptr).to(tl.int64) * INNER + offset
    target = first + tl.load(pair_ptr + 1).to(tl.int64) * INNER + offset
    tl.store(target, tl.load(source, mask=mask), mask=mask)


def from_ring(pages: Array, ring: Array, pairs: Array, *, axis: int, target: Target) -> Array:
    """See `reference.from_ring`."""
    written = jax.new_ref(pages)
    _copy(ring, written, pairs, pages, axis, target, from_ring=True)
    return jax.freeze(written)


def to_ring(pages: Array, ring: Array, pairs: Array, *, axis: int, target: Target) -> Array:
    """See `reference.to_ring`."""
    written = jax.new_ref(ring)
    _copy(pages, written, pairs, pages, axis, target, from_ring=False)
    return jax.freeze(written)


def within(pages: Array, pair: Array, *, axis: int, target: Target) -> Array:
    """See `reference.within`. It needs no scratch memory."""
    written = jax.new_ref(pages)
    outer, inner, block = _sizes(pages, axis)
    triton_call(
        written, pair,
        kernel=_within,
        name="copy_within",
        target=target,
        out_type=(),
        grid=(triton.cdiv(inner, block), outer),
        num_warps=4,
        PAGES=pages.shape[axis], INNER=inner, BLOCK=block,
    )  # fmt: skip
    return jax.freeze(written)


def _sizes(pages: Array, axis: int) -> tuple[int, int, int]:
    """Elements before and after the axis of pages, and those that a program copies."""
    inner = math.prod(pages.shape[axis + 1 :])
    block = min(triton.next_power_of_2(inner), _BYTES // pages.dtype.itemsize)
    return math.prod(pages.shape[:axis]), inner, block


def _copy(
    source: Array,
    written: Any,
    pairs: Array,
    pages: Array,
    axis: int,
    target: Target,
    *,
    from_ring: bool,
) -> None:
    outer, inner, block = _sizes(pages, axis)
    moves = pairs.shape[1]
    triton_call(
        source, written, pairs,
        kernel=_kernel,
        name="copy_from_ring" if from_ring else "copy_to_ring",
        target=target,
        out_type=(),
        grid=(triton.cdiv(inner, block), outer, moves),
        num_warps=4,
        MOVES=moves, OUTER=outer, PAGES=pages.shape[axis], INNER=inner, BLOCK=block,
        FROM_RING=from_ring,
    )  # fmt: skip
