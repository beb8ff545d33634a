"""A router and the experts of one token as three kernels of a chain, launched early (PDL).

The first adds and normalises the token, and scores it: what it reads of the router it has by the
time the token is there. In the two others each program finds its expert from the scores: nothing
lies between. `_gate_up` starts the kernel after it when scores are there, not before. So `_down`
reads scores before it waits, and fills its rings with the experts' weights while `_gate_up` runs.
"""

from __future__ import annotations

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
from jaxserve_kernels.add_rms_norm.triton import normed
from jaxserve_kernels.dense_matmul.triton_streaming import accumulate as accumulate_plain
from jaxserve_kernels.experts.types import (
    SWIGLU_OSS_ALPHA,
    SWIGLU_OSS_LIMIT,
    ExpertActivation,
    ExpertWeights,
    Routing,
    stacked,
)
from jaxserve_kernels.quantized_matmul.triton_streaming import accumulate, rows_of, store
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import triton_call

_PLAIN = gl.constexpr(-2)
"""In place of a `weights.Kind`: the weight is an array."""
_OSS = gl.constexpr(3)
"""In place of what `activation.gating` gives: gpt-oss's."""
_ALPHA = gl.constexpr(SWIGLU_OSS_ALPHA)
_LIMIT = gl.constexpr(SWIGLU_OSS_LIMIT)
_REMOVED = gl.constexpr(-(2**31))
"""Below the key of any score."""
_ROWS = 64
_TOKENS = 8
"""Of the tensor cores' smallest product."""
_RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own."""


@triton.jit
def _norm_and_score(
    x_ptr, update_ptr, weight_ptr, bias_ptr, w_ptr, total_ptr, out_ptr, scores_ptr,
    n: tl.constexpr, stride: tl.constexpr, embed: tl.constexpr, eps: tl.constexpr,
    parts: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program scores a token with some rows of the router, and the first one writes the token."""
    column = tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (row < n)[:, None] & (column < embed)[None, :]
    w = tl.load(w_ptr + row[:, None] * embed + column[None, :], mask=there, other=0.0)
    first = tl.program_id(1) == 0
    token = normed(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr, first,
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
    scores_ptr, bias_ptr, choice, experts: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    BIAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The expert that is the token's choice, and its weight: see `reference.route`.

    Each warp looks at all scores, as integers of the same order: a warp has the largest integer in
    one instruction. Scores come from the cache that all multiprocessors share: this one's own may
    still have what an earlier layer had in the same place.
    """
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0])
    lane = gl.arange(0, EXPERTS, layout)
    there = lane < experts
    scores = gl.load(scores_ptr + lane, mask=there, other=0.0, cache_modifier=".cg")
    if BIAS:
        scores += gl.load(bias_ptr + lane, mask=there, other=0.0).to(gl.float32)
    scores = gl.where(scores == scores, scores + 0.0, float("-inf"))  # -0.0 is 0.0
    bits = scores.to(gl.int32, bitcast=True)
    keys = gl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _REMOVED)
    largest = _score(gl.max(keys, axis=0))
    total = 0.0
    if not NORMALIZE and not SIGMOID:
        total = gl.sum(gl.where(there, gl.exp(scores - largest), 0.0), axis=0)
    expert = choice * 0
    weight = largest * 0.0
    for index in gl.static_range(K):
        key = gl.max(keys, axis=0)
        found = gl.min(gl.where(keys == key, lane, EXPERTS), axis=0)
        keys = gl.where(lane == found, _REMOVED, keys)
        score = _score(key)
        each = 1.0 / (1.0 + gl.exp(-score)) if SIGMOID else gl.exp(score - largest)
        if NORMALIZE:
            total += each
        expert = gl.where(choice == index, found, expert)
        weight = gl.where(choice == index, each, weight)
    if NORMALIZE or not SIGMOID:
        weight /= total
    return expert, weight


@gluon.jit
def _sums(
    x_ptr, packed_ptr, scale_ptr, second_ptr, expert,
    n: gl.constexpr, k: gl.constexpr, columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """An expert's rows times the token at x."""
    expert = expert.to(gl.int64)
    packed = packed_ptr + expert * packed_size
    program = gl.program_id(0)
    if KIND == _PLAIN:
        copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
        row = rows_of(program, gl.arange(0, ROWS, gl.SliceLayout(1, copy)), n, GATED, ROWS)
        acc = accumulate_plain(
            x_ptr, packed, row, 0, 1, k, k // DEPTH, TOKENS, ROWS, DEPTH, STAGES, EARLY, True,
            copy, mma,
        )  # fmt: skip
    else:
        acc = accumulate(
            x_ptr, packed, scale_ptr + expert * scale_size, second_ptr + expert * second_size,
            program, 0, 1, n, k, columns, GATED, KIND, GROUP, ZERO, TOKENS, ROWS, k // 128,
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
    experts: gl.constexpr, choices: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """activation(gate) * up of each choice, [choices, n]."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    choice = gl.program_id(1)
    expert, _ = _chosen(
        scores_ptr, router_bias_ptr, choice, experts, choices, EXPERTS, SIGMOID, NORMALIZE,
        ROUTER_BIAS, ROWS // 16,
    )  # fmt: skip
    acc = _sums(
        x_ptr, packed_ptr, scale_ptr, second_ptr, expert, n, k, columns,
        packed_size, scale_size, second_size, True, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, False,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * (2 * n), n, True)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    values = _activated(gate, up, dtype, GATED).to(dtype).reshape([ROWS // 2, TOKENS])
    store(values, out_ptr + choice * n, gl.program_id(0), 1, n, ROWS // 16)


@gluon.jit
def _down(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, early_scores_ptr, router_bias_ptr, out_ptr,
    experts: gl.constexpr, choices: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, SIGMOID: gl.constexpr, NORMALIZE: gl.constexpr,
    ROUTER_BIAS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """Each choice's result times its weight, [choices, n]."""
    choice = gl.program_id(1)
    expert, weight = _chosen(
        early_scores_ptr, router_bias_ptr, choice, experts, choices, EXPERTS, SIGMOID, NORMALIZE,
        ROUTER_BIAS, ROWS // 16,
    )  # fmt: skip
    acc = _sums(
        x_ptr + choice * columns, packed_ptr, scale_ptr, second_ptr, expert, n, k, columns,
        packed_size, scale_size, second_size, False, KIND, GROUP, ZERO,
        TOKENS, ROWS, K_TILES, DEPTH, STAGES, EARLY,
    )  # fmt: skip
    if BIAS:
        acc = _add_bias(acc, bias_ptr + expert * n, n, False)
    store(acc * weight, out_ptr + choice * n, gl.program_id(0), 1, n, ROWS // 16)


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
    """`reference.experts` of one token that `reference.route` routes: float32 [k, 1, embed].

    Args:
      scores: float32 [1, rows] of a router, of which the first are the experts'.
      bias: the router's.
      resident: programs whose rings share a multiprocessor's memory.
    """
    embed, k = x.shape[1], routing.top_k
    shared = {
        "experts": routing.num_experts, "choices": k,
        "EXPERTS": max(32, triton.next_power_of_2(routing.num_experts)),
        "SIGMOID": routing.scoring == "sigmoid", "NORMALIZE": routing.normalize,
        "ROUTER_BIAS": bias is not None,
    }  # fmt: skip
    router_bias = scores if bias is None else bias
    hidden = triton_call(
        x, *_arrays(w.gate_up, w.gate_up_bias), scores, router_bias,
        kernel=_gate_up,
        name=f"one_token_gate_up{_suffix(w.gate_up)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((k, w.width), x.dtype),
        GATED=_OSS.value if activation == "swiglu_oss" else gating(activation),
        **shared, **_launch(w.gate_up, w.gate_up_bias, k, embed, w.width, resident, target),
    )  # fmt: skip
    return triton_call(
        hidden, *_arrays(w.down, w.down_bias), scores, router_bias,
        kernel=_down,
        name=f"one_token_down{_suffix(w.down)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((k, 1, embed), jnp.float32),
        **shared, **_launch(w.down, w.down_bias, k, w.width, embed, resident, target),
    )  # fmt: skip


def _suffix(weight: Any) -> str:
    return "" if isinstance(weight, Array) else f"_{type(weight).__name__}"


def _arrays(weight: Any, bias: Array | None) -> tuple[Array, ...]:
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    return *found.arrays, found.arrays[0] if bias is None else bias


def _launch(
    weight: Any, bias: Array | None, choices: int, columns: int, n: int, resident: int,
    target: Target,
) -> dict[str, Any]:  # fmt: skip
    """Of a product. n: of the result; columns: of its tokens."""
    experts, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    sizes = [each.size // experts for each in found.arrays]
    ring = target.gpu.shared_memory // resident - _RESERVED
    operand = found.operand
    if operand is None:
        depth, k_tiles = 64 if k % 128 else 128, 1
        steps, stage = k // depth, 2 * (_ROWS + _TOKENS) * depth
        constants = {"KIND": _PLAIN.value, "GROUP": 0, "ZERO": 0}
    else:
        depth, tiles = 128, k // 128
        size = _ROWS * operand.row_bytes + 256 * _TOKENS
        k_tiles = 4 if tiles >= 8 else 2 if tiles >= 4 else 1
        while k_tiles > 1 and ring // (k_tiles * size) < 4:
            k_tiles //= 2
        steps, stage = -(-tiles // k_tiles), k_tiles * size
        constants = operand.constants
    return {
        "grid": (rows // _ROWS, choices), "num_warps": 4, "n": n, "k": k, "columns": columns,
        "packed_size": sizes[0], "scale_size": sizes[1], "second_size": sizes[2], **constants,
        "BIAS": bias is not None, "TOKENS": _TOKENS, "ROWS": _ROWS, "K_TILES": k_tiles,
        "DEPTH": depth, "STAGES": max(2, min(ring // stage, steps + 1)),
    }  # fmt: skip
