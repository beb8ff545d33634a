"""The emulator fails where a GPU might, and might not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tests.emulator import launch, memory


@gluon.jit
def _copy(x, ring, ready, free, STEPS: gl.constexpr):
    for step in range(STEPS):
        stage = step % 2
        mbarrier.wait(free.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 16 * 16 * 2)
        tma.async_copy_global_to_shared(x, [step * 16, 0], ready.index(stage), ring.index(stage))


@gluon.jit
def _multiply(
    ring, ready, free, out_ptr,
    STEPS: gl.constexpr, WAITS: gl.constexpr, FREES: gl.constexpr, LATE: gl.constexpr,
    BEYOND: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, 16)[:, None]
    column = gl.arange(0, 16)[None, :]
    acc = gl.zeros([16, 16], gl.float32)
    for step in range(STEPS):
        stage = step % 2
        if WAITS:
            mbarrier.wait(ready.index(stage), (step // 2) & 1)
        tile = ring.index(stage)
        acc = warpgroup_mma(tile, tile.permute((1, 0)), acc, is_async=True)
        if LATE:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if FREES:
            mbarrier.arrive(free.index(stage), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(out_ptr + row * 16 + column + BEYOND, acc)


@gluon.jit
def _squares(
    x, out_ptr, STEPS: gl.constexpr, WAITS: gl.constexpr, FREES: gl.constexpr, LATE: gl.constexpr,
    BEYOND: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 16, 16], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (ring, ready, free, out_ptr, STEPS, WAITS, FREES, LATE, BEYOND)),
            (_copy, (x, ring, ready, free, STEPS)),
        ],
        [1],
        [24],
    )


def squares(steps: int, seed: int, **flaws: Any) -> tuple[Any, Any]:
    """The sum of the products of blocks with themselves, transposed; and what it should be."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((16 * steps, 16)), jnp.bfloat16)
    out = launch.triton_call(
        launch.tensor_descriptor(x, (16, 16), None),
        kernel=_squares, name="squares", grid=(1,), num_warps=4, seed=seed,
        out_type=jax.ShapeDtypeStruct((16, 16), jnp.float32),
        STEPS=steps, **{"WAITS": True, "FREES": True, "LATE": True, "BEYOND": 0, **flaws},
    )  # fmt: skip
    blocks = np.asarray(x, np.float32).reshape(steps, 16, 16)
    return np.asarray(out), sum(block @ block.T for block in blocks)


@pytest.mark.parametrize("seed", range(10))
def test_a_kernel_that_waits_and_frees_as_it_should_is_right(seed: int) -> None:
    np.testing.assert_allclose(*squares(6, seed), rtol=1e-5, atol=1e-4)


def test_who_does_not_wait_for_a_copy_reads_what_was_there() -> None:
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(*squares(2, 0, WAITS=False, FREES=False), rtol=1e-5, atol=1e-4)


def test_a_place_that_is_freed_before_its_product_is_done_holds_other_numbers() -> None:
    with pytest.raises(AssertionError):
        for seed in range(10):
            np.testing.assert_allclose(*squares(8, seed, LATE=False), rtol=1e-5, atol=1e-4)


def test_a_wait_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.2)
    with pytest.raises(TimeoutError, match="1 of 1 have not arrived"):
        squares(4, 0, FREES=False)


def test_a_store_outside_of_its_array_is_an_error() -> None:
    with pytest.raises(IndexError, match="1 to 256 of 256"):
        squares(1, 0, BEYOND=1)
