"""Gated products of 33 to 64 tokens with 4-bit integers, with PDL: warpgroups share the tokens.

As in `triton_streaming`, codes are copied to a ring in shared memory while earlier kernels run.
There, three programs on a multiprocessor copy the tokens three times. Here, one program has three
warpgroups with 64 weight rows each, which share one copy of the tokens, and four warps that copy.
No barrier joins all warps: a ring stage is ready when it has been copied, and free when all three
warpgroups have used it.

All programs get equally many k-steps (stream-K): tiles of rows lie one behind the other, and each
program takes a range of their k-steps. So a range may begin and end within a tile. A program begins
with the tile that it does not end, stores these sums, and ends with the tile that it did not begin,
to which it adds the sums of the programs before it. These were stored long before.
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
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens
from jaxserve_kernels.quantized_matmul.triton_arguments import (
    INT4,
    NO_ZERO,
    arrays,
    kind,
    tokens_of,
)
from jaxserve_kernels.quantized_matmul.triton_int8_k_step import SIXTEENTH
from jaxserve_kernels.quantized_matmul.triton_results import finish, rows_of, sums_at
from jaxserve_kernels.quantized_matmul.triton_rings import (
    add_tiles,
    mma_of,
    token_rings,
    weight_rings,
)
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.weights import Int4Weight

_INT4 = gl.constexpr(INT4.value)
_NO_ZERO = gl.constexpr(NO_ZERO.value)

_ROWS = gl.constexpr(64)
"""Weight rows of a warpgroup."""

_GROUPS = gl.constexpr(3)
"""Warpgroups that multiply."""

_BEHIND = gl.constexpr(3)
"""Copies of tokens under way before the first is waited for."""


@gluon.jit
def _range(total: gl.constexpr, EACH: gl.constexpr):
    """The first k-step of the program, and the one after its last, among those of all tiles."""
    first = gl.program_id(0) * EACH
    return first, gl.minimum(first + EACH, total)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next stage, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _part(index, steps: gl.constexpr, tiles: gl.constexpr, EACH: gl.constexpr):
    """The program's `index`-th tile, from its last to its first, and its k-steps in it."""
    first, end = _range(tiles * steps, EACH)
    tile = (end - 1) // steps - index
    return tile, gl.maximum(first - tile * steps, 0), gl.minimum(end - tile * steps, steps)


@gluon.jit
def _parts(steps: gl.constexpr, tiles: gl.constexpr, EACH: gl.constexpr):
    """The number of tiles of which the program has k-steps."""
    first, end = _range(tiles * steps, EACH)
    return (end - 1) // steps - first // steps + 1


@gluon.jit
def _multiply(
    rings, x_rings, ready, free, out_ptr, partial_ptr, flag_ptr, group: gl.constexpr,
    tokens: gl.constexpr, n: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr,
    tiles: gl.constexpr, groups: gl.constexpr, ZERO: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, EACH: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One of the warpgroups that multiply."""
    int8: gl.constexpr = x_rings[0].dtype == gl.int8
    mma: gl.constexpr = mma_of(x_rings[0].dtype, TOKENS, _ROWS // 16)
    stage = 0
    phase = 0
    for index in range(_parts(steps, tiles, EACH)):
        tile, begin, end = _part(index, steps, tiles, EACH)
        rows = tile * _GROUPS + group
        acc = gl.zeros([_ROWS, TOKENS], gl.float32, mma)
        for _ in range(begin, end):
            mbarrier.wait(ready.index(stage), phase)
            place = stage * _GROUPS + group
            acc = add_tiles(acc, rings, place, x_rings, stage, 1, _INT4, 128 // groups, ZERO)
            mbarrier.arrive(free.index(stage), count=1)
            stage, phase = _next(stage, phase, STAGES)
        if rows < row_tiles:
            if end < steps:
                _leave(acc, partial_ptr, flag_ptr, group)
            else:
                if begin > 0:
                    acc = _add_parts(acc, partial_ptr, flag_ptr, tile * steps // EACH, group)
                acc *= SIXTEENTH if int8 else 64.0  # less_zero
                finish(acc, out_ptr, rows, tokens, n, GATED)


@gluon.jit
def _leave(acc, partial_ptr, flag_ptr, group: gl.constexpr):
    """Stores the sums of a tile that a later program ends."""
    index = gl.program_id(0) * _GROUPS + group
    gl.store(sums_at(partial_ptr, index, acc), acc)
    gl.barrier()
    gl.atomic_xchg(flag_ptr + index, 1, sem="release", scope="gpu")


@gluon.jit
def _add_parts(acc, partial_ptr, flag_ptr, first, group: gl.constexpr):
    """Adds the sums that the programs from `first` on have left. All run at once (`residency`)."""
    for program in range(first, gl.program_id(0)):
        index = program * _GROUPS + group
        while gl.atomic_add(flag_ptr + index, 0, sem="acquire", scope="gpu") == 0:
            pass
        gl.barrier()
        acc += gl.load(sums_at(partial_ptr, index, acc))
    return acc


@gluon.jit
def _pointers(
    packed_ptr, rows, step,
    n: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr, groups: gl.constexpr,
):  # fmt: skip
    """Pointers to the words of a warpgroup's rows in a k-step, and offsets of their scales. If the
    rows are past the last ones: those of the last ones."""
    word_copy: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    rows = gl.minimum(rows, row_tiles - 1)
    row = rows_of(rows, gl.arange(0, _ROWS, gl.SliceLayout(1, word_copy)), n, True, _ROWS)
    at = (row // 64 * steps + step).to(gl.int64) * 2048 + row % 64 * 32
    words = packed_ptr + at[:, None] + gl.arange(0, 32, gl.SliceLayout(0, word_copy))[None, :]
    lane = gl.arange(0, groups * _ROWS, flat)
    row = rows_of(rows, lane % _ROWS, n, True, _ROWS)
    return words, ((row // 64 * steps + step) * groups + lane // _ROWS) * 64 + row % 64


@gluon.jit
def _copy_codes(
    packed_ptr, scale_ptr, zero_ptr, rings, ready, free,
    n: gl.constexpr, steps: gl.constexpr, row_tiles: gl.constexpr, tiles: gl.constexpr,
    groups: gl.constexpr, ZERO: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Two warps that copy codes. They do not wait for earlier kernels."""
    gl.static_assert(_GROUPS == 3)
    word_ring, scale_ring, zero_ring = rings
    stage = 0
    phase = 1
    for index in range(_parts(steps, tiles, EACH)):
        tile, begin, end = _part(index, steps, tiles, EACH)
        a, a_at = _pointers(packed_ptr, tile * 3, begin, n, steps, row_tiles, groups)
        b, b_at = _pointers(packed_ptr, tile * 3 + 1, begin, n, steps, row_tiles, groups)
        c, c_at = _pointers(packed_ptr, tile * 3 + 2, begin, n, steps, row_tiles, groups)
        for _ in range(begin, end):
            mbarrier.wait(free.index(stage), phase)
            async_copy.async_load(word_ring.index(stage * 3), a)
            async_copy.async_load(word_ring.index(stage * 3 + 1), b)
            async_copy.async_load(word_ring.index(stage * 3 + 2), c)
            async_copy.async_load(scale_ring.index(stage * 3), scale_ptr + a_at)
            async_copy.async_load(scale_ring.index(stage * 3 + 1), scale_ptr + b_at)
            async_copy.async_load(scale_ring.index(stage * 3 + 2), scale_ptr + c_at)
            if ZERO != _NO_ZERO:
                async_copy.async_load(zero_ring.index(stage * 3), zero_ptr + a_at)
                async_copy.async_load(zero_ring.index(stage * 3 + 1), zero_ptr + b_at)
                async_copy.async_load(zero_ring.index(stage * 3 + 2), zero_ptr + c_at)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            a += 2048
            b += 2048
            c += 2048
            a_at += groups * 64
            b_at += groups * 64
            c_at += groups * 64
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _copy_tokens(
    x_ptr, factor_ptr, sum_ptr, x_rings, ready, free,
    tokens: gl.constexpr, k: gl.constexpr, tiles: gl.constexpr, TOKENS: gl.constexpr,
    ZERO: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Two warps that copy tokens, after earlier kernels have ended. When all copies are issued, the
    next kernel may start. A stage is ready when its copy has arrived and is fenced, some copies
    later: so the warps that multiply need no fence."""
    steps: gl.constexpr = k // 128
    x_ring, factor_ring, sum_ring = x_rings
    int8: gl.constexpr = x_ring.dtype == gl.int8
    wide: gl.constexpr = 16 if int8 else 8  # 16 bytes
    x_copy: gl.constexpr = gl.BlockedLayout([1, wide], [wide // 4, 128 // wide], [2, 1], [1, 0])
    lane = gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [2], [0]))
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, x_copy))[:, None]
    depth = gl.arange(0, 128, gl.SliceLayout(0, x_copy))[None, :]
    source = x_ptr + token * k + depth
    there, _ = gl.broadcast(token < tokens, source)
    if EARLY:
        gdc_wait()
    stage = 0
    phase = 1
    done = 0  # the next stage to be ready
    issued = 0
    for index in range(_parts(steps, tiles, EACH)):
        _tile, begin, end = _part(index, steps, tiles, EACH)
        for step in range(begin, end):
            mbarrier.wait(free.index(stage), phase)
            async_copy.async_load(x_ring.index(stage), source + step * 128, mask=there)
            if int8:
                at, known = step * tokens + lane, lane < tokens
                async_copy.async_load(factor_ring.index(stage), factor_ptr + at, mask=known)
                if ZERO != _NO_ZERO:
                    async_copy.async_load(sum_ring.index(stage), sum_ptr + at, mask=known)
            async_copy.commit_group()
            stage, phase = _next(stage, phase, STAGES)
            issued += 1
            if issued > _BEHIND:
                async_copy.wait_group(_BEHIND)
                fence_async_shared()
                mbarrier.arrive(ready.index(done), count=1)
                done = gl.where(done == STAGES - 1, 0, done + 1)
    if EARLY:
        gdc_launch_dependents()
    async_copy.wait_group(0)
    fence_async_shared()
    for _ in range(gl.minimum(issued, _BEHIND)):
        mbarrier.arrive(ready.index(done), count=1)
        done = gl.where(done == STAGES - 1, 0, done + 1)


@gluon.jit
def _product(
    x_ptr, factor_ptr, sum_ptr, packed_ptr, scale_ptr, zero_ptr, out_ptr, partial_ptr, flag_ptr,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, EACH: gl.constexpr, GATED: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    """n: rows of the result, half of the weight's. EACH: k-steps of a program."""
    steps: gl.constexpr = k // 128
    groups: gl.constexpr = 128 // GROUP
    row_tiles: gl.constexpr = 2 * n // _ROWS
    tiles: gl.constexpr = (row_tiles + _GROUPS - 1) // _GROUPS
    places: gl.constexpr = STAGES * _GROUPS
    rings = weight_rings(scale_ptr, zero_ptr, KIND, GROUP, ZERO, _ROWS, 1, places)
    x_rings = token_rings(x_ptr, rings[1], ZERO, TOKENS, 1, STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=64 + 1)  # the threads that copy codes; the tokens
        mbarrier.init(free.index(stage), count=_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                rings, x_rings, ready, free, out_ptr, partial_ptr, flag_ptr, 0,
                tokens, n, steps, row_tiles, tiles, groups, ZERO, TOKENS, STAGES, EACH, GATED,
            )),
            (_multiply, (
                rings, x_rings, ready, free, out_ptr, partial_ptr, flag_ptr, 1,
                tokens, n, steps, row_tiles, tiles, groups, ZERO, TOKENS, STAGES, EACH, GATED,
            )),
            (_multiply, (
                rings, x_rings, ready, free, out_ptr, partial_ptr, flag_ptr, 2,
                tokens, n, steps, row_tiles, tiles, groups, ZERO, TOKENS, STAGES, EACH, GATED,
            )),
            (_copy_codes, (
                packed_ptr, scale_ptr, zero_ptr, rings, ready, free,
                n, steps, row_tiles, tiles, groups, ZERO, STAGES, EACH,
            )),
            (_copy_tokens, (
                x_ptr, factor_ptr, sum_ptr, x_rings, ready, free, tokens, k, tiles, TOKENS, ZERO,
                STAGES, EACH, EARLY,
            )),
        ],
        [4, 4, 2, 2],
        [144, 144, 72, 72],
    )  # fmt: skip


def launch(
    x: Array | QuantizedTokens,
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
    steps = k // 128
    tiles = -(-weight.shape[0] // (_ROWS.value * _GROUPS.value))
    each = -(-tiles * steps // target.gpu.multiprocessors)
    programs = -(-tiles * steps // each)
    shared = each % steps > 0  # some programs have parts of tiles
    partial = (programs, _GROUPS.value * _ROWS.value, config.tokens) if shared else (1,)
    return triton_call(
        *tokens_of(x, weight, config, target), *arrays(weight),
        kernel=_product,
        name="gated_linear_stream_k_Int4Weight",
        target=target,
        out_type=(
            out_type,
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct((programs * _GROUPS.value,) if shared else (1,), jnp.int32),
        ),
        zeroed_outputs=(2,) if shared else (),
        together=shared,
        grid=(programs,),
        num_warps=4,
        tokens=tokens, n=out_type.shape[-1], k=k, **kind(weight),
        TOKENS=config.tokens, STAGES=config.num_stages, EACH=each,
        GATED=gating(activation),
    )[0]  # fmt: skip
