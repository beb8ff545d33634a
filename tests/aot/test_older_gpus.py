"""Quantised weights and caches on GPUs that know no e4m3, compiled without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.kv_format import attend, named
from jaxserve_kernels.matmul import gated_linear, linear
from jaxserve_kernels.target import Target
from tests.kernels.kv_steps import EPS, LAYER, Sequences

pytest.importorskip("triton", reason="Triton is not installed")

FORMATS: dict[str, Callable[[Any], Any]] = {
    "int4": weights.quantize_int4,
    "int4-g32": functools.partial(weights.quantize_int4, group=32),
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}

A100 = Target.for_gpu(80)


@pytest.mark.parametrize("tokens", [8, 32, 200, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_any_number_of_tokens_compile_for_an_a100(name: str, tokens: int) -> None:
    """Triton refuses e4m3 there."""
    plain = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    weight = jax.eval_shape(FORMATS[name], plain)
    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)

    def both(x: Any, weight: Any) -> tuple[Any, Any]:
        return linear(x, weight, target=A100), gated_linear(x, weight, target=A100)

    traced = jax.jit(both).trace(x, weight)
    traced.lower(lowering_platforms=("cuda",))
    kernels = "Weight" in str(traced.jaxpr)  # in their names
    assert kernels == (tokens <= 256 or name == "int8")


@pytest.mark.parametrize(("counts", "tile_size"), [((1, 1), 1), ((20, 1), 16)])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_caches_of_8_bits_compile_for_an_a100(
    name: str, counts: tuple[int, int], tile_size: int
) -> None:
    """Decodes, and a chunk beside one."""
    sequences = Sequences(lengths=(40, 70), page_size=64, head_dim=128, dtype="bfloat16")
    step = sequences.step((3, 65), counts, tile_size, apart=tile_size > 1)
    kv = named(name).allocate(sequences.shape, jnp.bfloat16)
    qkv, tables = sequences.projections(step)

    def attention(qkv: Any, kv: Any, tables: Any, step: Any) -> Any:
        return attend(
            qkv,
            kv,
            LAYER,
            sequences.heads,
            tables,
            step,
            eps=EPS,
            tile_size=tile_size,
            dtype=sequences.dtype,
            target=A100,
        )

    traced = jax.jit(attention).trace(qkv, kv, tables, step)
    traced.lower(lowering_platforms=("cuda",))
