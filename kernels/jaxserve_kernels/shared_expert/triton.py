"""The sum with a shared expert, as a kernel of a decode step's launch chain (PDL). There is one
program for some columns of a token."""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

_COLUMNS = 512


@triton.jit
def _sum(x_ptr, at, mask, stride, parts: tl.constexpr):
    total = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(x_ptr + part * stride + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add(
    update_ptr, shared_ptr, scores_ptr, out_ptr,
    tokens, embed: tl.constexpr, columns: tl.constexpr, column: tl.constexpr,
    updates: tl.constexpr, shares: tl.constexpr, parts: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = at < embed
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at += token * embed
    one = token * columns + column + tl.arange(0, 1)
    score = _sum(scores_ptr, one, one >= 0, tokens * columns, parts)
    shared = _sum(shared_ptr, at, within, tokens * embed, shares)
    total = _sum(update_ptr, at, within, tokens * embed, updates)
    total += shared / (1.0 + tl.exp(-score))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=within)


def add_shared_expert(
    update: Array, shared: Array, scores: Array, *, column: int, dtype: str, target: Target
) -> Array:
    """See `reference.add_shared_expert`."""
    _, tokens, embed = update.shape
    return triton_call(
        update, shared, scores,
        kernel=_add,
        name="add_shared_expert",
        target=target,
        out_type=jax.ShapeDtypeStruct((1, tokens, embed), dtype),
        grid=(tokens, triton.cdiv(embed, _COLUMNS)),
        num_warps=4,
        tokens=tokens, embed=embed, columns=scores.shape[2], column=column,
        updates=update.shape[0], shares=shared.shape[0], parts=scores.shape[0], COLUMNS=_COLUMNS,
    )  # fmt: skip
