"""The definition of the gated delta rule in plain JAX: token by token, in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve_kernels.recurrent_state import RecurrentStep

_EPS = 1e-6
"""Of the norms of queries and keys."""


class Heads(NamedTuple):
    """Heads of a layer. Key head j serves the value heads j * n to j * n + n - 1, where there are n
    times as many of these."""

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


class Inputs(NamedTuple):
    """What the recurrence takes of tokens, float32; the dots are any axes."""

    q: Array  # [..., value_heads, key_dim], normed and scaled
    k: Array  # [..., value_heads, key_dim], normed
    v: Array  # [..., value_heads, value_dim]
    log_decay: Array  # [..., value_heads], at most 0
    beta: Array  # [..., value_heads], from 0 to 1


def inputs(qkv: Array, gates: Array, a_log: Array, dt_bias: Array, heads: Heads) -> Inputs:
    """Norms, scale and gates; see `gated_delta_rule` for the arguments, whose axis of tokens may be
    missing."""
    wide = qkv.astype(jnp.float32)
    q, k, v = jnp.split(wide, [heads.keys, 2 * heads.keys], axis=-1)
    leading = qkv.shape[:-1]

    def of_keys(each: Array) -> Array:
        each = each.reshape(*leading, heads.key_heads, heads.key_dim)
        each = each * lax.rsqrt(jnp.sum(each * each, axis=-1, keepdims=True) + _EPS)
        return jnp.repeat(each, heads.value_heads // heads.key_heads, axis=-2)

    a, b = jnp.split(gates.astype(jnp.float32), 2, axis=-1)
    return Inputs(
        of_keys(q) * heads.key_dim**-0.5,
        of_keys(k),
        v.reshape(*leading, heads.value_heads, heads.value_dim),
        -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias),
        jax.nn.sigmoid(b),
    )


def one_token(state: Array, token: Inputs) -> tuple[Array, Array]:
    """The recurrence for one token of one sequence, or several of as many sequences::

        S = exp(log_decay) * S
        S = S + k (beta * (v - S^T k))^T
        o = S^T q

    Args:
      state: float32 [..., value_heads, key_dim, value_dim].
      token: the dots are those of the state.

    Returns:
      The new state, and o [..., value_heads, value_dim].
    """
    q, k, v, log_decay, beta = token
    state = state * jnp.exp(log_decay)[..., None, None]
    found = jnp.sum(state * k[..., None], axis=-2)
    write = beta[..., None] * (v - found)
    state = state + k[..., None] * write[..., None, :]
    return state, jnp.sum(state * q[..., None], axis=-2)


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
) -> tuple[Array, Array]:
    """Each token changes its slot's state and reads it (Yang et al. 2024, arXiv 2412.06464)::

        q, k, v = split(qkv)                                  # heads: key, key, value
        q, k = q / |q| / sqrt(key_dim), k / |k|               # |x|: sqrt(sum(x^2) + 1e-6)
        a, b = split(gates)
        log_decay, beta = -exp(a_log) * softplus(a + dt_bias), sigmoid(b)

    and then `one_token`, all in float32. A row at position 0 begins with a state of zeros.

    Whatever the split into steps and rows, the same numbers are computed in the same order.

    Args:
      qkv: [tokens, 2 * heads.keys + heads.values].
      gates: [tokens, 2 * value_heads].
      a_log, dt_bias: float32 [value_heads].
      state: float32 [layers, slots, value_heads, key_dim, value_dim], updated in place when
        donated.
      layer: index into the first axis of state.
      step: where the tokens belong.

    Returns:
      o [tokens, value_heads, value_dim] in qkv's dtype, and state.
    """

    # All of a token's numbers are computed inside the loop: outside, XLA might fuse and round
    # differently for other numbers of tokens.
    def advance(slots: Array, token: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        qkv, gates, slot, position = token
        old = lax.dynamic_index_in_dim(slots, slot, keepdims=False)
        old = jnp.where(position == 0, 0.0, old)
        new, out = one_token(old, inputs(qkv, gates, a_log, dt_bias, heads))
        return lax.dynamic_update_index_in_dim(slots, new, slot, 0), out

    of_layer, out = lax.scan(advance, state[layer], (qkv, gates, step.slots, step.positions))
    return out.astype(qkv.dtype), state.at[layer].set(of_layer)


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """rms_norm(x) * silu(gate) over the last axis, in x's dtype::

        cast(weight * cast(x / rms(x)) * silu(gate))

    computed in float32 but for the inner rounding. The weight is not zero-centred.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = weight * (wide * scale).astype(x.dtype)
    return (normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
