"""The sampler: picks the implementation."""

from __future__ import annotations

import functools

from jax import Array, lax

from jaxserve_kernels.fallback import compiles
from jaxserve_kernels.sampler import reference
from jaxserve_kernels.sampler.adjust import RowAdjustments, SlotTables
from jaxserve_kernels.sampler.reference import Largest, RowSampling, Sample, TokenScores
from jaxserve_kernels.target import Target


def sample(
    logits: Array,
    rows: RowSampling,
    adjustments: RowAdjustments,
    tables: SlotTables,
    wanted: Array,
    *,
    vocab: int,
    alternatives: int,
    target: Target,
) -> Sample:
    """See `reference.sample`."""
    inputs = (logits, rows, adjustments, tables, wanted)
    if target.uses_triton():
        from jaxserve_kernels.sampler import triton  # needs Triton: only for GPUs

        kernels = functools.partial(
            triton.sample, vocab=vocab, alternatives=alternatives, target=target
        )
        if compiles("sample", kernels, *inputs, static=(vocab, alternatives), target=target):
            return kernels(*inputs)
    return reference.sample(
        *inputs, vocab=vocab, alternatives=alternatives, largest=_largest(target=target)
    )


def score(
    logits: Array, tokens: Array, *, vocab: int, alternatives: int, target: Target
) -> TokenScores:
    """See `reference.score`."""
    if target.uses_triton():
        from jaxserve_kernels.sampler import triton

        kernels = functools.partial(
            triton.score, vocab=vocab, alternatives=alternatives, target=target
        )
        if compiles("score", kernels, logits, tokens, static=(vocab, alternatives), target=target):
            return kernels(logits, tokens)
    return reference.score(
        logits, tokens, vocab=vocab, alternatives=alternatives, largest=_largest(target=target)
    )


def _largest(*, target: Target) -> Largest:
    """On a CPU XLA has a library function, where the definition is a loop to be compiled."""
    return lax.top_k if target.implementation == "cpu" else reference.largest
