"""How fast pages go between host memory and a GPU, and what that does to steps and their results.

    python scripts/bench_link.py --out link.json

Takes half a minute on a GPU. Rates are in GB/s (1e9 bytes), of each direction:

- plain: one copy of pinned memory, one way and both ways at once; what the link gives
- copies: pages through `CudaCopier`, for sizes of chunks and numbers of chunks on their way; with
  the milliseconds that a small copy to the host takes meanwhile, as a step's tokens do
- verified: the same with checksums
- busy: beside threads that run Python all the time
- steps: milliseconds of a compiled step alone, and beside copies in both directions

Without a GPU it runs the same on arrays of the CPU, which only shows that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from jaxserve.startup import environment

environment.prepare(0.5)

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from working_tree import commit

from jaxserve.offload.copier import CpuCopier, CudaCopier, PageCopier, Ring, RingPart
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.lane import DEPTH
from jaxserve.offload.links import Direction
from jaxserve.offload.slab import HostSlab
from jaxserve_kernels.cuda_driver import check

MIB, GIB = 1 << 20, 1 << 30
BOTH = (Direction.STORE, Direction.LOAD)
SWITCH_INTERVAL = 0.001
"""As the engine sets it."""


class Bench:
    """A slab, a ring for each direction, and the link between them."""

    def __init__(self, args: argparse.Namespace):
        self.device = jax.devices()[0]
        self.cuda = CudaContext(self.device.local_hardware_id) if is_gpu() else None
        self.page_bytes = int(args.page_mib * MIB)
        begin = time.perf_counter()
        self.slab = HostSlab(
            int(args.gib * GIB) // self.page_bytes, self.page_bytes, cuda=self.cuda
        )
        self.pin_seconds = time.perf_counter() - begin
        self.slots = max(1, min(32, self.slab.num_slots // 2))
        make = jax.jit(lambda: jnp.zeros((self.slots, self.page_bytes), jnp.uint8))
        self.rings = [jax.block_until_ready(make()) for _ in BOTH]
        self.addresses = [ring.unsafe_buffer_pointer() for ring in self.rings]
        for slot in range(self.slab.num_slots):
            self.slab.slot(slot)[:] = bytes([slot % 251]) * self.page_bytes

    @contextlib.contextmanager
    def copier(self, *, chunk: int = 8 * MIB, depth: int = DEPTH, verify: bool = False):
        woken = threading.Event()
        options: dict[str, Any] = {"wake": woken.set, "verify": verify, "chunk_bytes": chunk}
        parts = [[RingPart(address, self.page_bytes)] for address in self.addresses]
        rings = [Ring([each], self.slots) for each in parts]
        copier: PageCopier
        if self.cuda is None:
            copier = CpuCopier(self.slab, *rings, **options)
        else:
            copier = CudaCopier(self.slab, *rings, cuda=self.cuda, depth=depth, **options)
        try:
            yield copier, woken
        finally:
            if not copier.close():
                sys.exit("copies hang")

    def plain(self, directions: Sequence[Direction]) -> list[float]:
        """Returns the GB/s of each direction: one copy each, as large as a ring, all at once."""
        size = self.slots * self.page_bytes
        if self.cuda is None:
            ring = self.addresses[0]
            return [
                rate(size, best(lambda: ctypes.memmove(ring, self.slab.address(0), size)))
            ] * len(directions)
        return best_rates(size, len(directions), lambda: self._plain(directions, size))

    def _plain(self, directions: Sequence[Direction], size: int) -> list[float]:
        assert self.cuda is not None
        driver = self.cuda.driver
        self.cuda.enter()
        streams = [c_void_p() for _ in directions]
        for stream in streams:
            check(driver.cuStreamCreate(byref(stream), 1), "cuStreamCreate")
        begin = time.perf_counter()
        for direction, stream in zip(directions, streams, strict=True):
            ring = c_uint64(self.addresses[BOTH.index(direction)])
            # Halves of the slab, so that what is stored is not what is loaded.
            host = c_void_p(self.slab.address(0 if direction is BOTH[0] else self.slots))
            if direction is Direction.STORE:
                check(driver.cuMemcpyDtoHAsync_v2(host, ring, c_size_t(size), stream), "copy")
            else:
                check(driver.cuMemcpyHtoDAsync_v2(ring, host, c_size_t(size), stream), "copy")
        seconds: list[float] = []
        for stream in streams:
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
            seconds.append(time.perf_counter() - begin)
            check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy")
        return seconds

    def pages(
        self,
        directions: Sequence[Direction],
        seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> list[float]:
        """Returns the GB/s of each direction, with as many pages waiting as a ring has."""
        with self.copier(**options) as (copier, woken):
            number, begin = 0, time.perf_counter()
            done = dict.fromkeys(BOTH, 0)
            waiting = dict.fromkeys(BOTH, 0)
            last = dict.fromkeys(BOTH, begin)
            while any(waiting.values()) or time.perf_counter() - begin < seconds:
                is_over = time.perf_counter() - begin >= seconds
                for direction in () if is_over else directions:
                    while waiting[direction] < self.slots:
                        self._submit(copier, direction, number)
                        waiting[direction] += 1
                        number += 1
                meanwhile()
                woken.wait(0.001)
                woken.clear()
                for completion in copier.poll():
                    if not completion.ok:
                        sys.exit(f"a copy failed: {completion.error}")
                    direction = BOTH[completion.tag]
                    waiting[direction] -= 1
                    done[direction] += 1
                    last[direction] = time.perf_counter()
            return [rate(done[d] * self.page_bytes, last[d] - begin) for d in directions]

    def _submit(self, copier: PageCopier, direction: Direction, number: int) -> None:
        """Stores go to the first half of the slab, loads come from the second."""
        half = self.slab.num_slots // 2
        if direction is Direction.STORE:
            copier.store(number % self.slots, number % half, 0)
        else:
            copier.load(half + number % half, number % self.slots, 1)


def is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


def best(function: Callable[[], object], times: int = 4) -> float:
    """Returns the shortest time of a call, in seconds."""
    found: list[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def best_rates(size: int, number: int, run: Callable[[], list[float]]) -> list[float]:
    rounds = [run() for _ in range(4)]
    return [rate(size, min(seconds[index] for seconds in rounds)) for index in range(number)]


class Small:
    """Copies of 4 KiB to the host on a stream of its own, as a step's tokens go."""

    def __init__(self, bench: Bench):
        self._cuda, self._bench, self._times = bench.cuda, bench, list[float]()
        if self._cuda is not None:
            self._cuda.enter()
            self._stream = c_void_p()
            check(self._cuda.driver.cuStreamCreate(byref(self._stream), 1), "cuStreamCreate")

    def __call__(self) -> None:
        if self._cuda is None:
            return
        driver, slab, begin = self._cuda.driver, self._bench.slab, time.perf_counter()
        host = c_void_p(slab.address(slab.num_slots - 1))
        ring = c_uint64(self._bench.addresses[1])
        check(driver.cuMemcpyDtoHAsync_v2(host, ring, c_size_t(4096), self._stream), "copy")
        check(driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")
        self._times.append(time.perf_counter() - begin)

    def summary(self) -> dict[str, float]:
        """Returns milliseconds, and forgets them."""
        times, self._times = sorted(self._times), []
        if not times:
            return {}
        return {
            "small_copy_p50_ms": round(1e3 * statistics.median(times), 3),
            "small_copy_p99_ms": round(1e3 * times[int(0.99 * (len(times) - 1))], 3),
        }


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Threads that run Python all the time."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            sum(range(100))

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def measure_copies(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    small = Small(bench)
    for _ in range(200):
        small()
    found: list[dict[str, Any]] = [{"chunk_mib": None, **small.summary()}]
    for chunk in args.chunk_mib:
        for depth in args.depth:
            options = {"chunk": int(chunk * MIB), "depth": depth}
            row: dict[str, Any] = {"chunk_mib": chunk, "depth": depth}
            row["store"] = bench.pages(BOTH[:1], args.seconds, small, **options)[0]
            row |= small.summary()
            row["load"] = bench.pages(BOTH[1:], args.seconds, **options)[0]
            row["store_both"], row["load_both"] = bench.pages(BOTH, args.seconds, **options)
            found.append(row)
    return found


def measure_steps(bench: Bench, args: argparse.Namespace) -> dict[str, float]:
    """A step of large products, of some milliseconds."""
    size, products = (8192, 8) if is_gpu() else (256, 8)

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for _ in range(products):
            x = jnp.tanh(x @ x)
        return x

    x = jnp.ones((size, size), jnp.bfloat16)
    expected = jax.block_until_ready(step(x))
    times: list[float] = []

    def run() -> None:
        begin = time.perf_counter()
        result = jax.block_until_ready(step(x))
        times.append(time.perf_counter() - begin)
        if not bool(jnp.array_equal(result, expected)):
            sys.exit("a step computed something else beside copies")

    for _ in range(20):
        run()
    alone = statistics.median(times[5:])
    times.clear()
    stored, loaded = bench.pages(BOTH, 4 * args.seconds, run)
    return {
        "alone_ms": round(1e3 * alone, 3),
        "beside_copies_ms": round(1e3 * statistics.median(times), 3),
        "store": stored,
        "load": loaded,
    }


def check_content(bench: Bench) -> None:
    """SystemExit: what was loaded and stored again is not what it was."""
    slab, half = bench.slab, bench.slab.num_slots // 2
    with bench.copier() as (copier, woken):
        for host_slot in range(half, half + bench.slots):
            copier.load(host_slot, host_slot - half, 0)
        collect(copier, woken, bench.slots)
    copy = jax.jit(lambda ring, out: out.at[:].set(ring), donate_argnums=1)
    before = bench.rings[0].unsafe_buffer_pointer()
    bench.rings[0] = jax.block_until_ready(copy(bench.rings[1], bench.rings[0]))
    if bench.rings[0].unsafe_buffer_pointer() != before:
        sys.exit("a donated ring has moved")
    with bench.copier() as (copier, woken):
        for slot in range(bench.slots):
            copier.store(slot, slot, 0)
        collect(copier, woken, bench.slots)
    if any(slab.slot(slot) != slab.slot(half + slot) for slot in range(bench.slots)):
        sys.exit("a page came back changed")


def collect(copier: PageCopier, woken: threading.Event, count: int) -> None:
    while count:
        woken.wait(1)
        woken.clear()
        for completion in copier.poll():
            count -= 1
            if not completion.ok:
                sys.exit(f"a copy failed: {completion.error}")


def pinned_host_kind(bench: Bench) -> str:
    """Returns where an array of jax's memory kind `pinned_host` really lies."""
    if bench.cuda is None:
        return "no GPU"
    try:
        sharding = jax.sharding.SingleDeviceSharding(bench.device, memory_kind="pinned_host")
        array = jax.block_until_ready(jax.device_put(np.zeros(MIB, np.uint8), sharding))
        kind, address = c_int(), c_uint64(array.unsafe_buffer_pointer())
    except Exception as error:  # whatever the runtime says is the answer
        return f"{type(error).__name__}: {str(error)[:200]}"
    bench.cuda.enter()
    status = bench.cuda.driver.cuPointerGetAttribute(byref(kind), 2, address)  # MEMORY_TYPE
    return f"CUDA error {status}" if status else {1: "host", 2: "device"}.get(kind.value, "other")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args)
    check_content(bench)
    result = {
        **describe(args),
        "pin_seconds_per_gib": round(bench.pin_seconds / args.gib, 3),
        "pinned_host_arrays_are_on": pinned_host_kind(bench),
        "plain": {
            "store": bench.plain(BOTH[:1])[0],
            "load": bench.plain(BOTH[1:])[0],
            **dict(zip(("store_both", "load_both"), bench.plain(BOTH), strict=True)),
        },
        "copies": measure_copies(bench, args),
    }
    with bench.copier(verify=True) as (copier, woken):
        for slot in range(bench.slab.num_slots):  # so that each has a checksum
            copier.store(slot % bench.slots, slot, 0)
        collect(copier, woken, bench.slab.num_slots)
    verified = [bench.pages([each], args.seconds, verify=True)[0] for each in BOTH]
    result["verified"] = dict(zip(("store", "load"), verified, strict=True))
    sys.setswitchinterval(SWITCH_INTERVAL)
    for number in (1, 2):
        with busy(number):
            rates = [bench.pages([each], args.seconds)[0] for each in BOTH]
            result[f"busy_{number}"] = dict(zip(("store", "load"), rates, strict=True))
    result["steps"] = measure_steps(bench, args)
    bench.slab.close()
    return result


def describe(args: argparse.Namespace) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "card": device.device_kind,
        "jax": jax.__version__,
        "driver": device.client.platform_version,
        "allocator": os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"),
        "commit": commit(),
        "page_mib": args.page_mib,
        "slab_gib": args.gib,
    }


def show(result: dict[str, Any]) -> None:
    plain = result["plain"]
    table = Table(title=f"{result['card']}, pages of {result['page_mib']} MiB, GB/s")
    columns = ("chunk MiB", "depth", "store", "load", "store, both", "load, both", "small copy ms")
    for column in columns:
        table.add_column(column, justify="right")
    names = ("store", "load", "store_both", "load_both")
    table.add_row("plain", "", *(str(plain[name]) for name in names), "")
    for row in result["copies"]:
        times = [str(row.get(f"small_copy_{p}_ms", "")) for p in ("p50", "p99")]
        cells = [
            f"{row[name]} ({row[name] / plain[name]:.0%})" if name in row else "" for name in names
        ]
        chunk, depth = row["chunk_mib"] or "none", row.get("depth", "")
        table.add_row(str(chunk), str(depth), *cells, " / ".join(times))
    Console(width=120).print(table)
    rest = ("pin_seconds_per_gib", "pinned_host_arrays_are_on", "verified", "busy_1", "busy_2")
    for name in (*rest, "steps"):
        print(f"{name}: {result[name]}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="host memory")
    parser.add_argument("--page-mib", type=float, default=9.0, help="Qwen3-4B in bf16: 9")
    parser.add_argument("--chunk-mib", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--depth", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4, 8]
    )
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    result = measure(args)
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
