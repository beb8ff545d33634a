"""The sampler: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.sampler import reference
from jaxserve_kernels.sampler.adjust import RowAdjustments, SlotTables
from jaxserve_kernels.sampler.reference import RowSampling, Sample, TokenScores


def sample(
    logits: Array,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    wanted: Array,
    *,
    vocab: int,
    alternatives: int,
) -> Sample:
    """See `reference.sample`."""
    inputs = (logits, rows, adjustments, tables, wanted)
    if not target.uses_triton():
        return reference.sample(*inputs, vocab=vocab, alternatives=alternatives)
    from jaxserve_kernels.sampler import triton  # needs Triton: only for GPUs

    return triton.sample(*inputs, vocab=vocab, alternatives=alternatives)


def score(logits: Array, tokens: Array, *, vocab: int, alternatives: int) -> TokenScores:
    """See `reference.score`."""
    if not target.uses_triton():
        return reference.score(logits, tokens, vocab=vocab, alternatives=alternatives)
    from jaxserve_kernels.sampler import triton

    return triton.score(logits, tokens, vocab=vocab, alternatives=alternatives)
