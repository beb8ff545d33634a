"""Prefetches to the L2 cache, for memory that a kernel reads later."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ask_for(pointers, size):
    """Prefetches `size` bytes from each pointer to the L2 cache. Size and pointers are multiples of
    16. Needs Hopper or later.

    A warp issues one request per distinct pointer, one after the other: give it few.
    """
    tl.inline_asm_elementwise(
        "mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2;",
        "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
