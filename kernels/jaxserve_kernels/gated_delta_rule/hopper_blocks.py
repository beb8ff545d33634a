"""Carries the state from block to block on Hopper: the same as `triton_blocks._advance`.

A program has one chunk, one value head, and 64 of the state's columns. A producer warp copies the
parts of the next blocks into a ring in shared memory. Two warpgroups have 32 columns of the state
each, in registers. A third computes the outputs of a block while those two compute the next state.
So the products that follow each other in a block are three instead of five.

The tensor cores read the state, and the sums that are multiplied again, from shared memory, as a
high and a low part (`_store_halves`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.gated_delta_rule.reference import Heads
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call

_BLOCK = gl.constexpr(64)
"""Tokens of a block."""

_COLUMNS = gl.constexpr(32)
"""State columns of a warpgroup."""

_STAGES = gl.constexpr(2)

_STATE, _WRITE, _FREE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Barriers between warpgroups: the state and the sums are ready; from _FREE on, they are free."""

_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _SUMS))


@gluon.jit
def _store_halves(x, buffers, part: gl.constexpr):
    """Stores float32 sums as bfloat16: the high parts, and the low parts, which are the rest."""
    high = x.to(gl.bfloat16)
    buffers.index(2 * part).store(high)
    buffers.index(2 * part + 1).store((x - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _add(left, halves, part: gl.constexpr, total):
    """total + left @ (high + low), not yet waited for."""
    total = warpgroup_mma(left, halves.index(2 * part + 1), total, is_async=True)
    return warpgroup_mma(left, halves.index(2 * part), total, is_async=True)


@gluon.jit
def _carry(
    k_ring, v_ring, solved_ring, factor_ring, states, wanted, writes, scaled, ready,
    free, handed,
    factors_ptr, state_ptr, kept_ptr, first_block, count, kept, head, goes_on,
    part: gl.constexpr, value_heads: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """Warpgroup `part`: carries its columns of the state over the chunk's blocks. Also stores the
    state after the first `kept` of them."""
    state_ready = handed.index(_STATE)
    state_free = handed.index(_FREE + _STATE)
    write_ready = handed.index(_WRITE)
    write_free = handed.index(_FREE + _WRITE)
    key = gl.arange(0, KEY, _ROW)[:, None]
    column = part * _COLUMNS + gl.arange(0, _COLUMNS, gl.SliceLayout(0, _SUMS))[None, :]
    tile = state_ptr + key * VALUE + column
    kept_tile = kept_ptr + key * VALUE + column
    there, _ = gl.broadcast((key >= 0) & goes_on, tile)
    state = gl.load(tile, mask=there, other=0.0)
    nothing = gl.zeros([_BLOCK, _COLUMNS], gl.float32, _SUMS)
    for block in range(count):
        stage = block % _STAGES
        before = (block & 1) ^ 1
        forget = gl.load(factors_ptr + ((first_block + block) * value_heads + head) * 256 + 255)
        mbarrier.wait(state_free, before)
        _store_halves(state, states, part)
        fence_async_shared()
        gl.barrier()
        mbarrier.arrive(state_ready, count=1)

        mbarrier.wait(ready.index(stage), (block // _STAGES) & 1)
        k = k_ring.index(stage)
        solved = solved_ring.index(stage)
        factors = factor_ring.index(stage)
        found = _add(k, states, part, nothing)
        v = v_ring.index(2 * stage + part).load(_SUMS).to(gl.float32)
        k_factor = factors.slice(0, _BLOCK).load(_ROW)
        found = warpgroup_mma_wait(0, deps=[found])
        _store_halves(v - k_factor[:, None] * found, wanted, part)
        fence_async_shared()
        gl.barrier()

        low = solved.slice(_BLOCK, _BLOCK)
        write = warpgroup_mma(low, wanted.index(2 * part), nothing, is_async=True)
        write = _add(solved.slice(0, _BLOCK), wanted, part, write)
        last = factors.slice(2 * _BLOCK, _BLOCK).load(_ROW)
        write = warpgroup_mma_wait(0, deps=[write])
        mbarrier.wait(write_free, before)
        _store_halves(write, writes, part)
        _store_halves(last[:, None] * write, scaled, part)
        fence_async_shared()
        gl.barrier()
        mbarrier.arrive(write_ready, count=1)

        state = _add(k.permute((1, 0)), scaled, part, forget * state)
        state = warpgroup_mma_wait(0, deps=[state])
        gl.barrier()
        mbarrier.arrive(free.index(stage), count=1)
        if block + 1 == kept:
            gl.store(kept_tile, state)
    gl.store(tile, state)


@gluon.jit
def _read(
    q_ring, scores_ring, factor_ring, states, writes, ready, free, handed, out_ptr, count,
    value_heads: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """The warpgroup that computes outputs of both warpgroups' columns."""
    state_ready = handed.index(_STATE)
    state_free = handed.index(_FREE + _STATE)
    write_ready = handed.index(_WRITE)
    write_free = handed.index(_FREE + _WRITE)
    token = gl.arange(0, _BLOCK, _ROW)[:, None]
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, _SUMS))[None, :]
    target = out_ptr + token * (value_heads * VALUE) + column
    nothing = gl.zeros([_BLOCK, _COLUMNS], gl.float32, _SUMS)
    for block in range(count):
        stage = block % _STAGES
        mbarrier.wait(ready.index(stage), (block // _STAGES) & 1)
        q_factor = factor_ring.index(stage).slice(_BLOCK, _BLOCK).load(_ROW)
        mbarrier.wait(state_ready, block & 1)
        first = _add(q_ring.index(stage), states, 0, nothing)
        second = _add(q_ring.index(stage), states, 1, nothing)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        gl.barrier()
        mbarrier.arrive(state_free, count=1)

        mbarrier.wait(write_ready, block & 1)
        scores = scores_ring.index(stage)
        first = _add(scores, writes, 0, q_factor[:, None] * first)
        second = _add(scores, writes, 1, q_factor[:, None] * second)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        gl.barrier()
        mbarrier.arrive(write_free, count=1)
        mbarrier.arrive(free.index(stage), count=1)
        gl.store(target, first.to(gl.bfloat16))
        gl.store(target + _COLUMNS, second.to(gl.bfloat16))
        target += _BLOCK * value_heads * VALUE


@gluon.jit
def _copy(
    of_keys, of_values, solved, scores, factors_ptr,
    k_ring, v_ring, q_ring, solved_ring, scores_ring, factor_ring, ready, free,
    first, first_block, count, head, column,
    key_heads: gl.constexpr, value_heads: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    factors_ptr += gl.arange(0, 4 * _BLOCK, flat)
    q_column = head // (value_heads // key_heads) * KEY
    v_column = 2 * key_heads * KEY + head * VALUE + column
    size: gl.constexpr = 2 * (2 * _BLOCK * KEY + 2 * _BLOCK * _COLUMNS + 3 * _BLOCK * _BLOCK)
    for block in range(count):
        stage = block % _STAGES
        bar = ready.index(stage)
        token = first + block * _BLOCK
        at = (first_block + block) * value_heads + head
        mbarrier.wait(free.index(stage), ((block // _STAGES) & 1) ^ 1)
        mbarrier.expect(bar, size)
        tma.async_load(of_keys, [token, q_column + key_heads * KEY], bar, k_ring.index(stage))
        tma.async_load(of_values, [token, v_column], bar, v_ring.index(2 * stage))
        second = [token, v_column + _COLUMNS]
        tma.async_load(of_values, second, bar, v_ring.index(2 * stage + 1))
        tma.async_load(solved, [at * (2 * _BLOCK), 0], bar, solved_ring.index(stage))
        tma.async_load(of_keys, [token, q_column], bar, q_ring.index(stage))
        tma.async_load(scores, [at * _BLOCK, 0], bar, scores_ring.index(stage))
        async_copy.async_load(factor_ring.index(stage), factors_ptr + at * (4 * _BLOCK))
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _advance(
    of_keys, of_values, solved, scores, factors_ptr,
    first_ptr, slot_ptr, position_ptr, count_ptr, number_ptr, kept_ptr, kept_slot_ptr,
    state_ptr, layer, out_ptr,
    slots, key_heads: gl.constexpr, value_heads: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    chunk = gl.program_id(0)
    head = gl.program_id(1)
    column = gl.program_id(2) * (2 * _COLUMNS)
    count = gl.load(count_ptr + chunk)
    if count == 0:
        return
    slot = gl.load(slot_ptr + chunk).to(gl.int64)
    goes_on = gl.load(position_ptr + chunk) > 0
    first = gl.load(first_ptr + chunk)
    first_block = gl.load(number_ptr + chunk)
    kept = gl.load(kept_ptr + chunk)
    kept_slot = gl.load(kept_slot_ptr + chunk).to(gl.int64)
    state_ptr += head * (KEY * VALUE) + column
    kept_state_ptr = state_ptr + (layer * slots + kept_slot) * (value_heads * KEY * VALUE)
    state_ptr += (layer * slots + slot) * (value_heads * KEY * VALUE)
    out_ptr += (first.to(gl.int64) * value_heads + head) * VALUE + column

    narrow: gl.constexpr = of_values.layout
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK, KEY], of_keys.layout)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK, KEY], of_keys.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES, _BLOCK, _COLUMNS], narrow)
    solved_ring = gl.allocate_shared_memory(
        gl.bfloat16, [_STAGES, 2 * _BLOCK, _BLOCK], solved.layout
    )
    scores_ring = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK, _BLOCK], scores.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factor_ring = gl.allocate_shared_memory(gl.float32, [_STAGES, 4 * _BLOCK], plain)
    states = gl.allocate_shared_memory(gl.bfloat16, [4, KEY, _COLUMNS], narrow)
    wanted = gl.allocate_shared_memory(gl.bfloat16, [4, _BLOCK, _COLUMNS], narrow)
    writes = gl.allocate_shared_memory(gl.bfloat16, [4, _BLOCK, _COLUMNS], narrow)
    scaled = gl.allocate_shared_memory(gl.bfloat16, [4, _BLOCK, _COLUMNS], narrow)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1 + 32)  # the producer's threads copy factors
        mbarrier.init(free.index(stage), count=3)
    for number in gl.static_range(2):
        mbarrier.init(handed.index(number), count=2)
        mbarrier.init(handed.index(2 + number), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_carry, (
                k_ring, v_ring, solved_ring, factor_ring, states, wanted, writes, scaled, ready,
                free, handed,
                factors_ptr, state_ptr, kept_state_ptr, first_block, count, kept, head, goes_on,
                0, value_heads, KEY, VALUE,
            )),
            (_carry, (
                k_ring, v_ring, solved_ring, factor_ring, states, wanted, writes, scaled, ready,
                free, handed,
                factors_ptr, state_ptr, kept_state_ptr, first_block, count, kept, head, goes_on,
                1, value_heads, KEY, VALUE,
            )),
            (_read, (
                q_ring, scores_ring, factor_ring, states, writes, ready, free, handed, out_ptr,
                count,
                value_heads, VALUE,
            )),
            (_copy, (
                of_keys, of_values, solved, scores, factors_ptr, k_ring, v_ring, q_ring,
                solved_ring, scores_ring, factor_ring, ready, free, first, first_block, count,
                head, column, key_heads, value_heads, KEY, VALUE,
            )),
        ],
        [4, 4, 1],
        [152, 152, 40],
    )  # fmt: skip


def advance(
    qkv: Array,
    prepared: tuple[Array, Array, Array],
    *arrays: Any,
    heads: Heads,
    target: Target,
) -> Array:
    """Returns o [tokens, value_heads, value_dim]. Only the rows of tokens in blocks are written.

    Args:
      prepared: what `triton_blocks._prepare` has computed.
      arrays: those of `triton_blocks._advance`: of each chunk the first token, slot, position,
        number of blocks, number of its first block, the block after which its state is kept, and
        the slot for that; then the state of all layers, updated in place, and the layer.
    """
    solved, scores, factors = prepared
    wide = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    size, columns = _BLOCK.value, _COLUMNS.value
    arguments: dict[str, Any] = {
        "key_heads": heads.key_heads, "value_heads": heads.value_heads,
        "KEY": heads.key_dim, "VALUE": heads.value_dim,
    }  # fmt: skip
    return triton_call(
        tensor_descriptor(qkv, (size, heads.key_dim), wide),
        tensor_descriptor(qkv, (size, columns), narrow),
        tensor_descriptor(solved.reshape(-1, size), (2 * size, size), wide),
        tensor_descriptor(scores.reshape(-1, size), (size, size), wide),
        factors, *arrays,
        kernel=_advance,
        name="gated_delta_rule_blocks_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct(
            (qkv.shape[0], heads.value_heads, heads.value_dim), qkv.dtype
        ),
        grid=(arrays[0].shape[0], heads.value_heads, heads.value_dim // (2 * columns)),
        num_warps=4,
        slots=arrays[-2].shape[1],
        **arguments,
    )  # fmt: skip


def fits(heads: Heads, block: int, dtype: Any) -> bool:
    """Whether the kernel supports these heads and blocks."""
    keys, values = heads.key_dim in (64, 128), heads.value_dim % (2 * _COLUMNS.value) == 0
    return block == _BLOCK.value and keys and values and dtype == jax.numpy.bfloat16
