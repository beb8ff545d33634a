"""A new format of weights (`tests/int6.py`) is known to the choice, and its kernel compiles."""

from __future__ import annotations

import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

import jax
import jax.numpy as jnp

from jaxserve_kernels.matmul import gated_linear, linear
from jaxserve_kernels.op import Choice
from jaxserve_kernels.target import Target
from tests.int6 import quantize_int6

WEIGHT = jax.eval_shape(quantize_int6, jax.ShapeDtypeStruct((256, 512), jnp.float32))


@pytest.mark.parametrize(
    ("tokens", "pdl", "name"),
    [(5, False, "triton"), (5, True, "triton"), (300, False, "dequantise")],
)
def test_the_choice_names_it(tokens: int, pdl: bool, name: str) -> None:
    seen: list[Choice] = []
    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
    target = Target.for_gpu(90).replace(checked=False, pdl=pdl, observe=seen.append)
    jax.make_jaxpr(lambda x, w: gated_linear(x, w, target=target))(x, WEIGHT)
    assert seen[0].operation == "gated_linear_Int6Weight"
    assert seen[0].implementation.name == name
    assert dict(seen[0].refused)["triton_streaming"]


def test_the_kernel_compiles_for_a_card() -> None:
    x = jax.ShapeDtypeStruct((5, 512), jnp.bfloat16)
    traced = jax.jit(lambda x, w: linear(x, w, target=Target.for_gpu(80))).trace(x, WEIGHT)
    traced.lower(lowering_platforms=("cuda",))
    assert "linear_Int6Weight" in str(traced.jaxpr)
