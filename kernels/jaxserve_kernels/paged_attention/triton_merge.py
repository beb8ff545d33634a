"""Merges the results of programs that share a context, by their softmax weights."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.paged_attention.config import Config, HopperConfig
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call
from jaxserve_kernels.triton_loads import added

_MERGED = 32
"""Rows of parts that a program of `_merge_many` holds."""

_BY_A_WARP = 1024
"""Numbers that a program of `_merge`, one warp, reads from the parts."""


@triton.jit
def first_block(position, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The first block of KEYS keys that the query at `position` sees; WINDOW: 0 for none."""
    return tl.maximum(position - WINDOW + 1, 0) // KEYS if WINDOW else 0


@triton.jit
def _merge(
    part_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, position_ptr, gates_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, TAKEN: tl.constexpr,
    gate_parts: tl.constexpr = 0, stride: tl.constexpr = 0,
    WINDOW: tl.constexpr = 0, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Merges TAKEN elements of the splits of one query and head, if there are several splits. Tiles
    have one token. `gates_ptr`: see `merged`; None for no gates."""
    tile = tl.program_id(0)
    q_head = tl.program_id(1)
    group: tl.constexpr = q_heads // kv_heads
    length = tl.minimum(tl.load(length_ptr + tile), tile_size)
    position = tl.load(position_ptr + tile)
    token = tl.load(first_ptr + tile).to(tl.int64)
    blocks = tl.cdiv(position + length, KEYS) - first_block(position, KEYS, WINDOW)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), MIN_BLOCKS)
    several = (per_split < blocks) & (length > 0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.arange(0, WIDTH)
    dim = tl.program_id(2) * TAKEN + tl.arange(0, TAKEN)
    there = (split * per_split < blocks) & several
    part = ((tile * kv_heads + q_head // group) * SPLITS + split).to(tl.int64) * ROWS
    part += q_head % group
    # Before the branch, and volatile: see `triton_loads`.
    peaks = tl.load(peak_ptr + part, mask=there, other=-1.0e30, volatile=True)
    weights = tl.load(weight_ptr + part, mask=there, other=0.0, volatile=True)
    acc = part_ptr + part[:, None] * DIM + dim[None, :]
    acc = tl.load(acc, mask=there[:, None], other=0.0, volatile=True)
    gates = ()
    if gates_ptr is not None:
        width: tl.constexpr = 2 * (q_heads + kv_heads) * DIM
        gate = gates_ptr + token * width + (2 * q_head + 1) * DIM + dim
        for index in tl.static_range(gate_parts):
            gates = gates + (tl.load(gate + index * stride, volatile=True),)  # noqa: RUF005
    if several:
        shares = tl.exp2(peaks - tl.max(peaks, axis=0))
        weight = tl.sum(weights * shares, axis=0)
        out = (tl.sum(acc * shares[:, None], axis=0) / weight).to(out_ptr.dtype.element_ty)
        if gates_ptr is not None:
            out *= _sigmoid(gates, out.dtype)
        tl.store(out_ptr + (token * q_heads + q_head) * DIM + dim, out)


@triton.jit
def _sigmoid(parts, dtype: tl.constexpr):
    """The sigmoid of a sum of parts. Both are rounded to `dtype`."""
    return (1.0 / (1.0 + tl.exp(-added(parts, dtype).to(tl.float32)))).to(dtype)


@triton.jit
def _merge_many(
    part_ptr, peak_ptr, weight_ptr, first_ptr, length_ptr, position_ptr, out_ptr,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, tile_size: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, TAKEN: tl.constexpr,
    TILES: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """`_merge` for TAKEN rows of a KV head, in every n-th tile."""
    kv_head = tl.program_id(1)
    begin = tl.program_id(2) * TAKEN
    group: tl.constexpr = q_heads // kv_heads
    for tile in tl.range(tl.program_id(0), TILES, tl.num_programs(0), num_stages=1):
        length = tl.minimum(tl.load(length_ptr + tile), tile_size)
        position = tl.load(position_ptr + tile)
        blocks = tl.cdiv(position + length, KEYS) - first_block(position, KEYS, WINDOW)
        per_split = tl.maximum(tl.cdiv(blocks, SPLITS), MIN_BLOCKS)
        if (per_split < blocks) & (begin < length * group):
            split = tl.arange(0, WIDTH)
            row = tl.minimum(begin + tl.arange(0, TAKEN), length * group - 1)  # repeat the last
            dim = tl.arange(0, DIM)
            there = (split * per_split < blocks)[:, None]
            part = ((tile * kv_heads + kv_head) * SPLITS + split).to(tl.int64) * ROWS
            part = part[:, None] + row[None, :]
            peaks = tl.load(peak_ptr + part, mask=there, other=-1.0e30)
            weights = tl.load(weight_ptr + part, mask=there, other=0.0)
            acc = part_ptr + part[:, :, None] * DIM + dim[None, None, :]
            acc = tl.load(acc, mask=there[:, :, None], other=0.0)
            shares = tl.exp2(peaks - tl.max(peaks, axis=0)[None, :])
            weight = tl.sum(weights * shares, axis=0)
            out = tl.sum(acc * shares[:, :, None], axis=0) / weight[:, None]
            q_row = (tl.load(first_ptr + tile).to(tl.int64) + row // group) * q_heads
            q_row += kv_head * group + row % group
            target = out_ptr + q_row[:, None] * DIM + dim[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty))


def part_types(
    tiles: int, kv_heads: int, splits: int, rows: int, head_dim: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of the arrays between splits and `merged`: sums, peaks and weights. With one split they
    are dummies."""
    parts = (tiles, kv_heads, splits, rows) if splits > 1 else ()
    statistics = jax.ShapeDtypeStruct(parts or (1,), jnp.float32)
    return jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32), statistics, statistics


def merged(
    found: Array,
    parts: Sequence[Array],
    tiles: QueryTiles,
    config: Config | HopperConfig,
    *,
    tile_size: int,
    keys: int,
    window: int | None,
    gates: Array | None = None,
    target: Target,
) -> Array:
    """Stores the merged rows in `found` [tokens, q_heads, head_dim]: those whose context several
    splits share.

    Args:
      parts: the splits' sums, peaks and weights: see `part_types`.
      keys: keys per block.
      gates: a projection [parts, tokens, width] with a gate after each query head, for tiles of one
        token: the merged rows are multiplied by the sigmoids of the gates.
    """
    if config.splits == 1:
        return found
    num_tiles, kv_heads, splits, rows, head_dim = parts[0].shape
    q_heads = found.shape[1]
    out = jax.new_ref(found)
    constants: dict[str, int] = {
        "q_heads": q_heads, "kv_heads": kv_heads, "tile_size": tile_size, "ROWS": rows,
        "DIM": head_dim, "KEYS": keys, "SPLITS": splits,
        "MIN_BLOCKS": config.min_blocks, "WIDTH": triton.next_power_of_2(splits),
        "WINDOW": window or 0,
    }  # fmt: skip
    arrays: tuple[Array | None, ...] = (*parts, tiles.first, tiles.length, tiles.position)
    if tile_size == 1:
        kernel = _merge
        taken = constants["TAKEN"] = min(head_dim, _BY_A_WARP // constants["WIDTH"])
        grid = (num_tiles, q_heads, head_dim // taken)
        arrays = (*arrays, gates)
        if gates is not None:
            constants |= {"gate_parts": gates.shape[0], "stride": gates[0].size}
    else:
        kernel = _merge_many
        taken = constants["TAKEN"] = max(1, min(rows, _MERGED // constants["WIDTH"]))
        constants["TILES"] = num_tiles
        # A step has room for far more tiles than its tokens fill, and idle programs cost time.
        filled = min(num_tiles, triton.cdiv(found.shape[0], tile_size) + 1)
        grid = (filled, kv_heads, triton.cdiv(tile_size * (q_heads // kv_heads), taken))
    triton_call(
        *arrays, out,
        kernel=kernel,
        name="paged_attention_merge",
        target=target,
        out_type=(),
        grid=grid,
        num_warps=1,  # several would exchange their sums through shared memory: 11 µs for 3.5
        **constants,
    )  # fmt: skip
    return jax.freeze(out)
