"""The emulator fails where a GPU might, and might not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jaxserve_kernels.target import Target
from tests.emulator import launch, memory
from tests.emulator.order import Race
from tests.emulator.targets import HOPPER, PDL


@gluon.jit
def _copy(x, ring, ready, free, STEPS: gl.constexpr):
    for step in range(STEPS):
        stage = step % 2
        mbarrier.wait(free.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 16 * 16 * 2)
        tma.async_load(x, [step * 16, 0], ready.index(stage), ring.index(stage))


@gluon.jit
def _multiply(
    ring, ready, free, out_ptr,
    STEPS: gl.constexpr, WAITS: gl.constexpr, FREES: gl.constexpr, LATE: gl.constexpr,
    STORES: gl.constexpr, FENCES: gl.constexpr, BEYOND: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, 16)[:, None]
    column = gl.arange(0, 16)[None, :]
    acc = gl.zeros([16, 16], gl.float32)
    for step in range(STEPS):
        stage = step % 2
        if WAITS:
            mbarrier.wait(ready.index(stage), (step // 2) & 1)
        tile = ring.index(stage)
        if STORES:
            tile.store(tile.load())
        if FENCES:
            fence_async_shared()
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
    STORES: gl.constexpr, FENCES: gl.constexpr, BEYOND: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 16, 16], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, ready, free, out_ptr, STEPS, WAITS, FREES, LATE, STORES, FENCES, BEYOND,
            )),
            (_copy, (x, ring, ready, free, STEPS)),
        ],
        [1],
        [24],
    )  # fmt: skip


_SOUND = {
    "WAITS": True, "FREES": True, "LATE": True, "STORES": False, "FENCES": False, "BEYOND": 0,
}  # fmt: skip


_EITHER = "_multiply reads where a copy may still write|_copy writes where _multiply may still read"
"""Whatever happens first."""


def squares(steps: int, seed: int, **flaws: Any) -> tuple[Any, Any]:
    """The sum of the products of blocks with themselves, transposed; and what it should be."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((16 * steps, 16)), jnp.bfloat16)
    out = launch.triton_call(
        launch.tensor_descriptor(x, (16, 16), None),
        kernel=_squares, name="squares", target=HOPPER, grid=(1,), num_warps=4, seed=seed,
        out_type=jax.ShapeDtypeStruct((16, 16), jnp.float32),
        STEPS=steps, **{**_SOUND, **flaws},
    )  # fmt: skip
    blocks = np.asarray(x, np.float32).reshape(steps, 16, 16)
    return np.asarray(out), sum(block @ block.T for block in blocks)


@pytest.mark.parametrize("seed", range(10))
def test_a_kernel_that_waits_and_frees_as_it_should_is_right(seed: int) -> None:
    np.testing.assert_allclose(*squares(6, seed), rtol=1e-5, atol=1e-4)


def test_who_does_not_wait_reads_what_a_copy_may_still_write() -> None:
    with pytest.raises(Race, match=_EITHER):
        squares(2, 0, WAITS=False, FREES=False)


def test_a_place_must_not_be_freed_before_its_product_is_done() -> None:
    for seed in range(10):
        with pytest.raises(Race, match=_EITHER):
            squares(8, seed, LATE=False)


def test_tensor_cores_see_what_was_stored_after_a_fence() -> None:
    with pytest.raises(Race, match="_multiply multiplies what was stored and not fenced"):
        squares(2, 0, STORES=True)
    np.testing.assert_allclose(*squares(2, 0, STORES=True, FENCES=True), rtol=1e-5, atol=1e-4)


def test_a_wait_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.2)
    with pytest.raises(TimeoutError, match="1 of 1 have not arrived"):
        squares(4, 0, FREES=False)


def test_a_store_outside_of_its_array_is_an_error() -> None:
    with pytest.raises(IndexError, match="1 to 256 of 256"):
        squares(1, 0, BEYOND=1)


@gluon.jit
def _double(
    x_ptr, out_ptr, READS: gl.constexpr, WAITS: gl.constexpr, WRITES: gl.constexpr,
    EARLY: gl.constexpr = False,
):  # fmt: skip
    place = gl.arange(0, 16)
    x = 0
    if READS:
        x = gl.load(x_ptr + place)
    if WRITES:
        gl.store(out_ptr + place, x)
    if EARLY and WAITS:
        gdc_wait()
    gl.store(out_ptr + place, 2 * gl.load(x_ptr + place))


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"READS": True}, "double reads x_ptr before"),
        ({"WRITES": True}, "double writes its results before"),
        ({"WAITS": False}, "double reads x_ptr before"),
        ({}, None),
    ],
)
def test_a_kernel_of_a_chain_waits_for_those_before_it(
    flaw: dict[str, bool], message: str | None
) -> None:
    x = jnp.arange(16, dtype=jnp.float32)
    flaws = {"READS": False, "WAITS": True, "WRITES": False, **flaw}

    def double(target: Target) -> Any:
        return launch.triton_call(
            x, kernel=_double, name="double", target=target, grid=(1,), num_warps=1,
            out_type=jax.ShapeDtypeStruct((16,), jnp.float32), **flaws,
        )  # fmt: skip

    np.testing.assert_array_equal(double(HOPPER), 2 * x)  # alone it may do as it likes
    with pytest.raises(Race, match=message) if message else nullcontext():
        np.testing.assert_array_equal(double(PDL), 2 * x)


@gluon.jit
def _nothing(x_ptr, out_ptr, EARLY: gl.constexpr = False):
    pass


def test_a_kernel_of_a_chain_does_not_end_before_those_before_it() -> None:
    with pytest.raises(Race, match="nothing may end before the kernels before it"):
        launch.triton_call(
            jnp.zeros(1), kernel=_nothing, name="nothing", target=PDL, grid=(2,),
            out_type=jax.ShapeDtypeStruct((1,), jnp.float32),
        )  # fmt: skip


@gluon.jit
def _start_dependents(x_ptr, out_ptr, LATE: gl.constexpr, EARLY: gl.constexpr = False):
    if not LATE:
        gdc_launch_dependents()
    gdc_wait()
    gdc_launch_dependents()
    gl.store(out_ptr, gl.load(x_ptr))


@gluon.jit
def _read_early(early_scores_ptr, out_ptr, EARLY: gl.constexpr = False):
    x = gl.load(early_scores_ptr)
    gdc_wait()
    gl.store(out_ptr, x)


@pytest.mark.parametrize("late", [False, True])
def test_what_the_last_kernel_but_one_wrote_is_there_if_the_last_one_starts_others_late(
    late: bool,
) -> None:
    x, one = jnp.ones(1), jax.ShapeDtypeStruct((1,), jnp.float32)
    call: dict[str, Any] = {"name": "", "target": PDL, "out_type": one, "grid": (2,)}
    launch.triton_call(x, kernel=_start_dependents, LATE=late, **call)
    with nullcontext() if late else pytest.raises(Race, match="reads early_scores_ptr"):
        launch.triton_call(x, kernel=_read_early, **call)


@gluon.jit
def _hand_on(
    out_ptr, flag_ptr, RELEASE: gl.constexpr, ACQUIRE: gl.constexpr, FLAG_FIRST: gl.constexpr
):
    program = gl.program_id(0)
    place = out_ptr + program * 16 + gl.arange(0, 16)
    before = 1
    if program > 0:
        while gl.atomic_add(flag_ptr + program - 1, 0, sem=ACQUIRE, scope="gpu") == 0:
            pass
        before = gl.load(place - 16)
    if FLAG_FIRST:
        gl.atomic_xchg(flag_ptr + program, 1, sem=RELEASE, scope="gpu")
    gl.store(place, before + before)
    if not FLAG_FIRST:
        gl.atomic_xchg(flag_ptr + program, 1, sem=RELEASE, scope="gpu")


@pytest.mark.parametrize(
    "flaw", [{}, {"RELEASE": "relaxed"}, {"ACQUIRE": "relaxed"}, {"FLAG_FIRST": True}], ids=str
)
def test_programs_know_by_flags_what_others_have_left(flaw: dict[str, Any]) -> None:
    def doubled() -> Any:
        return launch.triton_call(
            kernel=_hand_on, name="hand_on", target=HOPPER, grid=(3,), num_warps=1,
            zeroed_outputs=(1,), together=True,
            out_type=(
                jax.ShapeDtypeStruct((3, 16), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32),
            ),
            **{"RELEASE": "release", "ACQUIRE": "acquire", "FLAG_FIRST": False, **flaw},
        )[0]  # fmt: skip

    if flaw:
        with pytest.raises(Race, match=r"hand_on (read|write)s where hand_on may"):
            doubled()
    else:
        np.testing.assert_array_equal(doubled(), [[2] * 16, [4] * 16, [8] * 16])


@gluon.jit
def _add_last(
    out_ptr, partial_ptr, ended_ptr, SEM: gl.constexpr, COUNT_FIRST: gl.constexpr
):  # fmt: skip
    program = gl.program_id(0)
    place = partial_ptr + gl.arange(0, 16)
    before = 0
    if COUNT_FIRST:
        before = gl.atomic_add(ended_ptr, 1, sem=SEM, scope="gpu")
    gl.store(place + program * 16, gl.arange(0, 16) + program)
    if not COUNT_FIRST:
        before = gl.atomic_add(ended_ptr, 1, sem=SEM, scope="gpu")
    if before == 1:
        gl.store(out_ptr + gl.arange(0, 16), gl.load(place) + gl.load(place + 16))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "flaw",
    [{}, {"SEM": "relaxed"}, {"SEM": "acquire"}, {"SEM": "release"}, {"COUNT_FIRST": True}],
    ids=str,
)
def test_who_ends_last_knows_by_a_count_what_others_have_left(
    flaw: dict[str, Any], seed: int
) -> None:
    """Though programs run one after the other."""

    def added() -> Any:
        return launch.triton_call(
            kernel=_add_last, name="add_last", target=HOPPER, grid=(2,), num_warps=1, seed=seed,
            zeroed_outputs=(2,),
            out_type=[jax.ShapeDtypeStruct(each, jnp.int32) for each in ((16,), (2, 16), (1,))],
            **{"SEM": "acq_rel", "COUNT_FIRST": False, **flaw},
        )[0]  # fmt: skip

    if flaw:
        with pytest.raises(Race, match="add_last reads where add_last may still write"):
            added()
    else:
        np.testing.assert_array_equal(added(), np.arange(16) * 2 + 1)
