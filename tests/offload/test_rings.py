"""Pages of a real cache, through rings that programs of jax fill and empty. On a GPU the same
tests copy with its copy engines."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.offload.copier import Completion, CpuCopier, CudaCopier, PageCopier, Ring, RingPart
from jaxserve.offload.cuda import CudaContext
from jaxserve.offload.slab import HostSlab

LAYERS, PAGES, TOKENS, WIDTH = 3, 24, 8, 160
RING_SLOTS = 4
SHAPES = {"codes": ((LAYERS, TOKENS, WIDTH), jnp.bfloat16), "scales": ((LAYERS, 5), jnp.float32)}
"""Of a page: two arrays, as in a quantised format."""


def page_bytes() -> dict[str, int]:
    return {name: int(np.prod(s)) * jnp.dtype(d).itemsize for name, (s, d) in SHAPES.items()}


Arrays = dict[str, jax.Array]


@functools.partial(jax.jit, donate_argnums=1)
def gather(cache: Arrays, ring: Arrays, page: jax.Array, slot: jax.Array) -> Arrays:
    return {name: ring[name].at[slot].set(cache[name][:, page]) for name in cache}


@functools.partial(jax.jit, donate_argnums=0)
def scatter(cache: Arrays, ring: Arrays, page: jax.Array, slot: jax.Array) -> Arrays:
    return {name: cache[name].at[:, page].set(ring[name][slot]) for name in cache}


def make_cache(seed: int) -> Arrays:
    @jax.jit
    def make() -> Arrays:
        keys = jax.random.split(jax.random.key(seed), len(SHAPES))
        return {
            name: jax.random.normal(key, (shape[0], PAGES, *shape[1:]), dtype)
            for key, (name, (shape, dtype)) in zip(keys, SHAPES.items(), strict=True)
        }

    return make()


def make_ring() -> Arrays:
    @jax.jit
    def make() -> Arrays:
        return {name: jnp.zeros((RING_SLOTS, *s), d) for name, (s, d) in SHAPES.items()}

    return make()


def parts(ring: Arrays) -> Ring:
    sizes = page_bytes()
    found = [RingPart(ring[name].unsafe_buffer_pointer(), sizes[name]) for name in SHAPES]
    return Ring([found], RING_SLOTS)


class Tier:
    """All pages of a cache go out and come back in another order."""

    def __init__(self, copier_of: Any):
        self.cache, self.store_ring, self.load_ring = make_cache(1), make_ring(), make_ring()
        jax.block_until_ready((self.cache, self.store_ring, self.load_ring))
        self.addresses = parts(self.store_ring), parts(self.load_ring)
        self.woken = threading.Event()
        self.slab, self.copier = copier_of(*self.addresses, self.woken.set)

    def wait(self, count: int) -> list[Completion]:
        """Returns at least so many."""
        found: list[Completion] = []
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            self.woken.wait(0.1)
            self.woken.clear()
            found += self.copier.poll()
        assert len(found) >= count
        assert all(each.ok for each in found), found
        return found

    def store_all(self) -> None:
        """With gathers of later pages running while earlier ones are copied."""
        free, begun = list(range(RING_SLOTS)), {}
        for page in range(PAGES):
            while not free:
                free += [begun.pop(each.tag) for each in self.wait(1)]
            slot = free.pop()
            self.store_ring = gather(self.cache, self.store_ring, np.int32(page), np.int32(slot))
            jax.block_until_ready(self.store_ring)
            begun[page] = slot
            self.copier.store(slot, page, page)
            # The next gather writes to another slot, of the same memory.
            assert parts(self.store_ring) == self.addresses[0]
        self.wait(len(begun))

    def load_all(self, moved: list[int]) -> None:
        """Page p goes to `moved[p]`."""
        for first in range(0, PAGES, RING_SLOTS):
            pages = range(first, first + RING_SLOTS)
            for page in pages:
                self.copier.load(page, page - first, page)
            for completion in self.wait(RING_SLOTS):
                page, slot = moved[completion.tag], completion.tag - first
                self.cache = scatter(self.cache, self.load_ring, np.int32(page), np.int32(slot))
            jax.block_until_ready(self.cache)
            assert parts(self.load_ring) == self.addresses[1]


@pytest.fixture
def tier() -> Iterator[Tier]:
    def build(store: Any, load: Any, wake: Any) -> tuple[HostSlab, PageCopier]:
        size = sum(page_bytes().values())
        if jax.default_backend() == "gpu":
            cuda = CudaContext(jax.devices()[0].local_hardware_id)
            slab = HostSlab(PAGES, size, cuda=cuda)
            return slab, CudaCopier(slab, store, load, cuda=cuda, wake=wake, verify=True)
        slab = HostSlab(PAGES, size)
        return slab, CpuCopier(slab, store, load, wake=wake, verify=True)

    tier = Tier(build)
    yield tier
    assert tier.copier.close()
    tier.slab.close()


def restore_elsewhere(tier: Tier) -> None:
    expected = jax.tree.map(np.array, tier.cache)
    tier.store_all()
    moved = [int(page) for page in np.random.default_rng(5).permutation(PAGES)]
    tier.cache = make_cache(2)
    tier.load_all(moved)
    for name, content in tier.cache.items():
        np.testing.assert_array_equal(np.array(content)[:, moved], expected[name])


def test_pages_come_back_bit_for_bit(tier: Tier) -> None:
    restore_elsewhere(tier)


@pytest.mark.gpu
def test_pages_come_back_bit_for_bit_from_a_gpu(tier: Tier) -> None:
    assert isinstance(tier.copier, CudaCopier), "no GPU"
    for _ in range(10):
        restore_elsewhere(tier)


def test_a_page_is_its_arrays_one_after_another(tier: Tier) -> None:
    tier.store_all()
    codes, scales = page_bytes().values()
    content = np.frombuffer(tier.slab.slot(3), np.uint8)
    expected = np.ascontiguousarray(np.array(tier.cache["codes"])[:, 3])
    np.testing.assert_array_equal(content[:codes], expected.view(np.uint8).reshape(-1))
    expected = np.ascontiguousarray(np.array(tier.cache["scales"])[:, 3])
    np.testing.assert_array_equal(content[codes:], expected.view(np.uint8).reshape(-1))
    assert len(content) == codes + scales
