"""Products with quantised weights, and the tokens that they read, on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.add_rms_norm.triton import add_rms_norm
from jaxserve_kernels.matmul import gated_linear, linear
from jaxserve_kernels.quantized_matmul import triton as kernels
from jaxserve_kernels.quantized_matmul.config import Config, Method
from jaxserve_kernels.quantized_matmul.e4m3 import api as e4m3_products
from jaxserve_kernels.quantized_matmul.e4m3.tokens import Order, QuantizedTokens, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_convert import to_fp8
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from tests.emulated.errors import relative_error
from tests.emulated.weights import (
    WEIGHTS,
    exact,
    gated_product,
    gating,
    product,
    tokens_and_weight,
    tokens_in_8_bits,
)
from tests.emulator.targets import HOPPER, gpu

OUT, DEPTH, TOKENS = 256, 512, 5


def with_a_block_of_zeros(weight: Any) -> weights.Mxfp4Weight:
    """The first of each row, with the least exponent there is: its power is no measure for the
    blocks beside it."""
    packed = weights.quantize_mxfp4(weight.at[:, :32].set(0.0))
    first = packed.scale.at[:, 0].set(packed.scale[:, 0] & jnp.uint32(0xFFFFFF00))
    return packed._replace(scale=first)


QUANTIZE: dict[str, Callable[[Any], Any]] = {
    **WEIGHTS,
    "mxfp4-first-block-0": with_a_block_of_zeros,
}
made = functools.partial(tokens_and_weight, TOKENS, OUT, DEPTH)


@pytest.mark.parametrize("config", [Config(splits=2, unroll=2), Config(rows=128)], ids=str)
@pytest.mark.parametrize("name", QUANTIZE)
def test_products_with_unpacked_weights(name: str, config: Config) -> None:
    x, weight = made(QUANTIZE[name])
    found = product(kernels, x, weight, config)
    assert relative_error(found, exact(x, weight)) < 1e-6
    gated = gated_product(kernels, x, weight, replace(config, splits=1))
    assert relative_error(gated, gating(exact(x, weight))) < 1e-3


@pytest.mark.parametrize("beforehand", [False, True], ids=["registers", "beforehand"])
@pytest.mark.parametrize("name", QUANTIZE)
def test_products_in_e4m3(name: str, beforehand: bool) -> None:
    x, weight = made(QUANTIZE[name])
    values = weight
    if beforehand:
        if isinstance(weight, weights.Int8Weight | weights.Fp8Weight):
            pytest.skip("8 bits are not converted")
        values = to_fp8(weight, target=HOPPER)
    config = Config(method="e4m3", rows=128, splits=2, beforehand=beforehand)
    tokens = tokens_in_8_bits(x, weight)
    expected = tokens @ np.asarray(values.dequantize()).T
    found = product(e4m3_products, x, weight, config)
    assert relative_error(found, expected) < bound(name, beforehand=beforehand)
    config = Config(method="e4m3", beforehand=beforehand)
    gated = gated_product(e4m3_products, x, weight, config)
    assert relative_error(gated, gating(expected)) < 0.04


def bound(name: str, *, beforehand: bool) -> float:
    """Zeros of integers are a product in bfloat16; NVFP4's values times their scales are rounded
    to e4m3."""
    if beforehand or not name.startswith(("int4", "nvfp4")):
        return 1e-6
    return 1.5e-2 if name.startswith("int4") else 2.5e-2


@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-zeros", "nvfp4", "mxfp4"])
def test_a_weight_converted_beforehand_is_its_copy(name: str) -> None:
    """But for ties: which of two neighbours is nearer may be for the last bit of float32 to say."""
    _, weight = made(QUANTIZE[name])
    converted, copy = (
        to_fp8(weight, target=HOPPER).dequantize(),
        weights.e4m3_copy(weight).dequantize(),
    )
    ties = 0.2 if name == "nvfp4" else 1e-3
    assert np.mean(np.asarray(converted) != np.asarray(copy)) < ties
    assert relative_error(converted, weight.dequantize()) < (1e-7 if name == "mxfp4" else 0.03)


@pytest.mark.parametrize(
    ("name", "method"), [("nvfp4", "hopper"), ("mxfp4", "hopper"), ("mxfp4", "e4m3")]
)
def test_tokens_lie_as_codes_become_registers(name: str, method: Method) -> None:
    """For `e4m3.hopper`, a register has the even nibbles of two of NVFP4's words, or the odd ones,
    or all of one of MXFP4's. A thread has four words of NVFP4, or a block of MXFP4's eight. For
    `e4m3.triton`, MXFP4's tokens lie as its planes."""
    x, weight = made(QUANTIZE[name])
    form = format_for(weight, TOKENS, Config(method=method, rows=128, tokens=16))
    place = np.arange(DEPTH)
    register, thread, byte = place // 16 % 8, place // 4 % 4, place % 4
    if name == "nvfp4":
        half, register = register // 4, register % 4
        word, nibble = 2 * (register // 2) + byte // 2, 2 * (byte % 2) + register % 2
        inputs = 64 * half + 16 * nibble + 4 * thread + word
    elif method == "hopper":
        inputs = 32 * thread + 8 * byte + register
    else:
        plane, word = place // 32 % 4, place % 32
        inputs = 32 * (word // 8) + 8 * plane + word % 8
    plain = quantized(x, form._replace(order=Order.INPUTS), target=HOPPER)
    tokens = quantized(x, form, target=HOPPER)
    expected = np.asarray(plain.codes[:TOKENS], np.float32)[:, place // 128 * 128 + inputs]
    assert np.array_equal(np.asarray(tokens.codes[:TOKENS], np.float32), expected)
    assert np.array_equal(tokens.scale, plain.scale)


@pytest.mark.parametrize("name", ["int4-g64", "int8", "fp8"])
def test_a_norm_makes_the_tokens_that_its_reader_would(name: str) -> None:
    """Sums of groups and none, the order of inputs and that of weights in bytes."""
    x, weight = made(QUANTIZE[name])
    x = x.astype(jnp.float32)
    update, norm = 0.5 * x[None], jnp.linspace(0.5, 1.5, DEPTH)
    form = format_for(weight, TOKENS, Config(method="e4m3", tokens=16))
    total, tokens = add_rms_norm(x, update, norm, 1e-6, form, target=HOPPER)
    same, normed = add_rms_norm(x, update, norm, 1e-6, target=HOPPER)
    assert isinstance(tokens, QuantizedTokens) and tokens.shape == x.shape
    expected = quantized(normed, form, target=HOPPER)
    assert np.array_equal(total, same)
    assert np.array_equal(tokens.scale, expected.scale)
    codes = (np.asarray(each.codes[:TOKENS], np.float32) for each in (tokens, expected))
    assert np.array_equal(*codes)
    assert form.group == 0 or np.array_equal(tokens.sums[:, :TOKENS], expected.sums[:, :TOKENS])


@pytest.mark.parametrize("name", ["int4", "nvfp4", "fp8"])
def test_many_tokens_where_nothing_multiplies_e4m3(name: str) -> None:
    x, weight = tokens_and_weight(200, OUT, DEPTH, QUANTIZE[name])
    assert (
        relative_error(linear(x, weight, jnp.float32, target=gpu(80)).sum(0), exact(x, weight))
        < 1e-6
    )
    assert relative_error(gated_linear(x, weight, target=gpu(80)), gating(exact(x, weight))) < 1e-3
