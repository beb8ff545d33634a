"""What the paged attention kernels have in common, and how they are launched."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxserve_kernels import tuned
from jaxserve_kernels.target import Target

TILE_ROWS = 128
"""Rows of a full query tile: tokens times the query heads that share a KV head."""

LOG2_E = 1.4426950408889634
"""Exponentials are powers of two."""

_PROGRAMS = 2
"""On each multiprocessor: they keep the memory busy."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters. `splits` programs share the context of one tile and KV head."""

    splits: int
    num_warps: int
    num_stages: int
    min_blocks: int = 1
    """A split has at least so many blocks of keys; what a short context does not need idles."""


def tile_tokens(group: int) -> int:
    """Tokens of a full query tile where `group` query heads share a KV head.

    Half a tile is a whole number of tokens: two warpgroups share it.
    """
    return 2 * (TILE_ROWS // 2 // group)


def choose(*, tiles: int, kv_heads: int, rows: int, pages_per_seq: int, target: Target) -> Config:
    """A configuration for `rows` query rows (tokens x heads per KV head) in each tile."""
    parameters = tuned.find("paged_attention", (rows, kv_heads), tiles, target=target)
    if parameters is not None:
        return Config(**parameters)
    if rows > 16:
        return Config(splits=1, num_warps=8 if rows >= 128 else 4, num_stages=2)
    wanted = _PROGRAMS * target.gpu.multiprocessors // (tiles * kv_heads)
    splits = 1 << max(0, min(wanted, pages_per_seq, 32)).bit_length() >> 1
    return Config(
        splits=max(splits, 1),
        num_warps=4,
        num_stages=2 if splits > 8 else 3,  # few blocks to visit: more room for the next kernels
    )


@dataclass(frozen=True, kw_only=True)
class HopperConfig:
    """Launch parameters of the kernel for Hopper."""

    splits: int
    min_blocks: int = 8
    """As in Config; a block is a page. Fewer cost more in merging than they gain."""
    num_stages: int = 4
    """Pages of keys and values that are copied ahead."""


def fits_hopper(q: Array, kv: Array, tile_size: int, *, target: Target) -> bool:
    """Whether the kernel for Hopper takes such tiles; others are left to the one for any GPU."""
    kv_heads, page_size, head_dim = kv.shape[2], kv.shape[4], kv.shape[5]
    return (
        1 < tile_size <= tile_tokens(q.shape[1] // kv_heads)
        and q.dtype == kv.dtype == jnp.bfloat16
        and page_size == 64
        and head_dim in (64, 128)
        and target.runs_hopper_kernels()
    )


def hopper_heuristic(*, tokens: int, tile_size: int, kv_heads: int, target: Target) -> HopperConfig:
    """A configuration for a step of `tokens` tokens, most of which may be one sequence's."""
    programs = -(-tokens // tile_size) * kv_heads
    splits = max(1, min(target.gpu.multiprocessors // programs, 16))  # each takes a whole one
    return HopperConfig(splits=1 << splits.bit_length() >> 1)
