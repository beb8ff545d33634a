"""Constants that the paged attention kernels share, and their launch parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels import tables
from jaxserve_kernels.op import NO_KERNELS, NOT_HOPPER, Refusal
from jaxserve_kernels.paged_attention.reference import QueryTiles
from jaxserve_kernels.target import Target

TILE_ROWS = 128
"""Rows of a full query tile: tokens times the query heads that share a KV head."""

_SMALL_STEP = 128
"""Tokens up to which a step counts as small: see `hopper_heuristic`."""

LOG2_E = 1.4426950408889634
"""log2(e): kernels compute exp(x) as exp2(x * LOG2_E)."""


class Limits(NamedTuple):
    """See `tables/paged_attention/`."""

    programs_per_multiprocessor: int
    most_streaming: int
    warps_programs: int
    warps_three_pages: int


def limits_of(target: Target) -> Limits:
    """The limits measured on the nearest card."""
    return tables.limits("paged_attention", Limits, target)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters. `splits` programs share the context of one tile and KV head."""

    splits: int
    num_warps: int
    num_stages: int
    min_blocks: int = 1
    """The least blocks of keys per split. With a short context the remaining splits idle."""


def tile_tokens(group: int) -> int:
    """Tokens of a full query tile where `group` query heads share a KV head.

    Half a tile is a whole number of tokens, because two warpgroups share a tile.
    """
    return 2 * (TILE_ROWS // 2 // group)


def for_any(
    q: Array,
    kv: Array,
    page_table: Array,
    tiles: QueryTiles,
    sinks: Array | None = None,
    *,
    tile_size: int,
    target: Target,
    **_: Any,
) -> Config | Refusal:
    """`op.Implementation.configure` of the kernel for any GPU."""
    if not target.uses_triton():
        return NO_KERNELS
    return choose(
        tiles=tiles.first.shape[0],
        kv_heads=kv.shape[2],
        rows=tile_size * (q.shape[1] // kv.shape[2]),
        pages_per_seq=page_table.shape[1],
        target=target,
    )


def choose(*, tiles: int, kv_heads: int, rows: int, pages_per_seq: int, target: Target) -> Config:
    """A configuration for `rows` query rows (tokens x heads per KV head) in each tile."""
    parameters = tables.launch("paged_attention", (rows, kv_heads), tiles, target=target)
    if parameters is not None:
        return Config(**parameters)
    if rows > 16:
        return Config(splits=1, num_warps=8 if rows >= 128 else 4, num_stages=2)
    wanted = (
        limits_of(target).programs_per_multiprocessor
        * target.gpu.multiprocessors
        // (tiles * kv_heads)
    )
    splits = 1 << max(0, min(wanted, pages_per_seq, 32)).bit_length() >> 1
    return Config(
        splits=max(splits, 1),
        num_warps=4,
        num_stages=2 if splits > 8 else 3,  # few blocks: leave memory to the next kernels
    )


@dataclass(frozen=True, kw_only=True)
class HopperConfig:
    """Launch parameters of the kernel for Hopper."""

    splits: int
    keys: int = 64
    """Keys in a block: a page, or half of one where a page would leave room for two stages only."""
    min_blocks: int = 8
    """As in Config. With fewer blocks, merging costs more than splits gain."""
    num_stages: int = 4
    """Ring stages, each one block of keys and values."""


def for_hopper(
    q: Array, kv: Array, *_: Any, tile_size: int, target: Target, **__: Any
) -> HopperConfig | Refusal:
    """`op.Implementation.configure` of the kernel for Hopper."""
    kv_heads, page_size, head_dim = kv.shape[2], kv.shape[4], kv.shape[5]
    if not target.uses_triton():
        return NO_KERNELS
    if not target.runs_hopper_kernels():
        return NOT_HOPPER
    if tile_size == 1:
        return Refusal("tiles are single tokens")
    if tile_size > tile_tokens(q.shape[1] // kv_heads):
        return Refusal("tiles are too large")
    if not q.dtype == kv.dtype == jnp.bfloat16:
        return Refusal("not in bfloat16")
    if page_size != 64 or head_dim not in (64, 128, 256):
        return Refusal("pages are not of 64 tokens, or heads not of 64, 128 or 256")
    config = hopper_heuristic(
        tokens=q.shape[0], tile_size=tile_size, kv_heads=kv_heads, target=target
    )
    if head_dim > 128:
        config = replace(config, keys=32, min_blocks=2 * config.min_blocks)
    return config


def hopper_heuristic(*, tokens: int, tile_size: int, kv_heads: int, target: Target) -> HopperConfig:
    """A configuration for a step of `tokens` tokens. Most of them may be of one sequence.

    A program takes a whole multiprocessor. In a small step the tail of a cached prompt fills half
    of the bucket or less, so twice as many splits keep all multiprocessors busy.
    """
    filled = max(tokens // 2, 2 * tile_size) if tokens <= _SMALL_STEP else tokens
    programs = -(-filled // tile_size) * kv_heads
    splits = max(1, min(target.gpu.multiprocessors // programs, 16))
    return HopperConfig(splits=1 << splits.bit_length() >> 1)
