"""Products of tokens with their experts. An expert's weight is read once for all of its tokens, if
they fit one tile.

As in `dense_matmul/triton.py` the weight is the left operand, so that few tokens waste little of
the tensor cores. `triton_route.order` sorts the (token, choice) pairs by expert. A program takes
some weight rows of one expert and a block of its pairs, and finds both from the number of pairs of
each expert. The grid is as large as the worst case, and programs without tokens end at once.

With PDL the first programs may prefetch codes to the L2 cache while earlier kernels run
(`Launch.ahead`). `_gate_up` does not know the experts yet, and guesses that each one has a token.
`_down` reads the lists, which are complete before `_gate_up` lets it start.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.activation import gating
from jaxserve_kernels.experts import triton_route
from jaxserve_kernels.experts.config import Config, Launch, most_blocks
from jaxserve_kernels.experts.triton_activation import OSS, activated
from jaxserve_kernels.experts.types import ExpertActivation, ExpertWeights, Order, stacked
from jaxserve_kernels.quantized_matmul.triton import accumulate
from jaxserve_kernels.quantized_matmul.triton_arguments import INT4, NVFP4
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_prefetch import ask_for

_PLAIN = tl.constexpr(-2)
"""Stands for an unquantised weight where a `weights.Kind` is expected."""
_GATE_UP_AHEAD = tl.constexpr(8)
_DOWN_AHEAD = tl.constexpr(8)
"""Tiles of inputs per row block that a program prefetches to the L2 cache."""


@triton.jit
def block_of(
    ids_ptr, ends_ptr, experts: tl.constexpr, ONE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The program's expert, its first pair in expert order, and the end of the expert's pairs.

    The program takes up to TOKENS pairs from the first on. `experts` or more as the expert: it has
    no pairs. ONE: the step has a single token, so each pair is a block.
    """
    block = tl.program_id(1)
    if ONE:
        expert = tl.load(ids_ptr + block)
        begin = block
        end = block + 1
    else:
        lane = tl.arange(0, EXPERTS)
        there = lane < experts
        ends = tl.load(ends_ptr + lane, mask=there, other=0)
        begins = tl.load(ends_ptr + lane - 1, mask=there & (lane > 0), other=0)
        blocks = (ends - begins + TOKENS - 1) // TOKENS
        last = tl.cumsum(blocks, axis=0)
        expert = tl.sum((last <= block).to(tl.int32), axis=0)
        mine = lane == expert
        first = begins + (block - last + blocks) * TOKENS
        begin = tl.sum(tl.where(mine, first, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
    return expert, begin, end


@triton.jit
def _within(row, n: tl.constexpr, size: tl.constexpr):
    """Rows of a tile of `size`, those past the last of n rows replaced by the last one."""
    if n % size:
        row = tl.minimum(row, n - 1)
    return row


@triton.jit
def _ask_for_rows(
    packed_ptr, expert, first, last: tl.constexpr, rows: tl.constexpr, size: tl.constexpr,
    k: tl.constexpr, KIND: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Prefetches the first TILES input tiles of an expert's rows to the L2 cache.

    The rows are `rows` from `first` on, moved down where they would end after `last`. Each warp
    requests one tile at a time.
    """
    depth: tl.constexpr = 64 if KIND == NVFP4 else 128
    width: tl.constexpr = depth // 4 if KIND >= INT4 else depth // 2
    block: tl.constexpr = 64 if rows > 64 else rows  # rows that lie together in a tile
    warp = tl.arange(0, 32 * WARPS) // 32
    codes = packed_ptr + expert.to(tl.int64) * size
    for part in tl.static_range(rows // block):
        row = tl.minimum(first + part * block, last - block)
        of_row = row // 64 * (k // depth * 64 * width) + row % 64 * width
        for turn in tl.static_range((TILES + WARPS - 1) // WARPS):
            tile = tl.minimum(turn * WARPS + warp, k // depth - 1)
            ask_for(codes + (of_row + tile * (64 * width)), block * width * 2)


@triton.jit
def _plain(
    x_ptr, w_ptr, row, source, sources,
    k: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    depth = tl.arange(0, DEPTH)
    w = w_ptr + row.to(tl.int64)[:, None] * k + depth[None, :]
    x = x_ptr + source.to(tl.int64)[None, :] * k + depth[:, None]
    present = source[None, :] < sources
    acc = tl.zeros([row.shape[0], source.shape[0]], tl.float32)
    for _ in tl.range(0, k // DEPTH, num_stages=STAGES):
        a = tl.load(w)
        b = tl.load(x, mask=present, other=0.0)
        acc = tl.dot(a, b, acc)
        w += DEPTH
        x += DEPTH
    return acc


@triton.jit
def _sums(
    x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, source, sources,
    k: tl.constexpr, columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, UNPACK: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """An expert's weight rows `row` times the tokens x[source]. x has `sources` rows; a larger
    source counts as 0."""
    expert = expert.to(tl.int64)
    packed = packed_ptr + expert * packed_size
    if KIND == _PLAIN:
        acc = _plain(x_ptr, packed, row, source, sources, k, DEPTH, STAGES)
    else:
        acc = accumulate(
            x_ptr, packed, scale_ptr + expert * scale_size, second_ptr + expert * second_size,
            row, source, 0, sources, k // DEPTH, k, columns,
            KIND, GROUP, ZERO, 1, STAGES, UNPACK,
        )  # fmt: skip
    return acc


@triton.jit
def _gate_up(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, ids_ptr, order_ptr, ends_ptr, tokens,
    out_ptr,
    experts: tl.constexpr, choices: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
    columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ONE: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr, WARPS: tl.constexpr, LATE: tl.constexpr, UNPACK: tl.constexpr = None,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """activation(gate) * up of each pair, in expert order: [pairs, n].

    A tile is ROWS / 2 rows of gate and the same rows of up, so a program has both factors.
    LATE: start the next kernel only after this one's wait, because it reads the lists before its
    own.
    """
    half: tl.constexpr = ROWS // 2
    lane = tl.arange(0, ROWS)
    out_row = tl.program_id(0) * half + tl.arange(0, half)
    row = _within(tl.program_id(0) * half + lane % half, n, half) + (lane // half) * n
    if EARLY:
        if AHEAD > 0:
            first = tl.program_id(1)
            if (first * tl.num_programs(0) + tl.program_id(0) < AHEAD) & (first < experts):
                for part in tl.static_range(2):
                    _ask_for_rows(
                        packed_ptr, first, tl.program_id(0) * half + part * n, n + part * n, half,
                        packed_size, k, KIND, _GATE_UP_AHEAD, WARPS,
                    )  # fmt: skip
        if LATE:
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            gdc_wait()
    expert, begin, end = block_of(ids_ptr, ends_ptr, experts, ONE, TOKENS, EXPERTS)
    if expert < experts:
        place = begin + tl.arange(0, TOKENS)
        there = place < end
        if ONE:
            source = tl.where(there, 0, tokens)
        else:
            pair = tl.load(order_ptr + place, mask=there, other=0)
            source = tl.where(there, pair // choices, tokens)
        acc = _sums(
            x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, source, tokens, k, columns,
            packed_size, scale_size, second_size, KIND, GROUP, ZERO, UNPACK, DEPTH, STAGES,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(bias_ptr + expert * (2 * n) + row).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, TOKENS)), (1, 2, 0)))
        values = activated(gate, up, out_ptr.dtype.element_ty, GATED)
        out = out_ptr + place.to(tl.int64)[None, :] * n + out_row[:, None]
        tl.store(out, values, mask=there[None, :] & (out_row[:, None] < n))


@triton.jit
def _down(
    x_ptr, packed_ptr, scale_ptr, second_ptr, bias_ptr, early_ids_ptr, order_ptr, early_ends_ptr,
    weights_ptr, tokens, out_ptr,
    experts: tl.constexpr, choices: tl.constexpr, n: tl.constexpr, k: tl.constexpr,
    columns: tl.constexpr,
    packed_size: tl.constexpr, scale_size: tl.constexpr, second_size: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, ONE: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
    UNPACK: tl.constexpr = None, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Hidden activations [pairs, k] in expert order times down, times the pairs' weights:
    [choices, tokens, n]."""
    out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = _within(out_row, n, ROWS)
    if EARLY:
        gdc_launch_dependents()
        if AHEAD == 0:
            gdc_wait()
    expert, begin, end = block_of(early_ids_ptr, early_ends_ptr, experts, ONE, TOKENS, EXPERTS)
    if EARLY and AHEAD > 0:
        at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if (at < AHEAD) & (expert < experts):
            _ask_for_rows(
                packed_ptr, expert, tl.program_id(0) * ROWS, n, ROWS,
                packed_size, k, KIND, _DOWN_AHEAD, WARPS,
            )  # fmt: skip
        gdc_wait()
    if expert < experts:
        place = begin + tl.arange(0, TOKENS)
        there = place < end
        pairs = tokens * choices
        source = tl.where(there, place, pairs)
        acc = _sums(
            x_ptr, packed_ptr, scale_ptr, second_ptr, expert, row, source, pairs, k, columns,
            packed_size, scale_size, second_size, KIND, GROUP, ZERO, UNPACK, DEPTH, STAGES,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(bias_ptr + expert * n + row).to(tl.float32)[:, None]
        pair = place
        if not ONE:
            pair = tl.load(order_ptr + place, mask=there, other=0)
        acc *= tl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
        to = (pair % choices) * tokens + pair // choices
        out = out_ptr + to.to(tl.int64)[None, :] * n + out_row[:, None]
        mask = there[None, :] & (out_row[:, None] < n)
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    w: ExpertWeights,
    activation: ExpertActivation,
    config: Config,
    *,
    order: Order | None = None,
    target: Target,
) -> Array:
    """See `reference.experts`. With `config.parts` the result is float32 [k, tokens, embed], else
    [1, tokens, embed] in x's dtype."""
    tokens, embed = x.shape
    pairs = ids.size
    sorted_pairs, ends = ids, ids
    if tokens > 1:
        sorted_pairs, ends = order or triton_route.order(ids, w.gate_up.shape[0], target=target)
    hidden = triton_call(
        x, *arrays(w.gate_up, w.gate_up_bias), ids, sorted_pairs, ends, tokens,
        kernel=_gate_up,
        name=f"experts_gate_up{_suffix(w.gate_up)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((pairs, w.width), x.dtype),
        GATED=OSS.value if activation == "swiglu_oss" else gating(activation),
        LATE=config.down.ahead > 0,
        **launch_arguments(config.gate_up, w.gate_up, w.gate_up_bias, ids, x, w.width, target),
    )  # fmt: skip
    dtype = jnp.float32 if config.parts else x.dtype
    parts = triton_call(
        hidden, *arrays(w.down, w.down_bias), ids, sorted_pairs, ends, weights, tokens,
        kernel=_down,
        name=f"experts_down{_suffix(w.down)}",
        target=target,
        out_type=jax.ShapeDtypeStruct((ids.shape[1], tokens, embed), dtype),
        **launch_arguments(config.down, w.down, w.down_bias, ids, hidden, embed, target),
    )  # fmt: skip
    return parts if config.parts else parts.astype(jnp.float32).sum(0).astype(dtype)[None]


def _suffix(weight: Any) -> str:
    return "" if isinstance(weight, Array) else f"_{type(weight).__name__}"


def arrays(weight: Any, bias: Array | None) -> tuple[Array, ...]:
    """Returns a stacked weight's arrays for the kernels, then the bias or a stand-in."""
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    return *found.arrays, found.arrays[0] if bias is None else bias


def launch_arguments(
    launch: Launch,
    weight: Any,
    bias: Array | None,
    ids: Array,
    x: Array,
    n: int,
    target: Target,
) -> dict[str, Any]:
    """Launch arguments that both products share. n: width of the result."""
    experts, rows, k = weight.shape
    found = stacked(weight)
    assert found is not None, f"no kernel knows {type(weight)}"
    blocks = most_blocks(ids, experts, launch.tokens)
    sizes = [each.size // experts for each in found.arrays]
    constants = {"KIND": _PLAIN.value, "GROUP": 0, "ZERO": 0}
    return {
        "grid": (triton.cdiv(rows, launch.rows), blocks),
        "num_warps": launch.num_warps,
        "experts": experts, "choices": ids.shape[1], "n": n, "k": k, "columns": x.shape[1],
        "packed_size": sizes[0], "scale_size": sizes[1], "second_size": sizes[2],
        **(constants if found.operand is None else found.operand.constants),
        "BIAS": bias is not None, "ONE": ids.shape[0] == 1,
        "EXPERTS": triton.next_power_of_2(experts),
        "TOKENS": launch.tokens, "ROWS": launch.rows, "DEPTH": launch.depth,
        "STAGES": launch.num_stages, "WARPS": launch.num_warps,
        "AHEAD": 0 if found.operand is None else launch.ahead * target.gpu.multiprocessors,
    }  # fmt: skip
