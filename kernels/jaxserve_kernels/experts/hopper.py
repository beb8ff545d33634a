"""Products of many tokens with their experts on Hopper: weight rows are the left operand.

A program walks over tiles of 256 weight rows of one expert (128 of gate and 128 of up, or 256 of
down) by 64, 96, 128 or 160 of its tokens. So most experts with about 128 tokens are one tile, and
their weights are read once. Producer warps copy both into rings in shared memory (`hopper_copy`),
even while the previous tile is being stored (`hopper_results`), and list the tile's tokens
(`hopper_lists`). Each of two warpgroups multiplies half of the rows (`hopper_tiles`, `hopper_sums`,
`hopper_four_bits`). Tokens of fp8 weights and of 4-bit ones are rounded to e4m3 first.

Both warpgroups are one part of the program if they only multiply. Where they convert codes or scale
sums between products, each is a part of its own, so that one multiplies meanwhile. Its code is then
there twice, and the instruction cache does not hold it.

Gate and up gather their tokens. The hidden activations are stored in expert order, so a tile of
down reads consecutive rows. Rows past the end of an expert belong to the next one; their products
are discarded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import most_blocks, tokens_in_bytes
from jaxserve_kernels.experts.hopper_copy import (
    DEPTH,
    GATHERERS,
    PANEL,
    ROWS,
    TILES,
    copy,
    ring,
)
from jaxserve_kernels.experts.hopper_lists import BOX, DOWN, MAIN, room_for_lists
from jaxserve_kernels.experts.hopper_results import room
from jaxserve_kernels.experts.hopper_sums import PLAIN
from jaxserve_kernels.experts.hopper_tiles import LEAST, multiply
from jaxserve_kernels.experts.triton_activation import OSS
from jaxserve_kernels.experts.types import (
    ExpertActivation,
    ExpertWeights,
    Order,
    Stacked,
    stacked,
)
from jaxserve_kernels.quantized_matmul.e4m3.tokens import Order as TokenOrder
from jaxserve_kernels.quantized_matmul.e4m3.tokens import TokenFormat
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Kind

TOKENS = MAIN + BOX
"""The most tokens of a tile."""
_MAIN = gl.constexpr(MAIN)
_BOX = gl.constexpr(BOX)
_PANEL = gl.constexpr(PANEL)
_ROWS = gl.constexpr(ROWS)
_INT4 = gl.constexpr(INT4.value)


@triton.jit
def _blocks(
    ends_ptr, block_ptr,
    experts: tl.constexpr, count: tl.constexpr, BOX: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Stores each block's expert, the begin and end of its tokens, and the number of blocks.

    An expert's tokens are divided evenly over its blocks. Blocks of more boxes come first, so that
    programs get about as many of each size. A block has LEAST to MOST boxes of BOX tokens.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    there = lane < experts
    ends = tl.load(ends_ptr + lane, mask=there, other=0)
    begins = tl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
    tokens = tl.where(there, ends - begins, 0)
    blocks = (tokens + MOST * BOX - 1) // (MOST * BOX)
    each = (tokens + blocks - 1) // tl.maximum(blocks, 1)
    used = tl.minimum(tl.maximum((each + BOX - 1) // BOX, LEAST), MOST)
    first = 0
    last = tl.zeros_like(blocks)
    for boxes in tl.static_range(MOST, LEAST - 1, -1):
        of_size = tl.where(used == boxes, blocks, 0)
        last = tl.where(used == boxes, first + tl.cumsum(of_size, axis=0), last)
        first += tl.sum(of_size, axis=0)
    number = block - (last - blocks)
    mine = (number >= 0) & (number < blocks)
    begin = begins + number * each
    at = block_ptr + block
    tl.store(at, tl.sum(tl.where(mine, lane, 0), axis=0))
    tl.store(at + count, tl.sum(tl.where(mine, begin, 0), axis=0))
    tl.store(at + 2 * count, tl.sum(tl.where(mine, tl.minimum(begin + each, ends), 0), axis=0))
    tl.store(at + 3 * count, first)


@gluon.jit
def _program(
    x, w, scales, scale_ptr, zero_ptr, bias_ptr, block_ptr, order_ptr, weights_ptr,
    token_scale_ptr, tokens, out_ptr,
    count: gl.constexpr, columns: gl.constexpr, step: gl.constexpr, second: gl.constexpr,
    rows: gl.constexpr, all_rows: gl.constexpr,
    n: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, PARTS: gl.constexpr, UNPACK: gl.constexpr = None,
):  # fmt: skip
    """n: columns of the result. k: inputs of the weight; tokens have the first `inputs` of them.
    scales: tiles of those of groups, if there are any. PARTS: of the multiplying warps. The rings
    of weights have a block that is copied in each stage; sums read a part's rows of its halves."""
    HALF: gl.constexpr = _ROWS // PARTS
    gather: gl.constexpr = GATED != DOWN
    grouped: gl.constexpr = KIND >= _INT4 or (KIND != PLAIN and k > GROUP)
    dtype: gl.constexpr = x.dtype.element_ty if gather else x.dtype
    bits: gl.constexpr = 8 if dtype == gl.float8e4nv else 16
    panel: gl.constexpr = gl.NVMMASharedLayout(128, bits, rank=2)
    depth: gl.constexpr = _PANEL * 8 // bits
    panels: gl.constexpr = 1 if KIND == PLAIN else 128 // depth
    all_panels: gl.constexpr = STAGES * panels
    x_ring = gl.allocate_shared_memory(dtype, [all_panels, _MAIN, depth], panel)
    t_ring = gl.allocate_shared_memory(dtype, [all_panels, _BOX, depth], panel)
    w_stages = ring(w, STAGES)
    width: gl.constexpr = w.block_shape[-1]
    rows_of: gl.constexpr = gl.NVMMASharedLayout(2 * width, 16, rank=2)
    weight: gl.constexpr = 2 * _ROWS * (width * 2 + (4 if grouped else 0))
    w_ring = w_stages.reinterpret(w.dtype, [STAGES * 2 * PARTS, HALF, width], rows_of)
    s_stages, s_ring = w_stages, w_ring
    if grouped:
        flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
        s_stages = ring(scales, STAGES)
        s_ring = s_stages.reinterpret(scales.dtype, [STAGES * 2 * PARTS, HALF], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + GATHERERS if gather else 1)
        mbarrier.init(free.index(stage), count=PARTS)
    lists = room_for_lists(bits == 8, GATHERERS if gather else 32, PARTS)
    fence_async_shared()
    rings = (x_ring, t_ring, w_ring, s_ring, ready, free)
    filled = (x_ring, t_ring, w_stages, s_stages, ready, free)
    source = (x, w, scales)
    arrays = (order_ptr, weights_ptr, token_scale_ptr)
    factors = (scale_ptr, zero_ptr)
    staged: gl.constexpr = 2 * _BOX if KIND >= _INT4 else _BOX
    copies = source, filled, lists, arrays
    if PARTS == 1:
        results = room(staged, HALF), lists
        gl.warp_specialize(
            [
                (multiply, (
                    0, HALF, rings, factors, results, bias_ptr, block_ptr, out_ptr, count, columns,
                    step, second, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK,
                )),
                (copy, (
                    copies, block_ptr, tokens, count, columns, step, inputs, k, choices, GATED,
                    grouped, KIND == _INT4, weight, panels, STAGES,
                )),
            ],
            [GATHERERS // 32 if gather else 1],
            [40],
        )  # fmt: skip
    else:
        first = room(staged, HALF), lists
        then = room(staged, HALF), lists
        gl.warp_specialize(
            [
                (multiply, (
                    0, HALF, rings, factors, first, bias_ptr, block_ptr, out_ptr, count, columns,
                    step, second, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK,
                )),
                (multiply, (
                    1, HALF, rings, factors, then, bias_ptr, block_ptr, out_ptr, count, columns,
                    step, second, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK,
                )),
                (copy, (
                    copies, block_ptr, tokens, count, columns, step, inputs, k, choices, GATED,
                    grouped, KIND == _INT4, weight, panels, STAGES,
                )),
            ],
            [4, GATHERERS // 32 if gather else 1],
            [232, 40],
        )  # fmt: skip


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    *,
    order: Order | None = None,
    target: Target,
) -> Array:
    """See `reference.experts`. The result has a part for each of a token's k experts, rounded to
    x's dtype. `config.hopper_refuses` must accept the arguments."""
    tokens, embed = x.shape
    count = w.gate_up.shape[0]
    pairs, ends = order or triton_route.order(ids, count, target=target)
    most = most_blocks(ids, count, TOKENS)
    blocks = triton_call(
        ends,
        kernel=_blocks,
        name="expert_blocks",
        target=target,
        out_type=jax.ShapeDtypeStruct((4, most), jnp.int32),
        grid=(most,),
        num_warps=1,
        experts=count, count=most, BOX=BOX, LEAST=LEAST, MOST=TOKENS // BOX,
        EXPERTS=triton.next_power_of_2(count),
    )  # fmt: skip
    gated = OSS.value if activation == "swiglu_oss" else gating(activation)
    lists = blocks, pairs, weights, tokens
    hidden = _product(x, w.gate_up, w.gate_up_bias, ids, lists, w.width, gated, target)
    parts = _product(hidden, w.down, w.down_bias, ids, lists, embed, DOWN.value, target)
    return parts.reshape(ids.shape[1], tokens, embed)


def _product(
    x: Array,
    weight: Array,
    bias: Array | None,
    ids: Array,
    lists: tuple[Any, ...],
    n: int,
    gated: int,
    target: Target,
) -> Array:
    """One product, [pairs, n]. Gated, x are the tokens and the result is in expert order. Otherwise
    x are hidden activations in expert order and the result is in the order of choice and token."""
    count, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    _, scale, zero = found.arrays
    own, token_scale, bits = x, scale, 16
    if found.operand is None:
        constants: dict[str, Any] = {"KIND": PLAIN.value, "GROUP": k, "ZERO": 0, "STAGES": 4}
    else:
        constants = {**found.operand.constants, "STAGES": 3}
    if tokens_in_bytes(found):
        own, token_scale, _ = quantized(x, _token_format(found, x.shape[0], k), target=target)
        constants["STAGES"], bits = 4, 8
    known = found.operand
    plain = known is None or (known.kind == Kind.FP8 and bits == 8 and known.group == k)
    constants["PARTS"] = 1 if plain else 2
    step = ROWS if gated else 2 * ROWS
    columns = triton.cdiv(n, step)
    blocks, order, weights, tokens = lists
    return triton_call(
        own if gated else tensor_descriptor(own, (BOX, PANEL * 8 // bits), _layout(PANEL, bits)),
        *_weight(found, 2 if gated else 1, count, rows, k), scale, zero,
        weights if bias is None else bias, blocks, order, weights, token_scale, tokens,
        kernel=_program,
        name=f"experts_{'gate_up' if gated else 'down'}_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size, n), x.dtype),
        grid=(min(target.gpu.multiprocessors, blocks.shape[1] * columns),),
        num_warps=8 // constants["PARTS"],
        count=blocks.shape[1], columns=columns, step=step, second=n if gated else ROWS,
        rows=rows, all_rows=count * rows, n=n, inputs=own.shape[1], k=k, choices=ids.shape[1],
        BIAS=bias is not None, GATED=gated, **constants,
    )  # fmt: skip


def _token_format(weight: Stacked, tokens: int, inputs: int) -> TokenFormat:
    """The format of tokens in e4m3 for a weight of `inputs` inputs."""
    assert weight.operand is not None
    orders = {Kind.FP8: TokenOrder.BYTES, Kind.MXFP4: TokenOrder.SWAPPED}
    order = orders.get(weight.operand.kind, TokenOrder.INPUTS)
    group = weight.operand.group if weight.operand.sums else 0
    return TokenFormat(jnp.float8_e4m3fn, order, group, tokens, inputs=inputs, beside=group > 0)


def _weight(weight: Stacked, halves: int, count: int, rows: int, inputs: int) -> tuple[Any, Any]:
    """A weight and its groups' scales. TMA copies a step's block of each at once. Its rows are
    those of gate and of up, the two halves of an expert; down is in one part. Without groups the
    second one is any array."""
    codes, scale, _ = weight.arrays
    known = weight.operand
    if known is None:
        plain = codes.reshape(count * halves, rows // halves, inputs)
        box = halves, 2 * ROWS // halves, DEPTH
        return tensor_descriptor(plain, box, _layout(2 * DEPTH, rank=3)), scale
    words = codes.shape[-1]
    shape = count * halves, rows // halves // 64
    box = halves, TILES.value // halves
    tiles = tensor_descriptor(
        codes.reshape(*shape, inputs // 128, 64, words),
        (*box, 1, 64, words),
        _layout(2 * words, rank=5),
    )
    if known.kind < Kind.INT4 and known.group == inputs:
        return tiles, scale
    groups = scale.reshape(*shape, inputs // 128 * 64)
    return tiles, tensor_descriptor(groups, (*box, 64), _layout(0, 32, rank=3))


def _layout(size: int, bits: int = 16, rank: int = 2) -> Any:
    """Shared memory layout of rows of `size` bytes, with elements of `bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=size, element_bitwidth=bits, rank=rank)
