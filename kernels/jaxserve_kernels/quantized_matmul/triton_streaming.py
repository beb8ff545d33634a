"""Products of some tokens with 4-bit integers: codes stream through a ring in shared memory.

A program fills the ring with codes and scales of its rows, and only then waits for the kernels
before it in a chain, as `dense_matmul.triton_streaming` does; a tile of codes is a quarter of
bfloat16's, so that most of a weight is on its way by then. Codes become bfloat16 in registers, from
where the tensor cores take them, a plane of 32 inputs at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
from jax import Array
from jax.typing import DTypeLike
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton_arguments import NO_ZERO, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_unpack import less_zero, nibbles
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight

_NO_ZERO = gl.constexpr(NO_ZERO.value)


@gluon.jit
def _rows(program, lane, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr):
    """The weight's rows of the program's lanes. Gated, each 8 of gate are followed by the 8 of up
    that they go with: a thread of the tensor cores has the sums of both."""
    if GATED:
        row = program * (ROWS // 2) + lane // 16 * 8 + lane % 8 + lane // 8 % 2 * n
    else:
        row = program * ROWS + lane
    return row


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """n: rows of the result; gated, half of the weight's. STEPS: tiles of 128 inputs of a part."""
    tiles: gl.constexpr = k // 128
    groups: gl.constexpr = 128 // GROUP
    shared: gl.constexpr = 4 // groups  # planes of 32 inputs that share a scale
    ahead: gl.constexpr = STAGES - 1
    warps: gl.constexpr = ROWS // 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    program = gl.program_id(0)
    first = gl.program_id(1) * STEPS
    if tiles % STEPS == 0:
        steps: gl.constexpr = STEPS
    else:  # the last part is shorter
        steps = gl.minimum(STEPS, tiles - first)

    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    word_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, ROWS, 32], word_tile)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, groups * ROWS], row_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], x_tile)
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(
            zero_ptr.dtype.element_ty, [STAGES, groups * ROWS], row_tile
        )

    row = _rows(program, gl.arange(0, ROWS, gl.SliceLayout(1, word_copy)), n, GATED, ROWS)
    word = gl.arange(0, 32, gl.SliceLayout(0, word_copy))
    block = (row // 64).to(gl.int64) * tiles + first
    words = packed_ptr + (block * 2048 + row % 64 * 32)[:, None] + word[None, :]
    lane = gl.arange(0, groups * ROWS, flat)
    row = _rows(program, lane % ROWS, n, GATED, ROWS)
    of_row = ((row // 64) * tiles + first) * (groups * 64) + lane // ROWS * 64 + row % 64
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    x = x_ptr + token * k + first * 128 + depth
    there, _ = gl.broadcast(token < tokens, x)

    for step in gl.static_range(ahead):
        if step < steps:
            async_copy.async_copy_global_to_shared(word_ring.index(step), words + step * 2048)
            at = of_row + step * (groups * 64)
            async_copy.async_copy_global_to_shared(scale_ring.index(step), scale_ptr + at)
            if ZERO != _NO_ZERO:
                async_copy.async_copy_global_to_shared(zero_ring.index(step), zero_ptr + at)
        async_copy.commit_group()
    if EARLY:
        gdc_wait()
    for step in gl.static_range(ahead):
        if step < steps:
            async_copy.async_copy_global_to_shared(x_ring.index(step), x + step * 128, mask=there)
        async_copy.commit_group()

    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    nothing = acc
    for step in range(steps + gl.program_id(2)):  # not unrolled: the grid has no third dimension
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        later = step + ahead
        if later < steps:
            stage = later % STAGES
            async_copy.async_copy_global_to_shared(word_ring.index(stage), words + later * 2048)
            at = of_row + later * (groups * 64)
            async_copy.async_copy_global_to_shared(scale_ring.index(stage), scale_ptr + at)
            if ZERO != _NO_ZERO:
                async_copy.async_copy_global_to_shared(zero_ring.index(stage), zero_ptr + at)
            async_copy.async_copy_global_to_shared(x_ring.index(stage), x + later * 128, mask=there)
        async_copy.commit_group()
        stage = step % STAGES
        inputs = x_ring.index(stage)
        scale = scale_ring.index(stage)
        planes = nibbles(word_ring.index(stage).load(left))
        part = nothing
        for plane in gl.static_range(4):
            if ZERO == _NO_ZERO:
                values = less_zero(planes[plane], 0, ZERO)
            else:
                zeros = zero_ring.index(stage).slice(plane // shared * ROWS, ROWS)
                values = less_zero(planes[plane], zeros.load(gl.SliceLayout(1, left)), ZERO)
            right = inputs.slice(plane * 32, 32, dim=1).permute((1, 0))
            part = warpgroup_mma(values, right, part, use_acc=plane % shared > 0, is_async=True)
            if plane % shared == shared - 1:
                part = warpgroup_mma_wait(0, deps=[part])
                acc += part * scale.slice(plane // shared * ROWS, ROWS).load(by_row)[:, None]
    if EARLY:
        gdc_launch_dependents()

    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        gate = gate.to(dtype).to(gl.float32)  # rounded where the reference rounds
        gated = gate / (1.0 + gl.exp2(gate * -1.4426950408889634))
        gated = gated.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
        _store(gated.to(dtype).reshape([ROWS // 2, TOKENS]), out_ptr, tokens, n)
    else:
        _store(acc.to(dtype), out_ptr + gl.program_id(1) * (tokens * n), tokens, n)


@gluon.jit
def _store(values, out_ptr, tokens: gl.constexpr, n: gl.constexpr):
    rows: gl.constexpr = values.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    values = gl.convert_layout(values, layout)
    row = gl.program_id(0) * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < tokens, values)
    gl.store(out_ptr + token * n + row, values, mask=there)


def linear(x: Array, weight: Int4Weight, config: Config, dtype: DTypeLike) -> Array:
    """[config.splits, tokens, out]: float32 partial sums, or `dtype` where there is one part."""
    dtype = dtype if config.splits == 1 else jnp.float32
    shape = (config.splits, x.shape[0], weight.shape[0])
    return _launch(x, weight, config, jax.ShapeDtypeStruct(shape, dtype), gated=False)


def gated_linear(x: Array, weight: Int4Weight, config: Config) -> Array:
    """[tokens, ffn] in x's dtype; `config.splits` must be 1."""
    shape = (x.shape[0], weight.shape[0] // 2)
    return _launch(x, weight, config, jax.ShapeDtypeStruct(shape, x.dtype), gated=True)


def _launch(
    x: Array, weight: Int4Weight, config: Config, out_type: jax.ShapeDtypeStruct, *, gated: bool
) -> Array:
    tokens, k = x.shape
    return triton_call(
        x, *arrays(weight),
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_streaming_{type(weight).__name__}",
        out_type=out_type,
        grid=(weight.shape[0] // config.rows, config.splits),
        num_warps=config.rows // 16,
        tokens=tokens, n=out_type.shape[-1], k=k, GATED=gated, **kind(weight),
        TOKENS=config.tokens, ROWS=config.rows, STEPS=triton.cdiv(k // 128, config.splits),
        STAGES=config.num_stages,
    )  # fmt: skip
