"""Shared parts of the sampler's two kernels: the layout of the scan's results, noise, maxima, and
an integer order of float32."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.sampler import adjust

ACTIVE = tl.constexpr(1)
WANTED = tl.constexpr(2)
"""Flags of a row, as bits: it samples; its most likely tokens are wanted."""

PENALISED = tl.constexpr(adjust.PENALISED)
BIASED = tl.constexpr(adjust.BIASED)
MASKED = tl.constexpr(adjust.MASKED)
MAX_COUNT = tl.constexpr(adjust.MAX_COUNT)

PARTS = tl.constexpr(5)
"""Entries per chunk in the scan's two results, an array of numbers and one of token ids."""

PEAK = tl.constexpr(0)
MASS = tl.constexpr(1)
NOISY = tl.constexpr(2)
SCORE = tl.constexpr(3)
SCORE_MASS = tl.constexpr(4)
"""Entries of numbers: the largest logit, and the sum of exponentials relative to it; the largest
score with noise; the largest score, and the sum of exponentials relative to it at the row's
temperature. Scores are adjusted logits, if the row adjusts them."""

PEAK_ID = tl.constexpr(0)
NOISY_ID = tl.constexpr(1)
SCORE_ID = tl.constexpr(2)
"""Entries of token ids: the tokens with the largest values."""

TINY = tl.constexpr(1.1754943508222875e-38)
"""float32's smallest normal number. If top_p underflows, it keeps the most likely token (weight
1)."""


@triton.jit
def _rotate(x, distance: tl.constexpr):
    return (x << distance) | (x >> (32 - distance))


@triton.jit
def _mix(a, b, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    a += b
    b = _rotate(b, r0) ^ a
    a += b
    b = _rotate(b, r1) ^ a
    a += b
    b = _rotate(b, r2) ^ a
    a += b
    b = _rotate(b, r3) ^ a
    return a, b


@triton.jit
def gumbel(seed, position, ids):
    """Gumbel noise of token `ids`: threefry2x32 as in jax.random (Salmon et al. 2011)."""
    k0 = seed.to(tl.uint32, bitcast=True)
    k1 = position.to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    a = tl.zeros_like(ids).to(tl.uint32) + k0
    b = ids.to(tl.uint32) + k1
    a, b = _mix(a, b, 13, 15, 26, 6)
    a += k1
    b += k2 + 1
    a, b = _mix(a, b, 17, 29, 16, 24)
    a += k2
    b += k0 + 2
    a, b = _mix(a, b, 13, 15, 26, 6)
    a += k0
    b += k1 + 3
    a, b = _mix(a, b, 17, 29, 16, 24)
    a += k1
    b += k2 + 4
    a, b = _mix(a, b, 13, 15, 26, 6)
    a += k2
    b += k0 + 5
    uniform = (((a ^ b) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def largest(values, ids):
    """The largest value, and the lowest id with that value."""
    peak = tl.max(values, axis=0)
    return peak, tl.min(tl.where(values == peak, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def ordered(x):
    """Maps float32 values to uint32 keys of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000
