"""Steps that compute a little outside of kernels: their kernels are launched as chains."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import inspect, missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.experts import ExpertWeights, hopper
from jaxserve_kernels.pdl.describe import Description, describe
from jaxserve_kernels.target import Target
from jaxserve_kernels.tensor_map import TensorMap

HOPPER = Target.for_gpu(90).replace(checked=False)


def described(function: Any, *shapes: Any) -> list[Description]:
    """The kernels that a function calls."""
    equations = jax.make_jaxpr(function)(*shapes).jaxpr.eqns
    return [describe(each) for each in equations if each.primitive.name == "triton_kernel_call"]


def first_instruction(ptx: str) -> str:
    body = ptx[re.search(r"\.entry [^{]*\{", ptx).end() :]  # pyright: ignore[reportOptionalMemberAccess]
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    return next(line for line in lines if line and not line.startswith("."))


def test_kernels_wait_for_the_one_before_at_once_unless_they_know_better() -> None:
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    for early in (False, True):
        target = HOPPER.replace(pdl=early)
        (found,) = described(
            lambda x, w, target=target: add_rms_norm(x, x[None], w, 1e-6, target=target), x, weight
        )
        assert found.early == early
        first = first_instruction(found.chained.ptx)
        assert (first == "griddepcontrol.wait;") != early


def test_a_chain_describes_arrays_that_tma_copies() -> None:
    experts, embed, width = 4, 256, 128
    w = ExpertWeights(
        gate_up=jax.ShapeDtypeStruct((experts, 2 * width, embed), jnp.bfloat16),
        down=jax.ShapeDtypeStruct((experts, embed, width), jnp.bfloat16),
    )
    ids = jax.ShapeDtypeStruct((512, 2), jnp.int32)
    found = described(
        lambda x, ids, weights, w: hopper.experts(x, ids, weights, w, "silu", target=HOPPER),
        jax.ShapeDtypeStruct((512, embed), jnp.bfloat16),
        ids,
        jax.ShapeDtypeStruct((512, 2), jnp.float32),
        w,
    )
    down = found[-1]
    maps = [each for each in down.numbers if isinstance(each, TensorMap)]
    assert tuple(maps[0].shape) == (1024, width)
    taken = sum(each is None or isinstance(each, TensorMap) for each in down.numbers)
    assert taken == len(down.buffers)


@pytest.mark.parametrize(
    ("model", "quantization", "chains"),
    [
        # The router is a kernel, too, so all layers are one chain.
        ("qwen3-30b-a3b", "int4", {"decode_256": 1, "mixed_512": 1}),
        # XLA computes the gates of recurrent layers of prompts.
        ("qwen3.5-27b", "int4", {"decode_256": 1, "mixed_512": 4}),
        # The library computes products with unquantised weights.
        ("gpt-oss-20b", "mxfp4", {"decode_256": 8, "mixed_512": 7}),
    ],
)
def test_kernels_of_many_tokens_are_chains(
    model: str, quantization: str, chains: dict[str, int]
) -> None:
    flags = ("--model", model, "--quantization", quantization, "--layers", "4")
    reports = inspect(*flags, "--decode", "256", "--prefill", "512")
    assert {name: report["chains"] for name, report in reports.items()} == chains
    for report in reports.values():
        assert report["kv_copies"] == report["calls_with_input"] == 0
        assert report["aliased_bytes"] == report["state_bytes"]
        assert report["scratch_bytes"] < 640 * 2**20
