"""Carries the state from block to block on Hopper: the same as `triton_blocks._advance`.

A program has some chunks, one value head, and 64 of the state's columns. A producer warp copies the
parts of the next blocks into a ring in shared memory. A warpgroup has the columns of the state in
registers, transposed: [columns, keys]. So the tensor cores read the state, and the sums that are
multiplied again, from the registers in which they have computed them, as a high and a low part
(`_add`). A block's outputs are products beside those that follow each other.
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

_COLUMNS = gl.constexpr(64)
"""State columns of a program."""

_STAGES = gl.constexpr(2)

_AT_ONCE = 4
"""Chunks that have programs of their own: with all heads, more than there are multiprocessors. A
step seldom has more."""

_FIRST, _SLOT, _POSITION, _LENGTH, _NUMBER, _KEPT, _KEPT_SLOT = map(gl.constexpr, range(7))
"""Places in a list of arrays, which have a number for each chunk: see `advance`."""

_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Sums of [columns, tokens]."""
_TOKEN = gl.constexpr(gl.SliceLayout(0, _SUMS))


@gluon.jit
def _left(x, COLUMNS: gl.constexpr):
    """Sums, rounded to bfloat16, as the left operand of a product of so many columns."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    return gl.convert_layout(x.to(gl.bfloat16), layout, assert_trivial=True)


@gluon.jit
def _rest(x):
    """What float32 sums lose if they are rounded to bfloat16."""
    return x - x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _add(x, right, total, COLUMNS: gl.constexpr):
    """total + x @ right, not yet waited for. The low parts of x are computed while the tensor cores
    multiply the high ones."""
    total = warpgroup_mma(_left(x, COLUMNS), right, total, is_async=True)
    return warpgroup_mma(_left(_rest(x), COLUMNS), right, total, is_async=True)


@gluon.jit
def _places(
    state_of, slot_size: gl.constexpr, layout: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """Pointers to columns of a slot's state, [columns, keys]. state_of: pointers to the state of
    the layer's first slot and to the slot, and the first column.

    The column's number is copied, which the compiler cannot see through. Otherwise it would compute
    all pointers before the loops, which have no registers for them.
    """
    state_ptr, slot_ptr, column = state_of
    column = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [column], dtype=gl.int32, is_pure=False, pack=1
    )
    columns = column + gl.arange(0, _COLUMNS, gl.SliceLayout(1, layout))[:, None]
    state_ptr += gl.load(slot_ptr).to(gl.int64) * slot_size
    return state_ptr + (gl.arange(0, KEY, gl.SliceLayout(0, layout))[None, :] * VALUE + columns)


@gluon.jit
def _chunk_of(lists, chunk):
    """The first token, number of tokens and of blocks, and number of the first block."""
    length = gl.load(lists[_LENGTH] + chunk)
    count = (length + _BLOCK - 1) // _BLOCK
    return gl.load(lists[_FIRST] + chunk), length, count, gl.load(lists[_NUMBER] + chunk)


@gluon.jit
def _clear(tile, length):
    """Clears the rows of a tile from `length` on. They are of other sequences."""
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None]
    rows = tile.load(layout)
    there, _ = gl.broadcast(row < length, rows)
    tile.store(gl.where(there, rows, 0.0))


@gluon.jit
def _carry(
    rings, results, ready, free, lists, state_ptr, out_ptr, head, column,
    slot_size: gl.constexpr, value_heads: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Carries the state over the blocks of each chunk, and stores their outputs."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY, 16])
    at = 0
    for chunk in range(gl.program_id(0), CHUNKS, gl.num_programs(0)):
        first, length, count, _ = _chunk_of(lists, chunk)
        kept = gl.load(lists[_KEPT] + chunk)
        state_of = state_ptr, lists[_SLOT] + chunk, column
        places = _places(state_of, slot_size, layout, KEY, VALUE)
        goes_on = (gl.load(lists[_POSITION] + chunk) > 0) & (length > 0)
        there, _ = gl.broadcast(goes_on, places)
        state = gl.load(places, mask=there, other=0.0)
        target = out_ptr + (first.to(gl.int64) * value_heads + head) * VALUE + column
        for block in range(count):
            stage = at % _STAGES
            mbarrier.wait(ready.index(stage), (at // _STAGES) & 1)
            left = length - block * _BLOCK
            if left < _BLOCK:
                _clear(rings[0].index(stage), left)
                _clear(rings[1].index(stage), left)
                _clear(rings[2].index(stage), left)
                fence_async_shared()
                gl.barrier()
            state, out = _block(rings, stage, state, layout, KEY)
            _store(out, results.index(stage), target, free.index(stage), left, value_heads * VALUE)
            target += _BLOCK * value_heads * VALUE
            if block + 1 == kept:
                kept_of = state_ptr, lists[_KEPT_SLOT] + chunk, column
                gl.store(_places(kept_of, slot_size, layout, KEY, VALUE), state)
            at += 1
        if length > 0:
            gl.store(_places(state_of, slot_size, layout, KEY, VALUE), state)


@gluon.jit
def _block(rings, stage, state, layout: gl.constexpr, KEY: gl.constexpr):
    """The state after a block, and its outputs, [columns, tokens]."""
    k_ring, q_ring, v_ring, solved_ring, scores_ring, factor_ring = rings
    nothing = gl.zeros([_COLUMNS, _BLOCK], gl.float32, _SUMS)
    k = k_ring.index(stage)
    solved = solved_ring.index(stage)
    factors = factor_ring.index(stage)
    # Both parts come first: ptxas waits for all products before it reads what one has summed.
    high, low = _left(state, _BLOCK), _left(_rest(state), _BLOCK)
    found = warpgroup_mma(high, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    found = warpgroup_mma(low, k.permute((1, 0)), found, is_async=True)
    q = q_ring.index(stage).permute((1, 0))
    read = warpgroup_mma(high, q, nothing, use_acc=False, is_async=True)
    read = warpgroup_mma(low, q, read, is_async=True)
    found, read = warpgroup_mma_wait(0, deps=[found, read])

    v = v_ring.index(stage).permute((1, 0)).load(_SUMS).to(gl.float32)
    missing = v - factors.slice(0, _BLOCK).load(_TOKEN)[None, :] * found
    left, right = _left(missing, _BLOCK), solved.slice(_BLOCK, _BLOCK).permute((1, 0))
    write = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    write = _add(missing, solved.slice(0, _BLOCK).permute((1, 0)), write, _BLOCK)
    forget = factors.slice(4 * _BLOCK - 1, 1).load(gl.SliceLayout(1, layout))
    state *= forget[:, None]
    q_factor = factors.slice(_BLOCK, _BLOCK).load(_TOKEN)
    last = factors.slice(2 * _BLOCK, _BLOCK).load(_TOKEN)
    write = warpgroup_mma_wait(0, deps=[write])

    state = _add(last[None, :] * write, k, state, KEY)
    scores = scores_ring.index(stage).permute((1, 0))
    out = _add(write, scores, q_factor[None, :] * read, _BLOCK)
    return warpgroup_mma_wait(0, deps=[state, out])


@gluon.jit
def _store(out, buffer, out_ptr, free, length, stride: gl.constexpr):
    """Stores outputs [columns, tokens] of a block through shared memory, and frees its stage."""
    buffer.permute((1, 0)).store(out.to(gl.bfloat16))
    gl.barrier()
    mbarrier.arrive(free, count=1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, _BLOCK, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout))[None, :]
    there, _ = gl.broadcast(token < length, column)
    gl.store(out_ptr + token * stride + column, buffer.load(layout), mask=there)


@gluon.jit
def _copy(
    of_keys, of_values, solved, scores, lists, factors_ptr, rings, ready, free, head, column,
    key_heads: gl.constexpr, value_heads: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    k_ring, q_ring, v_ring, solved_ring, scores_ring, factor_ring = rings
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    factors_ptr += gl.arange(0, 4 * _BLOCK, flat)
    q_column = head // (value_heads // key_heads) * KEY
    v_column = 2 * key_heads * KEY + head * VALUE + column
    size: gl.constexpr = 2 * (2 * _BLOCK * KEY + _BLOCK * _COLUMNS + 3 * _BLOCK * _BLOCK)
    turn = 0
    for chunk in range(gl.program_id(0), CHUNKS, gl.num_programs(0)):
        token, _, count, number = _chunk_of(lists, chunk)
        for block in range(count):
            stage = turn % _STAGES
            bar = ready.index(stage)
            at = (number + block) * value_heads + head
            mbarrier.wait(free.index(stage), ((turn // _STAGES) & 1) ^ 1)
            mbarrier.expect(bar, size)
            tma.async_load(of_keys, [token, q_column + key_heads * KEY], bar, k_ring.index(stage))
            tma.async_load(of_keys, [token, q_column], bar, q_ring.index(stage))
            tma.async_load(of_values, [token, v_column], bar, v_ring.index(stage))
            tma.async_load(solved, [at * (2 * _BLOCK), 0], bar, solved_ring.index(stage))
            tma.async_load(scores, [at * _BLOCK, 0], bar, scores_ring.index(stage))
            async_copy.async_load(factor_ring.index(stage), factors_ptr + at * (4 * _BLOCK))
            async_copy.mbarrier_arrive(bar, increment_count=False)
            token += _BLOCK
            turn += 1


@gluon.jit
def _advance(
    of_keys, of_values, solved, scores, factors_ptr,
    first_ptr, slot_ptr, position_ptr, length_ptr, number_ptr, kept_ptr, kept_slot_ptr,
    state_ptr, layer, out_ptr,
    slots, key_heads: gl.constexpr, value_heads: gl.constexpr,
    KEY: gl.constexpr, VALUE: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Chunks with tokens come first."""
    if gl.load(length_ptr + gl.program_id(0)) == 0:
        return
    head = gl.program_id(1)
    column = gl.program_id(2) * _COLUMNS
    slot_size: gl.constexpr = value_heads * KEY * VALUE
    state_ptr += (layer * slots).to(gl.int64) * slot_size + head * (KEY * VALUE)
    keys: gl.constexpr = [_STAGES, _BLOCK, KEY]
    of_block: gl.constexpr = [_STAGES, _BLOCK, _BLOCK]
    k_ring = gl.allocate_shared_memory(gl.bfloat16, keys, of_keys.layout)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, keys, of_keys.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, of_block, of_values.layout)
    solved_ring = gl.allocate_shared_memory(
        gl.bfloat16, [_STAGES, 2 * _BLOCK, _BLOCK], solved.layout
    )
    scores_ring = gl.allocate_shared_memory(gl.bfloat16, of_block, scores.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factor_ring = gl.allocate_shared_memory(gl.float32, [_STAGES, 4 * _BLOCK], plain)
    results = gl.allocate_shared_memory(gl.bfloat16, of_block, scores.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=1 + 32)  # the producer's threads copy factors
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    rings = k_ring, q_ring, v_ring, solved_ring, scores_ring, factor_ring
    lists = first_ptr, slot_ptr, position_ptr, length_ptr, number_ptr, kept_ptr, kept_slot_ptr
    gl.warp_specialize(
        [
            (_carry, (
                rings, results, ready, free, lists, state_ptr, out_ptr, head, column,
                slot_size, value_heads, KEY, VALUE, CHUNKS,
            )),
            (_copy, (
                of_keys, of_values, solved, scores, lists, factors_ptr, rings, ready, free,
                head, column, key_heads, value_heads, KEY, VALUE, CHUNKS,
            )),
        ],
        [1],
        [40],
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
        number of tokens, number of its first block, the block after which its state is kept, and
        the slot for that; then the state of all layers, updated in place, and the layer.
    """
    solved, scores, factors = prepared
    wide = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    size, columns, chunks = _BLOCK.value, _COLUMNS.value, arrays[0].shape[0]
    arguments: dict[str, Any] = {
        "key_heads": heads.key_heads, "value_heads": heads.value_heads,
        "KEY": heads.key_dim, "VALUE": heads.value_dim,
    }  # fmt: skip
    return triton_call(
        tensor_descriptor(qkv, (size, heads.key_dim), wide),
        tensor_descriptor(qkv, (size, columns), wide),
        tensor_descriptor(solved.reshape(-1, size), (2 * size, size), wide),
        tensor_descriptor(scores.reshape(-1, size), (size, size), wide),
        factors, *arrays,
        kernel=_advance,
        name="gated_delta_rule_blocks_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct(
            (qkv.shape[0], heads.value_heads, heads.value_dim), qkv.dtype
        ),
        grid=(min(chunks, _AT_ONCE), heads.value_heads, heads.value_dim // columns),
        num_warps=4,
        slots=arrays[-2].shape[1], CHUNKS=chunks,
        **arguments,
    )  # fmt: skip


def fits(heads: Heads, block: int, dtype: Any) -> bool:
    """Whether the kernel supports these heads and blocks."""
    keys, values = heads.key_dim in (64, 128), heads.value_dim % _COLUMNS.value == 0
    return block == _BLOCK.value and keys and values and dtype == jax.numpy.bfloat16
