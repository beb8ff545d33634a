"""Quantised weights mean what their formats define: against NumPy written from the definitions."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve_kernels import weights
from jaxserve_kernels.matmul import (
    as_read,
    gated_linear,
    linear,
    sum_parts,
    take_rows,
    token_format,
)
from jaxserve_kernels.target import CPU, Target
from jaxserve_kernels.weights import layout

Values = NDArray[np.float32]
OUT, DEPTH = 128, 384
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=3, deadline=None)


def matrix(seed: int, scale: float = 0.02, shape: tuple[int, ...] = (OUT, DEPTH)) -> Values:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def test_a_word_holds_four_inputs_32_apart() -> None:
    codes = np.zeros((64, 256), np.uint8)
    codes[5, 128 + 7], codes[5, 128 + 39], codes[5, 128 + 71], codes[5, 128 + 103] = 1, 2, 3, 15
    packed = np.asarray(layout.pack_nibbles(jnp.asarray(codes)))
    assert packed.shape == (1, 2, 64, 32)
    assert packed[0, 1, 5, 7] == 0xF321
    assert np.count_nonzero(packed) == 1


def test_eight_words_of_mxfp4_are_a_block() -> None:
    """A word holds four inputs 8 apart."""
    codes = np.zeros((64, 256), np.uint8)
    for nibble, code in enumerate((1, 2, 3, 15)):
        codes[5, 128 + 32 * 2 + 8 * nibble + 7] = code
    packed = np.asarray(layout.pack_blocks(jnp.asarray(codes)))
    assert packed.shape == (1, 2, 64, 32)
    assert packed[0, 1, 5, 8 * 2 + 7] == 0xF321
    assert np.count_nonzero(packed) == 1
    weight = weights.pack_mxfp4(jnp.asarray(codes), jnp.zeros((64, 8), jnp.uint8))
    np.testing.assert_array_equal(weight.packed, packed)


def test_a_word_holds_two_bytes_64_apart() -> None:
    codes = np.zeros((128, 128), np.uint8)
    codes[64 + 3, 9], codes[64 + 3, 73] = 0x12, 0xFE
    packed = np.asarray(layout.pack_bytes(jnp.asarray(codes)))
    assert packed[1, 0, 3, 9] == 0xFE12
    assert np.count_nonzero(packed) == 1


@quick
@given(seeds, st.sampled_from([(), (3,)]))
def test_packing_loses_nothing(seed: int, leading: tuple[int, ...]) -> None:
    codes = np.random.default_rng(seed).integers(0, 256, (*leading, OUT, DEPTH), np.uint8)
    packed = layout.pack_bytes(jnp.asarray(codes))
    np.testing.assert_array_equal(layout.unpack_bytes(packed), codes)
    nibbles = codes & 15
    packed = layout.pack_nibbles(jnp.asarray(nibbles))
    np.testing.assert_array_equal(layout.unpack_nibbles(packed), nibbles)
    packed = layout.pack_blocks(jnp.asarray(nibbles))
    np.testing.assert_array_equal(layout.unpack_blocks(packed), nibbles)


@pytest.mark.parametrize("shape", [(96, 128), (64, 192)])
def test_sizes_that_tiles_do_not_divide_are_refused(shape: tuple[int, int]) -> None:
    for pack in (layout.pack_nibbles, layout.pack_blocks):
        with pytest.raises(ValueError, match="multiple of"):
            pack(jnp.zeros(shape, jnp.uint8))


@pytest.mark.parametrize("group", [32, 64, 128, DEPTH])
@pytest.mark.parametrize("zeros", ["none", "whole", "any"])
def test_int4_is_code_less_zero_times_scale(group: int, zeros: str) -> None:
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (OUT, DEPTH), np.uint8)
    scale = rng.normal(0, 0.01, (OUT, DEPTH // group)).astype(np.float32)
    zero = {
        "none": None,
        "whole": rng.integers(0, 16, scale.shape, np.int32),
        "any": rng.uniform(0, 15, scale.shape).astype(np.float32),
    }[zeros]
    packed = weights.pack_int4(
        jnp.asarray(codes), jnp.asarray(scale), None if zero is None else jnp.asarray(zero)
    )
    expected = np.empty((OUT, DEPTH), np.float32)
    for k in range(DEPTH):
        offset = np.float32(8) if zero is None else zero[:, k // group].astype(np.float32)
        expected[:, k] = (codes[:, k] - offset) * scale[:, k // group]
    np.testing.assert_array_equal(packed.dequantize(), expected)
    assert (packed.shape, packed.group) == ((OUT, DEPTH), group)


def test_eight_bit_codes_times_the_scale_of_their_row_or_group() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (OUT, DEPTH), np.uint8)
    codes[(codes & 127) == 127] = 0  # e4m3's NaN
    for groups in (1, 3):
        scale = rng.normal(0, 0.01, (OUT, groups)).astype(np.float32)
        each = np.repeat(scale, DEPTH // groups, axis=1)
        whole = weights.pack_int8(jnp.asarray(codes.view(np.int8)), jnp.asarray(scale))
        np.testing.assert_array_equal(whole.dequantize(), codes.view(np.int8) * each)
        floating = weights.pack_fp8(
            jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale)
        )
        np.testing.assert_array_equal(floating.dequantize(), e4m3(codes) * each)


def e4m3(codes: NDArray[np.uint8]) -> Values:
    """OCP 8-bit floating point, 5.1: bias 7, subnormals, no infinities."""
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return (sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)).astype(np.float32)


def test_nvfp4_is_e2m1_times_e4m3_times_the_scale_of_its_tensor() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (OUT, DEPTH), np.uint8)
    scale = rng.integers(1, 127, (OUT, DEPTH // 16), np.uint8)
    tensor = np.repeat(np.float32([0.37e-3, 2.9e-4]), OUT // 2)
    packed = weights.pack_nvfp4(
        jnp.asarray(codes),
        jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)),
        jnp.asarray(tensor),
    )
    expected = np.empty((OUT, DEPTH), np.float32)
    for k in range(DEPTH):
        expected[:, k] = E2M1[codes[:, k]] * e4m3(scale[:, k // 16]) * tensor
    np.testing.assert_array_equal(packed.dequantize(), expected)


def test_mxfp4_is_e2m1_times_a_power_of_two() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (OUT, DEPTH), np.uint8)
    exponents = rng.integers(3, 250, (OUT, DEPTH // 32), np.uint8)
    packed = weights.pack_mxfp4(jnp.asarray(codes), jnp.asarray(exponents))
    powers = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    np.testing.assert_array_equal(packed.dequantize(), E2M1[codes] * np.repeat(powers, 32, axis=1))


@quick
@given(seeds)
def test_rounding_takes_the_nearest_code(seed: int) -> None:
    """No other code would be nearer, for the scale that was chosen."""
    w = matrix(seed)
    fp8 = e4m3(np.delete(np.arange(256), [127, 255]).astype(np.uint8))
    grids = {
        "int4": (weights.quantize_int4, np.arange(-8.0, 8.0)),
        "int8": (weights.quantize_int8, np.arange(-127.0, 128.0)),
        "fp8": (weights.quantize_fp8, fp8),
        "fp8 in groups": (partial(weights.quantize_fp8, group=128), fp8),
        "nvfp4": (weights.quantize_nvfp4, E2M1),
        "mxfp4": (weights.quantize_mxfp4, E2M1),
    }
    for name, (quantize, grid) in grids.items():
        packed = quantize(jnp.asarray(w))
        step = scales_per_input(packed)
        nearest = np.abs(w - nearest_of(np.sort(grid), w / step) * step)
        error = np.abs(np.asarray(packed.dequantize()) - w)
        rounding = 1e-5 * np.abs(step) + 2e-7 * np.abs(w)  # of w / step, between two codes
        assert (error <= nearest + rounding).all(), name


def nearest_of(grid: Values, x: Values) -> Values:
    """Of the ascending values of the grid the one next to each x."""
    above = np.searchsorted(grid, x).clip(1, len(grid) - 1)
    lower, upper = grid[above - 1], grid[above]
    return np.where(x - lower <= upper - x, lower, upper)


def scales_per_input(packed: weights.Quantized) -> Values:
    """float32 [out, in]: what a code's value is multiplied by."""
    if isinstance(packed, weights.Nvfp4Weight | weights.Mxfp4Weight):
        one = packed._replace(packed=jnp.full_like(packed.packed, 0x2222))
    elif isinstance(packed, weights.Int4Weight):
        one = packed._replace(packed=jnp.full_like(packed.packed, 0x9999))
    elif isinstance(packed, weights.Int8Weight):
        one = packed._replace(packed=jnp.full_like(packed.packed, 0x0101))
    else:
        one = packed._replace(packed=jnp.full_like(packed.packed, 0x3838))
    return np.asarray(one.dequantize())


ERRORS = {"int4": 0.13, "int8": 0.013, "fp8": 0.03, "nvfp4": 0.13, "mxfp4": 0.16}
"""Relative root mean square error of normal weights that each format may have."""


@pytest.mark.parametrize("name", ERRORS)
def test_rounding_errors_are_those_of_the_format(name: str) -> None:
    w = matrix(4, shape=(256, 1024))
    quantize = getattr(weights, f"quantize_{name}")
    error = np.asarray(jax.jit(quantize)(jnp.asarray(w)).dequantize()) - w
    relative = np.sqrt((error**2).mean() / (w**2).mean())
    assert 0.3 * ERRORS[name] < relative < ERRORS[name]


@pytest.mark.parametrize("name", ERRORS)
def test_zeros_stay_zeros(name: str) -> None:
    w = matrix(5)
    w[:, :128] = 0
    w[7] = 0
    out = np.asarray(getattr(weights, f"quantize_{name}")(jnp.asarray(w)).dequantize())
    assert np.isfinite(out).all()
    assert not out[:, :128].any()
    assert not out[7].any()


@pytest.mark.parametrize("name", ERRORS)
def test_layers_on_a_leading_axis_are_quantised_each_alone(name: str) -> None:
    w = jnp.asarray(matrix(6, shape=(3, OUT, DEPTH)) * np.float32([[[1]], [[10]], [[0.1]]]))
    quantize = getattr(weights, f"quantize_{name}")
    together = quantize(w)
    for layer in range(3):
        alone = quantize(w[layer])
        for a, b in zip(together, alone, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a[layer], b)


@pytest.mark.parametrize("name", ERRORS)
def test_products_are_those_with_the_dequantised_weight(name: str) -> None:
    x, w = matrix(7, 1.0, (5, DEPTH)), matrix(8, 0.05, (2 * OUT, DEPTH))
    packed = getattr(weights, f"quantize_{name}")(jnp.asarray(w))
    plain = np.asarray(packed.dequantize())
    with jax.default_matmul_precision("highest"):
        product = sum_parts(linear(jnp.asarray(x), packed, target=CPU), jnp.float32)
        gated = gated_linear(jnp.asarray(x), packed, target=CPU)
    np.testing.assert_allclose(product, x @ plain.T, rtol=1e-4, atol=1e-4)
    gate, up = np.split(x @ plain.T, 2, axis=1)
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_an_eight_bit_embedding(name: str) -> None:
    packed = getattr(weights, f"quantize_{name}")(jnp.asarray(matrix(9)))
    ids = np.array([0, 63, 64, 127, 5, 5])
    rows = take_rows(packed, jnp.asarray(ids), jnp.float32)
    np.testing.assert_array_equal(rows, np.asarray(packed.dequantize())[ids])


def test_rows_of_other_formats_are_refused() -> None:
    with pytest.raises(TypeError, match="8-bit"):
        take_rows(weights.quantize_int4(jnp.asarray(matrix(9))), jnp.arange(3), jnp.float32)


def test_the_largest_magnitude_that_a_row_could_hold() -> None:
    """Of all codes with the weight's scales; 1 for a row without any."""
    w = matrix(10)
    w[5] = 0
    packed = weights.quantize_int4(jnp.asarray(w))
    each = [packed._replace(packed=jnp.full_like(packed.packed, code)) for code in (0, 0xFFFF)]
    largest = np.max([np.abs(one.dequantize()) for one in each], axis=(0, 2))
    largest[5] = 1
    np.testing.assert_allclose(layout.untile_rows(packed.largest())[:, 0], largest, rtol=1e-6)


class _Half(NamedTuple):
    codes: jax.Array  # int8 [out, in]


class HalfWeight(_Half, weights.Quantized):
    """weight = code / 2"""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self) -> jax.Array:
        return self.codes.astype(jnp.float32) / 2


def test_a_format_is_its_shape_and_its_definition() -> None:
    """What else it may have, it does not have: no list names it."""
    codes = np.random.default_rng(3).integers(-8, 8, (OUT, DEPTH))
    weight = HalfWeight(jnp.asarray(codes, jnp.int8))
    assert weights.types()["HalfWeight"] is HalfWeight and weights.is_quantized(weight)
    x = matrix(4, 1.0, (3, DEPTH))
    found = sum_parts(linear(jnp.asarray(x), weight, target=CPU), jnp.float32)
    np.testing.assert_allclose(found, x @ codes.T / 2, rtol=1e-4, atol=1e-3)
    assert token_format(weight, 512, jnp.bfloat16, target=Target.for_gpu(90)) is None
    assert as_read({"weight": weight}, 512, target=CPU)["weight"].codes is weight.codes
    with pytest.raises(TypeError, match="HalfWeight"):
        take_rows(weight, jnp.arange(2), jnp.float32)
    assert not weight.can_be_copied
    with pytest.raises(TypeError, match="HalfWeight"):
        weights.e4m3_copy(weight)
