"""SwiGLU of many tokens on Hopper: the gating is done in the registers that hold both products.

XLA writes the product with gate and up, 76 KB per token of a 4B model, for another kernel to read.
Here a program walks over tiles of 128 tokens and 128 columns of the result. A producer warp copies
the tokens, the rows of gate and those of up into a ring in shared memory (TMA), also while the
tile before is being stored; two warpgroups of 64 tokens each multiply.
"""

from __future__ import annotations

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

TOKENS = 128
COLUMNS = 128
DEPTH = 64
_TOKENS = gl.constexpr(TOKENS)
_COLUMNS = gl.constexpr(COLUMNS)
_DEPTH = gl.constexpr(DEPTH)
_STAGES = gl.constexpr(4)
"""Of 48 KB: what shared memory holds."""

_MULTIPROCESSORS = 132
"""Programs that share the tiles."""


@gluon.jit
def _multiply(
    x_ring, w_ring, ready, free, out_ptr, program, programs,
    part: gl.constexpr, tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """Warpgroup `part`: its 64 tokens of each tile of this program."""
    ROWS: gl.constexpr = _TOKENS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _COLUMNS, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows: gl.constexpr = (tokens + _TOKENS - 1) // _TOKENS
    at = 0
    for tile in range(program, rows * (n // _COLUMNS), programs):
        acc = gl.zeros([ROWS, 2 * _COLUMNS], gl.float32, layout)
        for step in range(k // _DEPTH):
            stage = at % _STAGES
            mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
            x = x_ring.index(stage).slice(part * ROWS, ROWS, dim=0)
            acc = warpgroup_mma(x, w_ring.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The product before this one is done, and its place free.
            mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1, pred=step > 0)
            at += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((at + _STAGES - 1) % _STAGES), count=1)
        gate, up = gl.split(acc.reshape([ROWS, 2, _COLUMNS]).permute((0, 2, 1)))
        gate = gate.to(gl.bfloat16).to(gl.float32)  # rounded where the reference rounds
        gated = gate / (1.0 + gl.exp2(gate * -1.4426950408889634))
        out = gated.to(gl.bfloat16).to(gl.float32) * up.to(gl.bfloat16).to(gl.float32)
        out = gl.convert_layout(out.to(gl.bfloat16), flat)
        token = tile % rows * _TOKENS + part * ROWS
        token = gl.expand_dims(token + gl.arange(0, ROWS, gl.SliceLayout(1, flat)), 1)
        column = tile // rows * _COLUMNS + gl.arange(0, _COLUMNS, gl.SliceLayout(0, flat))
        gl.store(out_ptr + token * n + gl.expand_dims(column, 0), out, mask=token < tokens)


@gluon.jit
def _copy(
    x, w, x_ring, w_ring, ready, free, program, programs,
    tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr,
):  # fmt: skip
    """The producer. Programs that run together share the rows of few weights, and all tokens."""
    rows: gl.constexpr = (tokens + _TOKENS - 1) // _TOKENS
    at = 0
    for tile in range(program, rows * (n // _COLUMNS), programs):
        token = tile % rows * _TOKENS
        column = tile // rows * _COLUMNS
        for depth in range(0, k, _DEPTH):
            stage = at % _STAGES
            bar = ready.index(stage)
            gate = w_ring.index(stage).slice(0, _COLUMNS, dim=0)
            up = w_ring.index(stage).slice(_COLUMNS, _COLUMNS, dim=0)
            mbarrier.wait(free.index(stage), ((at // _STAGES) & 1) ^ 1)
            mbarrier.expect(bar, (_TOKENS + 2 * _COLUMNS) * _DEPTH * 2)
            tma.async_copy_global_to_shared(x, [token, depth], bar, x_ring.index(stage))
            tma.async_copy_global_to_shared(w, [column, depth], bar, gate)
            tma.async_copy_global_to_shared(w, [n + column, depth], bar, up)
            at += 1


@gluon.jit
def _program(x, w, out_ptr, tokens: gl.constexpr, n: gl.constexpr, k: gl.constexpr):
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _TOKENS, _DEPTH], x.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 2 * _COLUMNS, _DEPTH], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (x_ring, w_ring, ready, free, out_ptr, program, programs, 0, tokens, n, k)),
            (_multiply, (x_ring, w_ring, ready, free, out_ptr, program, programs, 1, tokens, n, k)),
            (_copy, (x, w, x_ring, w_ring, ready, free, program, programs, tokens, n, k)),
        ],
        [4, 1],
        [232, 24],
    )


def gated_linear(x: Array, weight: Array) -> Array:
    """[tokens, ffn] in bfloat16. ffn is a multiple of COLUMNS, the depth one of DEPTH."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return triton_call(
        tensor_descriptor(x, (TOKENS, DEPTH), layout),
        tensor_descriptor(weight, (COLUMNS, DEPTH), layout),
        kernel=_program,
        name="gated_linear_hopper",
        out_type=jax.ShapeDtypeStruct((tokens, n), x.dtype),
        grid=(min(-(-tokens // TOKENS) * (n // COLUMNS), _MULTIPROCESSORS),),
        num_warps=4,
        tokens=tokens, n=n, k=k,
    )  # fmt: skip
