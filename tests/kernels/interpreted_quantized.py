"""Run by tests/aot/test_interpreted_kernels.py, in a process in which Triton interprets.

What is written in the GPU's instructions is replaced by its meaning; the rest is the kernels' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl

from jaxserve_kernels import weights
from jaxserve_kernels.add_rms_norm.triton import add_rms_norm
from jaxserve_kernels.quantized_matmul import reference
from jaxserve_kernels.quantized_matmul import triton as kernels
from jaxserve_kernels.quantized_matmul import triton_unpack as unpack
from jaxserve_kernels.quantized_matmul.config import Config
from jaxserve_kernels.quantized_matmul.e4m3 import api as e4m3_products
from jaxserve_kernels.quantized_matmul.e4m3 import triton as e4m3
from jaxserve_kernels.quantized_matmul.e4m3.tokens import QuantizedTokens, format_for
from jaxserve_kernels.quantized_matmul.e4m3.triton_convert import to_fp8
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized

OUT, DEPTH, TOKENS = 256, 512, 5


def with_whole_zeros(weight: Any) -> weights.Int4Weight:
    packed = weights.quantize_int4(weight)
    zeros = np.random.default_rng(1).integers(4, 12, packed.scale.shape, np.int32)
    return packed._replace(zero=jnp.asarray(zeros))


def with_a_block_of_zeros(weight: Any) -> weights.Mxfp4Weight:
    """The first of each row, with the least exponent there is: its power is no measure for the
    blocks beside it."""
    packed = weights.quantize_mxfp4(weight.at[:, :32].set(0.0))
    first = packed.scale.at[:, 0].set(packed.scale[:, 0] & jnp.uint32(0xFFFFFF00))
    return packed._replace(scale=first)


QUANTIZE: dict[str, Callable[[Any], Any]] = {
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int4-g32": functools.partial(weights.quantize_int4, group=32),
    "int4-whole-zeros": with_whole_zeros,
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
    "mxfp4-first-block-0": with_a_block_of_zeros,
}


def nibbles(words: Any) -> Any:
    """Without their powers of two, which `low_…` and `high_…` take off."""
    return tuple(((words.to(tl.int32) >> (4 * p)) & 15).to(tl.float32) for p in range(4))


def e2m1_times(words: Any, *factors: Any) -> Any:
    planes = []
    for plane, factor in enumerate(factors):
        code = (words.to(tl.int32) >> (4 * plane)) & 15
        exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
        normal = (1.0 + mantissa * 0.5) * (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
        magnitude = tl.where(exponent == 0, mantissa * 0.5, normal)
        planes.append(tl.where(code >= 8, -magnitude, magnitude) * factor[:, None])
    return tuple(planes)


def e4m3_e2m1_times(words: Any, *factors: Any) -> Any:
    planes = e2m1_times(words, *factors)
    return tuple(plane.to(tl.float8e4nv).to(tl.int8, bitcast=True) for plane in planes)


def e4m3_scales(factor: float) -> Callable[[Any], Any]:
    def scales(words: Any) -> Any:
        return tuple(unpack.e4m3_byte(words, byte) * factor for byte in range(4))

    return scales


def mxfp4_factor(factor: float) -> Callable[..., Any]:
    def relative(words: Any, largest: Any, block: Any) -> Any:
        exponent = ((words >> (8 * block)) & 0xFF).to(tl.int32)
        return unpack.power(tl.maximum(exponent - largest + 127, 0)) * factor

    return relative


def int8_pair(words: Any) -> Any:
    both = (words.to(tl.int32) & 255, words.to(tl.int32) >> 8)
    return tuple(tl.where(code >= 128, code - 256, code).to(tl.float32) for code in both)


def e4m3_pair(words: Any) -> Any:
    values = []
    for code in (words.to(tl.int32) & 255, words.to(tl.int32) >> 8):
        exponent, mantissa = (code >> 3) & 15, (code & 7).to(tl.float32)
        normal = (8.0 + mantissa) * (1 << exponent).to(tl.float32) * 2.0**-10
        value = tl.where(exponent == 0, mantissa * 2.0**-9, normal)
        values.append(tl.where(code >= 128, -value, value))
    return tuple(values)


@pytest.fixture(autouse=True)
def meaning_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(rows: Any, shape: Any) -> Any:
        return tl.broadcast_to(rows.to(tl.float32)[:, None], shape)

    replacements = {
        "nibbles": nibbles,
        "low_less_8": lambda values: (values - 8.0) / 64.0,
        "high_less_8": lambda values: (values - 8.0) / 64.0,
        "low_plus": lambda values, offset: values / 64.0 + offset,
        "high_plus": lambda values, offset: values / 64.0 + offset,
        "column": column,
        "nvfp4_factors": e4m3_scales(2.0**-8),
        "mxfp4_factor": mxfp4_factor(1.0),
        "e2m1_times": e2m1_times,
        "int8_pair": int8_pair,
        "e4m3_pair": e4m3_pair,
    }
    for name, replacement in replacements.items():
        for module in (unpack, kernels):
            monkeypatch.setattr(module, name, replacement, raising=module is unpack)
    replacements = {
        "nibble_bytes": e4m3_nibbles,
        "_bf16": lambda x: x,
        "_nvfp4_eighths": e4m3_scales(0.125),
        "_mxfp4_factor": mxfp4_factor(64.0),
        "_e2m1_times": e4m3_e2m1_times,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(e4m3, name, replacement)


def e4m3_nibbles(words: Any) -> Any:
    return tuple(((words.to(tl.int32) >> (4 * p)) & 15).to(tl.int8) for p in range(4))


def relative_error(out: Any, expected: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def tokens_and_weight(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((TOKENS, DEPTH)), jnp.float32)
    return x, QUANTIZE[name](jnp.asarray(rng.standard_normal((OUT, DEPTH)) / 16, jnp.float32))


@pytest.mark.parametrize("config", [Config(splits=2, unroll=2), Config(rows=128)], ids=str)
@pytest.mark.parametrize("name", QUANTIZE)
def test_products_with_unpacked_weights(name: str, config: Config) -> None:
    x, weight = tokens_and_weight(name)
    product = kernels.linear(x, weight, config, x.dtype).sum(0)
    assert relative_error(product, reference.linear(x, weight, x.dtype)[0]) < 1e-6
    gated = kernels.gated_linear(x, weight, config)
    assert relative_error(gated, reference.gated_linear(x, weight)) < 2e-6


@pytest.mark.parametrize("beforehand", [False, True], ids=["registers", "beforehand"])
@pytest.mark.parametrize("name", QUANTIZE)
def test_products_in_e4m3(name: str, beforehand: bool) -> None:
    """The interpreter cuts conversions off where a GPU rounds: twice the error, at most."""
    x, weight = tokens_and_weight(name)
    if beforehand:
        if isinstance(weight, weights.Int8Weight | weights.Fp8Weight):
            pytest.skip("8 bits are not converted")
        converted = to_fp8(weight).dequantize()
        exact = isinstance(weight, weights.Mxfp4Weight)
        assert relative_error(converted, weight.dequantize()) < (1e-7 if exact else 0.065)
    config = Config(method="e4m3", rows=128, splits=2, beforehand=beforehand)
    product = e4m3_products.linear(x, weight, config, x.dtype).sum(0)
    assert relative_error(product, reference.linear(x, weight, x.dtype)[0]) < 0.1
    gated = e4m3_products.gated_linear(x, weight, Config(method="e4m3", beforehand=beforehand))
    assert relative_error(gated, reference.gated_linear(x, weight)) < 0.14


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_tokens_lie_as_words_of_codes_become_registers(name: str) -> None:
    """For `e4m3.hopper`. A register has the even nibbles of two words, or the odd ones; a thread
    has four registers of 4 words."""
    x, weight = tokens_and_weight(name)
    form = format_for(weight, TOKENS, Config(method="hopper", rows=128, tokens=16))
    place = np.arange(DEPTH)
    half, register, thread, byte = place // 64 % 2, place // 16 % 4, place // 4 % 4, place % 4
    word = 2 * (register // 2) + byte // 2
    nibble = 2 * (byte % 2) + register % 2
    if name == "nvfp4":
        inputs = 64 * half + 16 * nibble + 4 * thread + word
    else:
        inputs = 32 * nibble + 8 * thread + 4 * half + word
    plain = quantized(x, format_for(weight, TOKENS, Config(method="e4m3", tokens=16)))
    tokens = quantized(x, form)
    expected = np.asarray(plain.codes[:TOKENS], np.float32)[:, place // 128 * 128 + inputs]
    assert np.array_equal(np.asarray(tokens.codes[:TOKENS], np.float32), expected)
    assert np.array_equal(tokens.scale, plain.scale)


@pytest.mark.parametrize("name", ["int4-g64", "int8", "fp8"])
def test_a_norm_makes_the_tokens_that_its_reader_would(name: str) -> None:
    """Sums of groups and none, the order of inputs and that of weights in bytes."""
    x, weight = tokens_and_weight(name)
    update, norm = 0.5 * x[None], jnp.linspace(0.5, 1.5, DEPTH)
    form = format_for(weight, TOKENS, Config(method="e4m3", tokens=16))
    total, tokens = add_rms_norm(x, update, norm, 1e-6, form)
    same, normed = add_rms_norm(x, update, norm, 1e-6)
    assert isinstance(tokens, QuantizedTokens) and tokens.shape == x.shape
    expected = quantized(normed, form)
    assert np.array_equal(total, same)
    assert np.array_equal(tokens.scale, expected.scale)
    codes = (np.asarray(each.codes[:TOKENS], np.float32) for each in (tokens, expected))
    assert np.array_equal(*codes)
    assert form.group == 0 or np.array_equal(tokens.sums[:, :TOKENS], expected.sums[:, :TOKENS])
