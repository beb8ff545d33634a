"""The definition of routers and experts (Shazeer et al. 2017), in plain JAX.

The routers are those of Qwen3-MoE (arXiv 2505.09388) and gpt-oss (arXiv 2508.10925), as
transformers implements them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.dense_matmul.reference import gated
from jaxserve_kernels.experts.types import (
    SWIGLU_OSS_ALPHA,
    SWIGLU_OSS_LIMIT,
    ExpertActivation,
    ExpertWeights,
    Routing,
)
from jaxserve_kernels.weights import is_quantized


def route(
    logits: Array, routing: Routing, bias: Array | None = None, active: Array | None = None
) -> tuple[Array, Array]:
    """Picks the k experts with the largest logits for each token, and the weights of their results.

    A weight is the softmax over all logits, or the sigmoid of the expert's logit
    (`routing.scoring`). With `routing.normalize` a token's weights are divided by their sum.

    Args:
      logits: float32 [tokens, experts], or partial sums [parts, tokens, experts] of them. Columns
        after the last expert are ignored: a router's matrix may have more rows.
      bias: [experts], added to the logits.
      active: int32 [tokens], 0 for padding, which has no experts; None: no token is padding.

    Returns:
      Expert ids int32 [tokens, k], by falling logit, ties by rising id, and the number of experts
      for padding; and their weights, float32 [tokens, k], 0 for padding.
    """
    logits = logits.astype(jnp.float32)
    if logits.ndim == 3:
        logits = logits.sum(0)
    logits = logits[:, : routing.num_experts]
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    chosen, ids = jax.lax.top_k(logits, routing.top_k)
    if routing.scoring == "sigmoid":
        weights = jax.nn.sigmoid(chosen)
    else:
        weights = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    if routing.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    if active is not None:
        there = (active != 0)[:, None]
        ids, weights = jnp.where(there, ids, routing.num_experts), jnp.where(there, weights, 0.0)
    return ids.astype(jnp.int32), weights


def experts(
    x: Array, ids: Array, weights: Array, w: ExpertWeights, activation: ExpertActivation
) -> Array:
    """The sum of weight * expert(x) over a token's experts, [1, tokens, embed] in x's dtype::

        hidden = act(x @ gate_up.T + gate_up_bias)
        expert(x) = hidden @ down.T + down_bias

    Products are accumulated in float32. hidden is rounded to x's dtype before and after the
    activation. The sum over experts is in float32. A loop multiplies one expert at a time with all
    tokens, so that only one dequantised expert is in memory.

    Args:
      x: [tokens, embed].
      ids, weights: [tokens, k], as `route` returns them.
    """

    def add(total: Array, each: tuple[Array, ExpertWeights]) -> tuple[Array, None]:
        index, one = each
        weight = jnp.where(ids == index, weights, 0.0).sum(-1, keepdims=True)
        return total + weight * _expert(x, one, activation), None

    count = jax.tree.leaves(w.gate_up)[0].shape[0]
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (jnp.arange(count), w))
    return total.astype(x.dtype)[None]


def swiglu_oss(gate_up: Array) -> Array:
    """gpt-oss's gated activation of gate_up [tokens, 2 * width]: [tokens, width], in float32::

    gate = min(gate, 7); up = clip(up, -7, 7)
    (up + 1) * gate * sigmoid(1.702 * gate)
    """
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gate = jnp.minimum(gate, SWIGLU_OSS_LIMIT)
    up = jnp.clip(up, -SWIGLU_OSS_LIMIT, SWIGLU_OSS_LIMIT)
    active = gate * jax.nn.sigmoid(SWIGLU_OSS_ALPHA * gate)
    return ((up + 1.0) * active).astype(gate_up.dtype)


def _expert(x: Array, w: ExpertWeights, activation: ExpertActivation) -> Array:
    """One expert's result, float32 [tokens, embed]. Its weights have no axis of experts."""
    gate_up = _product(x, w.gate_up, w.gate_up_bias).astype(x.dtype)
    hidden = swiglu_oss(gate_up) if activation == "swiglu_oss" else gated(gate_up, activation)
    return _product(hidden, w.down, w.down_bias)


def _product(x: Array, weight: Any, bias: Array | None) -> Array:
    """float32 [tokens, out]."""
    if is_quantized(weight):
        weight = weight.dequantize()[:, : x.shape[1]]
        x = x.astype(jnp.float32)
    sums = jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return sums if bias is None else sums + bias.astype(jnp.float32)
