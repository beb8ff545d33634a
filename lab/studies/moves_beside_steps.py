"""Measures what page moves cost a decode step: launches, waits and steps separately.

    python -m lab.studies.moves_beside_steps --out moves.json

It uses Qwen3-4B's shape with random weights and 16 rows. There are two rounds:

- Before each step, the load ring gives as many pages as the case says. Nothing is copied from the
  host, so any difference from a step alone comes from the moves.
- Steps alone, while eight pages are always in flight from the host straight into the KV cache, as
  without a ring. `direct_gb_per_s` is their rate. `direct_equal` says whether the pages hold the
  host's bytes afterwards, and `direct_stays` whether the cache has kept its address.

It takes half a minute on a GPU. On a CPU the first round works: --layers 2 --kv-gib 0.6 --context
300.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
import numpy as np
from bench_step import make_runner
from decode_steps import decode_plans
from working_tree import commit

from jaxserve.engine.engine import SWITCH_INTERVAL
from jaxserve.metrics.metrics import Metrics
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab
from jaxserve.plan import PageMove, PageMoves
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_kernels.cuda_driver import check

ROWS, WARM = 16, 12
CASES: tuple[tuple[int, ...], ...] = ((), (16,), (8,), (1,), (16, 1))
"""Pages in each launch before a step, by case."""
SLOTS, PAGES = 64, 40
"""Slots of the load ring, and the pages that are overwritten again and again."""


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
        with direct_copies(runner, config) as copied:
            beside = measure(runner, config, args, ())
        found.append(beside | copied)
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


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's API."""

    _fields_ = (
        ("src_x", c_size_t), ("src_y", c_size_t), ("src_type", c_uint32),
        ("src_host", c_void_p), ("src_device", c_uint64), ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t), ("dst_y", c_size_t), ("dst_type", c_uint32),
        ("dst_host", c_void_p), ("dst_device", c_uint64), ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_…
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ON_THEIR_WAY = 8


@contextmanager
def direct_copies(runner: Runner, config: RunnerConfig) -> Generator[dict[str, Any]]:
    """Pages go from the host into pages of the cache that no sequence has, all the while: all
    layers of a page are one copy of rows. What was found is in the dict at the end."""
    cuda = CudaContext(jax.devices()[0].local_hardware_id)
    cache = _cache_array(runner)
    layers, pages = cache.shape[:2]
    width = cache.nbytes // (layers * pages)
    address, first = cache.unsafe_buffer_pointer(), config.cache.num_pages - PAGES
    slab = HostSlab(PAGES, layers * width, cuda=cuda)
    host = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (PAGES * layers * width)).from_address(slab.address(0))
    )
    host[:] = np.random.default_rng(0).integers(0, 60, host.size, np.uint8)  # no NaN among them
    found: dict[str, Any] = {"beside": "direct copies"}
    stop = threading.Event()

    def run() -> None:
        cuda.enter()
        stream = c_void_p()
        check(cuda.driver.cuStreamCreate(byref(stream), _NON_BLOCKING), "cuStreamCreate")
        number, began = 0, time.perf_counter()
        while not stop.is_set() or number < PAGES:
            for page in range(number, number + _ON_THEIR_WAY):
                copy = _Copy2D(
                    src_type=_HOST, src_host=slab.address(page % PAGES), src_pitch=width,
                    dst_type=_DEVICE, dst_device=address + (first + page % PAGES) * width,
                    dst_pitch=pages * width, width=width, height=layers,
                )  # fmt: skip
                check(cuda.driver.cuMemcpy2DAsync_v2(byref(copy), stream), "cuMemcpy2DAsync")
            number += _ON_THEIR_WAY
            check(cuda.driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        seconds = time.perf_counter() - began
        found["direct_gb_per_s"] = round(number * layers * width / seconds / 1e9, 2)
        check(cuda.driver.cuStreamDestroy_v2(stream), "cuStreamDestroy")

    thread = threading.Thread(target=run, name="direct-copies")
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        cache = _cache_array(runner)
        on_device = np.asarray(cache[:, first:]).reshape(layers, PAGES, -1).view(np.uint8)
        expected = host.reshape(PAGES, layers, width).swapaxes(0, 1)
        found["direct_equal"] = bool((on_device == expected).all())
        found["direct_stays"] = cache.unsafe_buffer_pointer() == address
        slab.close()


def _cache_array(runner: Runner) -> jax.Array:
    """The KV cache of a model in one array, [layers, pages, ...]."""
    state: Any = runner._state  # pyright: ignore[reportPrivateUsage]
    (array,) = jax.tree.leaves(state.kv)
    return array


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
