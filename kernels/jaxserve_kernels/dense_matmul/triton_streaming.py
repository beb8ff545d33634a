"""Products of a few tokens, launched early (PDL): weights are copied before the inputs exist.

As in `triton.py` the weight is the left operand, and programs may share the rows of a tile by
splitting the inputs. Here each program first fills a ring in shared memory with tiles of the
weight, and then waits for the earlier kernels. So weights are read from memory while those run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.dense_matmul.config import Config
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_activation import gated_sums
from jaxserve_kernels.triton_call import triton_call

_RESERVED = 1024
"""Bytes of shared memory that CUDA reserves for each program."""
_MOST_RESIDENT = 4
"""The most programs on a multiprocessor: with more, their rings would not be deep enough."""


@gluon.jit
def accumulate(
    x_ptr, w_ptr, row, start,
    tokens: gl.constexpr, k: gl.constexpr, steps: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, NEXT_FIRST: gl.constexpr, copy: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    """Weight rows `row` times the tokens over `steps` of the input from `start`.

    NEXT_FIRST: the next kernel may start before this one reads its weights, not only after.
    """
    ahead: gl.constexpr = STAGES - 1
    token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, copy)), 1)
    depth = gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, copy)), 0)
    w = w_ptr + gl.expand_dims(row.to(gl.int64), 1) * k + start + depth
    x = x_ptr + token * k + start + depth
    w_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], gl.bfloat16)
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, DEPTH], gl.bfloat16)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], w_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, DEPTH], x_tile)

    if EARLY and NEXT_FIRST:
        gdc_launch_dependents()
    for step in gl.static_range(ahead):
        if step < steps:
            async_copy.async_load(w_ring.index(step), w + step * DEPTH)
        async_copy.commit_group()
    if EARLY:
        gdc_wait()
    for step in gl.static_range(ahead):
        if step < steps:
            async_copy.async_load(x_ring.index(step), x + step * DEPTH, mask=token < tokens)
        async_copy.commit_group()

    acc = gl.zeros([ROWS, TOKENS], gl.float32, acc_layout)
    for step in range(steps + gl.program_id(2)):  # not unrolled: the grid has no third dimension
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.barrier()
        stage = step % STAGES
        inputs = x_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_ring.index(stage), inputs, acc, is_async=True)
        # Copies issued between the fence and the product would cost another fence: the compiler
        # cannot tell that they write other stages than the product reads.
        later = step + ahead
        if later < steps:
            stage = later % STAGES
            async_copy.async_load(w_ring.index(stage), w + later * DEPTH)
            async_copy.async_load(x_ring.index(stage), x + later * DEPTH, mask=token < tokens)
        async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=[acc])
    if EARLY and not NEXT_FIRST:
        gdc_launch_dependents()
    return acc


@gluon.jit
def _linear(
    x_ptr, w_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, TOKENS: gl.constexpr,
    ROWS: gl.constexpr, DEPTH: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    NEXT_FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    split = gl.program_id(1)
    first = gl.program_id(0) * ROWS
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, copy))
    if n % ROWS:
        row = gl.minimum(row, n - 1)
    steps: gl.constexpr = k // DEPTH // SPLITS
    acc = accumulate(
        x_ptr, w_ptr, row, split * steps * DEPTH, tokens, k, steps, TOKENS, ROWS, DEPTH, STAGES,
        EARLY, NEXT_FIRST, copy, acc_layout,
    )  # fmt: skip
    acc = gl.convert_layout(acc, out_layout)
    token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout)), 0)
    out_row = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout)), 1)
    mask = token < tokens
    if n % ROWS:
        mask = mask & (out_row < n)
    gl.store(out_ptr + (split * tokens + token) * n + out_row, acc, mask=mask)


@gluon.jit
def _gated(
    x_ptr, w_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr, TOKENS: gl.constexpr,
    ROWS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, NEXT_FIRST: gl.constexpr,
    GATED: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A gated product. A tile is ROWS / 2 rows of gate and the same rows of up."""
    half: gl.constexpr = ROWS // 2
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DEPTH, DEPTH // 8], [4, 1], [1, 0])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    first = gl.program_id(0) * half
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, copy))
    row = first + lane % half + (lane // half) * n
    acc = accumulate(
        x_ptr, w_ptr, row, 0, tokens, k, k // DEPTH, TOKENS, ROWS, DEPTH, STAGES,
        EARLY, NEXT_FIRST, copy, acc_layout,
    )  # fmt: skip
    sums = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], flat)
    sums.store(acc)
    gl.barrier()
    gate = sums.slice(0, half).load(out_layout)
    up = sums.slice(half, half).load(out_layout)
    dtype = out_ptr.dtype.element_ty
    gated = gated_sums(gate, up, dtype, GATED)
    token = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout)), 0)
    out_row = gl.expand_dims(first + gl.arange(0, half, gl.SliceLayout(1, out_layout)), 1)
    gl.store(out_ptr + token * n + out_row, gated, mask=token < tokens)


def linear(x: Array, weight: Array, config: Config, *, target: Target) -> Array:
    """See `matmul.linear`: partial sums float32 [config.splits, tokens, out]."""
    tokens, k = x.shape
    n = weight.shape[0]
    tiles = triton.cdiv(n, config.rows)
    programs, steps = tiles * config.splits, k // config.depth // config.splits
    return triton_call(
        x, weight,
        kernel=_linear,
        name="linear",
        target=target,
        out_type=jax.ShapeDtypeStruct((config.splits, tokens, n), jnp.float32),
        grid=(tiles, config.splits),
        num_warps=4,
        tokens=tokens, n=n, k=k,
        ROWS=config.rows, DEPTH=config.depth, SPLITS=config.splits,
        **_launch(tokens, programs, steps, config, target=target),
    )  # fmt: skip


def gated_linear(
    x: Array, weight: Array, config: Config, activation: Activation = "silu", *, target: Target
) -> Array:
    """See `reference.gated_linear`: [tokens, ffn] in x's dtype. `config.splits` is ignored."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    programs, steps = 2 * n // config.rows, k // config.depth
    return triton_call(
        x, weight,
        kernel=_gated,
        name="gated_linear",
        target=target,
        out_type=jax.ShapeDtypeStruct((tokens, n), x.dtype),
        grid=(programs,),
        num_warps=4,
        tokens=tokens, n=n, k=k,
        ROWS=config.rows, DEPTH=config.depth, GATED=gating(activation),
        **_launch(tokens, programs, steps, config, target=target),
    )  # fmt: skip


def _launch(
    tokens: int, programs: int, steps: int, config: Config, *, target: Target
) -> dict[str, int | bool]:
    """Launch arguments of `programs` programs with `steps` steps each.

    All programs run at once if each multiprocessor needs at most four, whose rings share its shared
    memory. Otherwise a multiprocessor runs three at a time.

    NEXT_FIRST was measured on an H200; see lab/logs/decode.md.
    """
    columns = max(8, triton.next_power_of_2(tokens))
    tile = 2 * (config.rows + columns) * config.depth
    device = target.gpu
    resident = -(-programs // device.multiprocessors)
    if resident > _MOST_RESIDENT:
        resident = _MOST_RESIDENT - 1
    fit = (device.shared_memory // resident - _RESERVED) // tile
    return {
        "TOKENS": columns, "STAGES": min(fit, steps + 1), "NEXT_FIRST": tokens <= 16,
    }  # fmt: skip
