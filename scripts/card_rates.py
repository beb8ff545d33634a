"""Measures the rates from which floors are computed: copy bandwidth, and operations per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RUNS = 5
"""Runs of each program; the fastest counts."""


def copy_bandwidth(*, tiny: bool = False) -> float:
    """Bytes per second, read plus written, of copies of 2 GiB in device memory.

    The copy adds to int32. Adding to bfloat16 would convert it twice, and on an H200 that would be
    the limit instead of memory (3.2 TB/s instead of 4.1).
    """
    source = jnp.ones((2**20 if tiny else 2**29,), jnp.int32)
    return 2 * source.nbytes / fastest(jax.jit(lambda x: x + 1), source, calls=10)


def peak_flops(*, tiny: bool = False) -> float:
    """Operations per second of a large square product in bfloat16. Its numbers are random, so that
    it takes as much power as a model's products."""
    size = 256 if tiny else 8192
    side = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / fastest(jax.jit(jnp.dot), side, side, calls=10)


def fastest(call: Callable[..., Any], *args: Any, calls: int) -> float:
    """Seconds per call, in the fastest of several series of calls."""
    for _ in range(3):
        jax.block_until_ready(call(*args))
    best = math.inf
    for _ in range(RUNS):
        start = time.perf_counter()
        out = None
        for _ in range(calls):
            out = call(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best
