"""Measures operations per second of prefill attention, beside those of a large matrix product.

    python scripts/bench_attention.py --out attention.json

The cases are whole prompts and late chunks of long prompts, with a model's heads, over pages in
random order. There are four operations per query head, dimension and visible key; masked keys are
not counted. Both rates are measured in the second half of a second of repetitions, when the card
has reached its power limit.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=0.8)

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention, tile_tokens
from jaxserve_kernels.target import Target

PAGE_SIZE = 64
LAYERS = 4
"""Calls per repetition, each over different keys and values."""

CASES = ((0, 256), (0, 1024), (0, 2048), (0, 4096), (0, 16384), (3072, 1024), (14336, 2048))
"""(start, length) of the chunks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    product = product_rate()
    print(f"{jax.devices()[0].device_kind}: product {product / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for start, length in CASES:
        seconds, operations = attention(args.model, start, length)
        rate = operations / seconds
        print(
            f"{length} tokens from {start}: {seconds * 1e6:.0f} us, {rate / 1e12:.0f} TFLOP/s, "
            f"{rate / product:.2f} of the product"
        )
        rows.append({"start": start, "length": length, "us": seconds * 1e6, "rate": rate})
    if args.out:
        device = {"card": jax.devices()[0].device_kind, "jax": jax.__version__}
        result = {**device, "model": args.model, "product": product, "attention": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def repeated(call: Callable[[], Any]) -> float:
    """Seconds per call."""
    jax.block_until_ready(call())
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < 1.0:
        start = time.perf_counter()
        for _ in range(10):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 10)
    return median(times[len(times) // 2 :])


def product_rate() -> float:
    size = 8192
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / repeated(lambda: product(left, right))


def attention(model: str, start: int, length: int) -> tuple[float, float]:
    """Seconds and operations of one call."""
    spec = NAMED_MODELS[model]
    tile = tile_tokens(spec.q_heads // spec.kv_heads)
    pages = -(-(start + length) // PAGE_SIZE)
    shape = (LAYERS, 1 + pages, spec.kv_heads, 2, PAGE_SIZE, spec.head_dim)
    kv = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    q = jax.random.normal(jax.random.key(2), (length, spec.q_heads, spec.head_dim), jnp.bfloat16)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(pages), jnp.int32)[None]
    first = np.arange(0, length, tile, dtype=np.int32)[::-1]  # the longest contexts first
    sizes = np.minimum(length - first, tile).astype(np.int32)
    tiles = QueryTiles(*map(jnp.asarray, (first, sizes, np.zeros_like(first), start + first)))

    def calls(q: jax.Array, kv: jax.Array, table: jax.Array, tiles: QueryTiles) -> list[jax.Array]:
        outs: list[jax.Array] = []
        for layer in range(LAYERS):
            out = paged_attention(q, kv, layer, table, tiles, tile_size=tile, target=Target.here())
            q, out = jax.lax.optimization_barrier((q, out))  # one after the other
            outs.append(out)
        return outs

    seconds = repeated(functools.partial(jax.jit(calls), q, kv, table, tiles)) / LAYERS
    visible = length * start + length * (length + 1) / 2
    return seconds, 4 * spec.q_heads * spec.head_dim * visible


if __name__ == "__main__":
    main()
