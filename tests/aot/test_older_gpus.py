"""Products with quantised weights on GPUs that do not multiply e4m3, compiled without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels import target, weights
from jaxserve_kernels.matmul import gated_linear, linear

pytest.importorskip("triton", reason="Triton is not installed")

FORMATS: dict[str, Callable[[Any], Any]] = {
    "int4": weights.quantize_int4,
    "int4-g32": functools.partial(weights.quantize_int4, group=32),
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}


@pytest.mark.parametrize("tokens", [8, 32, 200, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_any_number_of_tokens_compile_for_an_a100(name: str, tokens: int) -> None:
    """Triton refuses e4m3 there."""
    plain = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    weight = jax.eval_shape(FORMATS[name], plain)
    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)

    def both(x: Any, weight: Any) -> tuple[Any, Any]:
        return linear(x, weight), gated_linear(x, weight)

    with target.use(target.Target("triton", 80, "NVIDIA A100-SXM4-80GB")):
        traced = jax.jit(both).trace(x, weight)
        traced.lower(lowering_platforms=("cuda",))
    kernels = "Weight" in str(traced.jaxpr)  # in their names
    assert kernels == (tokens <= 256 or name == "int8")
