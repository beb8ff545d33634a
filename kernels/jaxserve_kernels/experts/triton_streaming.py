"""Products of few tokens with their experts' codes, which stream through a ring in shared memory.

The layout of the work is that of `triton.py`: a program takes some weight rows of one expert and a
block of its (token, choice) pairs, in expert order. With up to 16 tokens a warp multiplies its own
rows (`quantized_matmul.triton_k_step`) with the tensor cores' smallest products, which need neither
descriptors nor waits. So a thread executes fewer instructions for each code than in `triton.py`.

With PDL, `_gate_up` lets the next kernel start only after its own wait. So the lists are complete
when `_down` starts, which finds its expert and fills its ring with codes before it waits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import Config, Launch
from jaxserve_kernels.experts.triton import arrays, launch_arguments
from jaxserve_kernels.experts.triton_few import OSS, activated
from jaxserve_kernels.experts.types import (
    ExpertActivation,
    ExpertWeights,
)
from jaxserve_kernels.quantized_matmul.triton_arguments import MXFP4, NO_ZERO
from jaxserve_kernels.quantized_matmul.triton_k_step import MOST_BY_A_WARP, add_k_steps, less_bias
from jaxserve_kernels.quantized_matmul.triton_unpack import MXFP4_POWER
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_prefetch import ask_for

_MXFP4 = gl.constexpr(MXFP4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)
_DOWN = gl.constexpr(0)
"""GATED of the down product; beside the values of `activation.gating` and `OSS`."""
_WIDTH = gl.constexpr(32)
"""16-bit words of a row in a tile of 128 inputs."""
_TILE = gl.constexpr(64 * 32)
"""Words of a tile, of 64 rows."""
_GUESSED_TILES = gl.constexpr(8)
"""Tiles of inputs that a program prefetches of the expert that it guesses."""


@gluon.jit
def _block_of(
    ends_ptr, experts: gl.constexpr, TOKENS: gl.constexpr, EXPERTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The program's expert, its first pair in expert order, and the end of the expert's pairs.

    `experts` or more as the expert: the program has no pairs. Every warp has all experts.
    """
    block = gl.program_id(1)
    lane = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0]))
    there = lane < experts
    ends = gl.load(ends_ptr + lane, mask=there, other=0)
    begins = gl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
    blocks = (ends - begins + TOKENS - 1) // TOKENS
    last = gl.cumsum(blocks, axis=0)
    expert = gl.sum((last <= block).to(gl.int32), axis=0)
    mine = lane == expert
    first = begins + (block - last + blocks) * TOKENS
    begin = gl.sum(gl.where(mine, first, 0), axis=0)
    end = gl.sum(gl.where(mine, ends, 0), axis=0)
    return expert, begin, end


@gluon.jit
def _row(lane, n: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr):
    """The weight rows of the program's lanes: which 64 rows, and which of these.

    Past the last row they are other rows. Gated, every 8 rows of gate are followed by the same 8 of
    up, so that a thread holds the sums of both.
    """
    if GATED == _DOWN:
        first = gl.program_id(0) * (ROWS // 64)
        block = gl.minimum(first + lane // 64, n // 64 - 1)
        inner = lane % 64
    else:
        gl.static_assert(ROWS == 128)
        block = gl.program_id(0) + lane // 8 % 2 * (n // 64)
        inner = lane // 16 * 8 + lane % 8
    return block, inner


@gluon.jit
def _guess(
    packed_ptr, experts: gl.constexpr, n: gl.constexpr, tiles: gl.constexpr,
    packed_size: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The first AHEAD programs prefetch gate's and up's codes to the L2 cache, as if each expert
    had one block of pairs."""
    expert = gl.program_id(1)
    if (expert * gl.num_programs(0) + gl.program_id(0) < AHEAD) & (expert < experts):
        warp = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0])) // 32
        codes = packed_ptr + expert.to(gl.int64) * packed_size
        for part in gl.static_range(2):
            block = (gl.program_id(0) + part * (n // 64)) * tiles
            for turn in gl.static_range(_GUESSED_TILES // WARPS):
                tile = gl.minimum(turn * WARPS + warp, tiles - 1)
                ask_for(codes + (block + tile) * _TILE, _TILE * 2)


@gluon.jit
def _copy_codes(
    word_ring, scale_ring, zero_ring, words, scales, zeros, slot, k_step,
    tiles: gl.constexpr, groups: gl.constexpr, ROWS: gl.constexpr, K_TILES: gl.constexpr,
    ZERO: gl.constexpr,
):  # fmt: skip
    """Copies a k-step's tiles of codes and scales into a slot of the rings, if there are any."""
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = word_ring.index(slot).slice(part * ROWS, ROWS)
            async_copy.async_load(place, words + tile * _TILE)
            at = tile * (groups * 64)
            place = scale_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
            async_copy.async_load(place, scales + at)
            if ZERO != _NO_ZERO:
                place = zero_ring.index(slot).slice(part * groups * ROWS, groups * ROWS)
                async_copy.async_load(place, zeros + at)


@gluon.jit
def _copy_inputs(
    x_ring, x, depth, there, slot, k_step,
    tiles: gl.constexpr, columns: gl.constexpr, TOKENS: gl.constexpr, K_TILES: gl.constexpr,
):  # fmt: skip
    """Copies the same tiles of the tokens that are `there`; inputs from `columns` on count as 0.
    `depth`: inputs of a tile."""
    for part in gl.static_range(K_TILES):
        tile = k_step * K_TILES + part
        if tile < tiles:
            place = x_ring.index(slot).slice(part * TOKENS, TOKENS)
            mask, _ = gl.broadcast(there, x)
            if columns < tiles * 128:
                mask = mask & (depth < columns - tile * 128)
            async_copy.async_load(place, x + tile * 128, mask=mask)


@gluon.jit
def _finish(
    acc, bias_ptr, order_ptr, weights_ptr, out_ptr, begin, end, tokens,
    n: gl.constexpr, choices: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Stores the sums of a program. Gated, in expert order; those of down times their weights, in
    the order of choice and token."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if BIAS:
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
        block, inner = _row(lane, n, GATED, ROWS)
        acc += gl.load(bias_ptr + block * 64 + inner).to(gl.float32)[:, None]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if GATED == _DOWN:
        values = acc
    else:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
        values = activated(gate, up, dtype, GATED).reshape([ROWS // 2, TOKENS])
    layout: gl.constexpr = values.type.layout
    rows: gl.constexpr = values.shape[0]
    row = gl.program_id(0) * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
    place = begin + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    there = place < end
    out = place
    if GATED == _DOWN:
        pair = gl.load(order_ptr + place, mask=there, other=0)
        values *= gl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
        out = (pair % choices) * tokens + pair // choices
    mask = there[None, :] & (row[:, None] < n)
    gl.store(out_ptr + out.to(gl.int64)[None, :] * n + row[:, None], values.to(dtype), mask=mask)


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, early_ends_ptr, order_ptr, weights_ptr,
    tokens, out_ptr,
    experts: gl.constexpr, choices: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    columns: gl.constexpr,
    packed_size: gl.constexpr, scale_size: gl.constexpr, second_size: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, EXPERTS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    K_TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """Gated: activation(gate) * up of each pair in expert order, [pairs, n], from x [tokens,
    columns]. Down: x are those, and the result is [choices, tokens, n].

    The weight has k inputs, tokens the first `columns` of them.
    """
    tiles: gl.constexpr = k // 128
    groups: gl.constexpr = 128 // GROUP if KIND < _MXFP4 else 1  # a word has a block's scales
    ahead: gl.constexpr = STAGES - 1
    if TOKENS <= MOST_BY_A_WARP:
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])

    if EARLY:
        if GATED == _DOWN:
            gdc_launch_dependents()
        else:
            if AHEAD > 0:
                _guess(packed_ptr, experts, n, tiles, packed_size, AHEAD, WARPS)
            gdc_wait()
            gdc_launch_dependents()
    expert, begin, end = _block_of(early_ends_ptr, experts, TOKENS, EXPERTS, WARPS)
    if expert >= experts:
        return
    own = expert.to(gl.int64)

    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    per_k_step: gl.constexpr = K_TILES * groups * ROWS
    word_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, K_TILES * ROWS, _WIDTH], word_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K_TILES * TOKENS, 128], x_tile)
    scale_ring = gl.allocate_shared_memory(
        scale_ptr.dtype.element_ty, [STAGES, per_k_step], row_tile
    )
    zero_ring = scale_ring
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(
            second_ptr.dtype.element_ty, [STAGES, per_k_step], row_tile
        )

    block, inner = _row(gl.arange(0, ROWS, gl.SliceLayout(1, word_copy)), n, GATED, ROWS)
    word = gl.arange(0, _WIDTH, gl.SliceLayout(0, word_copy))[None, :]
    words = packed_ptr + own * packed_size
    words += (block * (tiles * _TILE) + inner * _WIDTH)[:, None] + word
    lane = gl.arange(0, groups * ROWS, flat)
    block, inner = _row(lane % ROWS, n, GATED, ROWS)
    at = (block * (tiles * groups) + lane // ROWS) * 64 + inner
    scales = scale_ptr + own * scale_size + at
    zeros = second_ptr + own * second_size + at
    for k_step in gl.static_range(ahead):
        _copy_codes(
            word_ring, scale_ring, zero_ring, words, scales, zeros, k_step, k_step,
            tiles, groups, ROWS, K_TILES, ZERO,
        )  # fmt: skip
        async_copy.commit_group()
    if EARLY and GATED == _DOWN:
        gdc_wait()

    place = begin + gl.arange(0, TOKENS, gl.SliceLayout(1, x_copy))
    token = place
    if GATED != _DOWN:
        token = gl.load(order_ptr + place, mask=place < end, other=0) // choices
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    x = x_ptr + (token.to(gl.int64) * columns)[:, None] + depth
    there = (place < end)[:, None]
    for k_step in gl.static_range(ahead):
        _copy_inputs(x_ring, x, depth, there, k_step, k_step, tiles, columns, TOKENS, K_TILES)
        async_copy.commit_group()

    biased: gl.constexpr = TOKENS <= MOST_BY_A_WARP
    bias = less_bias(ROWS, mma)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    slot = 0
    # Not unrolled: the grid has no third dimension.
    for k_step in range(tiles // K_TILES + gl.program_id(2)):
        async_copy.wait_group(ahead - 1)
        gl.barrier()
        if TOKENS > MOST_BY_A_WARP:
            fence_async_shared()
        free = gl.where(slot == 0, ahead, slot - 1)
        _copy_codes(
            word_ring, scale_ring, zero_ring, words, scales, zeros, free, k_step + ahead,
            tiles, groups, ROWS, K_TILES, ZERO,
        )  # fmt: skip
        later = k_step + ahead
        _copy_inputs(x_ring, x, depth, there, free, later, tiles, columns, TOKENS, K_TILES)
        async_copy.commit_group()
        acc = add_k_steps(
            acc, word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot),
            x_ring.index(slot), K_TILES, groups, ROWS, TOKENS, KIND, ZERO, bias, biased,
        )  # fmt: skip
        slot = gl.where(slot == ahead, 0, slot + 1)
    if tiles % K_TILES > 0:
        async_copy.wait_group(0)
        gl.barrier()
        if TOKENS > MOST_BY_A_WARP:
            fence_async_shared()
        acc = add_k_steps(
            acc, word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot),
            x_ring.index(slot), tiles % K_TILES, groups, ROWS, TOKENS, KIND, ZERO, bias, biased,
        )  # fmt: skip
    acc *= MXFP4_POWER if KIND == _MXFP4 else 64.0  # less_zero
    _finish(
        acc, bias_ptr + own * (n if GATED == _DOWN else 2 * n), order_ptr, weights_ptr, out_ptr,
        begin, end, tokens, n, choices, GATED, BIAS,
    )  # fmt: skip


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    config: Config,
    *,
    target: Target,
) -> Array:
    """See `reference.experts`. There are at least 2 tokens, and `config` is from
    `config.choose_streaming`. The result is float32 [k, tokens, embed]."""
    tokens, embed = x.shape
    order, ends = triton_route.order(ids, w.gate_up.shape[0], target=target)
    lists = ends, order, weights, tokens
    hidden = triton_call(
        x, *arrays(w.gate_up, w.gate_up_bias), *lists,
        kernel=_product,
        name=f"experts_gate_up_streaming_{type(w.gate_up).__name__}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size, w.width), x.dtype),
        GATED=OSS.value if activation == "swiglu_oss" else gating(activation),
        **_launch(config.gate_up, w.gate_up, w.gate_up_bias, ids, x, w.width, target),
    )  # fmt: skip
    return triton_call(
        hidden, *arrays(w.down, w.down_bias), *lists,
        kernel=_product,
        name=f"experts_down_streaming_{type(w.down).__name__}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.shape[1], tokens, embed), jnp.float32),
        GATED=_DOWN.value,
        **_launch(config.down, w.down, w.down_bias, ids, hidden, embed, target),
    )  # fmt: skip


def _launch(
    launch: Launch,
    weight: Any,
    bias: Array | None,
    ids: Array,
    x: Array,
    n: int,
    target: Target,
) -> dict[str, Any]:
    """Launch arguments that both products share: see `triton.launch_arguments`."""
    found = launch_arguments(launch, weight, bias, ids, x, n, target)
    del found["ONE"], found["DEPTH"]
    found["EXPERTS"] = max(32, found["EXPERTS"])
    return {**found, "K_TILES": launch.depth // 128}
