"""A router's choice, and which pairs of a token and an expert lie together, inside a step's launch
chain: nothing is sorted, each program counts for itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.experts.config import lists_pairs
from jaxserve_kernels.experts.types import Lists, Routing
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def _choose(
    logits_ptr, bias_ptr, token, lane, choice, tokens,
    experts: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Experts and weights [tokens, choices] of the tokens `token`. NaN counts as -inf."""
    there = (lane < experts)[None, :]
    here = (token < tokens)[:, None] & there
    lanes = lane[None, :]
    logits = tl.zeros([token.shape[0], EXPERTS], tl.float32)
    for part in tl.static_range(parts):
        at = logits_ptr + (part * tokens + token)[:, None] * columns + lanes
        logits += tl.load(at, mask=here, other=0.0)
    if BIAS:
        logits += tl.load(bias_ptr + lane, mask=lane < experts, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(there & (logits == logits), logits, float("-inf"))
    largest = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    choices = choice[None, :]
    ids = tl.zeros([token.shape[0], choice.shape[0]], tl.int32)
    chosen = tl.full([token.shape[0], choice.shape[0]], float("-inf"), tl.float32)
    for index in tl.static_range(K):
        most = tl.max(logits, axis=1)
        expert = tl.min(tl.where(there & (logits == most[:, None]), lanes, EXPERTS), axis=1)
        ids = tl.where(choices == index, expert[:, None], ids)
        chosen = tl.where(choices == index, most[:, None], chosen)
        logits = tl.where(lanes == expert[:, None], float("-inf"), logits)
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-chosen))
        weights = tl.where(choices < K, weights, 0.0)
    else:
        weights = tl.exp(chosen - largest[:, None])
    if NORMALIZE:
        weights /= tl.sum(weights, axis=1)[:, None]
    elif not SIGMOID:
        weights /= total[:, None]
    return ids, weights


@triton.jit
def _route(
    logits_ptr, bias_ptr, tokens, ids_ptr, weights_ptr,
    experts: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program for each token."""
    token = tl.program_id(0) + tl.arange(0, 1)
    lane = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    ids, weights = _choose(
        logits_ptr, bias_ptr, token, lane, choice, tokens,
        experts, columns, parts, K, EXPERTS, SIGMOID, NORMALIZE, BIAS,
    )  # fmt: skip
    at = token[:, None] * K + choice[None, :]
    tl.store(ids_ptr + at, ids, mask=(choice < K)[None, :])
    tl.store(weights_ptr + at, weights, mask=(choice < K)[None, :])


@triton.jit
def _order(
    ids_ptr, order_ptr, ends_ptr,
    pairs: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """One program for each expert puts its pairs behind those of the experts before it."""
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


@triton.jit
def _rank(ids, experts: tl.constexpr, PAIRS: tl.constexpr):
    """Of pairs in their order [PAIRS]: place, whether it is the first of its expert, and then that
    expert's number among the touched ones and where its pairs end. Some have no expert."""
    index = tl.arange(0, PAIRS)
    before = ids[None, :] < ids[:, None]
    same = ids[None, :] == ids[:, None]
    fewer = tl.sum(before.to(tl.int32), axis=1)
    earlier = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    end = fewer + tl.sum(same.to(tl.int32), axis=1)
    first = (earlier == 0) & (ids < experts)
    number = tl.sum((before & first[None, :]).to(tl.int32), axis=1)
    return fewer + earlier, first, number, end


@triton.jit
def _route_and_list(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, order_ptr, block_ptr,
    tokens: tl.constexpr, experts: tl.constexpr, columns: tl.constexpr, parts: tl.constexpr,
    blocks: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """`_route` of all tokens, and `reference.lists`."""
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    ids, weights = _choose(
        logits_ptr, bias_ptr, token, lane, choice, tokens,
        experts, columns, parts, K, EXPERTS, SIGMOID, NORMALIZE, BIAS,
    )  # fmt: skip
    there = (token < tokens)[:, None] & (choice < K)[None, :]
    pair = token[:, None] * K + choice[None, :]
    tl.store(ids_ptr + pair, ids, mask=there)
    tl.store(weights_ptr + pair, weights, mask=there)
    ids = tl.where(there, ids, experts)
    PAIRS: tl.constexpr = TOKENS * CHOICES
    flat = tl.reshape(ids, (PAIRS,))
    place, first, number, end = _rank(flat, experts, PAIRS)
    tl.store(order_ptr + place, tl.reshape(pair, (PAIRS,)), mask=flat < experts)
    at = block_ptr + number
    tl.store(at, flat, mask=first)
    tl.store(at + blocks, place, mask=first)
    tl.store(at + 2 * blocks, end, mask=first)
    block = tl.arange(0, BLOCKS)
    behind = (block >= tl.sum(first.to(tl.int32), axis=0)) & (block < blocks)
    tl.store(block_ptr + block, experts, mask=behind)
    tl.store(block_ptr + blocks + block, 0, mask=behind)
    tl.store(block_ptr + 2 * blocks + block, 0, mask=behind)


def route(
    logits: Array, routing: Routing, bias: Array | None, *, target: Target
) -> tuple[Array, Array, Lists | None]:
    """See `reference.route`; and lists, of as many tokens as `config.lists_pairs`."""
    if lists_pairs(logits.shape[-2], target=target):
        return _listed(logits, routing, bias, target=target)
    *parts, tokens, columns = logits.shape
    experts = routing.num_experts
    shape = (tokens, routing.top_k)
    ids, weights = triton_call(
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
    return ids, weights, None


def _listed(
    logits: Array, routing: Routing, bias: Array | None, *, target: Target
) -> tuple[Array, Array, Lists]:
    """By one program."""
    *parts, tokens, columns = logits.shape
    experts, k = routing.num_experts, routing.top_k
    blocks = min(experts, tokens * k)
    ids, weights, order, listed = triton_call(
        logits, logits if bias is None else bias,
        kernel=_route_and_list,
        name="route_and_list",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((tokens, k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, k), jnp.float32),
            jax.ShapeDtypeStruct((tokens * k,), jnp.int32),
            jax.ShapeDtypeStruct((3, blocks), jnp.int32),
        ),
        grid=(1,),
        num_warps=min(max(4, triton.next_power_of_2(tokens)), 16),
        tokens=tokens, experts=experts, columns=columns, parts=parts[0] if parts else 1,
        blocks=blocks, K=k, EXPERTS=triton.next_power_of_2(experts),
        CHOICES=triton.next_power_of_2(k), TOKENS=triton.next_power_of_2(tokens),
        BLOCKS=triton.next_power_of_2(blocks), SIGMOID=routing.scoring == "sigmoid",
        NORMALIZE=routing.normalize, BIAS=bias is not None,
    )  # fmt: skip
    return ids, weights, Lists(order, listed)


def order(ids: Array, experts: int, *, at_once: int = 1024, target: Target) -> tuple[Array, Array]:
    """Pairs of a token and an expert by expert, and where each expert's end.

    Args:
      ids: int32 [tokens, k], each below `experts`.
      at_once: pairs that a program looks at in one step, at most.

    Returns:
      int32 [tokens * k]: token * k + choice; and int32 [experts].
    """
    pairs = ids.size
    block = min(at_once, triton.next_power_of_2(pairs))
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
