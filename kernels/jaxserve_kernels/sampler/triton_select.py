"""The sampler's second kernel: one program per row chooses a token from the scan's results."""

from __future__ import annotations

import triton
import triton.language as tl

from jaxserve_kernels.sampler.triton_parts import (
    ACTIVE,
    MASS,
    MAX_COUNT,
    NOISY,
    NOISY_ID,
    PARTS,
    PEAK,
    PENALISED,
    SCORE,
    SCORE_ID,
    SCORE_MASS,
    TINY,
    WANTED,
    gumbel,
    largest,
    ordered,
)


@triton.jit
def _take(logits_row, peaks, last, last_id, vocab: tl.constexpr, BLOCK: tl.constexpr,
          CHUNKS: tl.constexpr):  # fmt: skip
    """The next token by falling logit and rising id, and the chunks' maxima without it.

    `last` and `last_id` are the logit and id of the previous token. All tokens up to it in that
    order have been taken.
    """
    chunk = tl.arange(0, CHUNKS)
    value, home = largest(peaks, chunk)
    home = tl.minimum(home, CHUNKS - 1)  # if all peaks are NaN, none is the largest
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
    """Draws from the k most likely tokens and those that tie with the last, at most LIST in all."""
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
    inside = (before < tl.maximum(p * total, TINY)) & (values > -float("inf"))
    lowest = tl.min(tl.where(inside, scaled, float("inf")), axis=0)
    keep = ((scaled >= lowest) | (p >= 1)) & (weights >= min_p) & (values > -float("inf"))
    noisy = tl.where(keep, scaled + gumbel(seed, position, tokens), -float("inf"))
    return largest(noisy, tokens)[1]


@triton.jit
def _draw_from_nucleus(
    logits_row, token, top, mass, t, min_p, seed, position,
    vocab: tl.constexpr, chunks: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws from the tokens that top_p (as `mass`) and min_p keep. Both are in units of the largest
    weight. `token` has the largest noisy score of all tokens.

    A token is excluded if the tokens above it reach the mass; all tokens below it are then excluded
    too. So no threshold is searched: while the token is excluded, the next candidate is the token
    with the largest noisy score among those above it. The first candidate is kept with probability
    of about top_p.
    """
    more = True
    while more:
        value = tl.div_rn(tl.load(logits_row + token), t)
        more = tl.exp(value - top) < min_p
        if (mass < float("inf")) & (more == 0):
            above = tl.zeros([BLOCK], tl.float32)
            for chunk in range(chunks):
                ids = chunk * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
                scaled = tl.div_rn(x, t)
                above += tl.where(scaled > value, tl.exp(scaled - top), 0.0)
            more = tl.sum(above, axis=0) >= mass
        if more:
            noisy_peak = -float("inf")
            for chunk in range(chunks):
                ids = chunk * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
                scaled = tl.div_rn(x, t)
                noise = gumbel(seed, position, ids)
                likely = (scaled > value) & (tl.exp(scaled - top) >= min_p)
                noisy = tl.where(likely, scaled + noise, -float("inf"))
                peak, best = largest(noisy, ids)
                token = tl.where(peak > noisy_peak, best, token)
                noisy_peak = tl.maximum(noisy_peak, peak)
            more = noisy_peak > -float("inf")  # true unless scores are infinite
    return token


@triton.jit
def _threshold(
    logits_row, t, peak, floor, target, vocab: tl.constexpr, chunks: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens at or above it, and above `floor`, weigh at least
    `target`."""
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
            key = ordered(scaled)
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
    """Draws a token from the whole row, truncated at thresholds found by radix search."""
    top = tl.div_rn(peak, t)
    kth = tl.full([], 0, tl.uint32)
    count = tl.minimum(k, vocab).to(tl.float32)
    kth = _threshold(logits_row, t, top, kth, count, vocab, chunks, BLOCK, BITS, False)
    nucleus = kth
    if p < 1:
        total = tl.zeros([BLOCK], tl.float32)
        for chunk in range(chunks):
            ids = chunk * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
            scaled = tl.div_rn(x, t)
            total += tl.where(ordered(scaled) >= kth, tl.exp(scaled - top), 0.0)
        mass = tl.maximum(p * tl.sum(total, axis=0), TINY)
        nucleus = _threshold(logits_row, t, top, kth, mass, vocab, chunks, BLOCK, BITS, True)
    noisy_peak = -float("inf")
    token = 0x7FFFFFFF
    for chunk in range(chunks):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_row + ids, mask=ids < vocab, other=-float("inf"))
        scaled = tl.div_rn(x, t)
        key = ordered(scaled)
        keep = (key >= kth) & (key >= nucleus) & (tl.exp(scaled - top) >= min_p)
        noisy = tl.where(keep, scaled + gumbel(seed, position, ids), -float("inf"))
        value, best = largest(noisy, ids)
        token = tl.where(value > noisy_peak, best, token)
        noisy_peak = tl.maximum(noisy_peak, value)
    return token


@triton.jit
def _existing(token, vocab: tl.constexpr):
    """Clamps the token to the vocabulary. If scores are NaN, no valid token may have been chosen,
    but its logit is read and its count is written. The row's logprob is NaN."""
    return tl.where((token >= 0) & (token < vocab), token, 0)


@triton.jit
def select(
    logits_ptr, flags_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    position_ptr, features_ptr, slots_ptr, floats_ptr, ids_ptr, adjusted_ptr, counts_ptr,
    token_ptr, logprob_ptr, top_ids_ptr, top_ptr,
    vocab: tl.constexpr, stride: tl.constexpr, chunks: tl.constexpr, alternatives: tl.constexpr,
    count_stride: tl.constexpr, MIN_T: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per row: draws the token from the results of `scan`, and finds its logprob and
    the most likely alternatives."""
    row = tl.program_id(0)
    flags = tl.load(flags_ptr + row)
    if flags == 0:
        tl.store(token_ptr + row, 0)
        tl.store(logprob_ptr + row, 0.0)
        return
    logits_row = logits_ptr + row.to(tl.int64) * stride
    chunk = tl.arange(0, CHUNKS)
    part = (row * chunks + chunk) * PARTS
    real = chunk < chunks
    peaks = tl.load(floats_ptr + part + PEAK, mask=real, other=-float("inf"))
    peak = tl.max(peaks, axis=0)
    masses = tl.load(floats_ptr + part + MASS, mask=real, other=0.0)
    norm = peak + tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))

    features = tl.load(features_ptr + row)
    # The choice is made from the adjusted scores, if the row has any.
    scores_row = logits_row
    if features != 0:
        scores_row = adjusted_ptr + row.to(tl.int64) * stride
    score_peaks = tl.load(floats_ptr + part + SCORE, mask=real, other=-float("inf"))
    best_ids = tl.load(ids_ptr + part + SCORE_ID, mask=real, other=0x7FFFFFFF)
    score_peak, token = largest(score_peaks, best_ids)
    t = tl.load(temperature_ptr + row)
    if (flags & ACTIVE != 0) & (t > 0):
        t = tl.maximum(t, MIN_T)
        k = tl.load(top_k_ptr + row)
        p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        if k <= 0:
            noisy = tl.load(floats_ptr + part + NOISY, mask=real, other=-float("inf"))
            noisy_ids = tl.load(ids_ptr + part + NOISY_ID, mask=real, other=0x7FFFFFFF)
            token = _existing(largest(noisy, noisy_ids)[1], vocab)
            if (p < 1) | (min_p > 0):
                top = tl.div_rn(score_peak, t)
                mass = float("inf")
                if p < 1:
                    shares = tl.load(floats_ptr + part + SCORE_MASS, mask=real, other=0.0)
                    weights = tl.exp(tl.div_rn(score_peaks, t) - top)
                    mass = tl.maximum(p * tl.sum(shares * weights, axis=0), TINY)
                token = _draw_from_nucleus(
                    scores_row, token, top, mass, t, min_p, seed, position,
                    vocab, chunks, BLOCK,
                )  # fmt: skip
        elif k <= LIST:
            token = _draw_from_list(
                scores_row, score_peaks, t, k, p, min_p, seed, position,
                vocab, BLOCK, CHUNKS, LIST,
            )  # fmt: skip
        else:
            token = _draw_from_thresholds(
                scores_row, score_peak, t, k, p, min_p, seed, position,
                vocab, chunks, BLOCK, BITS,
            )  # fmt: skip
    token = _existing(token, vocab)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, tl.load(logits_row + token) - norm)
    if (flags & ACTIVE != 0) & (features & PENALISED != 0):
        counter = counts_ptr + tl.load(slots_ptr + row).to(tl.int64) * count_stride + token
        count = tl.load(counter).to(tl.int32)
        tl.store(counter, tl.where(count & MAX_COUNT == MAX_COUNT, count, count + 1).to(tl.int16))
    if flags & WANTED != 0:
        last = float("inf")
        last_id = -1
        for index in range(alternatives):
            last, last_id, peaks = _take(logits_row, peaks, last, last_id, vocab, BLOCK, CHUNKS)
            tl.store(top_ids_ptr + row * alternatives + index, last_id)
            tl.store(top_ptr + row * alternatives + index, last - norm)
