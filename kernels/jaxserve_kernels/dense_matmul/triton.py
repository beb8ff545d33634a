"""Products of a few tokens with a large weight, bound by the bandwidth of reading the weight.

The weight is the left operand: its rows fill the tall side of the tensor cores' tiles, and the few
tokens the narrow one. Several programs share the rows of a tile by splitting the inputs. The reader
of the result adds their float32 partial sums, which saves a kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.dense_matmul.config import Config
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated
from jaxserve_kernels.triton_call import triton_call


@triton.jit
def _accumulate(
    x_ptr, w_ptr, row, token, start,
    tokens: tl.constexpr, k: tl.constexpr, steps: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight rows `row` times tokens `token` over `steps` of the input from `start`."""
    depth = tl.arange(0, DEPTH)
    w = w_ptr + row.to(tl.int64)[:, None] * k + start + depth[None, :]
    x = x_ptr + token[None, :] * k + start + depth[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        a = tl.load(w)
        b = tl.load(x, mask=token[None, :] < tokens, other=0.0)
        acc = tl.dot(a, b, acc)
        w += DEPTH
        x += DEPTH
    return acc


@triton.jit
def _linear(
    x_ptr, w_ptr, out_ptr,
    tokens: tl.constexpr, n: tl.constexpr, k: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    TILES: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """TILES: of TOKENS tokens."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.arange(0, TOKENS)
    if TILES > 1:
        own += tl.program_id(2) * TOKENS
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    steps: tl.constexpr = k // DEPTH // SPLITS
    w_row = row
    if n % ROWS:
        w_row = tl.minimum(row, n - 1)
    acc = _accumulate(
        x_ptr, w_ptr, w_row, own, split * steps * DEPTH,
        tokens, k, steps, TOKENS, ROWS, DEPTH, STAGES,
    )  # fmt: skip
    token = own[None, :]
    mask = token < tokens
    if n % ROWS:
        mask = mask & (row < n)[:, None]
    tl.store(out_ptr + (split * tokens + token) * n + row[:, None], acc, mask=mask)


@triton.jit
def _gated(
    x_ptr, w_ptr, out_ptr,
    tokens: tl.constexpr, n: tl.constexpr, k: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A gated product. A tile is ROWS / 2 rows of gate and the same rows of up, so a program has
    both factors."""
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * half + lane % half + (lane // half) * n
    acc = _accumulate(
        x_ptr, w_ptr, row, tl.arange(0, TOKENS), 0,
        tokens, k, k // DEPTH, TOKENS, ROWS, DEPTH, STAGES,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, TOKENS)), (1, 2, 0)))
    values = gated(gate, up, out_ptr.dtype.element_ty, GATED)
    out_row = tl.program_id(0) * half + tl.arange(0, half)[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(out_ptr + token * n + out_row, values, mask=token < tokens)


def linear(x: Array, weight: Array, config: Config, *, target: Target) -> Array:
    """See `matmul.linear`: partial sums float32 [config.splits, tokens, out]."""
    tokens, k = x.shape
    n = weight.shape[0]
    width = config.tokens or max(16, triton.next_power_of_2(tokens))
    tiles = triton.cdiv(tokens, width)
    return triton_call(
        x, weight,
        kernel=_linear,
        name="linear",
        target=target,
        out_type=jax.ShapeDtypeStruct((config.splits, tokens, n), jnp.float32),
        grid=(triton.cdiv(n, config.rows), config.splits, tiles),
        num_warps=config.num_warps,
        tokens=tokens, n=n, k=k, TOKENS=width, TILES=tiles,
        ROWS=config.rows, DEPTH=config.depth, SPLITS=config.splits, STAGES=config.num_stages,
    )  # fmt: skip


def gated_linear(
    x: Array, weight: Array, config: Config, activation: Activation = "silu", *, target: Target
) -> Array:
    """See `reference.gated_linear`: [tokens, ffn] in x's dtype. `config.splits` is ignored."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    return triton_call(
        x, weight,
        kernel=_gated,
        name="gated_linear",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens, n), x.dtype),
        grid=(2 * n // config.rows,),
        num_warps=config.num_warps,
        tokens=tokens, n=n, k=k,
        TOKENS=max(16, triton.next_power_of_2(tokens)),
        ROWS=config.rows, DEPTH=config.depth, STAGES=config.num_stages, GATED=gating(activation),
    )  # fmt: skip
