"""Residual add and RMSNorm with one program per token: the row is read once and stays in
registers."""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, TokenFormat
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import out_types, store_quantized
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_loads import all_loaded

_ALONE = 64
"""Up to this many tokens, a program has a multiprocessor for itself. More warps then have more of
the parts in flight at a time."""

_HELD = 80
"""The most elements of the parts that a thread has registers for."""


@triton.jit
def add_and_norm(
    x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Stores the program's row plus its updates. Returns the sum and its norm, in x's dtype.

    The distance of an update's parts is a multiple of a constant. Otherwise the compiler could not
    tell that they are aligned, and would load elements one by one. AT_ONCE: load all parts before
    any is added (see `triton_loads`).
    """
    row = tl.program_id(0).to(tl.int64) * embed
    column = tl.arange(0, BLOCK)
    mask = column < embed
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0, volatile=AT_ONCE)
    found = ()
    for part in tl.static_range(parts):
        at = update_ptr + part * tl.num_programs(0) * embed + row + column
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
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / embed + eps)
        every = wide * scale
        if weight.dtype == x.dtype:
            every = every.to(x.dtype).to(tl.float32)
        normed = (every * weight.to(tl.float32)).to(x.dtype)
    return normed


@triton.jit
def _add_rms_norm(
    x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    normed = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, AT_ONCE, EARLY,
    )  # fmt: skip
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * embed + column
    tl.store(out_ptr + at, normed, mask=column < embed)


@triton.jit
def _quantizing(
    x_ptr, update_ptr, weight_ptr, bias_ptr, padded, total_ptr, codes_ptr, scale_ptr, sum_ptr,
    embed: tl.constexpr, eps: tl.constexpr, parts: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, GROUP: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    normed = add_and_norm(
        x_ptr, update_ptr, weight_ptr, bias_ptr, total_ptr,
        embed, eps, parts, BIAS, BLOCK, AT_ONCE, False,
    ).to(tl.float32)  # fmt: skip
    store_quantized(
        normed, tl.program_id(0), padded, codes_ptr, scale_ptr, sum_ptr, embed, GROUP, ORDER
    )  # fmt: skip


def add_rms_norm(
    x: Array,
    update: Array,
    weight: Array,
    eps: float,
    form: TokenFormat | None = None,
    *,
    bias: Array | None = None,
    target: Target,
) -> tuple[Array, Array | QuantizedTokens]:
    """See `add_rms_norm.api`: one program for each token."""
    tokens, embed = x.shape
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    block = triton.next_power_of_2(embed)
    few = max(4, min(16, block // 128))
    warps = few if tokens <= _ALONE else 8 if embed > 2048 else 4
    launch: dict[str, Any] = {
        "grid": (tokens,),
        "num_warps": warps,
        "embed": embed, "eps": eps, "parts": update.shape[0],
        "BIAS": bias is not None, "BLOCK": block,
        "AT_ONCE": update.shape[0] * block <= _HELD * 32 * warps,
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
    total, *quantized = triton_call(
        *inputs, form.padded,
        kernel=_quantizing,
        name="add_rms_norm_quantizing",
        target=target,
        out_type=(row, *out_types(tokens, embed, form)),
        GROUP=form.group, ORDER=form.order.value,
        **launch,
    )  # fmt: skip
    return total, QuantizedTokens(*quantized)
