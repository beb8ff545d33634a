"""Measures what page moves cost a decode step: launches, waits and steps separately.

    python -m lab.studies.moves_beside_steps --out moves.json

It uses Qwen3-4B's shape with random weights and 16 rows. Before each step, pages move from the load
ring to the cache, as many as the case says, like restores from host memory. Nothing is copied from
the host, so any difference from a step alone comes from the moves. In a second round, eight chunks
are always in flight to a ring, as with real restores. This takes half a minute on a GPU. With
--layers 2 --kv-gib 0.6 --context 300 a CPU shows that it works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
import jax.numpy as jnp
from bench_step import make_runner
from decode_steps import decode_plans
from working_tree import commit

from jaxserve.engine.engine import SWITCH_INTERVAL
from jaxserve.metrics.metrics import Metrics
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.offload.copier import CudaCopier, Ring, RingPart
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab
from jaxserve.plan import PageMove, PageMoves
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner

ROWS, WARM = 16, 12
CASES: tuple[tuple[int, ...], ...] = ((), (16,), (8,), (1,), (16, 1))
"""Pages in each launch before a step, by case."""
SLOTS, PAGES = 64, 40
"""Slots of the load ring, and the pages that are overwritten again and again."""
RING_BYTES = 9 << 20


def main() -> None:
    args = parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)
    made, config, params = make_runner(NAMED_MODELS[args.model], args)
    del made  # it was planned without rings
    config = replace(config, rings=Rings(store=32, load=SLOTS))
    runner = Runner(config, params, Metrics("study"))
    runner.compile(8, lambda phase, done: None)
    found = [measure(runner, config, args, case) for case in CASES]
    if jax.default_backend() == "gpu":
        with copies():
            found += [measure(runner, config, args, case) | {"beside": "copies"} for case in CASES]
    device = jax.devices()[0].device_kind
    result = {"card": device, "jax": jax.__version__, "commit": commit(), "cases": found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    runner: Runner, config: RunnerConfig, args: argparse.Namespace, case: tuple[int, ...]
) -> dict[str, Any]:
    """Returns medians in milliseconds, and the mean step."""
    first, pending = config.cache.num_pages, None
    spans: list[tuple[float, float, float]] = []
    began = 0.0
    for number, plan in enumerate(decode_plans(config, ROWS, args.context, args.steps + WARM, 0.0)):
        start = time.perf_counter()
        began = start if number == WARM else began
        for count in case:
            runner.move_pages(PageMoves(moves(first - PAGES, number * count, count), ()))
        moved = time.perf_counter()
        launched = runner.launch(plan)
        left = time.perf_counter()
        if pending is not None:
            runner.collect(pending)
        pending = launched
        spans.append((moved - start, left - moved, time.perf_counter() - left))
    assert pending is not None
    runner.collect(pending)
    step = (time.perf_counter() - began) / args.steps
    parts = zip(*spans[WARM:], strict=True)
    found: dict[str, Any] = {"pages": list(case), "step_ms": round(step * 1e3, 4)}
    for name, each in zip(("moves_ms", "launch_ms", "wait_ms"), parts, strict=True):
        found[name] = round(median(each) * 1e3, 4)
    print(found, flush=True)
    return found


def moves(page: int, begin: int, count: int) -> tuple[PageMove, ...]:
    """Returns moves from slots in turn to pages that no sequence has."""
    numbers = itertools.islice(itertools.count(begin), count)
    return tuple(PageMove(page + each % PAGES, each % SLOTS, 0) for each in numbers)


@contextmanager
def copies() -> Generator[None]:
    """Copies pages from the host to a ring during the block."""
    cuda = CudaContext(jax.devices()[0].local_hardware_id)
    slab = HostSlab(SLOTS, RING_BYTES, cuda=cuda)
    rings = [jax.jit(lambda: jnp.zeros((SLOTS, RING_BYTES), jnp.uint8))() for _ in range(2)]
    parts = [[RingPart(ring.unsafe_buffer_pointer(), RING_BYTES)] for ring in rings]
    stop: list[bool] = []

    def again() -> None:
        if not stop:
            copier.load(0, 0, 0)

    copier = CudaCopier(slab, *(Ring([each], SLOTS) for each in parts), cuda=cuda, wake=again)
    for slot in range(8):
        copier.load(slot, slot, slot)
    try:
        yield
    finally:
        stop.append(True)
        copier.close()
        slab.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(
        batch=[ROWS], quantization=None, lm_head_dtype=None, fp8_copy=False,
        kv_cache_dtype="auto", page_size=64, separate_layers=False,
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
