"""Products of 17 to 64 tokens with an int8 matrix of many rows, the output matrix, on Hopper.

A program takes several blocks of 128 rows at a time, so that it copies the tokens once for all of
them: 64 tokens are as many bytes as 128 rows of codes. It then goes on with the next blocks, and
its ring in shared memory stays full in between. Codes become bfloat16 in registers, from which the
tensor cores read.
"""

from __future__ import annotations

from typing import Literal

import jax
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

from jaxserve_kernels.activation import Activation
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton_unpack import int8_pair
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int8Weight

_ROWS = gl.constexpr(128)
"""Rows of a block: 16 for each of eight warps."""


@gluon.jit
def _copy(
    word_ring, x_ring, words, x, there, k_step, place,
    blocks: gl.constexpr, steps: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Copies the operands of a k-step: 128 inputs of each block and of all tokens."""
    first = (k_step // steps * gl.num_programs(0) + gl.program_id(0)) * BLOCKS
    tile = k_step % steps
    for each in gl.static_range(BLOCKS):
        block = gl.minimum(first + each, blocks - 1)  # past the end: repeat the last block
        source = words + (block.to(gl.int64) * (2 * steps) + tile) * 4096
        async_copy.async_load(word_ring.index(place * BLOCKS + each), source)
    async_copy.async_load(x_ring.index(place), x + tile * 128, mask=there)
    async_copy.commit_group()


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, out_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    TOKENS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = k // 128
    blocks: gl.constexpr = n // _ROWS
    groups: gl.constexpr = (blocks + BLOCKS - 1) // BLOCKS
    ahead: gl.constexpr = STAGES - 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    word_ring = gl.allocate_shared_memory(gl.uint16, [STAGES * BLOCKS, _ROWS, 64], word_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], x_tile)

    program = gl.program_id(0)
    programs = gl.num_programs(0)
    lane = gl.arange(0, _ROWS, gl.SliceLayout(1, word_copy))[:, None]
    word = gl.arange(0, 64, gl.SliceLayout(0, word_copy))[None, :]
    words = packed_ptr + lane // 64 * (steps * 4096) + lane % 64 * 64 + word
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    x = x_ptr + token * k + gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    there, _ = gl.broadcast(token < tokens, x)
    k_steps = (groups - program + programs - 1) // programs * steps
    for k_step in gl.static_range(ahead):  # a program has more k-steps than the ring has stages
        _copy(word_ring, x_ring, words, x, there, k_step, k_step, blocks, steps, BLOCKS)

    nothing = gl.zeros([_ROWS, TOKENS], gl.float32, mma)
    sums = ()
    for _ in gl.static_range(BLOCKS):
        sums = sums + (nothing,)  # noqa: RUF005  (Triton knows no other way)
    slot = 0
    for k_step in range(k_steps):
        async_copy.wait_group(ahead - 1)
        gl.barrier()
        fence_async_shared()
        if k_step + ahead < k_steps:
            place = gl.where(slot == 0, ahead, slot - 1)
            _copy(word_ring, x_ring, words, x, there, k_step + ahead, place, blocks, steps, BLOCKS)
        else:
            async_copy.commit_group()
        inputs = x_ring.index(slot)
        added = ()
        for each in gl.static_range(BLOCKS):
            low, high = int8_pair(word_ring.index(slot * BLOCKS + each).load(left))
            x_low = inputs.slice(0, 64, dim=1).permute((1, 0))
            x_high = inputs.slice(64, 64, dim=1).permute((1, 0))
            acc = warpgroup_mma(low, x_low, sums[each], is_async=True)
            added = added + (warpgroup_mma(high, x_high, acc, is_async=True),)  # noqa: RUF005
        sums = warpgroup_mma_wait(0, deps=added)
        slot = gl.where(slot == ahead, 0, slot + 1)
        if k_step % steps == steps - 1:
            first = (k_step // steps * programs + program) * BLOCKS
            for each in gl.static_range(BLOCKS):
                _store(sums[each], scale_ptr, out_ptr, first + each, tokens, n)
            sums = ()
            for _ in gl.static_range(BLOCKS):
                sums = sums + (nothing,)  # noqa: RUF005


@gluon.jit
def _store(sums, scale_ptr, out_ptr, block, tokens: gl.constexpr, n: gl.constexpr):
    layout: gl.constexpr = sums.type.layout
    row = block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    token = gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))[None, :]
    scale = gl.load(scale_ptr + row, mask=row < n, other=0.0)
    values = (sums * scale[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + token * n + row[:, None], values, mask=(token < tokens) & (row < n)[:, None])


def launch(
    x: Array,
    weight: Int8Weight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: Literal[False],
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    n = weight.shape[0]
    blocks = config.rows // _ROWS.value
    groups = triton.cdiv(n // _ROWS.value, blocks)
    return triton_call(
        x, weight.packed, weight.scale,
        kernel=_product,
        name="linear_large_n_Int8Weight",
        target=target,
        out_type=out_type,
        grid=(min(groups, target.gpu.multiprocessors),),
        num_warps=8,
        tokens=tokens, n=n, k=k,
        TOKENS=config.tokens, BLOCKS=blocks, STAGES=config.num_stages,
    )  # fmt: skip
