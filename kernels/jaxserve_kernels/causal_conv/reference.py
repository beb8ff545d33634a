"""The definition of the causal convolution with state, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.dense_matmul.reference import sum_parts
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows


def causal_conv(
    projected: Array, weight: Array, state: Array, layer: int, step: RecurrentStep
) -> tuple[Array, Array]:
    """Convolves each channel along its sequence, and keeps the inputs that the next step needs::

        x = sum_parts(projected)[:, :channels]
        y[p] = silu(sum(weight[:, i] * x[p - width + 1 + i] for i in range(width)))

    for position p of a sequence. Inputs before the sequence's first token are 0. Earlier steps'
    inputs come from the slot's state. The sum is taken in float32 and rounded to x's dtype after
    SiLU. `Chunks.kept` stores the inputs before another token, too.

    Args:
      projected: [parts, tokens, columns], partial sums. The first `channels` columns, rounded to
        state's dtype, are x.
      weight: [channels, width].
      state: [layers, slots, width - 1, channels] in the dtype of activations, updated in place when
        donated.
      layer: index into the first axis of state.
      step: slot and position of each token.

    Returns:
      y [tokens, channels] in x's dtype, and state.
    """
    x = sum_parts(projected[..., : weight.shape[0]], state.dtype)
    y = _convolved(x, weight, state, layer, step)
    return y, keep_inputs(x, state, layer, step.rows.with_kept())


def convolve(
    projected: Array, weight: Array, state: Array, layer: int, step: RecurrentStep
) -> Array:
    """Returns y of `causal_conv`, and does not update the state."""
    x = sum_parts(projected[..., : weight.shape[0]], state.dtype)
    return _convolved(x, weight, state, layer, step)


def _convolved(x: Array, weight: Array, state: Array, layer: int, step: RecurrentStep) -> Array:
    kept = weight.shape[1] - 1
    offsets = step.offsets(state.shape[1])
    begins = (step.positions - offsets == 0)[:, None]
    wide = weight.astype(jnp.float32)
    total = x.astype(jnp.float32) * wide[:, kept]
    for back in range(1, kept + 1):
        inside = jnp.pad(x, ((back, 0), (0, 0)))[: x.shape[0]]
        # Index into the state of an input `back - offset` places before the row.
        place = jnp.clip(kept - back + offsets, 0, kept - 1)
        before = state[layer, step.slots, place]
        before = jnp.where(begins, jnp.zeros_like(before), before)
        found = jnp.where((offsets >= back)[:, None], inside, before)
        total += found.astype(jnp.float32) * wide[:, kept - back]
    return jax.nn.silu(total).astype(x.dtype)


def keep_inputs(x: Array, state: Array, layer: int, rows: Rows) -> Array:
    """Returns the state of `causal_conv` after rows with inputs x [tokens, channels]."""
    kept = state.shape[2]
    old = state[layer, rows.slots]
    old = jnp.where((rows.positions == 0)[:, None, None], jnp.zeros_like(old), old)
    # Entry i is the input at `length - kept + i` of the row.
    at = rows.length[:, None] - kept + jnp.arange(kept)
    of_row = x[jnp.clip(rows.first[:, None] + at, 0, x.shape[0] - 1)]
    of_state = jnp.take_along_axis(old, jnp.clip(kept + at, 0, kept - 1)[:, :, None], axis=1)
    new = jnp.where((at >= 0)[:, :, None], of_row, of_state)
    slots = jnp.where(rows.length > 0, rows.slots, state.shape[1])  # padding rows write nothing
    return state.at[layer, slots].set(new, mode="drop")
