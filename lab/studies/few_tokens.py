"""A router and the experts of few tokens as three kernels of a chain, launched early (PDL): in
place of five (one token) or six, a candidate that no card has timed. See `bench_few_tokens`.

The first adds and normalises a token, and scores it: what it reads of the router it has by the time
the token is there. In the two others each program finds its expert, and that expert's tokens, from
all scores: nothing lies between. There is one for each pair of a token and a choice; those whose
expert a token before has too end at once. `_gate_up` starts the kernel after it when scores are
there, not before. So `_down` reads scores before it waits, and fills its rings with the experts'
weights while `_gate_up` runs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.add_rms_norm.triton import _normed
from jaxserve_kernels.dense_matmul.triton_streaming import _accumulate
from jaxserve_kernels.experts.triton import _ALPHA, _LIMIT, _OSS, _PLAIN
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Routing, stacked
from jaxserve_kernels.quantized_matmul.triton_streaming import accumulate, rows_of
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import triton_call

_REMOVED = gl.constexpr(-(2**31))
"""Below the key of any score."""
_ROWS = 64
_RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own."""


@triton.jit
def _norm_and_score(
    x_ptr, update_ptr, weight_ptr, bias_ptr, w_ptr, total_ptr, out_ptr, scores_ptr,
    n: tl.constexpr, stride: tl.constexpr, embed: tl.constexpr, eps: tl.constexpr,
    parts: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program scores a token with some rows of the router. All write the same sum, and the first
    one its norm."""
    column = tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (row < n)[:, None] & (column < embed)[None, :]
    w = tl.load(w_ptr + row[:, None] * embed + column[None, :], mask=there, other=0.0)
    first = tl.program_id(1) == 0
    token = _normed(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        stride, embed, eps, parts, BIAS, BLOCK, EARLY,
    )  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + at * embed + column, token, mask=(column < embed) & first)
    scores = tl.sum(w.to(tl.float32) * token.to(tl.float32)[None, :], axis=1)
    tl.store(scores_ptr + at * n + row, scores, mask=row < n)


@gluon.jit
def _score(key):
    """Of `_chosen`'s integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _chosen(
    scores_ptr, bias_ptr, pair, tokens: gl.constexpr, columns: gl.constexpr, experts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    BIAS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The expert of a pair of a token and a choice; whether no token before it has the expert;
    which choice of each token it is, or -1, and with what weight: see `reference.route`.

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
    return expert, first, choice, weight


@gluon.jit
def _of_columns(values, tokens: gl.constexpr, layout: gl.constexpr):
    """A number for each token as one for each column of a product."""
    if tokens == 1:
        values = gl.sum(values, axis=0)
    else:
        values = gl.convert_layout(values, gl.SliceLayout(0, layout))
    return values


@gluon.jit
def _store(values, out_ptr, place, there, n: gl.constexpr):
    """To the rows `place` of out, one for each column that is there."""
    rows: gl.constexpr = values.shape[0]
    row = gl.program_id(0) * rows + gl.arange(0, rows, gl.SliceLayout(1, values.type.layout))
    mask, _ = gl.broadcast(there[None, :], values)
    gl.store(out_ptr + place[None, :] * n + row[:, None], values, mask=mask)


@gluon.jit
def _sums(
    x_ptr, packed_ptr, scale_ptr, second_ptr, expert, tokens: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An expert's rows times the tokens at x."""
    expert = expert.to(gl.int64)
    packed = packed_ptr + expert * packed_size
    program = gl.program_id(0)
    if KIND == _PLAIN:
        copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
        row = rows_of(program, gl.arange(0, ROWS, gl.SliceLayout(1, copy)), n, GATED, ROWS)
        acc = _accumulate(
            x_ptr, packed, row, 0, tokens, k, k // DEPTH, TOKENS, ROWS, DEPTH, STAGES, EARLY, True,
            copy, mma,
        )  # fmt: skip
    else:
        acc = accumulate(
            x_ptr, packed, scale_ptr + expert * scale_size, second_ptr + expert * second_size,
            program, 0, tokens, n, k, columns, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, k // 128,
            K_TILES, STAGES, True, EARLY,
        )  # fmt: skip
    return acc


@gluon.jit
def _add_bias(acc, bias_ptr, n: gl.constexpr, GATED: gl.constexpr):
    ROWS: gl.constexpr = acc.shape[0]
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    row = rows_of(gl.program_id(0), lane, n, GATED, ROWS)
    return acc + gl.load(bias_ptr + row).to(gl.float32)[:, None]


@gluon.jit
def _activated(gate, up, dtype: gl.constexpr, GATED: gl.constexpr):
    """`reference.swiglu_oss`, or `gated`, in float32."""
    if GATED == _OSS:
        gate = gl.minimum(gate.to(dtype).to(gl.float32), _LIMIT)
        up = gl.minimum(gl.maximum(up.to(dtype).to(gl.float32), -_LIMIT), _LIMIT)
        values = (up + 1.0) * gate / (1.0 + gl.exp(-_ALPHA * gate))
    else:
        values = gated_sums(gate, up, dtype, GATED)
    return values


@gluon.jit
def _gate_up(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, scores_ptr, router_bias_ptr, out_ptr,
    tokens: gl.constexpr, scored: gl.constexpr, experts: gl.constexpr, K: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, ROUTED: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    K_TILES: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """activation(gate) * up of all tokens with the expert of each pair that is its expert's first:
    [pairs, tokens, n], of which only tokens that have the expert are written."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(1)
    expert, first, choice, _ = _chosen(
        scores_ptr, router_bias_ptr, pair, tokens, scored, experts, K, EXPERTS, SIGMOID, NORMALIZE,
        ROUTER_BIAS, ROUTED, ROWS // 16,
    )  # fmt: skip
    if not first:
        return
    acc = _sums(
        x_ptr, packed_ptr, scale_ptr, second_ptr, expert, tokens, n, k, columns,
        packed_size, scale_size, second_size, True, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, False,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * (2 * n), n, True)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    values = _activated(gate, up, dtype, GATED).to(dtype).reshape([ROWS // 2, TOKENS])
    layout: gl.constexpr = values.type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    there = (token < tokens) & (_of_columns(choice, tokens, layout) >= 0)
    _store(values, out_ptr, pair * tokens + token, there, n)


@gluon.jit
def _down(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, early_scores_ptr, router_bias_ptr, out_ptr,
    tokens: gl.constexpr, scored: gl.constexpr, experts: gl.constexpr, K: gl.constexpr,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, ROUTED: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    K_TILES: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """Of what `_gate_up` makes: each choice's result times its weight, [K, tokens, n]."""
    pair = gl.program_id(1)
    expert, first, choice, weight = _chosen(
        early_scores_ptr, router_bias_ptr, pair, tokens, scored, experts, K, EXPERTS, SIGMOID,
        NORMALIZE, ROUTER_BIAS, ROUTED, ROWS // 16,
    )  # fmt: skip
    if not first:
        return
    acc = _sums(
        x_ptr + pair * (tokens * columns), packed_ptr, scale_ptr, second_ptr, expert, tokens,
        n, k, columns, packed_size, scale_size, second_size, False, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, EARLY,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * n, n, False)
    layout: gl.constexpr = acc.type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    choice = _of_columns(choice, tokens, layout)
    weight = _of_columns(weight, tokens, layout)
    acc *= weight if tokens == 1 else weight[None, :]
    _store(acc, out_ptr, choice * tokens + token, (token < tokens) & (choice >= 0), n)


def norm_and_score(
    x: Array,
    update: Array,
    weight: Array,
    eps: float,
    router: Array,
    *,
    bias: Array | None = None,
    target: Target,
) -> tuple[Array, Array, Array]:
    """`add_rms_norm`, and of its second result the product with `router` [rows, embed], float32
    [tokens, rows]."""
    tokens, embed = x.shape
    n = router.shape[0]
    block = triton.next_power_of_2(embed)
    rows = max(1, 16_384 // block)
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(
        x, update, weight, weight if bias is None else bias, router,
        kernel=_norm_and_score,
        name="norm_and_score",
        target=target,
        out_type=(row, row, jax.ShapeDtypeStruct((tokens, n), jnp.float32)),
        grid=(tokens, triton.cdiv(n, rows)),
        num_warps=8,
        n=n, stride=tokens * embed, embed=embed, eps=eps, parts=update.shape[0],
        BIAS=bias is not None, BLOCK=block, ROWS=rows,
    )  # fmt: skip


def experts(
    x: Array,
    scores: Array,
    routing: Routing,
    w: ExpertWeights,
    activation: ExpertActivation,
    *,
    bias: Array | None = None,
    resident: int = 2,
    target: Target,
) -> Array:
    """`reference.experts` of tokens that `reference.route` routes: float32 [k, tokens, embed].

    Args:
      scores: float32 [tokens, rows] of a router, of which the first are the experts'.
      bias: the router's.
      resident: programs whose rings share a multiprocessor's memory.
    """
    (tokens, embed), k = x.shape, routing.top_k
    columns = max(8, triton.next_power_of_2(tokens))  # of the tensor cores' smallest product
    shared = {
        "tokens": tokens, "scored": scores.shape[1], "experts": routing.num_experts, "K": k,
        "EXPERTS": max(32, triton.next_power_of_2(routing.num_experts)),
        "SIGMOID": routing.scoring == "sigmoid", "NORMALIZE": routing.normalize,
        "ROUTER_BIAS": bias is not None, "TOKENS": columns,
        "ROUTED": 1 if tokens == 1 else columns,
    }  # fmt: skip
    router_bias = scores if bias is None else bias
    launch = functools.partial(_launch, tokens * k, columns, resident=resident, target=target)
    hidden = triton_call(
        x, *_arrays(w.gate_up, w.gate_up_bias), scores, router_bias,
        kernel=_gate_up,
        name=f"few_gate_up{_suffix(w.gate_up)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens * k, tokens, w.width), x.dtype),
        GATED=_OSS.value if activation == "swiglu_oss" else gating(activation),
        **shared, **launch(w.gate_up, w.gate_up_bias, embed, w.width),
    )  # fmt: skip
    return triton_call(
        hidden, *_arrays(w.down, w.down_bias), scores, router_bias,
        kernel=_down,
        name=f"few_down{_suffix(w.down)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((k, tokens, embed), jnp.float32),
        **shared, **launch(w.down, w.down_bias, w.width, embed),
    )  # fmt: skip


def _suffix(weight: Any) -> str:
    return "" if isinstance(weight, Array) else f"_{type(weight).__name__}"


def _arrays(weight: Any, bias: Array | None) -> tuple[Array, ...]:
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    return *found.arrays, found.arrays[0] if bias is None else bias


def _launch(
    pairs: int, tokens: int, weight: Any, bias: Array | None, columns: int, n: int, *,
    resident: int, target: Target,
) -> dict[str, Any]:  # fmt: skip
    """Of a product. tokens: of a tile; columns: of the tokens; n: of the result."""
    experts, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    sizes = [each.size // experts for each in found.arrays]
    ring = target.gpu.shared_memory // resident - _RESERVED
    operand = found.operand
    if operand is None:
        depth, k_tiles = 64 if k % 128 else 128, 1
        steps, stage = k // depth, 2 * (_ROWS + tokens) * depth
        constants = {"KIND": _PLAIN.value, "GROUP": 0, "ZERO": 0}
    else:
        depth, tiles = 128, k // 128
        size = _ROWS * operand.row_bytes + 256 * tokens
        k_tiles = 4 if tiles >= 8 else 2 if tiles >= 4 else 1
        while k_tiles > 1 and ring // (k_tiles * size) < 4:
            k_tiles //= 2
        steps, stage = -(-tiles // k_tiles), k_tiles * size
        constants = operand.constants
    return {
        "grid": (rows // _ROWS, pairs), "num_warps": 4, "n": n, "k": k, "columns": columns,
        "packed_size": sizes[0], "scale_size": sizes[1], "second_size": sizes[2], **constants,
        "BIAS": bias is not None, "ROWS": _ROWS, "K_TILES": k_tiles, "DEPTH": depth,
        "STAGES": max(2, min(ring // stage, steps + 1)),
    }  # fmt: skip
