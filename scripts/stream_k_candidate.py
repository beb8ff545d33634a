"""Products of 17 to 64 tokens with 4-bit integers, by PDL: all programs multiply as many k-steps.

As in `triton_streaming` codes wait in a ring in shared memory when the kernels before end. There a
program has a tile of rows, and as many programs as a multiprocessor has room for rarely divide the
tiles: the last ones run alone. Here the k-steps of all tiles are one sequence, of which each
program takes as many as the others; its ring never runs empty between two tiles. Of a tile that
several share the one that begins it adds what the others leave. It is the last thing that it does,
and most others have done it as their first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import Activation, gating
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NO_ZERO, arrays, kind
from jaxserve_kernels.quantized_matmul.triton_k_step import add_k_steps
from jaxserve_kernels.quantized_matmul.triton_streaming import finish, rows_of
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight

_INT4 = gl.constexpr(INT4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)
_ROWS = gl.constexpr(64)
"""Of a tile."""


@gluon.jit
def _places(tile, k_step, tiles: gl.constexpr, K_TILES: gl.constexpr, GATED: gl.constexpr):
    """Where a k-step of a tile of rows is, from where that of the first tile is: of codes and of
    the scales of a group. Gated, 64 rows of gate, and of up, are two tiles'."""
    if GATED:
        block = (tile // 2 * tiles + k_step * K_TILES).to(gl.int64)
        row = tile % 2 * 32
    else:
        block = (tile * tiles + k_step * K_TILES).to(gl.int64)
        row = 0
    return block, row


@gluon.jit
def _copy(
    words, scales, zeros, x, word_place, scale_place, zero_place, x_place, step, there,
    steps: gl.constexpr, tiles: gl.constexpr, groups: gl.constexpr, K_TILES: gl.constexpr,
    ZERO: gl.constexpr, GATED: gl.constexpr, CODES: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """A k-step of those of all tiles: CODES and what belongs to them, and TOKENS."""
    k_step = step % steps
    if CODES:
        block, row = _places(step // steps, k_step, tiles, K_TILES, GATED)
        async_copy.async_load(word_place, words + (block * 2048 + row * 32))
        at = block * (groups * 64) + row
        async_copy.async_load(scale_place, scales + at)
        if ZERO != _NO_ZERO:
            async_copy.async_load(zero_place, zeros + at)
    if TOKENS:
        async_copy.async_load(x_place, x + k_step * (K_TILES * 128), mask=there)


@gluon.jit
def _share(acc, partial_ptr, flag_ptr, begins, behind):
    """The sums of a program's part of a tile. Of one that begins the tile, with those of so many
    programs behind; any other leaves them. All programs run at once (`residency`)."""
    program = gl.program_id(0)
    TOKENS: gl.constexpr = acc.shape[1]
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, acc.type.layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, acc.type.layout))[None, :]
    partial = partial_ptr + row * TOKENS + token
    if begins:
        for other in range(program + 1, program + 1 + behind):
            while gl.atomic_add(flag_ptr + other, 0, sem="acquire", scope="gpu") == 0:
                pass
            gl.barrier()
            acc += gl.load(partial + other * (_ROWS * TOKENS))
    else:
        gl.store(partial + program * (_ROWS * TOKENS), acc)
        gl.barrier()
        gl.atomic_xchg(flag_ptr + program, 1, sem="release", scope="gpu")
    return acc


@gluon.jit
def _product(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, out_ptr, partial_ptr, flag_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, GATED: gl.constexpr,
    TOKENS: gl.constexpr, K_TILES: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
    FIRST: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """n: rows of the result; gated, half of the weight's. A program has EACH k-steps, of K_TILES
    tiles of inputs; the last one may have fewer."""
    gl.static_assert(KIND == _INT4 and n % 64 == 0)
    tiles: gl.constexpr = k // 128
    steps: gl.constexpr = tiles // K_TILES
    groups: gl.constexpr = 128 // GROUP
    rows: gl.constexpr = 2 * n if GATED else n
    ahead: gl.constexpr = STAGES - 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    begin = gl.program_id(0) * EACH
    count = gl.minimum(EACH, rows // _ROWS * steps - begin)

    word_tile: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    row_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, 128], gl.bfloat16)
    per_k_step: gl.constexpr = K_TILES * groups * _ROWS
    word_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, K_TILES * _ROWS, 32], word_tile)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, K_TILES * TOKENS, 128], x_tile)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, per_k_step], row_tile)
    zero_ring = scale_ring
    if ZERO != _NO_ZERO:
        zero_ring = gl.allocate_shared_memory(
            zero_ptr.dtype.element_ty, [STAGES, per_k_step], row_tile
        )

    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x_copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    lane = gl.arange(0, K_TILES * _ROWS, gl.SliceLayout(1, word_copy))
    row = rows_of(0, lane % _ROWS, n, GATED, _ROWS)
    words = (row // 64 * tiles + lane // _ROWS).to(gl.int64) * 2048 + row % 64 * 32
    words = packed_ptr + words[:, None] + gl.arange(0, 32, gl.SliceLayout(0, word_copy))[None, :]
    lane = gl.arange(0, per_k_step, flat)
    row = rows_of(0, lane % _ROWS, n, GATED, _ROWS)
    of_row = (row // 64 * tiles + lane // (groups * _ROWS)) * groups + lane // _ROWS % groups
    scales = scale_ptr + of_row * 64 + row % 64
    zeros = scales
    if ZERO != _NO_ZERO:
        zeros = zero_ptr + of_row * 64 + row % 64
    lane = gl.arange(0, K_TILES * TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    x = x_ptr + lane % TOKENS * k + lane // TOKENS * 128 + depth
    there, _ = gl.broadcast(lane % TOKENS < tokens, x)

    if EARLY and FIRST:
        gdc_launch_dependents()
    for step in gl.static_range(ahead):
        if step < count:
            _copy(
                words, scales, zeros, x, word_ring.index(step), scale_ring.index(step),
                zero_ring.index(step), x_ring.index(step), begin + step, there, steps, tiles,
                groups, K_TILES, ZERO, GATED, True, False,
            )  # fmt: skip
        async_copy.commit_group()
    if EARLY:
        gdc_wait()
    for step in gl.static_range(ahead):
        if step < count:
            _copy(
                words, scales, zeros, x, word_ring.index(step), scale_ring.index(step),
                zero_ring.index(step), x_ring.index(step), begin + step, there, steps, tiles,
                groups, K_TILES, ZERO, GATED, False, True,
            )  # fmt: skip
        async_copy.commit_group()

    acc = gl.zeros([_ROWS, TOKENS], gl.float32, mma)
    slot = 0
    for step in range(count):
        async_copy.wait_group(ahead - 1)
        gl.barrier()
        fence_async_shared()
        if step + ahead < count:
            place = gl.where(slot == 0, ahead, slot - 1)
            _copy(
                words, scales, zeros, x, word_ring.index(place), scale_ring.index(place),
                zero_ring.index(place), x_ring.index(place), begin + step + ahead, there, steps,
                tiles, groups, K_TILES, ZERO, GATED, True, True,
            )  # fmt: skip
        async_copy.commit_group()
        acc = add_k_steps(
            acc, word_ring.index(slot), scale_ring.index(slot), zero_ring.index(slot),
            x_ring.index(slot), K_TILES, groups, _ROWS, TOKENS, KIND, ZERO,
        )  # fmt: skip
        slot = gl.where(slot == ahead, 0, slot + 1)
        at = (begin + step) % steps
        if (at == steps - 1) | (step == count - 1):
            if EARLY and not FIRST:  # noqa: SIM102  (known beforehand)
                if step == count - 1:
                    gdc_launch_dependents()
            begins = step >= at
            behind = (steps - 1 - at + EACH - 1) // EACH
            acc = _share(acc * 64.0, partial_ptr, flag_ptr, begins, behind)  # less_zero
            if begins:
                finish(acc, out_ptr, (begin + step) // steps, tokens, n, GATED)
            acc = gl.zeros([_ROWS, TOKENS], gl.float32, mma)


STAGES_OF_3 = {64: 3, 32: 5}
"""Rings with which a multiprocessor has three programs; with shallower ones it has four."""


def launch(
    x: Array,
    weight: Int4Weight,
    config: Config,
    out_type: jax.ShapeDtypeStruct,
    *,
    gated: bool,
    activation: Activation = "silu",
    target: Target,
) -> Array:
    """The product, of type `out_type`: see `api`."""
    tokens, k = x.shape
    total = weight.shape[0] // _ROWS.value * (k // 128 // config.unroll)
    at_once = 3 if config.num_stages > STAGES_OF_3[config.tokens] - 1 else 4
    each = -(-total // (at_once * target.gpu.multiprocessors))
    programs = -(-total // each)
    return triton_call(
        x, *arrays(weight),
        kernel=_product,
        name=f"{'gated_' if gated else ''}linear_stream_k_{type(weight).__name__}",
        target=target,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct((programs, _ROWS.value, config.tokens), jnp.float32),
            jax.ShapeDtypeStruct((programs,), jnp.int32),
        ),
        zeroed_outputs=(2,),
        together=True,
        grid=(programs,),
        num_warps=4,
        tokens=tokens, n=out_type.shape[-1], k=k, **kind(weight),
        GATED=gating(activation, gated=gated),
        TOKENS=config.tokens, K_TILES=config.unroll, STAGES=config.num_stages, EACH=each,
        FIRST=config.first,
    )[0]  # fmt: skip
