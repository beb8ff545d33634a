"""Gated products of 33 to 64 tokens with 4-bit integers, with PDL: warpgroups share the tokens.

As in `triton_streaming`, codes are copied to a ring in shared memory while earlier kernels run.
There, three programs on a multiprocessor copy the tokens three times. Here, a program has three
warpgroups with 64 weight rows each, which share one copy of the tokens, and four warps that copy.
No barrier joins all warps: a ring stage is ready when it has been copied, and free when all three
warpgroups have used it.

If there are fewer than three row tiles per multiprocessor, all programs still get equal work: two
whole tiles, and a share of the inputs of a third (stream-K). The program with a tile's first share
passes its sums on to the one with the second, and so on.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config, stream_k_of
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_k_step import add_k_steps
from jaxserve_kernels.quantized_matmul.triton_streaming import finish, rows_of
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight

_INT4 = gl.constexpr(INT4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

_ROWS = gl.constexpr(64)
"""Weight rows of a tile: those of one warpgroup."""

_GROUPS = gl.constexpr(3)
"""Warpgroups that multiply."""


@gluon.jit
def _place(
    group: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """A warpgroup's row tile, and its range of steps, which is empty if there is no such tile."""
    program = gl.program_id(0)
    begin = 0
    end = steps
    if SPLITS == 1:
        tile = program * _GROUPS + group
    elif group < _GROUPS - 1:
        tile = program * (_GROUPS - 1) + group
    else:
        each: gl.constexpr = (steps + SPLITS - 1) // SPLITS
        gl.static_assert((SPLITS - 1) * each < steps)  # the last share stores the tile
        tile = gl.num_programs(0) * (_GROUPS - 1) + program // SPLITS
        begin = program % SPLITS * each
        end = gl.minimum(begin + each, steps)
    return tile, begin, gl.where(tile < row_tiles, end, begin)


@gluon.jit
def _multiply(
    word_ring, scale_ring, zero_ring, x_ring, ready, free, out_ptr, partial_ptr, flag_ptr,
    group: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr,
    groups: gl.constexpr, ZERO: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One of the warpgroups that multiply."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    tile, begin, end = _place(group, steps, row_tiles, SPLITS)
    acc = gl.zeros([_ROWS, TOKENS], gl.float32, mma)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if (step >= begin) & (step < end):
            fence_async_shared()
            place = stage * _GROUPS + group
            acc = add_k_steps(
                acc, word_ring.index(place), scale_ring.index(place), zero_ring.index(place),
                x_ring.index(stage), 1, groups, _ROWS, TOKENS, _INT4, ZERO,
            )  # fmt: skip
            if SPLITS > 1 and group == _GROUPS - 1:  # noqa: SIM102  (known beforehand)
                if step == end - 1:
                    acc = _hand_on(acc, partial_ptr, flag_ptr, SPLITS)
        mbarrier.arrive(free.index(stage), count=1)
    finishes = begin < end
    if SPLITS > 1 and group == _GROUPS - 1:  # the program with the last share stores the tile
        finishes = finishes & (gl.program_id(0) % SPLITS == SPLITS - 1)
    if finishes:
        finish(acc * 64.0, out_ptr, tile, tokens, n, GATED)  # less_zero


@gluon.jit
def _hand_on(acc, partial_ptr, flag_ptr, SPLITS: gl.constexpr):
    """Adds the sums of earlier shares of the tile, and passes the total on to the next share.
    Earlier shares finish earlier, so waits are short. All programs run at once (`residency`)."""
    program = gl.program_id(0)
    TOKENS: gl.constexpr = acc.shape[1]
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))[None, :]
    partial = partial_ptr + program * (_ROWS * TOKENS) + row * TOKENS + token
    if program % SPLITS > 0:
        while gl.atomic_add(flag_ptr + program - 1, 0, sem="acquire", scope="gpu") == 0:
            pass
        gl.barrier()
        acc += gl.load(partial - _ROWS * TOKENS)
    if program % SPLITS < SPLITS - 1:
        gl.store(partial, acc)
        gl.barrier()
        gl.atomic_xchg(flag_ptr + program, 1, sem="release", scope="gpu")
    return acc


@gluon.jit
def _copy_codes(
    packed_ptr, scale_ptr, zero_ptr, word_ring, scale_ring, zero_ring, ready, free,
    n: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr,
    groups: gl.constexpr, ZERO: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Two warps that copy codes. They do not wait for earlier kernels."""
    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    word = gl.arange(0, 32, gl.SliceLayout(0, word_copy))[None, :]
    word_lane = gl.arange(0, _ROWS, gl.SliceLayout(1, word_copy))
    lane = gl.arange(0, groups * _ROWS, flat)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        for group in gl.static_range(_GROUPS):
            tile, begin, end = _place(group, steps, row_tiles, SPLITS)
            if (step >= begin) & (step < end):
                place = stage * _GROUPS + group
                row = rows_of(tile, word_lane, n, True, _ROWS)
                at = (row // 64 * steps + step).to(gl.int64) * 2048 + row % 64 * 32
                source = packed_ptr + at[:, None] + word
                async_copy.async_load(word_ring.index(place), source)
                row = rows_of(tile, lane % _ROWS, n, True, _ROWS)
                at = ((row // 64 * steps + step) * groups + lane // _ROWS) * 64 + row % 64
                async_copy.async_load(scale_ring.index(place), scale_ptr + at)
                if ZERO != _NO_ZERO:
                    source = zero_ptr + at
                    async_copy.async_load(zero_ring.index(place), source)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def _copy_tokens(
    x_ptr, x_ring, ready, free,
    tokens: gl.constexpr, k: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Two warps that copy tokens, after earlier kernels have ended. When all copies are issued, the
    next kernel may start."""
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [2, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    source = x_ptr + token * k + depth
    there, _ = gl.broadcast(token < tokens, source)
    if EARLY:
        gdc_wait()
    for step in range(k // 128):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        async_copy.async_load(x_ring.index(stage), source + step * 128, mask=there)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    if EARLY:
        gdc_launch_dependents()


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, out_ptr, partial_ptr, flag_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """n: rows of the result, half of the weight's. SPLITS: programs that share the third tile."""
    steps: gl.constexpr = k // 128
    groups: gl.constexpr = 128 // GROUP
    row_tiles: gl.constexpr = 2 * n // _ROWS
    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    places: gl.constexpr = STAGES * _GROUPS
    word_ring = gl.allocate_shared_memory(gl.uint16, [places, _ROWS, 32], word_tile)
    scale_ring = gl.allocate_shared_memory(gl.float32, [places, groups * _ROWS], row_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, 128], x_tile)
    zero_ring = scale_ring
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(
            zero_ptr.dtype.element_ty, [places, groups * _ROWS], row_tile
        )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=128)  # the threads that copy
        mbarrier.init(free.index(stage), count=_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                word_ring, scale_ring, zero_ring, x_ring, ready, free, out_ptr, partial_ptr,
                flag_ptr, 0, tokens, n, steps, row_tiles, groups, ZERO, TOKENS, STAGES, SPLITS,
                GATED,
            )),
            (_multiply, (
                word_ring, scale_ring, zero_ring, x_ring, ready, free, out_ptr, partial_ptr,
                flag_ptr, 1, tokens, n, steps, row_tiles, groups, ZERO, TOKENS, STAGES, SPLITS,
                GATED,
            )),
            (_multiply, (
                word_ring, scale_ring, zero_ring, x_ring, ready, free, out_ptr, partial_ptr,
                flag_ptr, 2, tokens, n, steps, row_tiles, groups, ZERO, TOKENS, STAGES, SPLITS,
                GATED,
            )),
            (_copy_codes, (
                packed_ptr, scale_ptr, zero_ptr, word_ring, scale_ring, zero_ring, ready, free,
                n, steps, row_tiles, groups, ZERO, STAGES, SPLITS,
            )),
            (_copy_tokens, (x_ptr, x_ring, ready, free, tokens, k, TOKENS, STAGES, EARLY)),
        ],
        [4, 4, 2, 2],
        [144, 144, 72, 72],
    )  # fmt: skip


def launch(
    x: Array,
    weight: Int4Weight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: Literal[True],
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    shares, programs = stream_k_of(weight.shape[0] // _ROWS.value, k // 128, target=target)
    partial = (programs, _ROWS.value, config.tokens) if shares > 1 else (1,)
    return triton_call(
        x, *arrays(weight),
        kernel=_product,
        name="gated_linear_stream_k_Int4Weight",
        target=target,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct((programs,) if shares > 1 else (1,), jnp.int32),
        ),
        zeroed_outputs=(2,) if shares > 1 else (),
        together=shares > 1,
        grid=(programs,),
        num_warps=4,
        tokens=tokens, n=out_type.shape[-1], k=k, **kind(weight),
        TOKENS=config.tokens, STAGES=config.num_stages, SPLITS=shares,
        GATED=gating(activation),
    )[0]  # fmt: skip
