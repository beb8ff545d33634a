"""Residual add, RMSNorm and the router's product as one kernel of a launch chain (PDL).

Several programs share a token. Each one loads its rows of the router before it waits for the token,
and then normalises the token itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels.add_rms_norm.triton import add_and_norm
from jaxserve_kernels.experts.few_config import scoring
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def _norm_and_score(
    x_ptr, update_ptr, weight_ptr, bias_ptr, w_ptr, total_ptr, out_ptr, scores_ptr,
    n: tl.constexpr, embed: tl.constexpr, eps: tl.constexpr,
    parts: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LAST: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """A program scores one token with some rows of the router. All programs of a token write the
    same residual sum; the first one writes the norm, and has the router's last row with LAST."""
    column = tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (row < n)[:, None] & (column < embed)[None, :]
    w = tl.load(w_ptr + row[:, None] * embed + column[None, :], mask=there, other=0.0)
    first = tl.program_id(1) == 0
    mask = (column < embed) & first
    if LAST:
        w_last = tl.load(w_ptr + (n - 1) * embed + column, mask=mask, other=0.0)
    token = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, False, EARLY,
    )  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + at * embed + column, token, mask=mask)
    scores = tl.sum(w.to(tl.float32) * token.to(tl.float32)[None, :], axis=1)
    tl.store(scores_ptr + at * n + row, scores, mask=row < n)
    if LAST:
        score = tl.sum(w_last.to(tl.float32) * token.to(tl.float32), axis=0)
        tl.store(scores_ptr + at * n + n - 1, score, mask=first)


def norm_and_score(
    x: Array,
    update: Array,
    weight: Array,
    router: Array,
    bias: Array | None,
    *,
    eps: float,
    target: Target,
) -> tuple[Array, Array, Array]:
    """See `routed.norm_and_score`. The scores have one part."""
    tokens, embed = x.shape
    n = router.shape[0]
    block = triton.next_power_of_2(embed)
    launch = scoring(tokens, embed, n)
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(
        x, update, weight, weight if bias is None else bias, router,
        kernel=_norm_and_score,
        name="norm_and_score",
        target=target,
        out_type=(row, row, jax.ShapeDtypeStruct((1, tokens, n), jnp.float32)),
        grid=(tokens, launch.programs // tokens),
        num_warps=launch.num_warps,
        n=n, embed=embed, eps=eps, parts=update.shape[0],
        BIAS=bias is not None, BLOCK=block, ROWS=launch.rows, LAST=launch.last,
    )  # fmt: skip
