"""Copies by a real GPU: their rate, and steps beside them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxserve.offload.copier import CudaCopier, Ring, RingPart
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab
from jaxserve_kernels.cuda_driver import check

pytestmark = pytest.mark.gpu

PAGE_BYTES = 9 << 20
"""Of Qwen3-4B in bfloat16."""
RING_SLOTS, HOST_SLOTS = 32, 64


class Card(NamedTuple):
    cuda: CudaContext
    slab: HostSlab
    store_ring: jax.Array
    load_ring: jax.Array
    copier: CudaCopier
    woken: threading.Event

    def wait(self, count: int) -> None:
        while count:
            assert self.woken.wait(30), "a copy hangs"
            self.woken.clear()
            completions = self.copier.poll()
            assert all(each.ok for each in completions), completions
            count -= len(completions)

    def store(self, rounds: int) -> None:
        for number in range(rounds * RING_SLOTS):
            self.copier.store(number % RING_SLOTS, number % RING_SLOTS, number)
        self.wait(rounds * RING_SLOTS)

    def load(self, rounds: int) -> None:
        for number in range(rounds * RING_SLOTS):
            self.copier.load(RING_SLOTS + number % RING_SLOTS, number % RING_SLOTS, number)
        self.wait(rounds * RING_SLOTS)


@pytest.fixture
def card() -> Iterator[Card]:
    cuda = CudaContext(jax.devices()[0].local_hardware_id)
    slab = HostSlab(HOST_SLOTS, PAGE_BYTES, cuda=cuda)
    make = jax.jit(lambda: jnp.zeros((RING_SLOTS, PAGE_BYTES), jnp.uint8))
    rings = [jax.block_until_ready(make()) for _ in range(2)]
    parts = [[RingPart(ring.unsafe_buffer_pointer(), PAGE_BYTES)] for ring in rings]
    both = [Ring([each], RING_SLOTS) for each in parts]
    woken = threading.Event()
    copier = CudaCopier(slab, *both, cuda=cuda, wake=woken.set)
    yield Card(cuda, slab, *rings, copier, woken)
    assert copier.close()
    slab.close()


def seconds(function: Callable[[], None]) -> float:
    """Returns the shortest time of four calls."""
    found: list[float] = []
    for _ in range(4):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="a rate is measured alone, without -n",
)
@pytest.mark.parametrize("direction", ["store", "load"])
def test_pages_are_copied_at_the_rate_of_the_link(card: Card, direction: str) -> None:
    driver, size = card.cuda.driver, RING_SLOTS * PAGE_BYTES
    card.cuda.enter()
    stream = c_void_p()
    check(driver.cuStreamCreate(byref(stream), 1), "cuStreamCreate")
    host = c_void_p(card.slab.address(0))
    ring = card.store_ring if direction == "store" else card.load_ring
    device = c_uint64(ring.unsafe_buffer_pointer())

    def plain() -> None:
        if direction == "store":
            check(driver.cuMemcpyDtoHAsync_v2(host, device, c_size_t(size), stream), "copy")
        else:
            check(driver.cuMemcpyHtoDAsync_v2(device, host, c_size_t(size), stream), "copy")
        check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    of_link = size / seconds(plain)
    check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy")
    copy = card.store if direction == "store" else card.load
    of_pages = 4 * size / seconds(lambda: copy(4))
    print(f"{direction}: plain {of_link / 1e9:.1f} GB/s, pages {of_pages / 1e9:.1f} GB/s")
    assert of_pages >= 0.85 * of_link


def test_steps_and_copies_do_not_disturb_each_other_s_content(card: Card) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return x

    x = jnp.full((4096, 4096), 0.01, jnp.bfloat16)
    expected = jax.block_until_ready(step(x))
    for slot in range(HOST_SLOTS):
        card.slab.slot(slot)[:] = bytes([slot + 1]) * PAGE_BYTES
    stop, wrong = threading.Event(), list[int]()

    def run_steps() -> None:
        number = 0
        while not stop.is_set():
            if not bool(jnp.array_equal(step(x), expected)):
                wrong.append(number)
            number += 1

    thread = threading.Thread(target=run_steps)
    thread.start()
    try:
        for _ in range(10):
            for number in range(RING_SLOTS):
                card.copier.load(RING_SLOTS + number, number, number)
                card.copier.store(number, number, RING_SLOTS + number)
            card.wait(2 * RING_SLOTS)
    finally:
        stop.set()
        thread.join()
    assert not wrong
    sums = jax.jit(lambda ring: ring.reshape(RING_SLOTS, -1).astype(jnp.int32).max(1))
    for begin in (0, PAGE_BYTES - 100):
        found = sums(card.load_ring[:, begin : begin + 100])
        assert found.tolist() == [RING_SLOTS + slot + 1 for slot in range(RING_SLOTS)]
    assert all(not any(card.slab.slot(slot)[:100]) for slot in range(RING_SLOTS))  # zeros, stored
