"""Products of tokens with their experts: each touched expert's weight is read once for all of its
tokens, as far as they fit one tile.

As in `dense_matmul/triton.py` the weight is the left operand, so that few tokens waste little. A
program takes some rows of the weight of one expert, and some of the tokens that lie together after
`triton_route.order`. Which expert that is it finds from how many each has: the grid is as large as
it may have to be, and programs without tokens end at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import Config, Launch, most_blocks
from jaxserve_kernels.experts.triton_sums import PLAIN, block_of, pairs_at, sums, within
from jaxserve_kernels.experts.types import (
    SWIGLU_OSS_ALPHA,
    SWIGLU_OSS_LIMIT,
    ExpertActivation,
    ExpertWeights,
    stacked,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated
from jaxserve_kernels.triton_call import triton_call

MOST_COUNTED = 64
"""Pairs of tokens and experts that every program counts: a kernel less in the chain."""
_OSS = tl.constexpr(3)
"""In place of what `activation.gating` gives: gpt-oss's."""
_ALPHA = tl.constexpr(SWIGLU_OSS_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_OSS_LIMIT)


@triton.jit
def _activated(gate, up, dtype: tl.constexpr, GATED: tl.constexpr):
    """`reference.swiglu_oss`, or `gated`."""
    if GATED == _OSS:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), _LIMIT)
        up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -_LIMIT), _LIMIT)
        values = ((up + 1.0) * gate * tl.sigmoid(_ALPHA * gate)).to(dtype)
    else:
        values = gated(gate, up, dtype, GATED)
    return values


@triton.jit
def _store_gated(
    acc, acc_up, bias_ptr, out_ptr, row, out_row, place, end,
    n: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """acc has gate and, unless they are APART, up below it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    half: tl.constexpr = out_row.shape[0]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        if APART:
            acc_up += tl.load(bias_ptr + n + row).to(tl.float32)[:, None]
    if APART:
        # The compilers would round sums before the last product is waited for, and ptxas then makes
        # all products wait for each other (C7514).
        gate = acc + 0.0
        up = acc_up + 0.0
    else:
        both = tl.reshape(acc, (2, half, acc.shape[1]))
        gate, up = tl.split(tl.permute(both, (1, 2, 0)))
    values = _activated(gate, up, dtype, GATED)
    out = out_ptr + place.to(tl.int64)[None, :] * n + out_row[:, None]
    tl.store(out, values, mask=(place < end)[None, :] & (out_row < n)[:, None])


@triton.jit
def _gate_up(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, tokens,
    out_ptr,
    experts: tl.constexpr, choices: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
    columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE: tl.constexpr, FEW: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, APART: tl.constexpr,
    UNPACK: tl.constexpr = None, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Pair after pair as they lie together: activation(gate) * up, [pairs, n].

    A tile is ROWS / 2 rows of gate and the same rows of up, so the gating needs no exchange between
    programs; in one accumulator, or APART.
    """
    half: tl.constexpr = ROWS // 2
    up: tl.constexpr = n if APART else 0
    first = tl.program_id(0) * half
    out_row = first + tl.arange(0, half)
    if APART:
        row = within(out_row, n, half)
    else:
        lane = tl.arange(0, ROWS)
        row = within(first + lane % half, n, half) + (lane // half) * n
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, end = block_of(
        ids_ptr, ends_ptr, tokens * choices, experts, ONE, FEW, TOKENS + TAIL, EXPERTS
    )
    if expert < experts:
        place = begin + tl.arange(0, TOKENS)
        pair = pairs_at(ids_ptr, order_ptr, tokens * choices, expert, place, end, ONE, FEW)
        token = tl.where(place < end, pair // choices, tokens)
        bias = bias_ptr + expert * (2 * n)
        if TAIL > 0 and end > begin + TOKENS:
            rest = begin + TOKENS + tl.arange(0, TAIL)
            rest_pair = pairs_at(ids_ptr, order_ptr, tokens * choices, expert, rest, end, ONE, FEW)
            rest_token = tl.where(rest < end, rest_pair // choices, tokens)
            acc, acc_up, tail, tail_up = sums(
                x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, token, rest_token, tokens,
                up, k, columns, packed_size, scale_size, second_size,
                KIND, GROUP, ZERO, UNPACK, TAIL, DEPTH, UNROLL, STAGES,
            )  # fmt: skip
            _store_gated(
                tail, tail_up, bias, out_ptr, row, out_row, rest, end, n, BIAS, GATED, APART
            )
        else:
            acc, acc_up, _, _ = sums(
                x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, token, token, tokens,
                up, k, columns, packed_size, scale_size, second_size,
                KIND, GROUP, ZERO, UNPACK, 0, DEPTH, UNROLL, STAGES,
            )  # fmt: skip
        _store_gated(acc, acc_up, bias, out_ptr, row, out_row, place, end, n, BIAS, GATED, APART)


@triton.jit
def _store_weighted(
    acc, bias_ptr, weights_ptr, out_ptr, row, out_row, pair, there, tokens,
    choices: tl.constexpr, n: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    acc *= tl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
    to = (pair % choices) * tokens + pair // choices
    out = out_ptr + to.to(tl.int64)[None, :] * n + out_row[:, None]
    mask = there[None, :] & (out_row < n)[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, weights_ptr,
    tokens, out_ptr,
    experts: tl.constexpr, choices: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
    columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE: tl.constexpr, FEW: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr,
    UNPACK: tl.constexpr = None, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Of hidden tokens pair after pair as they lie together: results times the pairs' weights,
    [choices, tokens, n]."""
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = within(out_row, n, ROWS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, end = block_of(
        ids_ptr, ends_ptr, tokens * choices, experts, ONE, FEW, TOKENS + TAIL, EXPERTS
    )
    if expert < experts:
        place = begin + tl.arange(0, TOKENS)
        pairs = tokens * choices
        source = tl.where(place < end, place, pairs)
        bias = bias_ptr + expert * n
        if TAIL > 0 and end > begin + TOKENS:
            rest = begin + TOKENS + tl.arange(0, TAIL)
            acc, _acc_up, tail, _tail_up = sums(
                x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row,
                source, tl.where(rest < end, rest, pairs), pairs,
                0, k, columns, packed_size, scale_size, second_size,
                KIND, GROUP, ZERO, UNPACK, TAIL, DEPTH, UNROLL, STAGES,
            )  # fmt: skip
            _store_weighted(
                tail, bias, weights_ptr, out_ptr, row, out_row,
                pairs_at(ids_ptr, order_ptr, tokens * choices, expert, rest, end, ONE, FEW),
                rest < end, tokens, choices, n, BIAS,
            )  # fmt: skip
        else:
            acc, _acc_up, _, _ = sums(
                x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, source, source, pairs,
                0, k, columns, packed_size, scale_size, second_size,
                KIND, GROUP, ZERO, UNPACK, 0, DEPTH, UNROLL, STAGES,
            )  # fmt: skip
        _store_weighted(
            acc, bias, weights_ptr, out_ptr, row, out_row,
            pairs_at(ids_ptr, order_ptr, tokens * choices, expert, place, end, ONE, FEW),
            place < end, tokens, choices, n, BIAS,
        )  # fmt: skip


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    config: Config,
    *,
    target: Target,
) -> Array:
    """See `reference.experts`: [k, tokens, embed] in float32, or one part of many tokens."""
    tokens, embed = x.shape
    pairs = ids.size
    order, ends = ids, ids
    if pairs > MOST_COUNTED and tokens > 1:
        order, ends = triton_route.order(ids, w.gate_up.shape[0], target=target)
    hidden = triton_call(
        x, *_arrays(w.gate_up, w.gate_up_bias), ids, order, ends, tokens,
        kernel=_gate_up,
        name=f"experts_gate_up{_suffix(w.gate_up)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((pairs, w.width), x.dtype),
        GATED=_OSS.value if activation == "swiglu_oss" else gating(activation),
        APART=isinstance(w.gate_up, Array) and config.gate_up.rows >= 128,
        **_launch(config.gate_up, w.gate_up, w.gate_up_bias, ids, x, w.width),
    )  # fmt: skip
    dtype = jnp.float32 if config.parts else x.dtype
    parts = triton_call(
        hidden, *_arrays(w.down, w.down_bias), ids, order, ends, weights, tokens,
        kernel=_down,
        name=f"experts_down{_suffix(w.down)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.shape[1], tokens, embed), dtype),
        **_launch(config.down, w.down, w.down_bias, ids, hidden, embed),
    )  # fmt: skip
    return parts if config.parts else parts.astype(jnp.float32).sum(0).astype(dtype)[None]


def _suffix(weight: Any) -> str:
    return "" if isinstance(weight, Array) else f"_{type(weight).__name__}"


def _arrays(weight: Any, bias: Array | None) -> tuple[Array, ...]:
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    return *found.arrays, found.arrays[0] if bias is None else bias


def _launch(
    launch: Launch, weight: Any, bias: Array | None, ids: Array, x: Array, n: int
) -> dict[str, Any]:
    """What both products are launched with. n: of the result."""
    experts, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    sizes = [each.size // experts for each in found.arrays]
    constants = {"KIND": PLAIN.value, "GROUP": 0, "ZERO": 0}
    return {
        "grid": (
            triton.cdiv(rows, launch.rows),
            most_blocks(ids, experts, launch.tokens + launch.tail),
        ),
        "num_warps": launch.num_warps,
        "experts": experts, "choices": ids.shape[1], "n": n, "k": k, "columns": x.shape[1],
        "packed_size": sizes[0], "scale_size": sizes[1], "second_size": sizes[2],
        **(constants if found.operand is None else found.operand.constants),
        "BIAS": bias is not None, "ONE": ids.shape[0] == 1,
        "FEW": triton.next_power_of_2(ids.size) if ids.size <= MOST_COUNTED else 0,
        "EXPERTS": triton.next_power_of_2(experts),
        "TOKENS": launch.tokens, "TAIL": launch.tail, "ROWS": launch.rows, "DEPTH": launch.depth,
        "UNROLL": launch.unroll, "STAGES": launch.num_stages,
    }  # fmt: skip
