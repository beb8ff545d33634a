"""The sampler as two kernels: a scan of the vocabulary in parallel, then one program per row.

The scan leaves each chunk's maximum, its place, and its share of the softmax sum; a row that only
wants the most likely token, or draws from the whole distribution, needs no more than to merge them.
A row with a small top_k takes its tokens one by one, each from the chunk whose maximum is largest;
other truncations search their threshold digit by digit over the row. Nothing is sorted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.sampler.reference import (
    MIN_TEMPERATURE,
    RADIX_BITS,
    Logprobs,
    RowSampling,
)
from jaxserve_kernels.triton_call import triton_call

_CHUNK = 4096
_LIST = 64
"""The largest top_k whose tokens are taken one by one."""

_ACTIVE, _WANTED = 1, 2


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
def _gumbel(seed, position, ids):
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
def _best(values, ids):
    """The largest value and the lowest id that has it."""
    peak = tl.max(values, axis=0)
    return peak, tl.min(tl.where(values == peak, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _ordered(x):
    """uint32 whose order is that of the float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _scan(
    logits_ptr, flags_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    position_ptr, floats_ptr, ids_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr,
    MIN_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=-float("inf"))
    peak, best = _best(x, ids)
    part = (row * chunks + chunk) * 3
    tl.store(floats_ptr + part, peak)
    tl.store(floats_ptr + part + 1, tl.sum(tl.exp(x - tl.maximum(peak, -1.0e38)), axis=0))
    tl.store(ids_ptr + part, best)
    t = tl.load(temperature_ptr + row)
    whole = (tl.load(top_k_ptr + row) <= 0) & (tl.load(top_p_ptr + row) >= 1)
    whole = whole & (tl.load(min_p_ptr + row) <= 0)
    if (tl.load(flags_ptr + row) & 1 != 0) & (t > 0) & whole:
        noise = _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), ids)
        noisy_peak, noisy_best = _best(tl.div_rn(x, tl.maximum(t, MIN_T)) + noise, ids)
        tl.store(floats_ptr + part + 2, noisy_peak)
        tl.store(ids_ptr + part + 1, noisy_best)


@triton.jit
def _take(logits_row, peaks, last, last_id, vocab: tl.constexpr, BLOCK: tl.constexpr,
          CHUNKS: tl.constexpr):  # fmt: skip
    """The next token in order of (logit falling, id rising), and the chunks' maxima after it.

    `last` and `last_id` are the token taken before: everything up to it in that order is gone.
    """
    chunk = tl.arange(0, CHUNKS)
    value, home = _best(peaks, chunk)
    ids = home * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
    left = (x < last) | ((x == last) & (ids > last_id))
    x = tl.where(left, x, -float("inf"))
    taken = tl.min(tl.where(x == value, ids, 0x7FFFFFFF), axis=0)
    rest = tl.max(tl.where(ids == taken, -float("inf"), x), axis=0)
    return value, taken, tl.where(chunk == home, rest, peaks)


@triton.jit
def _draw_from_list(
    logits_row, peaks, t, k, p, min_p, seed, position,
    vocab: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """A token of the k most likely ones (and those that tie with the last), at most LIST."""
    slot = tl.arange(0, LIST)
    values = tl.full([LIST], -float("inf"), tl.float32)
    tokens = tl.zeros([LIST], tl.int32)
    last = float("inf")
    last_id = -1
    count = 0
    more = True
    while more:
        value, token, peaks = _take(logits_row, peaks, last, last_id, vocab, BLOCK, CHUNKS)
        more = ((count < k) | (value == last)) & (value > -float("inf"))
        here = (slot == count) & more
        values = tl.where(here, value, values)
        tokens = tl.where(here, token, tokens)
        count += 1
        more = more & (count < LIST)
        last = value
        last_id = token
    scaled = tl.div_rn(values, t)
    weights = tl.exp(scaled - tl.max(scaled, axis=0))
    total = tl.sum(weights, axis=0)
    before = tl.cumsum(weights, axis=0) - weights
    inside = (before < tl.maximum(p * total, 1.1754943508222875e-38)) & (values > -float("inf"))
    lowest = tl.min(tl.where(inside, scaled, float("inf")), axis=0)
    keep = ((scaled >= lowest) | (p >= 1)) & (weights >= min_p) & (values > -float("inf"))
    noisy = tl.where(keep, scaled + _gumbel(seed, position, tokens), -float("inf"))
    return _best(noisy, tokens)[1]


@triton.jit
def _threshold(
    logits_row, t, peak, floor, target, vocab: tl.constexpr, chunks: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The largest key whose tokens at or above it (and above `floor`) weigh at least `target`."""
    found = tl.full([], 0, tl.uint32)
    for index in range(32 // BITS):
        shift = (32 - BITS * (index + 1)).to(tl.uint32)
        c1 = found | (tl.full([], 1, tl.uint32) << shift)
        c2 = found | (tl.full([], 2, tl.uint32) << shift)
        c3 = found | (tl.full([], 3, tl.uint32) << shift)
        m1 = tl.zeros([BLOCK], tl.float32)
        m2 = tl.zeros([BLOCK], tl.float32)
        m3 = tl.zeros([BLOCK], tl.float32)
        for chunk in range(chunks):
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
            scaled = tl.div_rn(x, t)
            key = _ordered(scaled)
            if WEIGHTED:
                weight = tl.where(key >= floor, tl.exp(scaled - peak), 0.0)
            else:
                weight = tl.where(ids < vocab, 1.0, 0.0)
            m1 += tl.where(key >= c1, weight, 0.0)
            m2 += tl.where(key >= c2, weight, 0.0)
            m3 += tl.where(key >= c3, weight, 0.0)
        found = tl.where(tl.sum(m1, axis=0) >= target, c1, found)
        found = tl.where(tl.sum(m2, axis=0) >= target, c2, found)
        found = tl.where(tl.sum(m3, axis=0) >= target, c3, found)
    return found


@triton.jit
def _draw_from_thresholds(
    logits_row, peak, t, k, p, min_p, seed, position,
    vocab: tl.constexpr, chunks: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A token of the whole row, truncated by thresholds that are searched for."""
    top = tl.div_rn(peak, t)
    kth = tl.full([], 0, tl.uint32)
    if k > 0:
        count = tl.minimum(k, vocab).to(tl.float32)
        kth = _threshold(logits_row, t, top, kth, count, vocab, chunks, BLOCK, BITS, False)
    nucleus = kth
    if p < 1:
        total = tl.zeros([BLOCK], tl.float32)
        for chunk in range(chunks):
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
            scaled = tl.div_rn(x, t)
            total += tl.where(_ordered(scaled) >= kth, tl.exp(scaled - top), 0.0)
        mass = tl.maximum(p * tl.sum(total, axis=0), 1.1754943508222875e-38)
        nucleus = _threshold(logits_row, t, top, kth, mass, vocab, chunks, BLOCK, BITS, True)
    noisy_peak = -float("inf")
    token = 0x7FFFFFFF
    for chunk in range(chunks):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
        scaled = tl.div_rn(x, t)
        key = _ordered(scaled)
        keep = (key >= kth) & (key >= nucleus) & (tl.exp(scaled - top) >= min_p)
        noisy = tl.where(keep, scaled + _gumbel(seed, position, ids), -float("inf"))
        value, best = _best(noisy, ids)
        token = tl.where(value > noisy_peak, best, token)
        noisy_peak = tl.maximum(noisy_peak, value)
    return token


@triton.jit
def _select(
    logits_ptr, flags_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    position_ptr, floats_ptr, ids_ptr, token_ptr, logprob_ptr, top_ids_ptr, top_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr, alternatives: tl.constexpr,
    MIN_T: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_row = logits_ptr + row.to(tl.int64) * stride
    chunk = tl.arange(0, CHUNKS)
    part = (row * chunks + chunk) * 3
    real = chunk < chunks
    peaks = tl.load(floats_ptr + part, mask=real, other=-float("inf"))
    peak, token = _best(peaks, tl.load(ids_ptr + part, mask=real, other=0x7FFFFFFF))
    masses = tl.load(floats_ptr + part + 1, mask=real, other=0.0)
    norm = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))

    flags = tl.load(flags_ptr + row)
    t = tl.load(temperature_ptr + row)
    if (flags & 1 != 0) & (t > 0):
        t = tl.maximum(t, MIN_T)
        k = tl.load(top_k_ptr + row)
        p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        if (k <= 0) & (p >= 1) & (min_p <= 0):
            noisy = tl.load(floats_ptr + part + 2, mask=real, other=-float("inf"))
            token = _best(noisy, tl.load(ids_ptr + part + 1, mask=real, other=0x7FFFFFFF))[1]
        elif (k > 0) & (k <= LIST):
            token = _draw_from_list(
                logits_row, peaks, t, k, p, min_p, seed, position, vocab, BLOCK, CHUNKS, LIST
            )
        else:
            token = _draw_from_thresholds(
                logits_row, peak, t, k, p, min_p, seed, position, vocab, chunks, BLOCK, BITS
            )
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, tl.load(logits_row + token) - norm)
    if flags & 2 != 0:
        last = float("inf")
        last_id = -1
        for index in range(alternatives):
            last, last_id, peaks = _take(logits_row, peaks, last, last_id, vocab, BLOCK, CHUNKS)
            tl.store(top_ids_ptr + row * alternatives + index, last_id)
            tl.store(top_ptr + row * alternatives + index, last - norm)


def sample(
    logits: Array, rows: RowSampling, wanted: Array, *, vocab: int, alternatives: int
) -> tuple[Array, Logprobs]:
    num_rows, stride = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    flags = rows.active.astype(jnp.int32) * _ACTIVE + wanted.astype(jnp.int32) * _WANTED
    shared: dict[str, Any] = {
        "vocab": vocab, "stride": stride, "chunks": chunks,
        "MIN_T": MIN_TEMPERATURE, "BLOCK": _CHUNK, "num_warps": 8,
    }  # fmt: skip
    inputs = (logits, flags, *rows[1:])
    parts = (num_rows * chunks * 3,)
    floats, ids = triton_call(
        *inputs,
        kernel=_scan,
        name="sampler_scan",
        out_type=(
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
        ),
        grid=(num_rows, chunks),
        **shared,
    )
    token, logprob, top_ids, top = triton_call(
        *inputs,
        floats,
        ids,
        kernel=_select,
        name="sampler_select",
        out_type=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, alternatives), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, alternatives), jnp.float32),
        ),
        grid=(num_rows,),
        alternatives=alternatives,
        BITS=RADIX_BITS,
        LIST=_LIST,
        CHUNKS=triton.next_power_of_2(chunks),
        **shared,
    )
    return token, Logprobs(logprob, top_ids, top)
