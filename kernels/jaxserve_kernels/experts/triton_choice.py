"""The router's choice inside another kernel: each program finds its expert from all scores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

REMOVED = gl.constexpr(-(2**31))
"""Key of a score that was already chosen: below the key of any score."""


@gluon.jit
def key_of(score):
    """An integer of the same order as the float32 score, because a warp finds the largest integer
    in one instruction."""
    bits = score.to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def score_of(key):
    """The score of a key: see `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _choices(
    scores_ptr, bias_ptr, experts: gl.constexpr, K: gl.constexpr, EXPERTS: gl.constexpr,
    SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A token's K experts, their weights, and a number by which the weights are divided.

    Each warp looks at all scores. They are read from the L2 cache: the multiprocessor's own cache
    may still hold an earlier layer's scores at the same address.
    """
    lane = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0]))
    there = lane < experts
    scores = gl.load(scores_ptr + lane, mask=there, other=0.0, cache_modifier=".cg")
    if BIAS:
        scores += gl.load(bias_ptr + lane, mask=there, other=0.0).to(gl.float32)
    scores = gl.where(scores == scores, scores + 0.0, float("-inf"))  # -0.0 is 0.0
    keys = gl.where(there, key_of(scores), REMOVED)
    largest = score_of(gl.max(keys, axis=0))
    total = 0.0 if NORMALIZE else 1.0
    if not NORMALIZE and not SIGMOID:
        total = gl.sum(gl.where(there, gl.exp(scores - largest), 0.0), axis=0)
    found = ()
    weights = ()
    for _ in gl.static_range(K):
        key = gl.max(keys, axis=0)
        expert = gl.min(gl.where(keys == key, lane, EXPERTS), axis=0)
        keys = gl.where(lane == expert, REMOVED, keys)
        score = score_of(key)
        weight = 1.0 / (1.0 + gl.exp(-score)) if SIGMOID else gl.exp(score - largest)
        if NORMALIZE:
            total += weight
        found = found + (expert,)  # noqa: RUF005  (Triton knows no other way)
        weights = weights + (weight,)  # noqa: RUF005
    return found, weights, total


@gluon.jit
def chosen(
    scores_ptr, bias_ptr, pair, tokens: gl.constexpr, columns: gl.constexpr, experts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    BIAS: gl.constexpr, SHARED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Finds the expert of a (token, choice) pair: see `reference.route`.

    Returns the expert; whether no earlier token has chosen it; and for each token, as tuples, which
    choice of the token it is, -1 if none, and its weight.

    SHARED: the pair after the last one is the shared expert, choice K of every token.
    """
    found = ()
    weights = ()
    totals = ()
    for token in gl.static_range(tokens):
        own, own_weights, total = _choices(
            scores_ptr + token * columns, bias_ptr, experts, K, EXPERTS, SIGMOID, NORMALIZE, BIAS,
            WARPS,
        )  # fmt: skip
        found = found + own
        weights = weights + own_weights
        totals = totals + (total,)  # noqa: RUF005
    expert = pair * 0
    for index in gl.static_range(tokens * K):
        expert = gl.where(pair == index, found[index], expert)
    is_shared = pair == tokens * K
    first = pair >= 0
    choices = ()
    chosen_weights = ()
    for token in gl.static_range(tokens):
        choice = pair * 0 - 1
        weight = 0.0
        for index in gl.static_range(K):
            own = found[token * K + index] == expert
            choice = gl.where(own, index, choice)
            weight = gl.where(own, weights[token * K + index], weight)
        weight /= totals[token]
        first = first & ((choice < 0) | (token >= pair // K))
        if SHARED:
            score = gl.load(scores_ptr + token * columns + experts, cache_modifier=".cg")
            choice = gl.where(is_shared, K, choice)
            weight = gl.where(is_shared, 1.0 / (1.0 + gl.exp(-score)), weight)
        choices = choices + (choice,)  # noqa: RUF005
        chosen_weights = chosen_weights + (weight,)  # noqa: RUF005
    return expert, first | (is_shared & SHARED), choices, chosen_weights


@gluon.jit
def of_columns(values, tokens: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Values of tokens, as those of a product's columns; 0 after the last token's."""
    column = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    every = column * 0
    for token in gl.static_range(tokens):
        every = gl.where(column == token, values[token], every)
    return every
