"""The sampler as two kernels: a scan of the vocabulary in parallel, then one program per row.

The scan leaves each chunk's maximum, its place, and its share of the softmax sum; a row that only
wants the most likely token, or draws from the whole distribution, needs no more than to merge them.
A row with a small top_k takes its tokens one by one, each from the chunk whose maximum is largest;
other truncations search their threshold digit by digit over the row. Nothing is sorted.

For a row that adjusts its scores the scan also writes the adjusted ones, and the choice reads those
instead. They are scratch that other rows never touch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.sampler.adjust import (
    MAX_BIASES,
    SUPPRESSED,
    RowAdjustments,
    SlotTables,
)
from jaxserve_kernels.sampler.reference import (
    MIN_TEMPERATURE,
    RADIX_BITS,
    Logprobs,
    RowSampling,
    Sample,
    TokenScores,
    ranks,
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
def _add_biases(x, ids, first, position, list_ptr, BLOCK: tl.constexpr, BIASES: tl.constexpr):
    """Scores of the tokens `first + arange(BLOCK)` with their slot's biases."""
    entries = tl.load(list_ptr + tl.arange(0, BIASES))
    start = tl.sum((entries < first).to(tl.int32), axis=0)
    end = tl.sum((entries < first + BLOCK).to(tl.int32), axis=0)
    for entry in range(start, end):
        token = tl.load(list_ptr + entry)
        value = tl.load(list_ptr + BIASES + entry).to(tl.float32, bitcast=True)
        until = tl.load(list_ptr + 2 * BIASES + entry)
        x += tl.where((ids == token) & (position < until), value, 0.0)
    return x


@triton.jit
def _penalise(x, counts, presence, frequency, repetition, LOWEST: tl.constexpr):
    output = (counts & 0x7FFF).to(tl.float32)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    lower = tl.where(counts != 0, repeated, x)
    lower = lower - frequency * output
    lower = lower - tl.where(output > 0, presence, 0.0)
    return tl.minimum(tl.maximum(lower, LOWEST), -LOWEST)


@triton.jit
def _scan(
    logits_ptr, flags_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    position_ptr, features_ptr, slots_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    counts_ptr, biases_ptr, masks_ptr, floats_ptr, ids_ptr, adjusted_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr,
    count_stride: tl.constexpr, mask_stride: tl.constexpr, BIASES: tl.constexpr,
    MIN_T: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    first = chunk * BLOCK
    ids = first + tl.arange(0, BLOCK)
    real = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=real, other=-float("inf"))
    peak, best = _best(x, ids)
    part = (row * chunks + chunk) * 4
    tl.store(floats_ptr + part, peak)
    tl.store(floats_ptr + part + 1, tl.sum(tl.exp(x - tl.maximum(peak, -1.0e38)), axis=0))
    tl.store(ids_ptr + part, best)
    position = tl.load(position_ptr + row)
    features = tl.load(features_ptr + row)
    if features != 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if features & 2 != 0:
            x = _add_biases(
                x, ids, first, position, biases_ptr + slot * (3 * BIASES), BLOCK, BIASES
            )
        if features & 1 != 0:
            counts = tl.load(counts_ptr + slot * count_stride + ids, mask=real, other=0)
            x = _penalise(
                x, counts.to(tl.int32), tl.load(presence_ptr + row), tl.load(frequency_ptr + row),
                tl.load(repetition_ptr + row), LOWEST,
            )  # fmt: skip
        if features & 4 != 0:
            words = tl.load(masks_ptr + slot * mask_stride + ids // 32, mask=real, other=0)
            x = tl.where((words >> (ids % 32)) & 1 != 0, x, -float("inf"))
        x = tl.where(real, x, -float("inf"))
        tl.store(adjusted_ptr + row.to(tl.int64) * stride + ids, x, mask=real)
        peak, best = _best(x, ids)
    tl.store(floats_ptr + part + 3, peak)
    tl.store(ids_ptr + part + 2, best)
    t = tl.load(temperature_ptr + row)
    whole = (tl.load(top_k_ptr + row) <= 0) & (tl.load(top_p_ptr + row) >= 1)
    whole = whole & (tl.load(min_p_ptr + row) <= 0)
    if (tl.load(flags_ptr + row) & 1 != 0) & (t > 0) & whole:
        noise = _gumbel(tl.load(seed_ptr + row), position, ids)
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
    position_ptr, features_ptr, slots_ptr, floats_ptr, ids_ptr, adjusted_ptr, counts_ptr,
    token_ptr, logprob_ptr, top_ids_ptr, top_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr, alternatives: tl.constexpr,
    count_stride: tl.constexpr, MIN_T: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_row = logits_ptr + row.to(tl.int64) * stride
    chunk = tl.arange(0, CHUNKS)
    part = (row * chunks + chunk) * 4
    real = chunk < chunks
    peaks = tl.load(floats_ptr + part, mask=real, other=-float("inf"))
    peak = tl.max(peaks, axis=0)
    masses = tl.load(floats_ptr + part + 1, mask=real, other=0.0)
    norm = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))

    flags = tl.load(flags_ptr + row)
    features = tl.load(features_ptr + row)
    # What the choice is made from: the adjusted scores, where there are any.
    scores_row = logits_row
    if features != 0:
        scores_row = adjusted_ptr + row.to(tl.int64) * stride
    score_peaks = tl.load(floats_ptr + part + 3, mask=real, other=-float("inf"))
    best_ids = tl.load(ids_ptr + part + 2, mask=real, other=0x7FFFFFFF)
    score_peak, token = _best(score_peaks, best_ids)
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
                scores_row, score_peaks, t, k, p, min_p, seed, position,
                vocab, BLOCK, CHUNKS, LIST,
            )  # fmt: skip
        else:
            token = _draw_from_thresholds(
                scores_row, score_peak, t, k, p, min_p, seed, position,
                vocab, chunks, BLOCK, BITS,
            )  # fmt: skip
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, tl.load(logits_row + token) - norm)
    if (flags & 1 != 0) & (features & 1 != 0):
        counter = counts_ptr + tl.load(slots_ptr + row).to(tl.int64) * count_stride + token
        count = tl.load(counter).to(tl.int32)
        tl.store(counter, tl.where(count & 0x7FFF == 0x7FFF, count, count + 1).to(tl.int16))
    if flags & 2 != 0:
        last = float("inf")
        last_id = -1
        for index in range(alternatives):
            last, last_id, peaks = _take(logits_row, peaks, last, last_id, vocab, BLOCK, CHUNKS)
            tl.store(top_ids_ptr + row * alternatives + index, last_id)
            tl.store(top_ptr + row * alternatives + index, last - norm)


def sample(
    logits: Array,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    wanted: Array,
    *,
    vocab: int,
    alternatives: int,
) -> Sample:
    num_rows, stride = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    flags = rows.active.astype(jnp.int32) * _ACTIVE + wanted.astype(jnp.int32) * _WANTED
    shared: dict[str, Any] = {
        "vocab": vocab, "stride": stride, "chunks": chunks, "count_stride": tables.counts.shape[1],
        "MIN_T": MIN_TEMPERATURE, "BLOCK": _CHUNK, "num_warps": 8,
    }  # fmt: skip
    inputs = (logits, flags, *rows[1:])
    parts = (num_rows * chunks * 4,)
    floats, ids, adjusted = triton_call(
        *inputs,
        *adjustments,
        *tables,
        kernel=_scan,
        name="sampler_scan",
        out_type=(
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
            jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        ),
        grid=(num_rows, chunks),
        mask_stride=tables.masks.shape[1],
        BIASES=MAX_BIASES,
        LOWEST=SUPPRESSED,
        **shared,
    )
    counts = jax.new_ref(tables.counts)
    token, logprob, top_ids, top = triton_call(
        *inputs,
        adjustments.features,
        adjustments.slots,
        floats,
        ids,
        adjusted,
        counts,
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
    tables = tables._replace(counts=jax.freeze(counts))
    return Sample(token, Logprobs(logprob, top_ids, top), tables)


def score(logits: Array, tokens: Array, *, vocab: int, alternatives: int) -> TokenScores:
    """The alternatives by the kernels, of rows that do not sample; the rest is one pass by XLA."""
    zeros, ones = jnp.zeros(tokens.shape, jnp.int32), jnp.ones(tokens.shape, jnp.float32)
    rows = RowSampling(zeros != 0, 0 * ones, zeros, ones, 0 * ones, zeros, zeros)
    adjustments = RowAdjustments(zeros, zeros, ones, ones, ones)
    unread = SlotTables(*(jnp.zeros((1, 8), dtype) for dtype in (jnp.int16, jnp.int32, jnp.int32)))
    _, (_, top_ids, top), _ = sample(
        logits, rows, adjustments, unread, zeros == 0, vocab=vocab, alternatives=alternatives
    )
    logits = jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)
    logprob = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprob -= jax.nn.logsumexp(logits, axis=-1)
    return TokenScores(logprob, ranks(logits, tokens), top_ids, top)
