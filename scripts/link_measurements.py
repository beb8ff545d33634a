"""Runs the measurements of scripts/bench_link.py, in a child process that may die.

    python scripts/link_measurements.py SETTINGS REPORT NAME...

SETTINGS is a JSON file. When a measurement, or a part of one, begins, the script appends a line of
JSON to the file REPORT; when a measurement ends, a line with its result.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from ctypes import byref, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from jaxserve.startup import environment

environment.prepare(0.5)

import jax
import jax.numpy as jnp

from jaxserve.offload.copier import CpuCopier, CudaCopier, PageCopier, Ring, RingPart
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.links import Direction
from jaxserve.offload.slab import HostSlab
from jaxserve_kernels.cuda_driver import check

MIB, GIB = 1 << 20, 1 << 30
BOTH = (Direction.STORE, Direction.LOAD)
SWITCH_INTERVAL = 0.001
"""Seconds for `sys.setswitchinterval`, as in the engine."""


class Report:
    """The report file, which the parent process reads."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def begin(self, step: str) -> None:
        """Records the beginning of a step, in which the process may die."""
        print(json.dumps({"step": step}), file=self._file)

    def end(self, name: str, result: Any) -> None:
        """Records the result of a measurement."""
        print(json.dumps({"name": name, "result": result}), file=self._file)


class Bench:
    """A slab, a ring for each direction, and the link between them."""

    def __init__(self, args: argparse.Namespace, report: Report):
        self.args, self.report = args, report
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
    def copier(
        self,
        *,
        chunk: int | None = None,
        depths: tuple[int, int] | None = None,
        verify: bool = False,
    ) -> Generator[tuple[PageCopier, threading.Event]]:
        woken = threading.Event()
        options: dict[str, Any] = {"wake": woken.set, "verify": verify, "chunk_bytes": chunk}
        parts = [[RingPart(address, self.page_bytes)] for address in self.addresses]
        rings = [Ring([each], self.slots) for each in parts]
        copier: PageCopier
        if self.cuda is None:
            copier = CpuCopier(self.slab, *rings, **options)
        else:
            copier = CudaCopier(self.slab, *rings, cuda=self.cuda, depths=depths, **options)
        try:
            yield copier, woken
        finally:
            if not copier.close():
                sys.exit("copies hang")

    def plain(self, directions: Sequence[Direction]) -> list[float]:
        """Returns the GB/s of each direction, for simultaneous copies as large as a ring."""
        size = self.slots * self.page_bytes
        rounds = [self._plain(directions, size) for _ in range(4)]
        return [rate(size, min(seconds)) for seconds in zip(*rounds, strict=True)]

    def _plain(self, directions: Sequence[Direction], size: int) -> list[float]:
        if self.cuda is None:
            begin = time.perf_counter()
            ctypes.memmove(self.addresses[0], self.slab.address(0), size)
            return [time.perf_counter() - begin] * len(directions)
        driver = self.cuda.driver
        self.cuda.enter()
        streams = [c_void_p() for _ in directions]
        for stream in streams:
            check(driver.cuStreamCreate(byref(stream), 1), "cuStreamCreate")
        begin = time.perf_counter()
        for direction, stream in zip(directions, streams, strict=True):
            ring = c_uint64(self.addresses[BOTH.index(direction)])
            # Each direction uses its own half of the slab.
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
        """Returns the GB/s of each direction, with a ring's number of pages always queued."""
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
        """Submits a page. Stores go to the first half of the slab, loads come from the second."""
        half = self.slab.num_slots // 2
        if direction is Direction.STORE:
            copier.store(number % self.slots, number % half, 0)
        else:
            copier.load(half + number % half, number % self.slots, 1)


def is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)


class Small:
    """Copies 4 KiB to the host on a separate stream, like a step's tokens."""

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
        """Returns a summary of the milliseconds so far, and resets them."""
        times, self._times = sorted(self._times), []
        if not times:
            return {}
        return {
            "small_copy_p50_ms": round(1e3 * statistics.median(times), 3),
            "small_copy_p99_ms": round(1e3 * times[int(0.99 * (len(times) - 1))], 3),
        }


@contextlib.contextmanager
def busy(number: int) -> Generator[None]:
    """Context manager: runs `number` threads that execute Python all the time."""
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


def measure_copies(bench: Bench) -> list[dict[str, Any]]:
    args, small = bench.args, Small(bench)
    for _ in range(200):
        small()
    found: list[dict[str, Any]] = [{"chunk_mib": None, **small.summary()}]
    for chunk in args.chunk_mib:
        for depth in args.depth:
            bench.report.begin(f"copies, chunks of {chunk} MiB, {depth} at once")
            options: dict[str, Any] = {"chunk": int(chunk * MIB), "depths": (depth, depth)}
            row: dict[str, Any] = {"chunk_mib": chunk, "depth": depth}
            row["store"] = bench.pages(BOTH[:1], args.seconds, small, **options)[0]
            row |= small.summary()
            row["load"] = bench.pages(BOTH[1:], args.seconds, **options)[0]
            row["store_both"], row["load_both"] = bench.pages(BOTH, args.seconds, **options)
            found.append(row)
    return found


def measure_steps(bench: Bench) -> dict[str, float]:
    """Times a step of large products, which takes several milliseconds."""
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
    stored, loaded = bench.pages(BOTH, 4 * bench.args.seconds, run)
    return {
        "alone_ms": round(1e3 * alone, 3),
        "beside_copies_ms": round(1e3 * statistics.median(times), 3),
        "store": stored,
        "load": loaded,
    }


def check_content(bench: Bench) -> None:
    """Raises SystemExit if pages differ after they were loaded and stored again."""
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


def describe(bench: Bench) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "card": device.device_kind,
        "jax": jax.__version__,
        "driver": device.client.platform_version,
        "allocator": os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"),
        "page_mib": bench.args.page_mib,
        "slab_gib": bench.args.gib,
        "pin_seconds_per_gib": round(bench.pin_seconds / bench.args.gib, 3),
    }


def measure_plain(bench: Bench) -> dict[str, float]:
    found = {"store": bench.plain(BOTH[:1])[0], "load": bench.plain(BOTH[1:])[0]}
    return found | dict(zip(("store_both", "load_both"), bench.plain(BOTH), strict=True))


def measure_verified(bench: Bench) -> dict[str, float]:
    with bench.copier(verify=True) as (copier, woken):
        for slot in range(bench.slab.num_slots):  # so that each has a checksum
            copier.store(slot % bench.slots, slot, 0)
        collect(copier, woken, bench.slab.num_slots)
    rates = [bench.pages([each], bench.args.seconds, verify=True)[0] for each in BOTH]
    return dict(zip(("store", "load"), rates, strict=True))


def measure_busy(bench: Bench) -> list[dict[str, float]]:
    sys.setswitchinterval(SWITCH_INTERVAL)
    found: list[dict[str, float]] = []
    for number in (1, 2):
        with busy(number):
            rates = [bench.pages([each], bench.args.seconds)[0] for each in BOTH]
        found.append(dict(zip(("store", "load"), rates, strict=True)))
    return found


MEASUREMENTS: dict[str, Callable[[Bench], Any]] = {
    "setting": describe,
    "content": check_content,
    "plain": measure_plain,
    "copies": measure_copies,
    "verified": measure_verified,
    "busy": measure_busy,
    "steps": measure_steps,
}


def main() -> None:
    faulthandler.enable()
    settings, path, *names = sys.argv[1:]
    report = Report(Path(path))
    report.begin("start")
    bench = Bench(argparse.Namespace(**json.loads(Path(settings).read_text())), report)
    for name in names:
        report.begin(name)
        report.end(name, MEASUREMENTS[name](bench))
    report.begin("end")
    bench.slab.close()


if __name__ == "__main__":
    main()
