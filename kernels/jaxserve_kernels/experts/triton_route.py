"""The router's choice of experts, and the sort of (token, expert) pairs by expert.

Both run inside a step's launch chain. No kernel sorts: each program counts the pairs before its
own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.experts.types import Routing
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_AT_ONCE = 4096
"""The most pairs that a program of `_order` looks at in one iteration."""

_REMOVED = tl.constexpr(-(2**31))
"""Key of a logit that was already chosen: below the key of any logit."""


@triton.jit
def _route(
    logits_ptr, bias_ptr, tokens, ids_ptr, weights_ptr,
    experts: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program per token. NaN counts as -inf."""
    token = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    there = lane < experts
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.zeros([EXPERTS], tl.float32)
    for part in tl.static_range(parts):
        at = logits_ptr + (part * tokens + token) * columns + lane
        logits += tl.load(at, mask=there, other=0.0)
    if BIAS:
        logits += tl.load(bias_ptr + lane, mask=there, other=0.0).to(tl.float32)
    logits = tl.where(there & (logits == logits), logits + 0.0, float("-inf"))  # -0.0 is 0.0
    # Integers of the same order, because a warp finds the largest one in one instruction.
    bits = logits.to(tl.int32, bitcast=True)
    keys = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _REMOVED)
    ids = tl.zeros([CHOICES], tl.int32)
    best = tl.full([CHOICES], _REMOVED, tl.int32)
    for index in tl.static_range(K):
        most = tl.max(keys, axis=0)
        expert = tl.min(tl.where(keys == most, lane, EXPERTS), axis=0)
        ids = tl.where(choice == index, expert, ids)
        best = tl.where(choice == index, most, best)
        keys = tl.where(lane == expert, _REMOVED, keys)
    chosen = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    chosen = tl.where(choice < K, chosen, float("-inf"))
    largest = tl.max(chosen, axis=0)
    total = tl.sum(tl.exp(logits - largest), axis=0)
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-chosen))
        weights = tl.where(choice < K, weights, 0.0)
    else:
        weights = tl.exp(chosen - largest)
    if NORMALIZE:
        weights /= tl.sum(weights, axis=0)
    elif not SIGMOID:
        weights /= total
    at = token * K + choice
    tl.store(ids_ptr + at, ids, mask=choice < K)
    tl.store(weights_ptr + at, weights, mask=choice < K)


@triton.jit
def _order(
    ids_ptr, order_ptr, ends_ptr,
    pairs: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program per expert. It stores the expert's pairs after those of all lower experts."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=2147483647)
        before += (ids < expert).to(tl.int32)
    end = tl.sum(before, axis=0)
    for start in tl.range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=2147483647)
        mine = (ids == expert).to(tl.int32)
        place = end + tl.cumsum(mine, axis=0) - 1
        tl.store(order_ptr + place, pair, mask=mine > 0)
        end += tl.sum(mine, axis=0)
    tl.store(ends_ptr + expert, end)


def route(
    logits: Array, routing: Routing, bias: Array | None, *, target: Target
) -> tuple[Array, Array]:
    """See `reference.route`."""
    *parts, tokens, columns = logits.shape
    experts = routing.num_experts
    shape = (tokens, routing.top_k)
    return triton_call(
        logits, logits if bias is None else bias, tokens,
        kernel=_route,
        name="route",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(tokens,),
        num_warps=1,
        experts=experts, columns=columns, parts=parts[0] if parts else 1, K=routing.top_k,
        EXPERTS=triton.next_power_of_2(experts), CHOICES=triton.next_power_of_2(routing.top_k),
        SIGMOID=routing.scoring == "sigmoid", NORMALIZE=routing.normalize, BIAS=bias is not None,
    )  # fmt: skip


def order(ids: Array, experts: int, *, target: Target) -> tuple[Array, Array]:
    """Sorts the (token, choice) pairs by expert.

    Args:
      ids: int32 [tokens, k], expert ids, each below `experts`.

    Returns:
      The pairs, token * k + choice, int32 [tokens * k]; and the end of each expert's pairs in that
      list, int32 [experts].
    """
    pairs = ids.size
    block = min(_AT_ONCE, triton.next_power_of_2(pairs))
    placed, ends = triton_call(
        ids,
        kernel=_order,
        name="order_pairs",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((pairs,), jnp.int32), jax.ShapeDtypeStruct((experts,), jnp.int32),
        ),
        grid=(experts,),
        num_warps=8 if block > 1024 else 4 if block > 256 else 1,
        pairs=pairs, BLOCK=max(16, block),
    )  # fmt: skip
    return placed, ends
