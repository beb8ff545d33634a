"""The sampler's first kernel: adjusted scores, and each chunk's maximum and share of the sums."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.sampler.triton_parts import (
    ACTIVE,
    BIASED,
    MASKED,
    MASS,
    MAX_COUNT,
    NOISY,
    NOISY_ID,
    PARTS,
    PEAK,
    PEAK_ID,
    PENALISED,
    SCORE,
    SCORE_ID,
    SCORE_MASS,
    gumbel,
    largest,
)


@triton.jit
def _add_biases(x, ids, first, position, list_ptr, BLOCK: tl.constexpr, BIASES: tl.constexpr):
    """Adds the slot's biases to the scores x of the tokens `first + arange(BLOCK)`."""
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
    output = (counts & MAX_COUNT).to(tl.float32)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    lower = tl.where(counts != 0, repeated, x)
    lower = lower - frequency * output
    lower = lower - tl.where(output > 0, presence, 0.0)
    lower = tl.minimum(tl.maximum(lower, LOWEST), -LOWEST)
    return tl.where(x > -float("inf"), lower, x)


@triton.jit
def scan(
    logits_ptr, flags_ptr, temperature_ptr, top_k_ptr, top_p_ptr, _min_p_ptr, seed_ptr,
    position_ptr, features_ptr, slots_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    counts_ptr, biases_ptr, masks_ptr, floats_ptr, ids_ptr, adjusted_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr,
    count_stride: tl.constexpr, mask_stride: tl.constexpr, BIASES: tl.constexpr,
    MIN_T: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk of BLOCK logits. It adjusts them, and stores the chunk's
    results for `select` (`triton_parts`)."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    flags = tl.load(flags_ptr + row)
    if flags == 0:
        return
    first = chunk * BLOCK
    ids = first + tl.arange(0, BLOCK)
    real = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + ids, mask=real, other=-float("inf"))
    peak, best = largest(x, ids)
    part = (row * chunks + chunk) * PARTS
    tl.store(floats_ptr + part + PEAK, peak)
    tl.store(floats_ptr + part + MASS, tl.sum(tl.exp(x - tl.maximum(peak, -1.0e38)), axis=0))
    tl.store(ids_ptr + part + PEAK_ID, best)
    position = tl.load(position_ptr + row)
    features = tl.load(features_ptr + row)
    if features != 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if features & BIASED != 0:
            x = _add_biases(
                x, ids, first, position, biases_ptr + slot * (3 * BIASES), BLOCK, BIASES
            )
        if features & PENALISED != 0:
            counts = tl.load(counts_ptr + slot * count_stride + ids, mask=real, other=0)
            x = _penalise(
                x, counts.to(tl.int32), tl.load(presence_ptr + row), tl.load(frequency_ptr + row),
                tl.load(repetition_ptr + row), LOWEST,
            )  # fmt: skip
        if features & MASKED != 0:
            words = tl.load(masks_ptr + slot * mask_stride + ids // 32, mask=real, other=0)
            x = tl.where((words >> (ids % 32)) & 1 != 0, x, -float("inf"))
        x = tl.where(real, x, -float("inf"))
        tl.store(adjusted_ptr + row.to(tl.int64) * stride + ids, x, mask=real)
        peak, best = largest(x, ids)
    tl.store(floats_ptr + part + SCORE, peak)
    tl.store(ids_ptr + part + SCORE_ID, best)
    t = tl.load(temperature_ptr + row)
    if (flags & ACTIVE != 0) & (t > 0) & (tl.load(top_k_ptr + row) <= 0):
        scaled = tl.div_rn(x, tl.maximum(t, MIN_T))
        noise = gumbel(tl.load(seed_ptr + row), position, ids)
        noisy_peak, noisy_best = largest(scaled + noise, ids)
        tl.store(floats_ptr + part + NOISY, noisy_peak)
        tl.store(ids_ptr + part + NOISY_ID, noisy_best)
        if tl.load(top_p_ptr + row) < 1:
            highest = tl.maximum(tl.max(scaled, axis=0), -1.0e38)
            tl.store(floats_ptr + part + SCORE_MASS, tl.sum(tl.exp(scaled - highest), axis=0))
