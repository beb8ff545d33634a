"""Memory that a kernel will read, on its way to the L2 cache before the kernel can begin."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ask_for(pointers, size):
    """Has `size` bytes from each pointer brought to the L2 cache; both are multiples of 16. Hopper
    or later.

    A warp asks for one place after the other: it should have one, or few.
    """
    tl.inline_asm_elementwise(
        "mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2;",
        "=r,l,r", [pointers, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
