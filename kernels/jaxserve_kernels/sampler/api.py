"""The sampler: picks the implementation."""

from __future__ import annotations

from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.sampler import reference
from jaxserve_kernels.sampler.reference import Logprobs, RowSampling


def sample(
    logits: Array, rows: RowSampling, wanted: Array, *, vocab: int, alternatives: int
) -> tuple[Array, Logprobs]:
    """See `reference.sample`."""
    if target.current().implementation == "reference":
        return reference.sample(logits, rows, wanted, vocab=vocab, alternatives=alternatives)
    from jaxserve_kernels.sampler import triton  # needs Triton: only for GPUs

    return triton.sample(logits, rows, wanted, vocab=vocab, alternatives=alternatives)
