"""Every kernel that gates, with the activation that is not Qwen's, against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.dense_matmul import config as dense_config
from jaxserve_kernels.dense_matmul import hopper as dense_hopper
from jaxserve_kernels.dense_matmul import triton as dense_triton
from jaxserve_kernels.dense_matmul import triton_streaming as dense_streaming
from jaxserve_kernels.quantized_matmul import (
    config,
    triton,
    triton_small_m,
    triton_stream_k,
    triton_streaming,
)
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3 import hopper, hopper_bytes
from jaxserve_kernels.quantized_matmul.e4m3 import triton as e4m3_triton
from jaxserve_kernels.quantized_matmul.e4m3.tokens import format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from tests.emulated.errors import relative_error
from tests.emulated.weights import (
    WEIGHTS,
    as_read,
    exact,
    gated_product,
    gating,
    tokens_and_weight,
    tokens_in_8_bits,
)
from tests.emulator.targets import HOPPER, gpu

GATED = 1e-3
"""Some sums are rounded to the other neighbour in bfloat16."""


@pytest.mark.parametrize("kernels", [dense_triton, dense_streaming, dense_hopper])
def test_weights_in_bfloat16(kernels: Any) -> None:
    tokens = 130 if kernels is dense_hopper else 5
    x, weight = tokens_and_weight(tokens, 256, 256, lambda values: values.astype(jnp.bfloat16))
    launch = () if kernels is dense_hopper else (dense_config.Config(rows=64, depth=128),)
    found = kernels.gated_linear(x, weight, *launch, activation="gelu_tanh", target=HOPPER)
    both = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    assert relative_error(found, gating(both, "gelu_tanh")) < GATED


@pytest.mark.parametrize("kernels", [triton, triton_small_m, triton_streaming, triton_stream_k])
def test_weights_unpacked_in_registers(kernels: Any) -> None:
    target = gpu(90, multiprocessors=4)
    tokens, out = (40, 640) if kernels is triton_stream_k else (5, 256)
    x, weight = tokens_and_weight(tokens, out, 1024, WEIGHTS["int4"])
    call = config.Call.of(weight, tokens, gated=True, target=target)
    assert call is not None
    chosen = {
        triton: Config(method="unpack", rows=64, tokens=16),
        triton_small_m: config.small_m(1024, gated=True),
        triton_streaming: replace(config.streaming(call), splits=1),
        triton_stream_k: config.stream_k(call),
    }[kernels]
    found = gated_product(kernels, x, weight, chosen, "gelu_tanh", target=target)
    expected = gating(exact(as_read(x, chosen), weight), "gelu_tanh")
    assert relative_error(found, expected) < GATED


@pytest.mark.parametrize(
    ("kernels", "name", "bound"),
    [(e4m3_triton, "fp8", GATED), (hopper, "mxfp4", GATED), (hopper_bytes, "fp8", GATED)],
)
def test_tokens_in_8_bits(kernels: Any, name: str, bound: float) -> None:
    x, weight = tokens_and_weight(100, 256, 256, WEIGHTS[name])
    method: Any = "e4m3" if kernels is e4m3_triton else "hopper"
    rows, stages = (256, 4) if kernels is hopper_bytes else (128, 4)
    chosen = Config(method=method, rows=rows, tokens=128, num_stages=stages)
    codes: Any = quantized(x, format_for(weight, x.shape[0], chosen), target=HOPPER)
    found = gated_product(kernels, codes, weight, chosen, "gelu_tanh")
    both = tokens_in_8_bits(x, weight) @ np.asarray(weight.dequantize()).T
    assert relative_error(found, gating(both, "gelu_tanh")) < bound
