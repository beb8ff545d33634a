"""Products of many tokens with their experts on Hopper: weight rows are the left operand.

A program walks over tiles of 256 weight rows of one expert (of gate and up 8 rows of either in
turn, or of down) by 64, 96, 128 or 160 of its tokens. So most experts with about 128 tokens are one
tile, and their weights are read once. Producer warps copy both into rings in shared memory
(`hopper_copy`), even while the previous tile is being stored (`hopper_results`), and list the
tile's tokens (`hopper_lists`). Two warpgroups multiply half of the rows each (`hopper_tiles`,
`hopper_sums`, `hopper_four_bits`, `hopper_integers`). Tokens of fp8 weights and of 4-bit ones are
rounded to e4m3 first.

Both warpgroups are one part of the program if they only multiply. Where they convert codes or scale
sums between products, each is a part of its own, so that one multiplies meanwhile. Its code is then
there twice, and the instruction cache does not hold it. With few tokens for each expert, 4-bit
weights have tiles of 128 rows, and a multiprocessor two programs: one multiplies while the other
one stores.

Gate and up gather their tokens. The hidden activations are stored in expert order, so a tile of
down reads consecutive rows. Rows past the end of an expert belong to the next one; their products
are discarded.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

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
from jaxserve_kernels.experts.config import format_of, has_small_tiles, most_blocks, tokens_in_bytes
from jaxserve_kernels.experts.hopper_blocks import blocks_of, layout
from jaxserve_kernels.experts.hopper_copy import GATHERERS, PANEL, copy, ring
from jaxserve_kernels.experts.hopper_lists import BOX, DOWN, room_for_lists
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
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, plain
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import tensor_descriptor, triton_call
from jaxserve_kernels.weights import Kind


class Tile(NamedTuple):
    """How a program multiplies tiles."""

    parts: int
    """Of its multiplying warps. One part has two warpgroups, two have one each."""
    own: int
    """Weight rows of each part."""
    programs: int = 1
    """On a multiprocessor."""
    registers: int | None = None
    """Of a thread when a program starts; None: as many as there are."""


MULTIPLYING = Tile(1, 256)
"""Of bfloat16, and of fp8 with a scale for each row."""
SCALING = Tile(2, 128)
"""Of 4-bit codes, and of fp8 with a scale for each block."""
CONVERTING = Tile(2, 64)
"""Of 8-bit codes that become bfloat16: those of 128 rows need more registers than there are."""
SMALL = Tile(2, 64, programs=2, registers=80)
"""Of 4-bit codes with few tokens for each expert."""
MOST, MOST_SMALL = 5, 3
"""The most boxes of tokens of a tile."""
_MOST_SMALL = gl.constexpr(MOST_SMALL)
_BOX = gl.constexpr(BOX)
_PANEL = gl.constexpr(PANEL)
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
    count: gl.constexpr, columns: gl.constexpr, rows: gl.constexpr, all_rows: gl.constexpr,
    n: gl.constexpr, inputs: gl.constexpr, k: gl.constexpr, choices: gl.constexpr,
    STAGES: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, ZERO: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    MOST: gl.constexpr, UNPACK: gl.constexpr = None,
):  # fmt: skip
    """n: columns of the result. k: inputs of the weight; tokens have the first `inputs` of them.
    scales: tiles of those of groups, if there are any. PARTS, OWN: see `Tile`. The rings of weights
    have the blocks that are copied in each stage; sums read a part's rows. MOST: boxes of a
    tile."""
    ROWS: gl.constexpr = PARTS * OWN
    MAIN: gl.constexpr = MOST // 2 * 2 * _BOX
    gather: gl.constexpr = GATED != DOWN
    step: gl.constexpr = ROWS // 2 if gather else ROWS
    grouped: gl.constexpr = KIND >= _INT4 or (KIND != PLAIN and k > GROUP)
    dtype: gl.constexpr = x.dtype.element_ty if gather else x.dtype
    bits: gl.constexpr = 8 if dtype == gl.float8e4nv else 16
    panel: gl.constexpr = gl.NVMMASharedLayout(128, bits, rank=2)
    depth: gl.constexpr = _PANEL * 8 // bits
    panels: gl.constexpr = 1 if KIND == PLAIN else 128 // depth
    all_panels: gl.constexpr = STAGES * panels
    x_ring = gl.allocate_shared_memory(dtype, [all_panels, MAIN, depth], panel)
    t_ring = gl.allocate_shared_memory(dtype, [all_panels, _BOX, depth], panel)
    w_stages = ring(w, ROWS // 128 if gather and KIND != PLAIN else 1, STAGES)
    width: gl.constexpr = w.block_shape[-1]
    rows_of: gl.constexpr = gl.NVMMASharedLayout(2 * width, 16, rank=2)
    weight: gl.constexpr = ROWS * (width * 2 + (4 if grouped else 0))
    w_ring = w_stages.reinterpret(w.dtype, [STAGES * PARTS, OWN, width], rows_of)
    s_stages, s_ring = w_stages, w_ring
    if grouped:
        flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
        s_stages = ring(scales, 1, STAGES)
        s_ring = s_stages.reinterpret(scales.dtype, [STAGES * PARTS, OWN], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + GATHERERS if gather else 1)
        mbarrier.init(free.index(stage), count=PARTS)
    lists = room_for_lists(MAIN, bits == 8, GATHERERS if gather else 32, PARTS)
    fence_async_shared()
    rings = (x_ring, t_ring, w_ring, s_ring, ready, free)
    filled = (x_ring, t_ring, w_stages, s_stages, ready, free)
    source = (x, w, scales)
    arrays = (order_ptr, weights_ptr, token_scale_ptr)
    factors = (scale_ptr, zero_ptr)
    staged: gl.constexpr = 2 * _BOX if KIND >= _INT4 else _BOX
    results: gl.constexpr = min(OWN // 2 if gather else OWN, 128 // PARTS)
    copies = source, filled, lists, arrays
    if PARTS == 1:
        first = room(staged, results), lists
        gl.warp_specialize(
            [
                (multiply, (
                    0, PARTS, OWN, rings, factors, first, bias_ptr, block_ptr, out_ptr, count,
                    columns, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK, MOST,
                )),
                (copy, (
                    copies, block_ptr, tokens, count, columns, step, rows, inputs, k, choices,
                    GATED, grouped, KIND == _INT4, weight, panels, STAGES,
                )),
            ],
            [GATHERERS // 32 if gather else 1],
            [40],
        )  # fmt: skip
    else:
        first = room(staged, results), lists
        then = room(staged, results), lists
        gl.warp_specialize(
            [
                (multiply, (
                    0, PARTS, OWN, rings, factors, first, bias_ptr, block_ptr, out_ptr, count,
                    columns, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK, MOST,
                )),
                (multiply, (
                    1, PARTS, OWN, rings, factors, then, bias_ptr, block_ptr, out_ptr, count,
                    columns, rows, all_rows, n, k, STAGES, BIAS, GATED, KIND, GROUP, ZERO,
                    UNPACK, MOST,
                )),
                (copy, (
                    copies, block_ptr, tokens, count, columns, step, rows, inputs, k, choices,
                    GATED, grouped, KIND == _INT4, weight, panels, STAGES,
                )),
            ],
            [4, GATHERERS // 32 if gather else 1],
            [104, 32] if MOST == _MOST_SMALL else [232, 40],
        )  # fmt: skip


def experts(
    x: Array | BothForms,
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
    boxes = MOST_SMALL if has_small_tiles(ids, w, target=target) else MOST
    most = most_blocks(ids, count, boxes * BOX)
    blocks = triton_call(
        ends,
        kernel=_blocks,
        name="expert_blocks",
        target=target,
        out_type=jax.ShapeDtypeStruct((4, most), jnp.int32),
        grid=(most,),
        num_warps=1,
        experts=count, count=most, BOX=BOX, LEAST=LEAST, MOST=boxes,
        EXPERTS=triton.next_power_of_2(count),
    )  # fmt: skip
    gated = OSS.value if activation == "swiglu_oss" else gating(activation)
    lists = blocks, pairs, weights, tokens
    product = partial(_product, ids=ids, lists=lists, boxes=boxes, target=target)
    hidden = product(x, w.gate_up, w.gate_up_bias, n=w.width, gated=gated)
    parts = product(hidden, w.down, w.down_bias, n=embed, gated=DOWN.value)
    return parts.reshape(ids.shape[1], tokens, embed)


def _product(
    x: Array | BothForms,
    weight: Array,
    bias: Array | None,
    *,
    ids: Array,
    lists: tuple[Any, ...],
    n: int,
    gated: int,
    boxes: int,
    target: Target,
) -> Array:
    """One product, [pairs, n]. Gated, x are the tokens and the result is in expert order. Otherwise
    x are hidden activations in expert order and the result is in the order of choice and token."""
    count, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    _, scale, zero = found.arrays
    blocks, order, weights, tokens = lists
    own, token_scale, bits = plain(x), scale, 16
    if found.operand is None:
        constants: dict[str, Any] = {"KIND": PLAIN.value, "GROUP": k, "ZERO": 0, "STAGES": 4}
    else:
        constants = {**found.operand.constants, "STAGES": 3}
    if tokens_in_bytes(found):
        in_bytes = (
            x.quantized
            if isinstance(x, BothForms)
            else quantized(x, format_of(found, x.shape[0], k), target=target)
        )
        own, token_scale, _ = in_bytes
        constants["STAGES"], bits = 4, 8
    tile = _tile(found, k, boxes)
    size = tile.parts * tile.own
    columns = triton.cdiv(n, size // 2 if gated else size)
    return triton_call(
        own if gated else tensor_descriptor(own, (BOX, PANEL * 8 // bits), layout(PANEL, bits)),
        *blocks_of(found, count, rows, k, size, gated=bool(gated)), scale, zero,
        weights if bias is None else bias, blocks, order, weights, token_scale, tokens,
        kernel=_program,
        name=f"experts_{'gate_up' if gated else 'down'}_hopper",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.size, n), x.dtype),
        grid=(min(target.gpu.multiprocessors * tile.programs, blocks.shape[1] * columns),),
        num_warps=8 // tile.parts, registers=tile.registers,
        count=blocks.shape[1], columns=columns, rows=rows, all_rows=count * rows, n=n,
        inputs=own.shape[1], k=k, choices=ids.shape[1],
        BIAS=bias is not None, GATED=gated, PARTS=tile.parts, OWN=tile.own, MOST=boxes, **constants,
    )  # fmt: skip


def _tile(weight: Stacked, inputs: int, boxes: int) -> Tile:
    """How a weight is multiplied with tiles of up to `boxes` boxes of tokens."""
    known = weight.operand
    if known is None:
        return MULTIPLYING
    if boxes == MOST_SMALL:
        return SMALL
    if known.kind is Kind.FP8:
        return MULTIPLYING if known.group == inputs else SCALING
    return SCALING if known.bits == 4 else CONVERTING
