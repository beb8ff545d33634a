"""Draws drafts with the target's sampling noise.

Plain decoding chooses argmax(scores / temperature + g). The Gumbel noise g depends on seed and
position only. A draft drawn from the head's scores with the same noise is accepted with
probability::

    sum over tokens i of  1 / sum over j of max(p[j] / p[i], q[j] / q[i])

where p and q are the target's and the head's distributions (Daliri, Musco and Suresh 2024, arXiv
2408.07978). With independent noise, the probability would only be sum p q.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels.sampler import PENALISED, RowAdjustments, RowSampling, SlotTables, sample
from jaxserve_kernels.target import Target


def draw(
    scores: Array,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    *,
    vocab: int,
    target: Target,
) -> Array:
    """Draws one draft per row. Returns token ids, int32 [rows].

    The requests' temperature, truncation, biases and masks apply. Penalties do not: they would need
    counts that include the drafts before.

    Args:
      scores: float32 [rows, padded vocab].
      rows: sampling parameters, with the positions of the drafts.
      vocab: only token ids below it are drawn.
    """
    unpenalised = adjustments._replace(features=adjustments.features & ~PENALISED)
    # Without penalties nothing reads the counts. The sampler would copy the real ones.
    uncounted = tables._replace(counts=jnp.zeros_like(tables.counts, shape=(1, scores.shape[1])))
    wanted = jnp.zeros(scores.shape[0], bool)
    found = sample(
        scores, rows, unpenalised, uncounted, wanted, vocab=vocab, alternatives=1, target=target
    )
    return found.tokens
