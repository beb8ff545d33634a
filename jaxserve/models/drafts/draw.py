"""Drafts are drawn with the target's noise.

Plain decoding chooses argmax(scores / temperature + g) with Gumbel noise g of seed and position
only. A draft drawn from the head's scores with the same noise is accepted with probability::

    sum over tokens i of  1 / sum over j of max(p[j] / p[i], q[j] / q[i])

where p and q are the target's and the head's distributions (Daliri, Musco and Suresh 2024, arXiv
2408.07978); with noise of its own only with sum p q.
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
    """Returns the drafts that scores, float32 [rows, padded vocab], choose: int32 [rows].

    Temperature, truncation, biases and masks are those of the requests. Penalties are left out: the
    drafts before would have to be counted.

    Args:
      rows: of the positions that the drafts are for.
      vocab: only token ids below it are drawn.
    """
    unpenalised = adjustments._replace(features=adjustments.features & ~PENALISED)
    # Nobody reads the counts, and the sampler would copy those that steps go on with.
    uncounted = tables._replace(counts=jnp.zeros_like(tables.counts, shape=(1, scores.shape[1])))
    wanted = jnp.zeros(scores.shape[0], bool)
    found = sample(
        scores, rows, unpenalised, uncounted, wanted, vocab=vocab, alternatives=1, target=target
    )
    return found.tokens
