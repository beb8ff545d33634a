"""A new format of weights (`tests/int6.py`) is multiplied by its definition and by the kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.matmul import linear
from jaxserve_kernels.quantized_matmul import triton as kernels
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.target import REFERENCE
from tests.emulated.errors import relative_error
from tests.emulated.weights import exact, gated_product, gating, product, tokens_and_weight
from tests.emulator.targets import HOPPER
from tests.int6 import quantize_int6


def test_it_is_multiplied_by_its_definition() -> None:
    x, weight = tokens_and_weight(5, 256, 512, quantize_int6)
    plain = tokens_and_weight(5, 256, 512, lambda values: values)[1]
    assert relative_error(weight.dequantize(), plain) < 0.04
    found = linear(x, weight, jnp.float32, target=REFERENCE).sum(0)
    rounded = np.asarray(weight.dequantize().astype(jnp.bfloat16), np.float32)
    assert relative_error(found, np.asarray(x, np.float32) @ rounded.T) < 1e-6


def test_the_kernel_multiplies_it() -> None:
    x, weight = tokens_and_weight(5, 256, 512, quantize_int6)
    config = Config(method="unpack", rows=64, tokens=16, splits=2)
    assert relative_error(product(kernels, x, weight, config), exact(x, weight)) < 1e-6
    whole = Config(method="unpack", rows=64, tokens=16)
    both = gated_product(kernels, x, weight, whole)
    assert relative_error(both, gating(exact(x, weight))) < 1e-3
    assert (
        relative_error(linear(x, weight, jnp.float32, target=HOPPER).sum(0), exact(x, weight))
        < 1e-6
    )
