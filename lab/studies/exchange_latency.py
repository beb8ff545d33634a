"""Times what a dependency costs: programs that all read what all of them stored before.

    python -m lab.studies.exchange_latency --out exchange_latency.json

Each of a step's kernels reads one token that the kernel before it has stored, in all its programs.
Here nothing else is done: a program loads the whole token, sums it, and stores its share of the
next one. So a decode step of one token takes at least its number of dependent kernels times this.

- "kernels": a chain of kernels that start early (PDL), as decode steps are launched.
- "barriers": one kernel whose programs wait for each other by a counter in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

# Chains of a step are in CUDA graphs, as here: a launch from the host takes longer than a kernel.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels import pdl
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from working_tree import commit

EXCHANGES = 512
TOKEN = 4096
PROGRAMS = (16, 64, 128)


@triton.jit
def _exchange(source, target, TOKEN: tl.constexpr, SHARE: tl.constexpr):
    """Loads the token past the first cache, which other multiprocessors do not write."""
    place = tl.arange(0, TOKEN)
    total = tl.sum(tl.load(source + place, cache_modifier=".cg").to(tl.float32), axis=0)
    share = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    tl.store(target + share, tl.full([SHARE], total * (1.0 / TOKEN), tl.bfloat16))


@triton.jit
def _kernel(x_ptr, out_ptr, TOKEN: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr = False):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    _exchange(x_ptr, out_ptr, TOKEN, SHARE)


@triton.jit
def _barriers(
    x_ptr, counter_ptr, out_ptr, EXCHANGES: tl.constexpr, TOKEN: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    programs = tl.num_programs(0)
    source = x_ptr
    for exchange in range(EXCHANGES):
        target = out_ptr + exchange % 2 * TOKEN
        _exchange(source, target, TOKEN, SHARE)
        source = target
        tl.debug_barrier()
        seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
        while seen < programs * (exchange + 1):
            seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
        tl.debug_barrier()


def kernels(programs: int, target: Target) -> Callable[[jax.Array], jax.Array]:
    """A function that exchanges a token EXCHANGES times, in a chain of kernels."""

    def chain(x: jax.Array, *, target: Target) -> jax.Array:
        for _ in range(EXCHANGES):
            x = triton_call(
                x, kernel=_kernel, name="exchange", target=target, grid=(programs,), num_warps=8,
                out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
                TOKEN=TOKEN, SHARE=TOKEN // programs,
            )  # fmt: skip
        return x

    return jax.jit(lambda x: pdl.call(chain, x, target=target))


def barriers(programs: int, target: Target) -> Callable[[jax.Array], jax.Array]:
    """The same by one kernel."""

    def run(x: jax.Array) -> jax.Array:
        return triton_call(
            x, jnp.zeros(1, jnp.int32), kernel=_barriers, name="barriers", target=target,
            grid=(programs,), num_warps=8, together=True,
            out_type=jax.ShapeDtypeStruct((2 * TOKEN,), x.dtype),
            EXCHANGES=EXCHANGES, TOKEN=TOKEN, SHARE=TOKEN // programs,
        )  # fmt: skip

    return jax.jit(run)


def microseconds(run: Callable[[jax.Array], Any]) -> float:
    """Of an exchange: the median of 20 calls."""
    x = jnp.ones(TOKEN, jnp.bfloat16)
    jax.block_until_ready(run(x))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return median(times) / EXCHANGES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = Target.here()
    card = jax.devices()[0].device_kind
    result: dict[str, Any] = {"card": card, "commit": commit(), "exchanges": EXCHANGES, "us": {}}
    for programs in PROGRAMS:
        found = {
            "kernels": microseconds(kernels(programs, target)),
            "barriers": microseconds(barriers(programs, target)),
        }
        result["us"][programs] = found
        print(programs, "programs:", *(f"{name} {us:.2f} µs" for name, us in found.items()))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
