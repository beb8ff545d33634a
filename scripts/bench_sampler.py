"""Times the sampler on a GPU, for kinds of sampling and for each feature of a row.

    python scripts/bench_sampler.py --batch 1,64,256 --out sampler.json

Logits are random. Each figure is the time of one call, in microseconds, within a chain of calls
that runs as one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.startup.environment import prepare

prepare(gpu_memory_utilization=float(os.environ.get("XLA_CLIENT_MEM_FRACTION", 0.9)))

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.api import MAX_LOGIT_BIAS, MAX_LOGPROBS
from jaxserve.runner import slot_tables
from jaxserve_kernels.sampler import (
    BIASED,
    MASKED,
    MAX_BIASES,
    PENALISED,
    RowAdjustments,
    RowSampling,
    SlotTables,
    sample,
)
from jaxserve_kernels.target import Target

VOCAB, PADDED, SLOTS, CHAIN = 151_669, 151_936, 256, 20
KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (0.8, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
}
"""Temperature, top_k, top_p, min_p."""
FEATURES = {
    "none": 0,
    "penalties": PENALISED,
    f"{MAX_LOGIT_BIAS} biases": BIASED,
    "mask": MASKED,
    "all": PENALISED | BIASED | MASKED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,64,256")
    parser.add_argument("--features", default=",".join(FEATURES), help="only these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "unit": "us"}
    for rows in map(int, args.batch.split(",")):
        for kind in KINDS:
            for name in args.features.split(","):
                taken = measure(rows, kind, FEATURES[name])
                report[f"{rows} rows, {kind}, {name}"] = round(taken, 1)
                print(f"{rows:4} rows  {kind:22} {name:12} {taken:8.1f} us", flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(rows: int, kind: str, features: int) -> float:
    """Microseconds of one call, the best of five chains."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (rows, PADDED)), jnp.float32)
    temperature, top_k, top_p, min_p = KINDS[kind]
    numbers, ones = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows)
    sampling = RowSampling(
        active=ones > 0,
        temperature=ones * temperature,
        top_k=jnp.full(rows, top_k, jnp.int32),
        top_p=ones * top_p,
        min_p=ones * min_p,
        seed=numbers,
        position=0 * numbers,
    )
    penalties = (0.5 * ones, 0.5 * ones, 1.1 * ones)
    adjustments = RowAdjustments(jnp.full(rows, features, jnp.int32), numbers, *penalties)

    def chain(position: jax.Array, tables: SlotTables) -> tuple[jax.Array, SlotTables]:
        for _ in range(CHAIN):
            tokens, _, tables = sample(
                logits,
                sampling._replace(position=position),
                adjustments,
                tables,
                ones < 0,
                vocab=VOCAB,
                alternatives=MAX_LOGPROBS,
                target=Target.here(),
            )
            position = position + tokens % 2
        return position, tables

    return best_time(jax.jit(chain, donate_argnums=1), sampling.position, make_tables(rng))


def make_tables(rng: np.random.Generator) -> SlotTables:
    """Full lists of biases, masks that allow everything."""
    abstract = slot_tables.abstract(SLOTS, PADDED)
    biases = np.full((SLOTS + 1, 3, MAX_BIASES), 2**31 - 1, np.int32)
    biases[:, 0, :MAX_LOGIT_BIAS] = np.sort(rng.choice(VOCAB, MAX_LOGIT_BIAS, replace=False))
    biases[:, 1, :MAX_LOGIT_BIAS] = np.float32(-1).view(np.int32)
    return SlotTables(
        counts=jnp.zeros(abstract.counts.shape, jnp.int16),
        biases=jnp.asarray(biases.reshape(SLOTS + 1, -1)),
        masks=jnp.full(abstract.masks.shape, -1, jnp.int32),
    )


def best_time(
    chain: Callable[..., tuple[jax.Array, SlotTables]], position: jax.Array, tables: SlotTables
) -> float:
    times: list[float] = []
    for _ in range(8):  # the first calls record the graph
        started = time.perf_counter()
        for _ in range(4):
            position, tables = chain(position, tables)
        position.block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times[3:]) / (4 * CHAIN) * 1e6


if __name__ == "__main__":
    main()
