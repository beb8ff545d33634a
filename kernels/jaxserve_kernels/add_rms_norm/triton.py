"""Residual add and RMSNorm with one program per token: the row is read once and stays in
registers.

A multiprocessor reads at most 64 bytes in a cycle from the L2 cache, so alone it takes most of a
microsecond for the parts of a row. In a PDL chain on Hopper, the programs of a cluster have pieces
of the row, and add their sums of squares.
"""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, QuantizedTokens, TokenFormat
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import (
    out_types,
    store_quantized,
    store_scaled_groups,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_cluster import begin_cluster, sum_of_cluster
from jaxserve_kernels.triton_loads import all_loaded

_ALONE = 64
"""Up to this many tokens, a program has a multiprocessor for itself. More warps then have more of
the parts in flight at a time."""

_MOST_PROGRAMS = 8
"""The largest cluster that every Hopper GPU runs."""

_HELD = 80
"""The most elements of the parts that a thread has registers for."""


@triton.jit
def add_and_norm(
    x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
    CLUSTER: tl.constexpr = 1, TAKEN: tl.constexpr = None,
):  # fmt: skip
    """Stores the program's row, or piece of a row, plus its updates. Returns the norm, in x's
    dtype. TAKEN: columns of a piece. The last one may have fewer.

    The distance of an update's parts is a multiple of a constant. Otherwise the compiler could not
    tell that they are aligned, and would load elements one by one. AT_ONCE: load all parts before
    any is added (see `triton_loads`).
    """
    row = (tl.program_id(0) // CLUSTER).to(tl.int64) * embed
    column = tl.arange(0, BLOCK)
    mask = column < (TAKEN if CLUSTER > 1 else embed)
    if CLUSTER > 1:
        column += tl.program_id(0) % CLUSTER * TAKEN
        if embed < CLUSTER * TAKEN:
            mask &= column < embed
        space = begin_cluster()
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0, volatile=AT_ONCE)
    found = ()
    for part in tl.static_range(parts):
        at = update_ptr + part * (tl.num_programs(0) // CLUSTER) * embed + row + column
        found = found + (tl.load(at, mask=mask, other=0.0, volatile=AT_ONCE),)  # noqa: RUF005
    normed = tl.zeros_like(x)
    if all_loaded():
        update = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(parts):
            update += found[part]
        if BIAS:
            update += bias
        update = update.to(x.dtype).to(tl.float32)  # rounded where the reference rounds
        total = (x.to(tl.float32) + update).to(x.dtype)
        tl.store(total_ptr + row + column, total, mask=mask)
        wide = total.to(tl.float32)
        squares = tl.sum(wide * wide, axis=0)
        if CLUSTER > 1:
            squares = sum_of_cluster(squares, space)
        scale = tl.rsqrt(squares / embed + eps)
        every = wide * scale
        if weight.dtype == x.dtype:
            every = every.to(x.dtype).to(tl.float32)
        normed = (every * weight.to(tl.float32)).to(x.dtype)
    return normed


@triton.jit
def _add_rms_norm(
    x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, CLUSTER: tl.constexpr,
    TAKEN: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    normed = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, AT_ONCE, EARLY, CLUSTER, TAKEN,
    )  # fmt: skip
    _store(normed, out_ptr, embed, CLUSTER, TAKEN)


@triton.jit
def _quantizing(
    x_ptr, update_ptr, weight_ptr, bias_ptr, padded, total_ptr, codes_ptr, scale_ptr, sum_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, CLUSTER: tl.constexpr,
    TAKEN: tl.constexpr, GROUP: tl.constexpr, ORDER: tl.constexpr, INPUTS: tl.constexpr,
    BESIDE: tl.constexpr, SCALE_GROUP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    normed = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, AT_ONCE, EARLY, CLUSTER, TAKEN,
    )  # fmt: skip
    _quantize(
        normed, padded, codes_ptr, scale_ptr, sum_ptr,
        CLUSTER, TAKEN, GROUP, ORDER, INPUTS, BESIDE, SCALE_GROUP,
    )  # fmt: skip


@triton.jit
def _also_quantizing(
    x_ptr, update_ptr, weight_ptr, bias_ptr, padded,
    total_ptr, out_ptr, codes_ptr, scale_ptr, sum_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, CLUSTER: tl.constexpr,
    TAKEN: tl.constexpr, GROUP: tl.constexpr, ORDER: tl.constexpr, INPUTS: tl.constexpr,
    BESIDE: tl.constexpr, SCALE_GROUP: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    normed = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, AT_ONCE, EARLY, CLUSTER, TAKEN,
    )  # fmt: skip
    _store(normed, out_ptr, embed, CLUSTER, TAKEN)
    _quantize(
        normed, padded, codes_ptr, scale_ptr, sum_ptr,
        CLUSTER, TAKEN, GROUP, ORDER, INPUTS, BESIDE, SCALE_GROUP,
    )  # fmt: skip


@triton.jit
def _store(
    normed, out_ptr, embed: tl.constexpr, CLUSTER: tl.constexpr, TAKEN: tl.constexpr
):  # fmt: skip
    """Stores the program's row, or piece of one."""
    own = tl.arange(0, normed.shape[0])
    at = tl.program_id(0).to(tl.int64) * TAKEN + own
    mask = own < TAKEN
    if embed < CLUSTER * TAKEN:  # the last piece is shorter
        at -= tl.program_id(0) // CLUSTER * (CLUSTER * TAKEN - embed)
        mask &= tl.program_id(0) % CLUSTER * TAKEN + own < embed
    tl.store(out_ptr + at, normed, mask=mask)


@triton.jit
def _quantize(
    normed, padded, codes_ptr, scale_ptr, sum_ptr,
    CLUSTER: tl.constexpr, TAKEN: tl.constexpr, GROUP: tl.constexpr, ORDER: tl.constexpr,
    INPUTS: tl.constexpr, BESIDE: tl.constexpr, SCALE_GROUP: tl.constexpr,
):  # fmt: skip
    """Quantises and stores the program's row, or piece of one: see `TokenFormat`."""
    wide = normed.to(tl.float32)
    if SCALE_GROUP:
        token, piece = tl.program_id(0) // CLUSTER, tl.program_id(0) % CLUSTER
        store_scaled_groups(
            wide, token, padded, piece, codes_ptr, scale_ptr, sum_ptr,
            INPUTS, TAKEN, SCALE_GROUP, ORDER, GROUP > 0,
        )  # fmt: skip
    else:
        store_quantized(
            wide, tl.program_id(0), padded, codes_ptr, scale_ptr, sum_ptr, INPUTS, GROUP, ORDER,
            BESIDE,
        )  # fmt: skip


def pieces_of(size: int, inputs: int = 8) -> tuple[int, int]:
    """Programs that share a row of `size` columns, and the columns of each but the last, which may
    have fewer: the fewest programs with the smallest block, in pieces of whole `inputs`. By default
    pieces can be loaded 16 bytes at a time."""

    def taken(programs: int) -> int:
        return triton.cdiv(size, programs * inputs) * inputs

    sizes = [each for each in range(1, _MOST_PROGRAMS + 1) if taken(each) * (each - 1) < size]
    best = min(sizes, key=lambda each: triton.next_power_of_2(taken(each)))
    return best, taken(best)


def add_rms_norm(
    x: Array,
    update: Array,
    weight: Array,
    eps: float,
    form: TokenFormat | None = None,
    *,
    bias: Array | None = None,
    both: bool = False,
    target: Target,
) -> tuple[Array, Array | QuantizedTokens | BothForms]:
    """See `add_rms_norm.api`: one program for each token, or a cluster."""
    tokens, embed = x.shape
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    groups = 0 if form is None else form.scale_group
    size = embed if form is None else form.inputs or embed
    in_pieces = form is None or groups > 0
    shared = target.pdl and target.runs_hopper_kernels() and tokens <= _ALONE and in_pieces
    cluster, taken = pieces_of(size, groups or 8) if shared else (1, size)
    block = triton.next_power_of_2(taken)
    few = max(1 if shared else 4, min(16, block // 128))
    warps = few if tokens <= _ALONE else 8 if embed > 2048 else 4
    launch: dict[str, Any] = {
        "grid": (tokens * cluster,),
        "num_warps": warps,
        "embed": embed, "eps": eps, "parts": update.shape[0],
        "BIAS": bias is not None, "BLOCK": block,
        "AT_ONCE": update.shape[0] * block <= _HELD * 32 * warps, "CLUSTER": cluster,
        "TAKEN": taken,
    }  # fmt: skip
    inputs = x, update, weight, weight if bias is None else bias
    if form is None:
        return triton_call(
            *inputs,
            kernel=_add_rms_norm,
            name="add_rms_norm",
            target=target,
            out_type=(row, row),
            **launch,
        )  # fmt: skip
    form_of_reader = {
        "GROUP": form.group, "ORDER": form.order.value, "INPUTS": size,
        "BESIDE": form.beside, "SCALE_GROUP": form.scale_group,
    }  # fmt: skip
    if both:
        total, normed, *quantized = triton_call(
            *inputs, form.padded,
            kernel=_also_quantizing,
            name="add_rms_norm_also_quantizing",
            target=target,
            out_type=(row, row, *out_types(tokens, size, form)),
            **form_of_reader, **launch,
        )  # fmt: skip
        return total, BothForms(normed, QuantizedTokens(*quantized))
    total, *quantized = triton_call(
        *inputs, form.padded,
        kernel=_quantizing,
        name="add_rms_norm_quantizing",
        target=target,
        out_type=(row, *out_types(tokens, size, form)),
        **form_of_reader, **launch,
    )  # fmt: skip
    return total, QuantizedTokens(*quantized)
