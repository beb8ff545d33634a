"""Loads that are all under way before the first is waited for.

ptxas moves a load behind arithmetic that needs an earlier one, so a kernel that reads eight arrays
waits for the L2 cache two or three times. Volatile loads stay before a branch: a kernel reads with
`volatile=True`, and computes in `if all_loaded()`. Where several programs read the same lines,
volatile loads are slower than others: see lab/logs/decode.md.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def all_loaded():
    """True, which the compilers do not know. For grids of at most two dimensions."""
    return tl.program_id(2) == 0


@triton.jit
def added(parts, dtype: tl.constexpr):
    """The sum of a tuple of partial sums, computed in float32, rounded to `dtype`."""
    total = parts[0].to(tl.float32)
    for index in tl.static_range(1, len(parts)):
        total += parts[index].to(tl.float32)
    return total.to(dtype)
