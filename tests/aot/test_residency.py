"""Programs that wait for each other all run at once, or their kernel is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve_kernels import ptxas, residency, weights
from jaxserve_kernels.matmul import gated_linear
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_call import triton_call

HOPPER = Target.for_gpu(90)
SHARING = {
    "gated_linear_stream_k_Int4Weight": (64, weights.quantize_int4),
    "gated_linear_hopper_Nvfp4Weight": (256, weights.quantize_nvfp4),
    "gated_linear_hopper_Int4Weight": (512, weights.quantize_int4),
}
"""Kernels whose programs leave sums to others: tokens, and a format."""


def gated_call(
    name: str, tokens: int, shape: tuple[int, int], quantize: Any, target: Target
) -> Any:
    """The traced call of a kernel, for gate and up of a shape."""
    weight = jax.eval_shape(quantize, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((tokens, shape[1]), jnp.bfloat16)
    program = jax.make_jaxpr(lambda x, w: gated_linear(x, w, target=target))(x, weight)
    (found,) = (each for each in program.eqns if each.params.get("name") == name)
    return found


@pytest.mark.parametrize("name", SHARING)
def test_grids_of_kernels_that_hand_sums_on_fit(name: str) -> None:
    """For gate and up of Qwen3-4B."""
    tokens, quantize = SHARING[name]
    target = HOPPER.replace(checked=False, pdl=tokens <= 64)
    call = gated_call(name, tokens, (19_456, 2560), quantize, target)
    assert call.params["zeroed_outputs"] and call.params["backend_options"]["together"]
    described = describe(call)
    programs = described.grid[0] * described.grid[1] * described.grid[2]
    at_once = residency.programs_at_once(described.code, target.gpu)
    assert programs <= at_once and at_once % target.gpu.multiprocessors == 0


@pytest.mark.parametrize("tokens", [17, 32])
@pytest.mark.parametrize("name", ["Int4", "Int8", "Fp8", "Nvfp4", "Mxfp4"])
def test_whole_tiles_fill_a_wave_before_halves(name: str, tokens: int) -> None:
    """Of gate and up of Qwen3.6-27B, 544 tiles. No program waits for another."""
    quantize = getattr(weights, f"quantize_{name.lower()}")
    target = HOPPER.replace(checked=False, pdl=True)
    full = f"gated_linear_streaming_{name}Weight"
    call = gated_call(full, tokens, (34_816, 5120), quantize, target)
    assert call.params["zeroed_outputs"] and not call.params["backend_options"]["together"]
    described = describe(call)
    at_once = residency.programs_at_once(described.code, target.gpu)
    assert at_once == 396 and described.grid == (at_once + 2 * (544 - at_once), 1, 1)


@triton.jit
def _kernel(out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + at, at)


def small_call(programs: int, *, together: bool, block: int = 32) -> jax.Array:
    """On a GPU that has room for 32 programs."""
    small = HOPPER.replace(device=replace(HOPPER.gpu, multiprocessors=2))
    return triton_call(
        kernel=_kernel, name="kernel", target=small, together=together,
        out_type=jax.ShapeDtypeStruct((programs * block,), jnp.int32),
        grid=(programs,), num_warps=4, BLOCK=block,
    )  # fmt: skip


def test_a_grid_that_does_not_fit_is_refused() -> None:
    def lower(programs: int, *, together: bool) -> None:
        traced = jax.jit(lambda: small_call(programs, together=together)).trace()
        traced.lower(lowering_platforms=("cuda",))

    lower(32, together=True)
    lower(1000, together=False)
    with pytest.raises(ValueError, match="of 33 only 32 run at once on 2 multiprocessors"):
        lower(33, together=True)


def test_the_calls_of_a_kernel_ask_the_assembler_once() -> None:
    """Each layer of a model has some: 256 in a prefill step of Qwen3.5-27B in int4."""

    def calls() -> list[jax.Array]:
        return [small_call(programs, together=True, block=64) for programs in (3, 4, 5)]

    before = ptxas.registers.cache_info().misses
    jax.jit(calls).trace().lower(lowering_platforms=("cuda",))
    assert ptxas.registers.cache_info().misses == before + 1


def test_what_a_program_takes_decides_how_many_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(warps: int, shared_bytes: int, registers: int | None) -> int:
        monkeypatch.setattr(ptxas, "registers", lambda *_: registers)
        code = ptxas.Code("kernel", warps, shared_bytes, "", 90)
        device = replace(HOPPER.gpu, multiprocessors=1)
        return residency.programs_at_once(code, device)

    assert fit(4, 0, 32) == 16
    assert fit(16, 0, 32) == 4  # threads
    assert fit(4, 75 * 1024, 32) == 3 and fit(4, 76 * 1024, 32) == 2  # shared memory
    assert fit(8, 0, 128) == 2 and fit(8, 0, 129) == 1  # registers
    assert fit(8, 0, None) == 1  # nobody knows: as many as a thread may have
