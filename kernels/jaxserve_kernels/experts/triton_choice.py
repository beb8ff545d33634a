"""The router's choice inside another kernel: each program finds its expert from all scores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_REMOVED = gl.constexpr(-(2**31))
"""Key of a score that was already chosen: below the key of any score."""


@gluon.jit
def _score(key):
    """The score of a key: see `chosen`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def chosen(
    scores_ptr, bias_ptr, pair, tokens: gl.constexpr, columns: gl.constexpr, experts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    BIAS: gl.constexpr, SHARED: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Finds the expert of a (token, choice) pair: see `reference.route`.

    Returns the expert; whether no earlier token has chosen it; which choice of each token it is, -1
    if none; and its weight for each token.

    SHARED: the pair after the last one is the shared expert, choice K of every token.

    A warp looks at all scores of its tokens. It maps them to integers (keys) of the same order,
    because it can find the largest integer in one instruction. Scores are read from the L2 cache:
    the multiprocessor's own cache may still hold an earlier layer's scores at the same address.
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
