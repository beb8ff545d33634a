"""The definition of the gated delta rule in plain JAX, in float32.

Prompts are computed in blocks of tokens, the other tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve_kernels.dense_matmul.reference import sum_parts
from jaxserve_kernels.gated_delta_rule.blocks import blocks_of, in_blocks, most_blocks
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows

_EPS = 1e-6
"""Epsilon of the norms of queries and keys."""


class Heads(NamedTuple):
    """Heads of a layer. There are n value heads for each key head: key head j serves the value
    heads j * n to j * n + n - 1."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim


class RuleTokens(NamedTuple):
    """A step's tokens: results of the layer's projections and of its convolution."""

    qkv: Array  # [tokens, 2 * keys + values]
    gates: Array  # [parts, tokens, 2 * value_heads], partial sums: decay gates, then write gates
    projected: Array
    """[parts, tokens, columns], partial sums. The last `values` columns gate the output."""


class RuleWeights(NamedTuple):
    """Weights of a layer's heads."""

    a_log: Array  # float32 [value_heads], or longer
    dt_bias: Array  # float32 [value_heads], or longer
    norm: Array  # [value_dim]


class RuleConfig(NamedTuple):
    """Sizes and constants that a layer's kernels are compiled for."""

    heads: Heads
    block: int
    """Tokens per block."""
    eps: float
    """Epsilon of the output's norm."""


class Inputs(NamedTuple):
    """Inputs of the recurrence, float32. The dots stand for any leading axes."""

    q: Array  # [..., value_heads, key_dim], normed and scaled
    k: Array  # [..., value_heads, key_dim], normed
    v: Array  # [..., value_heads, value_dim]
    log_decay: Array  # [..., value_heads], at most 0
    beta: Array  # [..., value_heads], from 0 to 1


def inputs(qkv: Array, gates: Array, a_log: Array, dt_bias: Array, heads: Heads) -> Inputs:
    """Splits, norms and scales queries and keys, and computes the gates. The arguments are those of
    `gated_delta_rule`; their axis of tokens may be missing."""
    wide = qkv.astype(jnp.float32)
    q, k, v = jnp.split(wide, [heads.keys, 2 * heads.keys], axis=-1)
    leading = qkv.shape[:-1]

    def of_keys(each: Array) -> Array:
        each = each.reshape(*leading, heads.key_heads, heads.key_dim)
        each = each * lax.rsqrt(jnp.sum(each * each, axis=-1, keepdims=True) + _EPS)
        return jnp.repeat(each, heads.value_heads // heads.key_heads, axis=-2)

    return Inputs(
        of_keys(q) * heads.key_dim**-0.5,
        of_keys(k),
        v.reshape(*leading, heads.value_heads, heads.value_dim),
        *decay_and_beta(gates, a_log, dt_bias),
    )


def decay_and_beta(gates: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """The log decay and the write gate of each token and value head, float32 [..., value_heads],
    from gates [..., 2 * value_heads]."""
    a, b = jnp.split(gates.astype(jnp.float32), 2, axis=-1)
    own = slice(a.shape[-1])
    return -jnp.exp(a_log[own]) * jax.nn.softplus(a + dt_bias[own]), jax.nn.sigmoid(b)


def one_token(state: Array, token: Inputs) -> tuple[Array, Array]:
    """The recurrence for one token of one sequence, or of each of several sequences::

        S = exp(log_decay) * S
        S = S + k (beta * (v - S^T k))^T
        o = S^T q

    Args:
      state: float32 [..., value_heads, key_dim, value_dim].
      token: its leading axes are those of state.

    Returns:
      The new state, and o [..., value_heads, value_dim].
    """
    q, k, v, log_decay, beta = token
    state = state * jnp.exp(log_decay)[..., None, None]
    found = jnp.sum(state * k[..., None], axis=-2)
    write = beta[..., None] * (v - found)
    state = state + k[..., None] * write[..., None, :]
    return state, jnp.sum(state * q[..., None], axis=-2)


def one_block(state: Array, tokens: Inputs) -> tuple[Array, Array]:
    """The recurrence for consecutive tokens of a sequence, as matrix products: the chunked form
    (Yang et al. 2024, arXiv 2412.06464; its UT transform is in arXiv 2406.06484). In exact
    arithmetic it equals repeated calls of `one_token`. D[i, j] is the product of the decays of
    tokens j + 1 to i, and c[i] that of the tokens up to i::

        A = strictly lower part of beta * (K K^T * D)
        W = (1 + A)^-1 beta * (V - c * K S)
        O = c * (Q S) + lower part of (Q K^T * D) W
        S = c[last] * S + (D[last] * K)^T W

    D is computed from log decays that are summed separately for each j. Differences of prefix sums
    would cancel, and lose small decays beside large ones.

    Args:
      state: float32 [value_heads, key_dim, value_dim].
      tokens: their leading axis is that of the tokens.

    Returns:
      The new state, and o [tokens, value_heads, value_dim].
    """
    q, k, v = (jnp.swapaxes(each, 0, 1) for each in tokens[:3])
    log_decay, beta = tokens.log_decay.T, tokens.beta.T[..., None]
    size = k.shape[1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    strictly = jnp.tril(lower, -1)
    sums = jnp.cumsum(jnp.where(strictly, log_decay[..., None], 0.0), axis=1)
    decay = jnp.where(lower, jnp.exp(sums), 0.0)
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=1))[..., None]
    system = jnp.where(strictly, beta * _times(k, k.mT) * decay, 0.0)
    wanted = beta * (v - from_start * _times(k, state))
    write = lax.linalg.triangular_solve(
        system, wanted, left_side=True, lower=True, unit_diagonal=True
    )
    out = from_start * _times(q, state) + _times(_times(q, k.mT) * decay, write)
    kept = (k * decay[:, -1, :, None]).mT
    state = from_start[:, -1:] * state + _times(kept, write)
    return state, jnp.swapaxes(out, 0, 1)


def _times(a: Array, b: Array) -> Array:
    """a @ b in full float32 precision, without TF32."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def gated_delta_rule(
    qkv: Array,
    gates: Array,
    a_log: Array,
    dt_bias: Array,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    heads: Heads,
    block: int,
) -> tuple[Array, Array]:
    """Each token updates its slot's state, then reads it (Yang et al. 2024, arXiv 2412.06464)::

        q, k, v = split(qkv)                                  # heads: key, key, value
        q, k = q / |q| / sqrt(key_dim), k / |k|               # |x|: sqrt(sum(x^2) + 1e-6)
        a, b = split(gates)
        log_decay, beta = -exp(a_log) * softplus(a + dt_bias), sigmoid(b)

    Then `one_block` computes the tokens that a row takes in blocks (`Rows.blocked`), and
    `one_token` the others, all in float32. A row at position 0 begins with a state of zeros.

    The state within a row that `Chunks.kept` names is also stored in its slot.

    The result is bitwise the same however a sequence is split into steps and rows.

    Args:
      qkv: [tokens, 2 * heads.keys + heads.values].
      gates: [tokens, 2 * value_heads].
      a_log, dt_bias: float32 [value_heads].
      state: float32 [layers, slots, value_heads, key_dim, value_dim], updated in place when
        donated.
      layer: index into the first axis of state.
      step: slot and position of each token.
      block: tokens per block.

    Returns:
      o [tokens, value_heads, value_dim] in qkv's dtype, and state.
    """

    def inputs_of(qkv: Array, gates: Array) -> Inputs:
        return inputs(qkv, gates, a_log, dt_bias, heads)

    tokens, rows = qkv.shape[0], step.rows
    carry = _Carry(state[layer], jnp.zeros((tokens, heads.value_heads, heads.value_dim), qkv.dtype))
    singles, count = jnp.arange(tokens), jnp.int32(tokens)
    if rows.blocked is not None:
        carry = _block_by_block(carry, qkv, gates, inputs_of, rows, block)
        alone = ~in_blocks(step, state.shape[1])
        singles, count = jnp.nonzero(alone, size=tokens, fill_value=0)[0], jnp.sum(alone)
    carry = _one_by_one(carry, qkv, gates, inputs_of, step, singles, count)
    return carry.outs, state.at[layer].set(carry.slots)


class _Carry(NamedTuple):
    """Carry of the loops over tokens or blocks. All arithmetic is inside the loops: outside, XLA
    might fuse and round differently for other numbers of tokens."""

    slots: Array  # the state of one layer
    outs: Array  # [tokens, value_heads, value_dim]

    def begun(self, slot: Array, position: Array) -> Array:
        """A slot's state before `position`: zeros before position 0."""
        old = lax.dynamic_index_in_dim(self.slots, slot, keepdims=False)
        return jnp.where(position == 0, 0.0, old)

    def after(self, slot: Array, new: Array, outs: Array, tokens: Array) -> _Carry:
        """A copy with a slot's new state, and with the outputs of `tokens`, of which those past the
        last token count for nothing."""
        slots = lax.dynamic_update_index_in_dim(self.slots, new, slot, 0)
        return _Carry(slots, self.outs.at[tokens].set(outs.astype(self.outs.dtype), mode="drop"))


type _InputsOf = Callable[[Array, Array], Inputs]
"""Makes the inputs of the recurrence from qkv and gates."""


def _block_by_block(
    carry: _Carry, qkv: Array, gates: Array, inputs_of: _InputsOf, rows: Rows, block: int
) -> _Carry:
    assert rows.chunks is not None
    most = most_blocks(qkv.shape[0], rows.chunks, block)
    found, count = blocks_of(rows.chunks, block, most)
    lane = jnp.arange(block)

    def advance(number: Array, carry: _Carry) -> _Carry:
        first, length, slot, position, kept = (each[number] for each in found)
        token = jnp.where(lane < length, first + lane, qkv.shape[0])
        part = (each.at[token].get(mode="fill", fill_value=0) for each in (qkv, gates))
        new, outs = one_block(carry.begun(slot, position), _only(lane < length, inputs_of(*part)))
        slots = lax.dynamic_update_index_in_dim(carry.slots, new, kept, 0)
        carry = carry._replace(slots=slots)
        return carry.after(slot, new, outs, token)

    return lax.fori_loop(0, count, advance, carry)


def _only(there: Array, tokens: Inputs) -> Inputs:
    """A block in which the tokens that are not `there` change nothing."""
    log_decay = jnp.where(there[:, None], tokens.log_decay, 0.0)
    return tokens._replace(log_decay=log_decay, beta=jnp.where(there[:, None], tokens.beta, 0.0))


def _one_by_one(
    carry: _Carry,
    qkv: Array,
    gates: Array,
    inputs_of: _InputsOf,
    step: RecurrentStep,
    tokens: Array,
    count: Array,
) -> _Carry:
    """Computes the first `count` of `tokens`, which are indices into the step."""

    def advance(number: Array, carry: _Carry) -> _Carry:
        token = tokens[number]
        slot, begun = step.slots[token], carry.begun(step.slots[token], step.positions[token])
        new, out = one_token(begun, inputs_of(qkv[token], gates[token]))
        return carry.after(slot, new, out[None], token[None])

    return lax.fori_loop(0, count, advance, carry)


def rule_and_norm(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
) -> tuple[Array, Array]:
    """`gated_delta_rule` and the norm of its output::

        gates, z = sum_parts(gates), sum_parts(projected)[:, -values:]
        o, state = gated_delta_rule(qkv, gates, a_log, dt_bias, state, layer, step)
        return gated_rms_norm(o, z, norm), state

    Both sums are rounded to qkv's dtype. The output is [tokens, values].
    """
    gates = sum_parts(tokens.gates, tokens.qkv.dtype)
    out, state = gated_delta_rule(
        *(tokens.qkv, gates, weights.a_log, weights.dt_bias, state, layer, step),
        heads=config.heads,
        block=config.block,
    )
    return norm_of(out, tokens, weights, config), state


def rule_outputs(
    tokens: RuleTokens,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
) -> Array:
    """Returns the output of `rule_and_norm`, and does not update the state."""
    return rule_and_norm(tokens, weights, state, layer, step, config=config)[0]


def advance_state(
    qkv: Array,
    gates: Array,
    weights: RuleWeights,
    state: Array,
    layer: int,
    step: RecurrentStep,
    *,
    config: RuleConfig,
) -> Array:
    """Returns the new state of `gated_delta_rule`. gates must have qkv's dtype."""
    own = (qkv, gates, weights.a_log, weights.dt_bias, state, layer, step)
    return gated_delta_rule(*own, heads=config.heads, block=config.block)[1]


def norm_of(out: Array, tokens: RuleTokens, weights: RuleWeights, config: RuleConfig) -> Array:
    """The gated norm of `rule_and_norm`, applied to o [tokens, value_heads, value_dim]."""
    columns = tokens.projected[..., -config.heads.values :]
    gate = sum_parts(columns, out.dtype).reshape(out.shape)
    normed = gated_rms_norm(out, gate, weights.norm, config.eps)
    return normed.reshape(out.shape[0], -1)


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """rms_norm(x) * silu(gate) over the last axis, in x's dtype::

        cast(weight * cast(x / rms(x)) * silu(gate))

    The rest is computed in float32. The weight is not zero-centred.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = weight * (wide * scale).astype(x.dtype)
    return (normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
