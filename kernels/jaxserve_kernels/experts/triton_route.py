"""The router's choice of experts, and the sort of (token, expert) pairs by expert.

Both run inside a step's launch chain. For few tokens one program does both. No kernel sorts: the
place of a pair is the number of pairs before it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.experts.config import limits_of
from jaxserve_kernels.experts.triton_choice import REMOVED, key_of, score_of
from jaxserve_kernels.experts.types import Order, Routes, Routing
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@gluon.jit
def _best(
    logits, columns, keys, K: gl.constexpr, CHOICES: gl.constexpr, SIGMOID: gl.constexpr,
    NORMALIZE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The K largest logits of each row: expert ids and weights, [rows, CHOICES]."""
    TOKENS: gl.constexpr = keys.shape[0]
    EXPERTS: gl.constexpr = keys.shape[1]
    each: gl.constexpr = gl.BlockedLayout([1, CHOICES], [1, 32], [WARPS, 1], [1, 0])
    own: gl.constexpr = gl.SliceLayout(1, each)
    choice = gl.arange(0, CHOICES, gl.SliceLayout(0, each))[None, :]
    ids = gl.zeros([TOKENS, CHOICES], gl.int32, each)
    best = gl.full([TOKENS, CHOICES], REMOVED, gl.int32, each)
    for index in gl.static_range(K):
        most = gl.max(keys, axis=1)
        expert = gl.min(gl.where(keys == most[:, None], columns, EXPERTS), axis=1)
        keys = gl.where(columns == expert[:, None], REMOVED, keys)
        ids = gl.where(choice == index, gl.convert_layout(expert, own)[:, None], ids)
        best = gl.where(choice == index, gl.convert_layout(most, own)[:, None], best)
    chosen = gl.where(choice < K, score_of(best), float("-inf"))
    largest = gl.max(chosen, axis=1)
    if SIGMOID:
        weights = gl.where(choice < K, 1.0 / (1.0 + gl.exp(-chosen)), 0.0)
    else:
        weights = gl.exp(chosen - largest[:, None])
    if NORMALIZE:
        weights /= gl.sum(weights, axis=1)[:, None]
    elif not SIGMOID:
        over = gl.convert_layout(largest, gl.SliceLayout(1, keys.type.layout))[:, None]
        total = gl.sum(gl.exp(logits - over), axis=1)
        weights /= gl.convert_layout(total, own)[:, None]
    return ids, weights


@gluon.jit
def _store_order(
    ids, there, pair, order_ptr, ends_ptr, experts: gl.constexpr, EXPERTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """See `order`. All pairs: their experts, whether they exist, and their numbers."""
    PAIRS: gl.constexpr = ids.shape[0]
    every: gl.constexpr = gl.BlockedLayout([1, PAIRS // 4], [8, 4], [WARPS, 1], [1, 0])
    # No two pairs have the same rank. Pairs that do not exist come last.
    rank = gl.where(there, ids, EXPERTS) * PAIRS + gl.arange(0, PAIRS, ids.type.layout)
    other = gl.convert_layout(rank, gl.SliceLayout(0, every))[None, :]
    rows: gl.constexpr = gl.SliceLayout(1, every)
    mine = gl.convert_layout(rank, rows)[:, None]
    place = gl.sum((other < mine).to(gl.int32), axis=1)
    stored = gl.convert_layout(there.to(gl.int32), rows) > 0
    gl.store(order_ptr + place, gl.convert_layout(pair, rows), mask=stored)
    expert = gl.arange(0, EXPERTS, rows)
    end = gl.sum((other < (expert * PAIRS + PAIRS)[:, None]).to(gl.int32), axis=1)
    gl.store(ends_ptr + expert, end, mask=expert < experts)


@gluon.jit
def _route(
    logits_ptr, bias_ptr, active_ptr, tokens, ids_ptr, weights_ptr, order_ptr, ends_ptr,
    experts: gl.constexpr, columns: gl.constexpr, parts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, CHOICES: gl.constexpr, SIGMOID: gl.constexpr,
    NORMALIZE: gl.constexpr, BIAS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
    ORDER: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """TOKENS tokens, a warp for each. NaN counts as -inf. ORDER: the program has all tokens."""
    each: gl.constexpr = EXPERTS // 32 if columns % 4 == 0 else 1  # else rows are not aligned
    layout: gl.constexpr = gl.BlockedLayout([1, each], [1, 32], [WARPS, 1], [1, 0])
    token = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    lane = gl.arange(0, EXPERTS, gl.SliceLayout(0, layout))[None, :]
    token, lane = gl.broadcast(token, lane)
    there = (lane < experts) & (token < tokens)
    own: gl.constexpr = gl.BlockedLayout([1, CHOICES], [1, 32], [WARPS, 1], [1, 0])
    row = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, own))[:, None]
    if active_ptr is not None:
        active = gl.load(active_ptr + row, mask=row < tokens, other=0) != 0
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    logits = gl.zeros([TOKENS, EXPERTS], gl.float32, layout)
    for part in gl.static_range(parts):
        at = logits_ptr + (part * tokens + token) * columns + lane
        logits += gl.load(at, mask=there, other=0.0)
    if BIAS:
        logits += gl.load(bias_ptr + lane, mask=there, other=0.0).to(gl.float32)
    logits = gl.where(there & (logits == logits), logits + 0.0, float("-inf"))  # -0.0 is 0.0
    keys = gl.where(there, key_of(logits), REMOVED)
    ids, weights = _best(logits, lane, keys, K, CHOICES, SIGMOID, NORMALIZE, WARPS)
    choice = gl.arange(0, CHOICES, gl.SliceLayout(0, own))[None, :]
    pair = row * K + choice
    there = (row < tokens) & (choice < K)
    if active_ptr is not None:
        active, _ = gl.broadcast(active, ids)
        ids = gl.where(active, ids, experts)
        weights = gl.where(active, weights, 0.0)
    gl.store(ids_ptr + pair, ids, mask=there)
    gl.store(weights_ptr + pair, weights, mask=there)
    if ORDER:
        PAIRS: gl.constexpr = TOKENS * CHOICES
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        ids = gl.convert_layout(ids.reshape([PAIRS]), flat)
        place = gl.arange(0, PAIRS, flat)
        there = (place // CHOICES < tokens) & (place % CHOICES < K) & (ids < experts)
        pair = place // CHOICES * K + place % CHOICES
        _store_order(ids, there, pair, order_ptr, ends_ptr, experts, EXPERTS, WARPS)


@gluon.jit
def _order(
    ids_ptr, order_ptr, ends_ptr,
    pairs: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """One program per expert. It stores the expert's pairs after those of all lower experts.

    Each thread looks at EACH consecutive pairs, so that only their number is exchanged."""
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
    threads: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    BLOCK: gl.constexpr = 32 * WARPS * EACH
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = gl.program_id(0)
    thread = gl.arange(0, 32 * WARPS, threads)[:, None]
    block = thread * EACH + gl.arange(0, EACH, gl.SliceLayout(0, layout))[None, :]
    lower = gl.zeros([32 * WARPS], gl.int32, threads)
    for start in range(0, pairs, BLOCK):
        pair = start + block
        ids = gl.load(ids_ptr + pair, mask=pair < pairs, other=2147483647)
        lower += gl.sum((ids < expert).to(gl.int32), axis=1)
    end = gl.sum(lower, axis=0)
    for start in range(0, pairs, BLOCK):
        pair = start + block
        ids = gl.load(ids_ptr + pair, mask=pair < pairs, other=2147483647)
        mine = (ids == expert).to(gl.int32)
        count = gl.sum(mine, axis=1)
        last = gl.cumsum(gl.convert_layout(count, flat), axis=0)
        before = end + gl.convert_layout(last, threads) - count
        place = gl.cumsum(mine, axis=1) - 1 + gl.expand_dims(before, 1)
        gl.store(order_ptr + place, pair, mask=mine > 0)
        end += gl.sum(count, axis=0)
    gl.store(ends_ptr + expert, end)


def route(
    logits: Array,
    bias: Array | None,
    active: Array | None,
    *,
    routing: Routing,
    target: Target,
) -> Routes:
    """See `reference.route`. With few tokens the result has the pairs' order, too."""
    *parts, tokens, columns = logits.shape
    experts, k = routing.num_experts, routing.top_k
    ordered = 1 < tokens <= limits_of(target).ordered_tokens
    own = triton.next_power_of_2(tokens) if ordered else 1
    warps = max(4, min(16, own)) if ordered else 1
    shape = (tokens, k)
    ids, weights, pairs, ends = triton_call(
        logits, logits if bias is None else bias, active, tokens,
        kernel=_route,
        name="route",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct((tokens * k if ordered else 1,), jnp.int32),
            jax.ShapeDtypeStruct((experts if ordered else 1,), jnp.int32),
        ),
        grid=(triton.cdiv(tokens, own),),
        num_warps=warps,
        experts=experts, columns=columns, parts=parts[0] if parts else 1, K=k,
        EXPERTS=max(32, triton.next_power_of_2(experts)), CHOICES=triton.next_power_of_2(k),
        SIGMOID=routing.scoring == "sigmoid", NORMALIZE=routing.normalize, BIAS=bias is not None,
        TOKENS=own, WARPS=warps, ORDER=ordered,
    )  # fmt: skip
    return Routes(ids, weights, Order(pairs, ends) if ordered else None)


def order(ids: Array, experts: int, *, target: Target) -> Order:
    """Sorts the (token, choice) pairs by expert.

    Args:
      ids: int32 [tokens, k], expert ids. Pairs with larger ids are left out.
    """
    pairs = ids.size
    each = 4 if pairs <= 2048 else 16
    warps = max(1, min(16, triton.next_power_of_2(pairs) // (32 * each)))
    return Order(*triton_call(
        ids,
        kernel=_order,
        name="order_pairs",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((pairs,), jnp.int32), jax.ShapeDtypeStruct((experts,), jnp.int32),
        ),
        grid=(experts,),
        num_warps=warps,
        pairs=pairs, EACH=each, WARPS=warps,
    ))  # fmt: skip
