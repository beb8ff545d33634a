"""The sampler: picks the implementation."""

from __future__ import annotations

from typing import Any

from jax import Array, lax

from jaxserve_kernels.op import Implementation, Op, Refusal, anything, on_kernels
from jaxserve_kernels.sampler import reference
from jaxserve_kernels.sampler.adjust import RowAdjustments, SlotTables
from jaxserve_kernels.sampler.reference import RowSampling, Sample, TokenScores
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
    return _SAMPLE(*inputs, vocab=vocab, alternatives=alternatives, target=target)


def score(
    logits: Array, tokens: Array, *, vocab: int, alternatives: int, target: Target
) -> TokenScores:
    """See `reference.score`."""
    return _SCORE(logits, tokens, vocab=vocab, alternatives=alternatives, target=target)


def _for_cpus(*_: Any, target: Target, **__: Any) -> Refusal | None:
    """Accepts CPUs. There XLA has a library function for `top_k`; the definition is a loop, which
    takes long to compile."""
    return None if target.implementation == "cpu" else Refusal("made for CPUs")


def _op(name: str) -> Op:
    """The operation `name`, a function that both `reference` and `triton` define."""
    definition = getattr(reference, name)

    def kernels(_: None, *args: Any, **options: Any) -> Any:
        from jaxserve_kernels.sampler import triton  # needs Triton: only for GPUs

        return getattr(triton, name)(*args, **options)

    def cpu(_: None, *args: Any, target: Target, **options: Any) -> Any:
        return definition(*args, largest=lax.top_k, **options)

    def defined(_: None, *args: Any, target: Target, **options: Any) -> Any:
        return definition(*args, **options)

    return Op(
        name=name,
        implementations=(
            Implementation(name="triton", configure=on_kernels, run=kernels),
            Implementation(name="cpu", configure=_for_cpus, run=cpu, kernels=False),
            Implementation(name="reference", configure=anything, run=defined, kernels=False),
        ),
        describe=lambda *_, vocab, **__: f"vocabulary of {vocab}",
    )


_SAMPLE, _SCORE = _op("sample"), _op("score")
