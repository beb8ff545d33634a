"""A router's choice by those who need it: each program finds its expert from all scores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_REMOVED = gl.constexpr(-(2**31))
"""Below the key of any score."""


@gluon.jit
def _score(key):
    """Of `chosen`'s integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def chosen(
    scores_ptr, bias_ptr, pair, tokens: gl.constexpr, columns: gl.constexpr, experts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    BIAS: gl.constexpr, SHARED: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The expert of a pair of a token and a choice; whether no token before it has the expert;
    which choice of each token it is, or -1, and with what weight: see `reference.route`.

    SHARED: the pair after the last is that of the expert that all tokens have, as choice K.

    A warp looks at all scores of its tokens, as integers of the same order: it has the largest
    integer in one instruction. Scores come from the cache that all multiprocessors share: this
    one's own may still have what an earlier layer had in the same place.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, EXPERTS // 32], [1, 32], [WARPS, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    lane = gl.arange(0, EXPERTS, gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(lane < experts, token[:, None])
    at = gl.minimum(token, tokens - 1)[:, None] * columns + lane
    scores = gl.load(scores_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
    if BIAS:
        scores += gl.load(bias_ptr + lane, mask=lane < experts, other=0.0).to(gl.float32)
    scores = gl.where(scores == scores, scores + 0.0, float("-inf"))  # -0.0 is 0.0
    bits = scores.to(gl.int32, bitcast=True)
    keys = gl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _REMOVED)
    largest = _score(gl.max(keys, axis=1))
    total = gl.zeros_like(largest)
    if not NORMALIZE and not SIGMOID:
        total = gl.sum(gl.where(there, gl.exp(scores - largest[:, None]), 0.0), axis=1)
    found = ()
    weights = ()
    of_pair = token * 0
    for index in gl.static_range(K):
        key = gl.max(keys, axis=1)
        expert = gl.min(gl.where(keys == key[:, None], lane, EXPERTS), axis=1)
        keys = gl.where(lane == expert[:, None], _REMOVED, keys)
        score = _score(key)
        weight = 1.0 / (1.0 + gl.exp(-score)) if SIGMOID else gl.exp(score - largest)
        if NORMALIZE:
            total += weight
        found = found + (expert,)  # noqa: RUF005  (Triton knows no other way)
        weights = weights + (weight,)  # noqa: RUF005
        of_pair = gl.where(pair % K == index, expert, of_pair)
    expert = gl.sum(gl.where(token == pair // K, of_pair, 0), axis=0)
    choice = token * 0 - 1
    weight = gl.zeros_like(total)
    for index in gl.static_range(K):
        own = (found[index] == expert) & (token < tokens)
        choice = gl.where(own, index, choice)
        weight = gl.where(own, weights[index], weight)
    if NORMALIZE or not SIGMOID:
        weight /= total
    first = gl.min(gl.where(choice >= 0, token, TOKENS), axis=0) == pair // K
    if SHARED:
        shared = pair == tokens * K
        at = gl.minimum(token, tokens - 1) * columns + experts
        score = gl.load(scores_ptr + at, cache_modifier=".cg")
        first = first | shared
        choice = gl.where(shared & (token < tokens), K, choice)
        weight = gl.where(shared, 1.0 / (1.0 + gl.exp(-score)), weight)
    return expert, first, choice, weight
