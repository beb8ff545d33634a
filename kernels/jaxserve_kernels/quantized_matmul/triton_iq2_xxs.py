"""Products with IQ2_XXS weights, for comparison: points of the grid are looked up in memory.

For few tokens a program unpacks its rows in registers and multiplies; for many a kernel writes the
weight in bfloat16, and cuBLASLt multiplies. Plain: neither has been tuned.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from jaxserve_kernels import target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights.iq2_xxs import BLOCK, Iq2XxsWeight, grid

FEW_TOKENS = 64
_ROWS = 32
_ENOUGH_PROGRAMS = 2
"""On each multiprocessor."""


@triton.jit
def _block(points_ptr, signs_ptr, d_ptr, grid_ptr, row, block, blocks: tl.constexpr):
    """float32 [rows, 256]: a block of each row."""
    at = row.to(tl.int64) * blocks + block
    eighth = tl.arange(0, 32)
    point = tl.load(points_ptr + at[:, None] * 32 + eighth[None, :]).to(tl.int32)
    word = tl.load(signs_ptr + at[:, None] * 8 + (eighth // 4)[None, :])
    code = ((word >> (7 * (eighth % 4))[None, :].to(tl.uint32)) & 127).to(tl.int32)
    parity = code ^ (code >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    code = code | (parity << 7)
    d = tl.load(d_ptr + at).to(tl.float32)
    scale = d[:, None] * ((word >> 28).to(tl.float32) + 0.5) * 0.25
    lane = tl.arange(0, 8)
    value = tl.load(grid_ptr + point[:, :, None] * 8 + lane[None, None, :]).to(tl.float32)
    minus = (code[:, :, None] >> lane[None, None, :]) & 1
    value = tl.where(minus == 1, -value, value) * scale[:, :, None]
    return tl.reshape(value, (row.shape[0], 256))


@triton.jit
def _dequantize(
    points_ptr, signs_ptr, d_ptr, grid_ptr, out_ptr, blocks: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    values = _block(points_ptr, signs_ptr, d_ptr, grid_ptr, row, block, blocks)
    out = out_ptr + row.to(tl.int64)[:, None] * (256 * blocks) + block * 256
    tl.store(out + tl.arange(0, 256)[None, :], values.to(out_ptr.dtype.element_ty))


@triton.jit
def _linear(
    x_ptr, points_ptr, signs_ptr, d_ptr, grid_ptr, tokens, out_ptr,
    n: tl.constexpr, blocks: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial sums of split program_id(1)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, 256)
    steps: tl.constexpr = blocks // SPLITS
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(steps):
        block = split * steps + step
        values = _block(points_ptr, signs_ptr, d_ptr, grid_ptr, row, block, blocks)
        x = x_ptr + token[None, :] * (256 * blocks) + block * 256 + lane[:, None]
        inputs = tl.load(x, mask=token[None, :] < tokens, other=0.0)
        acc = tl.dot(values.to(inputs.dtype), inputs, acc)
    out = out_ptr + (split * tokens + token[None, :]) * n + row[:, None]
    tl.store(out, acc, mask=token[None, :] < tokens)


def dequantize(weight: Iq2XxsWeight, dtype: jnp.dtype = jnp.bfloat16) -> Array:
    """[out, in]"""
    out, depth = weight.shape
    return triton_call(
        *weight, jnp.asarray(grid()),
        kernel=_dequantize,
        name="dequantize_iq2_xxs",
        out_type=jax.ShapeDtypeStruct((out, depth), dtype),
        grid=(out // _ROWS, depth // BLOCK),
        blocks=depth // BLOCK, ROWS=_ROWS,
    )  # fmt: skip


def linear(x: Array, weight: Iq2XxsWeight) -> Array:
    """x [tokens, in] times weight [out, in] transposed: float32 [tokens, out]."""
    tokens = x.shape[0]
    out, depth = weight.shape
    if tokens > FEW_TOKENS:
        plain = dequantize(weight, x.dtype)
        return jnp.matmul(x, plain.T, preferred_element_type=jnp.float32)
    blocks = depth // BLOCK
    wanted = _ENOUGH_PROGRAMS * target.multiprocessors() // (out // _ROWS)
    splits = max(s for s in range(1, blocks + 1) if blocks % s == 0 and s <= max(wanted, 1))
    parts = triton_call(
        x, *weight, jnp.asarray(grid()), tokens,
        kernel=_linear,
        name="linear_iq2_xxs",
        out_type=jax.ShapeDtypeStruct((splits, tokens, out), jnp.float32),
        grid=(out // _ROWS, splits),
        n=out, blocks=blocks, ROWS=_ROWS,
        TOKENS=max(16, triton.next_power_of_2(tokens)), SPLITS=splits,
    )  # fmt: skip
    return jnp.sum(parts, axis=0)
