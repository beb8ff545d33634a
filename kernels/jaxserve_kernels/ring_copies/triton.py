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
    outer, inner = math.prod(pages.shape[:axis]), math.prod(pages.shape[axis + 1 :])
    moves = pairs.shape[1]
    block = min(triton.next_power_of_2(inner), _BYTES // pages.dtype.itemsize)
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
