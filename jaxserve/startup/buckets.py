"""Chooses the buckets of an engine: the row and token counts that steps are compiled for."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.cli.options import Options
from jaxserve.config import Buckets
from jaxserve.speculation_config import NO_SPECULATION, SpeculationConfig

GPU_DECODE = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256)
# Smaller buckets take as long as 64. Larger buckets take longer per token than 2048: see
# "Buckets" in lab/logs/prefill.md.
GPU_PREFILL = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
CPU_DECODE = (1, 4, 16, 64)
CPU_PREFILL = (16, 64, 256)
# (rows, positions per row). Up to 64 positions in total, a step takes hardly longer than one with
# as many decode rows. Up to about 200, it reads the matrices once.
GPU_VERIFY = ((1, 8), (2, 8), (4, 8), (8, 4), (8, 8), (16, 4), (32, 4), (64, 2), (128, 2))
_FREE_POSITIONS = 32
"""Positions of a verify step that fit into the memory of any engine."""
_CPU_VERIFY = ((1, 4), (1, 8), (4, 4), (16, 2))


def bucket_choices(options: Options, *, gpu: bool) -> list[Buckets]:
    """Returns candidate buckets, the most sequences first. On a GPU, memory decides between them
    unless a flag does."""
    if not gpu or options.decode_buckets or options.max_num_seqs:
        return [buckets_of(options, gpu=gpu)]
    return [
        buckets_of(replace(options, max_num_seqs=most), gpu=gpu) for most in reversed(GPU_DECODE)
    ]


def buckets_of(options: Options, *, gpu: bool) -> Buckets:
    """Returns the buckets that the flags ask for, with the defaults of the device."""
    decode = options.decode_buckets or (GPU_DECODE if gpu else CPU_DECODE)
    prefill = options.prefill_buckets or (GPU_PREFILL if gpu else CPU_PREFILL)
    limit = options.max_num_seqs or decode[-1]
    decode = (*(size for size in decode if size < limit), limit)
    tokens = options.max_num_batched_tokens or max(prefill[-1], limit)
    prefill = (*(size for size in prefill if size < tokens), tokens)
    chosen = options.speculative_config or (SpeculationConfig() if gpu else NO_SPECULATION)
    verify = _verify_buckets(chosen, limit, prefill[-1], gpu=gpu)
    return Buckets(decode=decode, prefill=prefill, verify=verify)


def _verify_buckets(
    speculation: SpeculationConfig, most_rows: int, most_tokens: int, *, gpu: bool
) -> tuple[tuple[int, int], ...]:
    """Returns (rows, positions per row) of the verify buckets for an engine with these limits. They
    sample at hardly more positions than decode steps, so that scores and tables leave the memory to
    keys and values."""
    widest = max(speculation.positions, default=0)
    most = min(most_tokens, max(most_rows, _FREE_POSITIONS))
    found = {
        (min(rows, most_rows), min(positions, widest))
        for rows, positions in (GPU_VERIFY if gpu else _CPU_VERIFY)
        if widest
    }
    return tuple(sorted(shape for shape in found if shape[0] * shape[1] <= most))
