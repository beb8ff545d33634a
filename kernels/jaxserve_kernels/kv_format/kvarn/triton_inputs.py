"""QK-norm, RoPE and rotation of a step's queries, keys and values."""

from __future__ import annotations

import math

import jax
import triton
import triton.language as tl
from jax import Array
from jax.typing import DTypeLike

from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.attention_inputs.triton_parts import head_halves
from jaxserve_kernels.kv_format.base import AttentionStep
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_MAX_HEADS = 8


@triton.jit
def signs(SIZE: tl.constexpr, dtype: tl.constexpr):
    """The Hadamard matrix [SIZE, SIZE] of 1 and -1: the parity of the bits that both indices
    share."""
    shared = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    shared ^= shared >> 4
    odd = 0x6996 >> (shared & 15)  # bit n is the parity of n; indices have eight bits
    return tl.where((odd & 1) != 0, -1.0, 1.0).to(dtype)


@triton.jit
def _rotated_quarters(half, matrix):
    """Multiplies each quarter of a half [heads, half] by the matrix: two [heads, quarter]."""
    HEADS: tl.constexpr = half.shape[0]
    QUARTER: tl.constexpr = half.shape[1] // 2
    rows = tl.reshape(half, [2 * HEADS, QUARTER])
    # The matrix is symmetric, so it may be the left operand, which needs 16 rows or more.
    rows = tl.trans(tl.dot(matrix, tl.trans(rows), input_precision="ieee"))
    first, second = tl.split(tl.permute(tl.reshape(rows, [HEADS, 2, QUARTER]), (0, 2, 1)))
    return first + second, first - second


@triton.jit
def _inputs(
    qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr,
    kv_ptr, q_ptr,
    first_slot, stride, parts: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr,
    eps: tl.constexpr, KEEP: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS  # heads in the order queries, keys, values
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    low, high = head_halves(
        qkv_ptr, q_norm_ptr, k_norm_ptr, bias_ptr, cos_ptr, sin_ptr, token, first,
        stride, parts, q_heads, kv_heads, eps, dtype, HEADS, HALF, EARLY,
    )  # fmt: skip
    QUARTER: tl.constexpr = HALF // 2
    matrix = signs(QUARTER, dtype)
    a, b = _rotated_quarters(low, matrix)
    c, d = _rotated_quarters(high, matrix)
    norm: tl.constexpr = (2 * HALF) ** -0.5
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, QUARTER)[None, :]
    if first < q_heads:
        target = q_ptr + (token * q_heads + first + head) * (2 * HALF) + dim
    else:
        is_value = tl.where(first >= q_heads + kv_heads, 1, 0)
        kv_head = first - q_heads - is_value * kv_heads + head
        if KEEP:  # directly into the slot's sink or tail
            position = tl.load(position_ptr + token)
            slot = first_slot + tl.load(slot_ptr + token)
            tile = slot.to(tl.int64) * 2 + tl.where(position >= GROUP, 1, 0)
            row = ((tile * kv_heads + kv_head) * 2 + is_value) * GROUP + position % GROUP
        else:
            row = (token * kv_heads + kv_head) * 2 + is_value
        target = kv_ptr + row * (2 * HALF) + dim
    tl.store(target, ((a + c) * norm).to(dtype))
    tl.store(target + QUARTER, ((b + d) * norm).to(dtype))
    tl.store(target + 2 * QUARTER, ((a - c) * norm).to(dtype))
    tl.store(target + 3 * QUARTER, ((b - d) * norm).to(dtype))


def inputs(
    qkv: Array,
    kv: KVarNKV,
    layer: int,
    heads: HeadWeights,
    tables: tuple[Array, Array],
    step: AttentionStep,
    *,
    eps: float,
    keep: bool,
    dtype: DTypeLike,
    target: Target,
) -> tuple[Array, KVarNKV, Array | None]:
    """Returns rotated queries [tokens, q_heads, head_dim], the cache, and rotated keys and values.

    With `keep` keys and values are written to sinks and tails, and None is returned for them. The
    step must have one token per sequence. Otherwise they are [tokens, kv_heads, 2, head_dim].
    """
    num_slots, _, kv_heads, _, group, head_dim = kv.raw.shape[1:]
    parts, tokens, width = qkv.shape
    q_heads = width // head_dim - 2 * kv_heads
    block = math.gcd(math.gcd(q_heads, kv_heads), _MAX_HEADS)
    raw = jax.new_ref(kv.raw) if keep else None
    q_type = jax.ShapeDtypeStruct((tokens, q_heads, head_dim), dtype)
    fresh_type = jax.ShapeDtypeStruct((tokens, kv_heads, 2, head_dim), dtype)
    outputs = triton_call(
        qkv, *heads.of_inputs, *tables, step.slots, step.positions, *([] if raw is None else [raw]),
        kernel=_inputs,
        name="kvarn_inputs",
        target=target,
        out_type=(q_type,) if keep else (fresh_type, q_type),
        grid=(tokens, (q_heads + 2 * kv_heads) // block),
        num_warps=4 if keep else 2,
        first_slot=layer * num_slots, stride=tokens * width, parts=parts,
        q_heads=q_heads, kv_heads=kv_heads, eps=eps, KEEP=keep,
        HEADS=block, HALF=head_dim // 2, GROUP=group,
    )  # fmt: skip
    if raw is not None:
        return outputs[0], kv._replace(raw=jax.freeze(raw)), None
    fresh, q = outputs
    return q, kv, fresh
