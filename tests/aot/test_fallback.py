"""Kernels that do not compile for a GPU: another implementation takes their place, said once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from support_matrix import Bucket, Step, arguments, kernel_calls, launches, spec_of

from jaxserve.metrics.metrics import Metrics
from jaxserve.runner.step import run_step
from jaxserve.startup import fast_paths
from jaxserve_kernels import fallback, ptxas, weights
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.matmul import gated_linear, linear
from jaxserve_kernels.target import Target
from jaxserve_kernels.triton_compat import triton_lib

ROWS = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((512,), jnp.bfloat16)
A100, H100 = 80, 90


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_known", {})
    monkeypatch.setattr(fallback, "_fallen", {})


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the compilation of kernels whose functions have this name fail; all: any name."""
    compiled = triton_lib.TritonFunction.get_or_create_kernel

    def begin(name: str) -> None:
        def compile_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
            if name in (function.name, "all"):
                raise RuntimeError(f"no {function.name} on this GPU")
            return compiled(function, *args, **kwargs)

        monkeypatch.setattr(triton_lib.TritonFunction, "get_or_create_kernel", compile_kernel)

    return begin


def kernels(
    function: Callable[..., Any], *args: Any, capability: int = A100, on: Target | None = None
) -> list[str]:
    """Names of the kernels that it calls on such a GPU, all of which compile."""
    target = on or Target.for_gpu(capability)
    traced = jax.jit(lambda *args: function(*args, target=target)).trace(*args)
    traced.lower(lowering_platforms=("cuda",))
    return [each.params["name"] for each in kernel_calls(traced.jaxpr)]


def norm(x: Any, update: Any, weight: Any, target: Target) -> Any:
    return add_rms_norm(x, update[None], weight, 1e-6, target=target)


def test_an_operation_whose_kernel_fails_is_left_to_xla_and_others_are_not(
    refuse: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    weight = jax.eval_shape(weights.quantize_int4, jax.ShapeDtypeStruct((512, 512), jnp.float32))

    def both(x: Any, weight: Any, scale: Any, target: Target) -> Any:
        return norm(
            linear(x, weight, target=target)[0].astype(x.dtype),
            gated_linear(x, weight, target=target)[:, :1],
            scale,
            target,
        )

    assert kernels(norm, ROWS, ROWS, WEIGHT) == ["add_rms_norm"]
    fallback._known.clear()
    refuse("_gated")
    assert kernels(both, ROWS, weight, WEIGHT) == ["linear_Int4Weight", "add_rms_norm"]
    assert kernels(both, ROWS, weight, WEIGHT) == ["linear_Int4Weight", "add_rms_norm"]
    quantised, plain = caplog.records  # the product that is tried next has such a kernel, too
    assert quantised.levelno == plain.levelno == logging.WARNING
    assert "gated_linear_Int4Weight: a kernel does not compile for this GPU" in quantised.message
    assert "RuntimeError: no _gated on this GPU" in quantised.message
    assert "gated_linear: a kernel" in plain.message


def test_the_metrics_name_the_operation(refuse: Callable[[str], None]) -> None:
    refuse("_add_rms_norm")
    assert kernels(norm, ROWS, ROWS, WEIGHT) == []
    metrics = Metrics("model")
    fast_paths.report(metrics, Target.for_gpu(A100))
    assert b'jaxserve_kernel_fallback{operation="add_rms_norm"} 1.0' in metrics.exposition()


def test_a_kernel_that_needs_more_shared_memory_than_the_card_has_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = Target.for_gpu(A100)
    small = small.replace(device=replace(small.gpu, shared_memory_per_block=1))
    assert kernels(norm, ROWS, ROWS, WEIGHT, on=small) == []
    assert "bytes of shared memory" in caplog.text


def test_what_the_assembler_refuses_is_not_left_to_jaxlib(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ptxas.assemble(".version 7.0\n.target sm_80\n.address_size 64\n", 80) is not None
    with pytest.raises(ptxas.Refused, match="refuses a kernel"):
        ptxas.assemble("no PTX", 80)

    def refused(ptx: str, capability: int) -> bytes:
        raise ptxas.Refused("ptxas refuses a kernel")

    monkeypatch.setattr(ptxas, "assemble", refused)
    monkeypatch.setattr("jaxserve_kernels.add_rms_norm.triton._add_rms_norm._jT_kernel_cache", {})
    assert kernels(norm, ROWS, ROWS, WEIGHT) == []
    assert "Refused: ptxas refuses a kernel" in caplog.text


@pytest.mark.parametrize("kv", ["bf16", "int8", "kvarn_k4v4_g128"])
@pytest.mark.parametrize("bucket", ["decode", "mixed"])
@pytest.mark.parametrize("capability", [A100, H100])
def test_a_step_none_of_whose_kernels_compiles_is_a_step_of_xla_alone(
    capability: int, bucket: str, kv: str, refuse: Callable[[str], None]
) -> None:
    """Of int4 weights beside bfloat16, with their tokens in 8 bits on the H100."""
    tokens = Bucket.decode(8)
    if bucket == "mixed":
        tokens = Bucket.mixed(256, max_rows=8, tile_size=32, updates=16)
    step = Step(model="qwen3-0.6b", weights="int4", kv=kv, bucket=tokens)
    assert launches(capability, step)
    refuse("all")
    spec = spec_of(step)
    run = functools.partial(run_step, spec=spec, bucket=step.bucket, sampled_vocab=spec.vocab_size)
    assert not kernels(run, *arguments(spec, step), capability=capability)
