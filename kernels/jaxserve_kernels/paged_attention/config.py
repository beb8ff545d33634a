"""How the paged attention kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve_kernels import tuned

_TARGET_PROGRAMS = 264
"""Two programs for each of an H100's 132 multiprocessors keep its memory busy."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters. `splits` programs share the context of one tile and KV head."""

    splits: int
    num_warps: int
    num_stages: int


def choose(*, tiles: int, kv_heads: int, rows: int, pages_per_seq: int) -> Config:
    """A configuration for `rows` query rows (tokens x heads per KV head) in each tile."""
    parameters = tuned.find("paged_attention", (rows, kv_heads), tiles)
    if parameters is not None:
        return Config(**parameters)
    if rows > 16:
        return Config(splits=1, num_warps=8 if rows >= 128 else 4, num_stages=2)
    wanted = _TARGET_PROGRAMS // (tiles * kv_heads)
    splits = 1 << max(0, min(wanted, pages_per_seq, 32)).bit_length() >> 1
    return Config(splits=max(splits, 1), num_warps=4, num_stages=3)
