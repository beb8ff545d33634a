"""The sampler: picks the implementation."""

from __future__ import annotations

import functools

from jax import Array, lax

from jaxserve_kernels import target
from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.sampler import reference
from jaxserve_kernels.sampler.adjust import RowAdjustments, SlotTables
from jaxserve_kernels.sampler.reference import Largest, RowSampling, Sample, TokenScores


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
    if target.uses_triton():
        from jaxserve_kernels.sampler import triton  # needs Triton: only for GPUs

        kernels = functools.partial(triton.sample, vocab=vocab, alternatives=alternatives)
        if compiles("sample", kernels, *inputs, static=(vocab, alternatives)):
            return kernels(*inputs)
    return reference.sample(*inputs, vocab=vocab, alternatives=alternatives, largest=_largest())


def score(logits: Array, tokens: Array, *, vocab: int, alternatives: int) -> TokenScores:
    """See `reference.score`."""
    if target.uses_triton():
        from jaxserve_kernels.sampler import triton

        kernels = functools.partial(triton.score, vocab=vocab, alternatives=alternatives)
        if compiles("score", kernels, logits, tokens, static=(vocab, alternatives)):
            return kernels(logits, tokens)
    return reference.score(
        logits, tokens, vocab=vocab, alternatives=alternatives, largest=_largest()
    )


def _largest() -> Largest:
    """On a CPU XLA has a library function, where the definition is a loop to be compiled."""
    return lax.top_k if target.current().implementation == "cpu" else reference.largest
