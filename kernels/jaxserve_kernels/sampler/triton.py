"""The sampler as two kernels: a scan of the vocabulary in parallel, then one program per row.

The scan stores each chunk's maximum, its place and its part of the softmax sum, and the same for
scores with noise. The selection then depends on the row:

- Greedy rows, and rows that draw from the whole distribution, only merge the chunks.
- With top_p or min_p, the row tests whether the drawn token is among the kept ones, and draws again
  if it is not.
- With a small top_k, the row takes its tokens one by one, each from the chunk with the largest
  maximum. With a large one, it searches the threshold digit by digit over the row.

Nothing is sorted. If a row adjusts its scores, the scan also writes the adjusted scores to scratch
memory, and the selection reads those. Other rows do not touch the scratch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
from jax import Array

from jaxserve_kernels.sampler.adjust import (
    MAX_BIASES,
    SUPPRESSED,
    RowAdjustments,
    SlotTables,
)
from jaxserve_kernels.sampler.reference import (
    MIN_TEMPERATURE,
    RADIX_BITS,
    Logprobs,
    RowSampling,
    Sample,
    TokenScores,
    ranks,
)
from jaxserve_kernels.sampler.triton_parts import ACTIVE, PARTS, WANTED
from jaxserve_kernels.sampler.triton_scan import scan
from jaxserve_kernels.sampler.triton_select import select
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_CHUNK = 4096
_LIST = 64
"""The largest top_k for which tokens are taken one by one."""


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
    """See `sampler.api`: one kernel scans chunks of the logits, one selects for each row."""
    num_rows, stride = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    flags = rows.active.astype(jnp.int32) * ACTIVE.value + wanted.astype(jnp.int32) * WANTED.value
    shared: dict[str, Any] = {
        "vocab": vocab, "stride": stride, "chunks": chunks, "count_stride": tables.counts.shape[1],
        "MIN_T": MIN_TEMPERATURE, "BLOCK": _CHUNK, "num_warps": 8,
    }  # fmt: skip
    inputs = (logits, flags, *rows[1:])
    parts = (num_rows * chunks * PARTS.value,)
    floats, ids, adjusted = triton_call(
        *inputs,
        *adjustments,
        *tables,
        kernel=scan,
        name="sampler_scan",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.int32),
            jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        ),
        grid=(num_rows, chunks),
        mask_stride=tables.masks.shape[1],
        BIASES=MAX_BIASES,
        LOWEST=SUPPRESSED,
        **shared,
    )
    counts = jax.new_ref(tables.counts)
    token, logprob, top_ids, top = triton_call(
        *inputs,
        adjustments.features,
        adjustments.slots,
        floats,
        ids,
        adjusted,
        counts,
        kernel=select,
        name="sampler_select",
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, alternatives), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, alternatives), jnp.float32),
        ),
        grid=(num_rows,),
        alternatives=alternatives,
        BITS=RADIX_BITS,
        LIST=_LIST,
        CHUNKS=triton.next_power_of_2(chunks),
        **shared,
    )
    tables = tables._replace(counts=jax.freeze(counts))
    return Sample(token, Logprobs(logprob, top_ids, top), tables)


def score(
    logits: Array, tokens: Array, *, vocab: int, alternatives: int, target: Target
) -> TokenScores:
    """See `sampler.api`. The kernels find the alternatives, with rows that do not sample; XLA
    computes the rest in one pass."""
    zeros, ones = jnp.zeros(tokens.shape, jnp.int32), jnp.ones(tokens.shape, jnp.float32)
    rows = RowSampling(zeros != 0, 0 * ones, zeros, ones, 0 * ones, zeros, zeros)
    adjustments = RowAdjustments(zeros, zeros, ones, ones, ones)
    unread = SlotTables(*(jnp.zeros((1, 8), dtype) for dtype in (jnp.int16, jnp.int32, jnp.int32)))
    _, (_, top_ids, top), _ = sample(
        logits,
        rows,
        adjustments,
        unread,
        zeros == 0,
        vocab=vocab,
        alternatives=alternatives,
        target=target,
    )
    logits = jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)
    logprob = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    logprob -= jax.nn.logsumexp(logits, axis=-1)
    return TokenScores(logprob, ranks(logits, tokens), top_ids, top)
