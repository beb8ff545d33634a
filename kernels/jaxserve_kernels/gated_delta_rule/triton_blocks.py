"""Blocks of a prompt's tokens: see `reference.one_block`.

`_prepare` computes the parts that do not need the state, for all blocks in parallel. Then
`_advance` carries the state from block to block, with one program per chunk, value head and part of
the state's columns. On Hopper, `hopper_blocks` can do that.

Products of two activations use the tensor cores on unscaled values, which are exact there; norms
and decays multiply the results. A float32 factor is split into a high and a low part of the
activations' dtype. With bfloat16 the two parts keep 16 significant bits instead of 8.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jax import Array, lax
from triton import jit

from jaxserve_kernels.gated_delta_rule import hopper_blocks
from jaxserve_kernels.gated_delta_rule.blocks import blocks_of, counts_of, most_blocks
from jaxserve_kernels.gated_delta_rule.reference import (
    RuleConfig,
    RuleTokens,
    RuleWeights,
    decay_and_beta,
)
from jaxserve_kernels.recurrent_state import RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_COLUMNS = 32
"""State columns of a program: one prompt with 48 heads of 128 columns has 192 programs."""

_PART = tl.constexpr(16)
_PART_LEVELS = tl.constexpr(4)
"""Rows of the diagonal blocks that are inverted first, side by side; and the power of two."""


@jit
def _times(tokens, wide, total):
    """total + tokens @ wide, where wide is float32."""
    if tokens.dtype == tl.float32:
        return tl.dot(tokens, wide, total, input_precision="tf32x3")
    high = wide.to(tokens.dtype)
    low = (wide - high.to(tl.float32)).to(tokens.dtype)
    return tl.dot(tokens, high, tl.dot(tokens, low, total))


@jit
def _product(a, b, total, dtype: tl.constexpr):
    """total + a @ b. Both are float32, and are split into high and low parts of `dtype`."""
    high = a.to(dtype)
    low = (a - high.to(tl.float32)).to(dtype)
    return _times(high, b, tl.dot(low, b.to(dtype), total, input_precision="tf32x3"))


@jit
def _inverted(system, solved, row, column, zero, FIRST: tl.constexpr, LAST: tl.constexpr, dtype):
    """Inverts diagonal blocks of 2 ** LAST rows; `solved` has the inverses of those of 2 ** FIRST.

    Each pair of inverses gives the inverse of a block twice as large. Its lower left part is
    -(second inverse) @ (lower left part of the system) @ (first inverse).
    """
    for level in range(FIRST, LAST):
        same = (row >> (level + 1)) == (column >> (level + 1))
        below = (row >> level) > (column >> level)
        part = tl.where(same & below, system, 0.0)
        part = _product(part, solved, zero, dtype)
        solved -= _product(solved, part, zero, dtype)
    return solved


@jit
def _prepare(
    qkv_ptr, gates_ptr, tokens, first_ptr, length_ptr, count_ptr,
    solved_ptr, scores_ptr, factors_ptr,
    key_heads: tl.constexpr, value_heads: tl.constexpr, scale: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """gates_ptr: log decays and write gates, [2, value_heads, tokens]. Computed here, they would be
    a third of the instructions, because all threads need those of many tokens. The tokens that a
    short block lacks count as its last one without decay, and write nothing."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    if block < tl.load(count_ptr):
        i = tl.arange(0, BLOCK)
        length = tl.load(length_ptr + block)
        there = i < length
        key = tl.arange(0, KEY)
        width: tl.constexpr = 2 * key_heads * KEY + value_heads * VALUE
        dtype: tl.constexpr = scores_ptr.dtype.element_ty
        token = tl.load(first_ptr + block).to(tl.int64) + tl.minimum(i, length - 1)
        qkv_ptr += (head // (value_heads // key_heads)) * KEY
        gates = gates_ptr + head * tokens + tl.load(first_ptr + block) + i
        log_decay = tl.load(gates, mask=there, other=0.0)
        beta = tl.load(gates + tokens * value_heads, mask=there, other=0.0)
        from_start = tl.exp(tl.cumsum(log_decay, axis=0))

        source = qkv_ptr + token[:, None] * width + key[None, :]
        q = tl.load(source)
        k = tl.load(source + key_heads * KEY)
        wide_q = q.to(tl.float32)
        wide_k = k.to(tl.float32)
        q_norm = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + 1e-6) * scale
        k_norm = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + 1e-6)

        later = i[:, None] > i[None, :]
        sums = tl.cumsum(tl.where(later, log_decay[:, None], 0.0), axis=0)
        decay = tl.where(i[:, None] >= i[None, :], tl.exp(sums), 0.0) * k_norm[None, :]
        zero = tl.zeros([BLOCK, BLOCK], tl.float32)
        transposed = tl.trans(k)
        scores = tl.dot(q, transposed, zero, input_precision="tf32x3") * decay * q_norm[:, None]
        at = (block * value_heads + head).to(tl.int64) * (BLOCK * BLOCK)
        matrix = at + i[:, None] * BLOCK + i[None, :]
        tl.store(scores_ptr + matrix, scores.to(dtype))
        system = tl.dot(k, transposed, zero, input_precision="tf32x3") * decay
        system = tl.where(later, system * (beta * k_norm)[:, None], 0.0)

        factors = factors_ptr + (block * value_heads + head).to(tl.int64) * (4 * BLOCK) + i
        last = tl.sum(tl.where(i[:, None] == BLOCK - 1, decay, 0.0), axis=0)
        tl.store(factors, from_start * k_norm)
        tl.store(factors + BLOCK, from_start * q_norm)
        tl.store(factors + 2 * BLOCK, last)
        tl.store(factors + 3 * BLOCK, from_start)

        # The blocks on the diagonal: [parts, _PART, _PART].
        parts: tl.constexpr = BLOCK // _PART
        number = tl.arange(0, parts)
        own = number[:, None, None, None] == number[None, None, :, None]
        small = tl.reshape(system, [parts, _PART, parts, _PART])
        small = tl.sum(tl.where(own, small, 0.0), axis=2)
        j = tl.arange(0, _PART)
        row = j[None, :, None]
        column = j[None, None, :]
        pairs = (row >> 1) == (column >> 1)
        solved = tl.where(row == column, 1.0, 0.0) - tl.where(pairs, small, 0.0)
        nothing = tl.zeros([parts, _PART, _PART], tl.float32)
        solved = _inverted(small, solved, row, column, nothing, 1, _PART_LEVELS, dtype)
        solved = tl.reshape(tl.where(own, solved[:, :, None, :], 0.0), [BLOCK, BLOCK])
        row = i[:, None]
        column = i[None, :]
        solved = _inverted(system, solved, row, column, zero, _PART_LEVELS, LEVELS, dtype)
        solved *= beta[None, :]
        high = solved.to(dtype)
        tl.store(solved_ptr + at + matrix, high)
        tl.store(solved_ptr + at + BLOCK * BLOCK + matrix, (solved - high.to(tl.float32)).to(dtype))


@jit
def _advance(
    qkv_ptr, solved_ptr, scores_ptr, factors_ptr,
    first_ptr, slot_ptr, position_ptr, length_ptr, number_ptr, kept_ptr, kept_slot_ptr,
    state_ptr, layer, out_ptr,
    slots, key_heads: tl.constexpr, value_heads: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state after the first `kept` blocks also goes to another slot."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(length_ptr + chunk)
    if length > 0:
        i = tl.arange(0, BLOCK)
        key = tl.arange(0, KEY)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        slot = tl.load(slot_ptr + chunk).to(tl.int64)
        goes_on = tl.load(position_ptr + chunk) > 0
        kept = tl.load(kept_ptr + chunk)
        kept_slot = tl.load(kept_slot_ptr + chunk).to(tl.int64)
        of_slot: tl.constexpr = value_heads * KEY * VALUE
        tile = state_ptr + head * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
        kept_tile = tile + (layer * slots + kept_slot) * of_slot
        tile += (layer * slots + slot) * of_slot
        inside = (key[:, None] >= 0) & (column[None, :] >= 0)
        state = tl.load(tile, mask=inside & goes_on, other=0.0)
        width: tl.constexpr = 2 * key_heads * KEY + value_heads * VALUE
        of_key = (head // (value_heads // key_heads)) * KEY
        of_value = 2 * key_heads * KEY + head * VALUE
        first = tl.load(first_ptr + chunk).to(tl.int64)
        number = tl.load(number_ptr + chunk).to(tl.int64)
        zero = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for block in range(tl.cdiv(length, BLOCK)):
            token = first + tl.minimum(block * BLOCK + i, length - 1)
            there = (block * BLOCK + i < length)[:, None]
            source = qkv_ptr + token[:, None] * width
            k = tl.load(source + key_heads * KEY + of_key + key[None, :])
            v = tl.load(source + of_value + column[None, :]).to(tl.float32)
            at = (number + block) * value_heads + head
            matrix = at * (BLOCK * BLOCK) + i[:, None] * BLOCK + i[None, :]
            solved = solved_ptr + at * (BLOCK * BLOCK) + matrix
            high = tl.load(solved)
            low = tl.load(solved + BLOCK * BLOCK)
            factors = factors_ptr + at * (4 * BLOCK)
            k_factor = tl.load(factors + i)
            missing = v - k_factor[:, None] * _times(k, state, zero)
            write = tl.dot(low, missing.to(low.dtype), zero, input_precision="tf32x3")
            write = _times(high, missing, write)
            q = tl.load(source + of_key + key[None, :])
            q_factor = tl.load(factors + BLOCK + i)
            scores = tl.load(scores_ptr + matrix)
            out = _times(scores, write, q_factor[:, None] * _times(q, state, zero))
            target = out_ptr + (token[:, None] * value_heads + head) * VALUE + column[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=there)
            last = tl.load(factors + 2 * BLOCK + i)
            forget = tl.load(factors + 4 * BLOCK - 1)
            state = _times(tl.trans(k), last[:, None] * write, forget * state)
            if block + 1 == kept:
                tl.store(kept_tile, state)
        tl.store(tile, state)


def in_blocks(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: jax.Ref,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
    hopper: bool,
    target: Target,
) -> Array:
    """Returns o [tokens, value_heads, value_dim]. Only the rows of tokens in blocks are written.

    Args:
      tokens: with gates that are summed over their parts.
      state: the state of all layers, updated in place.
      hopper: `hopper_blocks` carries the state.
    """
    heads, size, chunks = config.heads, config.block, step.rows.chunks
    assert chunks is not None
    count = tokens.qkv.shape[0]
    number = most_blocks(count, chunks, size)
    blocks, total = blocks_of(chunks, size, number)
    counts = counts_of(chunks, size)
    matrix = (number, heads.value_heads, size, size)
    common: dict[str, Any] = {
        "target": target, "key_heads": heads.key_heads, "value_heads": heads.value_heads,
        "KEY": heads.key_dim, "VALUE": heads.value_dim, "BLOCK": size,
    }  # fmt: skip
    # Before Hopper the tensor cores read both operands from registers, which four warps lack.
    warps = 4 if target.gpu.compute_capability >= 90 else 8
    # Otherwise XLA computes them from sums that it has not rounded.
    own = jnp.finfo(tokens.gates.dtype)
    rounded = lax.reduce_precision(tokens.gates[0].astype(jnp.float32), own.nexp, own.nmant)
    gates = decay_and_beta(rounded, weights.a_log, weights.dt_bias)
    gates = jnp.stack(gates).swapaxes(1, 2)
    prepared = triton_call(
        tokens.qkv, gates, count, *blocks[:2], total[None],
        kernel=_prepare,
        name="gated_delta_rule_prepare",
        out_type=(
            jax.ShapeDtypeStruct((*matrix[:2], 2, *matrix[2:]), tokens.qkv.dtype),
            jax.ShapeDtypeStruct(matrix, tokens.qkv.dtype),
            jax.ShapeDtypeStruct((number, heads.value_heads, 4, size), jnp.float32),
        ),
        grid=(number, heads.value_heads),
        num_warps=warps,
        scale=heads.key_dim**-0.5, LEVELS=size.bit_length() - 1,
        **common,
    )  # fmt: skip
    numbers = jnp.cumsum(counts) - counts
    places = *chunks[:4], numbers
    arrays = (*places, chunks.kept.tokens // size, chunks.kept.slots, state, layer)
    if hopper:
        return hopper_blocks.advance(tokens.qkv, prepared, *arrays, heads=heads, target=target)
    columns = min(_COLUMNS, heads.value_dim)
    return triton_call(
        tokens.qkv, *prepared, *arrays,
        kernel=_advance,
        name="gated_delta_rule_blocks",
        out_type=jax.ShapeDtypeStruct(
            (count, heads.value_heads, heads.value_dim), tokens.qkv.dtype
        ),
        grid=(counts.shape[0], heads.value_heads, heads.value_dim // columns),
        num_warps=warps,
        num_stages=1,
        slots=state.shape[1], COLUMNS=columns,
        **common,
    )  # fmt: skip
