"""Products of few tokens with their experts' codes, which stream through a ring in shared memory.

The layout of the work is that of `triton.py`: a program takes some weight rows of one expert and a
block of its (token, choice) pairs, in expert order. With up to 16 tokens a warp multiplies its own
rows (`quantized_matmul.triton_k_step`) with the tensor cores' smallest products, which need neither
descriptors nor waits. So a thread executes fewer instructions for each code than in `triton.py`.
Gate and up of 4-bit integers may read int8 tokens (`quantized_matmul.triton_int8_k_step`), which
the norm writes. The hidden activations stay in bfloat16.

With PDL, gate and up let the next kernel start only after their own wait. So the lists are complete
when down starts, which finds its expert and fills its ring with codes before it waits.

A shared expert may take part. The first programs have its rows and all tokens, whose rows of the
hidden activations follow those of all pairs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import Config, Launch
from jaxserve_kernels.experts.triton import launch_arguments
from jaxserve_kernels.experts.triton_activation import OSS, activated_sums
from jaxserve_kernels.experts.triton_few import expert_arrays, expert_at
from jaxserve_kernels.experts.triton_streaming_blocks import DOWN, block_of, row_of
from jaxserve_kernels.experts.triton_streaming_copies import (
    copy_codes,
    copy_tokens,
    guess,
    scales_of_rows,
    token_source,
    weight_source,
)
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Order
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, int8_form, plain
from jaxserve_kernels.quantized_matmul.triton_arguments import MXFP4
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP, less_bias
from jaxserve_kernels.quantized_matmul.triton_mxfp4_int8_k_step import tables
from jaxserve_kernels.quantized_matmul.triton_results import scaled
from jaxserve_kernels.quantized_matmul.triton_rings import (
    add_tiles,
    groups_of,
    mma_of,
    token_rings,
    wait_for_copies,
    weight_rings,
    words_of,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Mxfp4Weight

_MXFP4 = gl.constexpr(MXFP4.value)


@gluon.jit
def _finish(
    acc, bias_ptr, order_ptr, weights_ptr, scores_ptr, out_ptr, begin, end, tokens, shared,
    n: gl.constexpr, experts: gl.constexpr, choices: gl.constexpr, scored: gl.constexpr,
    parts: gl.constexpr, SHARED: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Stores the sums of a program. Gated, in expert order; those of down times their weights, in
    the order of choice and token. The shared expert is the last choice. Its weight is the sigmoid
    of the score after the experts'."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if BIAS:
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
        block, inner = row_of(lane, n, GATED, ROWS)
        acc += gl.load(bias_ptr + block * 64 + inner).to(gl.float32)[:, None]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED == DOWN:
        values = acc
    else:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        values = activated_sums(gate, up, dtype, GATED).reshape([ROWS // 2, TOKENS])
    layout: gl.constexpr = values.type.layout
    rows: gl.constexpr = values.shape[0]
    row = gl.program_id(0) * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
    place = begin + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    there = place < end
    out = place
    if GATED == DOWN:
        routed = there
        if SHARED > 0:
            routed = there & (not shared)
        pair = gl.load(order_ptr + place, mask=routed, other=0)
        weight = gl.load(weights_ptr + pair, mask=routed, other=0.0)
        out = (pair % choices) * tokens + pair // choices
        if SHARED > 0:
            token = place - tokens * choices
            score = gl.zeros_like(weight)
            for part in gl.static_range(parts):
                at = scores_ptr + (part * tokens + token) * scored + experts
                score += gl.load(at, mask=there & shared, other=0.0)
            weight = gl.where(shared, 1.0 / (1.0 + gl.exp(-score)), weight)
            out = gl.where(shared, place, out)
        values *= weight[None, :]
    mask = there[None, :] & (row[:, None] < n)
    gl.store(out_ptr + out.to(gl.int64)[None, :] * n + row[:, None], values.to(dtype), mask=mask)


@gluon.jit
def _sums(
    rings, x_rings, weight, own, of_rows, table_ptr, tokens,
    mma: gl.constexpr, tiles: gl.constexpr, columns: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, TOKENS: gl.constexpr,
    ROWS: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's rows times its tokens, [rows, tokens] in the layout `mma`, before `scaled`. All
    but one of the rings' slots have been requested; `weight` and `own` are the sources of the
    others."""
    dtype: gl.constexpr = x_rings[0].dtype
    ahead: gl.constexpr = STAGES - 1
    biased: gl.constexpr = TOKENS <= MOST_BY_A_WARP and dtype != gl.int8
    bias = less_bias(ROWS, mma) if biased else 0
    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    slot = 0
    # Not unrolled: the grid has no third dimension.
    for k_step in range(tiles // K_TILES + gl.program_id(2)):
        wait_for_copies(ahead - 1, TOKENS)
        free = gl.where(slot == 0, ahead, slot - 1)
        later = k_step + ahead
        copy_codes(rings, weight, free, later, tiles, KIND, GROUP, ZERO, ROWS, K_TILES)
        copy_tokens(x_rings, own, free, later, tokens, tiles, columns, ZERO, TOKENS, K_TILES)
        async_copy.commit_group()
        acc = add_tiles(
            acc, rings, slot, x_rings, slot, K_TILES, KIND, GROUP, ZERO, bias, biased, of_rows,
            table_ptr,
        )  # fmt: skip
        slot = gl.where(slot == ahead, 0, slot + 1)
    if tiles % K_TILES > 0:
        wait_for_copies(0, TOKENS)
        acc = add_tiles(
            acc, rings, slot, x_rings, slot, tiles % K_TILES, KIND, GROUP, ZERO, bias, biased,
            of_rows, table_ptr,
        )  # fmt: skip
    return acc


@gluon.jit
def _product(
    x_ptr, factor_ptr, sum_ptr, table_ptr, packed_ptr, scale_ptr, second_ptr, shared_packed_ptr,
    shared_scale_ptr, shared_second_ptr, bias_ptr, early_ends_ptr, order_ptr, weights_ptr,
    scores_ptr, tokens, out_ptr,
    experts: gl.constexpr, choices: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    columns: gl.constexpr, scored: gl.constexpr, parts: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    SHARED: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """Gated: activation(gate) * up of each pair in expert order, [pairs, n], from x [tokens,
    columns]. Down: x are those, and the result is [choices, tokens, n]. Tokens may be int8, with
    scales and, for zero points, sums [tiles, tokens].

    With a shared expert both have another row for each token. The weight has k inputs, tokens the
    first `columns` of them. SHARED: blocks of tokens of the shared expert; 0: there is none.
    """
    tiles: gl.constexpr = k // 128
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = mma_of(dtype, TOKENS, WARPS)
    ahead: gl.constexpr = STAGES - 1
    if EARLY:
        if GATED == DOWN:
            gdc_launch_dependents()
        else:
            if AHEAD > 0:
                guess(
                    gl.program_id(1) - SHARED, packed_ptr, experts, n, tiles, 64 * words_of(KIND),
                    packed_size, AHEAD, WARPS,
                )  # fmt: skip
            gdc_wait()
            gdc_launch_dependents()
    block = gl.program_id(1) - SHARED
    shared = block < 0
    expert, begin, end = block_of(block, early_ends_ptr, experts, TOKENS, EXPERTS, WARPS)
    if expert >= experts:
        if EARLY and GATED == DOWN:  # noqa: SIM102  (the first is known when it is compiled)
            if block == 0:  # all tokens are padding: do not end before the kernels before this one
                gdc_wait()
        return
    if SHARED > 0:
        begin = gl.where(shared, tokens * choices + gl.program_id(1) * TOKENS, begin)
        end = gl.where(shared, tokens * choices + tokens, end)
    rings = weight_rings(scale_ptr, second_ptr, KIND, GROUP, ZERO, ROWS, K_TILES, STAGES)
    x_rings = token_rings(x_ptr, rings[1], ZERO, TOKENS, K_TILES, STAGES)
    packed = expert_at(packed_ptr, shared_packed_ptr, expert, shared, packed_size, SHARED > 0)
    scale = expert_at(scale_ptr, shared_scale_ptr, expert, shared, scale_size, SHARED > 0)
    second = expert_at(second_ptr, shared_second_ptr, expert, shared, second_size, SHARED > 0)
    weight = weight_source(packed, scale, second, n, k, GATED, KIND, GROUP, ROWS, WARPS)
    of_rows = scales_of_rows(scale, n, GATED, groups_of(KIND, GROUP), ROWS, mma)
    if dtype == gl.int8 and KIND == _MXFP4:
        of_rows = scales_of_rows(second, n, GATED, 0, ROWS, mma).to(gl.int32)
    for k_step in gl.static_range(ahead):
        copy_codes(rings, weight, k_step, k_step, tiles, KIND, GROUP, ZERO, ROWS, K_TILES)
        async_copy.commit_group()
    if EARLY and GATED == DOWN:
        gdc_wait()
    own = token_source(
        (x_ptr, factor_ptr, sum_ptr), order_ptr, begin, end, shared, tokens, choices, columns,
        GATED, KIND, SHARED, TOKENS, WARPS,
    )  # fmt: skip
    for k_step in gl.static_range(ahead):
        copy_tokens(x_rings, own, k_step, k_step, tokens, tiles, columns, ZERO, TOKENS, K_TILES)
        async_copy.commit_group()

    acc = _sums(
        rings, x_rings, weight, own, of_rows, table_ptr, tokens, mma, tiles, columns,
        KIND, GROUP, ZERO, TOKENS, ROWS, K_TILES, STAGES,
    )  # fmt: skip
    acc = scaled(acc, of_rows, dtype, KIND, groups_of(KIND, GROUP))
    bias_ptr += expert.to(gl.int64) * (n if GATED == DOWN else 2 * n)
    _finish(
        acc, bias_ptr, order_ptr, weights_ptr, scores_ptr, out_ptr, begin, end, tokens, shared,
        n, experts, choices, scored, parts, SHARED, GATED, BIAS,
    )  # fmt: skip


def experts(
    x: Array | BothForms,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    config: Config,
    *,
    order: Order | None = None,
    shared: ExpertWeights | None = None,
    scores: Array | None = None,
    target: Target,
) -> Array:
    """See `reference.experts`. There are at least 2 tokens, and `config` is from
    `config.choose_streaming` for the same x.

    Args:
      shared: weights of a shared expert, of the same format and shape as those of each expert.
      scores: float32 [parts, tokens, rows], partial sums of the router's scores, if there is a
        shared expert. Its score is the one after the experts'.

    Returns:
      float32 [k, tokens, embed]; with a shared expert [k + 1, tokens, embed].
    """
    tokens, embed = x.shape
    order = order or triton_route.order(ids, w.gate_up.shape[0], target=target)
    lists = order.ends, order.pairs, weights, weights if scores is None else scores, tokens
    every, more = shared or w, 0 if shared is None else 1
    constants = {"scored": 0, "parts": 0} if scores is None else {
        "scored": scores.shape[2], "parts": scores.shape[0],
    }  # fmt: skip
    read = _read(x, w.gate_up)
    hidden = triton_call(
        *read, *expert_arrays(w.gate_up, every.gate_up, w.gate_up_bias), *lists,
        kernel=_product,
        name=f"experts_gate_up_streaming_{type(w.gate_up).__name__}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size + more * tokens, w.width), x.dtype),
        GATED=OSS.value if activation == "swiglu_oss" else gating(activation),
        **_launch(config.gate_up, w.gate_up, w.gate_up_bias, ids, read[0], w.width, more, target),
        **constants,
    )  # fmt: skip
    return triton_call(
        hidden, hidden, hidden, None, *expert_arrays(w.down, every.down, w.down_bias), *lists,
        kernel=_product,
        name=f"experts_down_streaming_{type(w.down).__name__}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.shape[1] + more, tokens, embed), jnp.float32),
        GATED=DOWN.value,
        **_launch(config.down, w.down, w.down_bias, ids, hidden, embed, more, target),
        **constants,
    )  # fmt: skip


def _read(x: Array | BothForms, weight: Any) -> tuple[Array, Array, Array, Array | None]:
    """Tokens as kernel arguments: in int8, their scales and sums, and the tables for an MXFP4
    weight; or plain ones three times."""
    found = int8_form(x)
    if found is None:
        return *(plain(x),) * 3, None
    mxfp4 = isinstance(weight, Mxfp4Weight)
    return found.codes, found.scale, found.sums, jnp.asarray(tables()) if mxfp4 else None


def _launch(
    launch: Launch,
    weight: Any,
    bias: Array | None,
    ids: Array,
    x: Array,
    n: int,
    more: int,
    target: Target,
) -> dict[str, Any]:
    """Launch arguments that both products share: see `triton.launch_arguments`. more: number of
    shared experts."""
    found = launch_arguments(launch, weight, bias, ids, x, n, target)
    del found["ONE"], found["DEPTH"]
    found["EXPERTS"] = max(32, found["EXPERTS"])
    shared = more * -(-ids.shape[0] // launch.tokens)
    rows, blocks = found["grid"]
    found["grid"] = rows, blocks + shared
    return {**found, "K_TILES": launch.depth // 128, "SHARED": shared}
