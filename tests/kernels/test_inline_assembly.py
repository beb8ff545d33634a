"""Every code through the kernels' instructions, against the formats' definitions."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_kernels.weights.fp4 import e2m1_values
from tests.emulator.ptx import Words, assembly

UNPACK = "quantized_matmul/triton_unpack.py"
E4M3 = "quantized_matmul/e4m3/triton.py"
HOPPER = "quantized_matmul/e4m3/hopper_operand.py"
HOPPER_MXFP4 = "quantized_matmul/e4m3/hopper_mxfp4.py"

CODES = np.arange(65536, dtype=np.uint32)
PAIRS = CODES | CODES[::-1] << np.uint32(16)
"""Two words of 16 bits in a register, each with every value."""


def bf16(words: Words) -> NDArray[np.float32]:
    """[2, n]: of the first word's lane and of the second's."""
    return halves(words).view(ml_dtypes.bfloat16).astype(np.float32)


def halves(words: Words) -> NDArray[np.uint16]:
    return np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16)


def each_half(values: Any, dtype: Any) -> Words:
    """Numbers as `dtype` in both halves of words."""
    bits = np.asarray(values, np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    return bits | bits << np.uint32(16)


def nibble(words: Words, plane: int) -> NDArray[np.int32]:
    return ((halves(words) >> (4 * plane)) & 15).astype(np.int32)


def e2m1(codes: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.asarray(e2m1_values(codes))


def e4m3(codes: Any) -> NDArray[np.float32]:
    return np.asarray(codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def int8(codes: Any) -> NDArray[np.float32]:
    return np.asarray(codes).astype(np.uint8).view(np.int8).astype(np.float32)


def test_nibbles_become_integers() -> None:
    """Over 64, less 8 or another zero point."""
    planes = assembly(UNPACK, "nibbles")(PAIRS)
    for plane, words in enumerate(planes):
        half = "high" if plane % 2 else "low"
        (less,) = assembly(UNPACK, f"{half}_less_8")(words)
        np.testing.assert_array_equal(64 * bf16(less), nibble(PAIRS, plane) - 8)
        for zero in (0, 3, 15, 7.5):
            offset = each_half(-zero / 64, ml_dtypes.bfloat16)
            (less,) = assembly(UNPACK, f"{half}_plus")(words, offset)
            np.testing.assert_array_equal(64 * bf16(less), nibble(PAIRS, plane) - zero)


def test_nibbles_of_even_planes_have_a_bias() -> None:
    """Which is exact: 2 + 8 / 64 is taken from the sums."""
    planes = assembly(UNPACK, "nibbles_and_biased")(PAIRS)
    for plane, words in enumerate(planes):
        if plane % 2:
            (words,) = assembly(UNPACK, "high_less_8")(words)
        bias = 0 if plane % 2 else 2.125
        np.testing.assert_array_equal(64 * (bf16(words) - bias), nibble(PAIRS, plane) - 8)


@pytest.mark.parametrize("name", ["int8_pair", "e4m3_pair"])
def test_bytes_become_numbers(name: str) -> None:
    low, high = (halves(PAIRS) & 255, halves(PAIRS) >> 8)
    for words, codes in zip(assembly(UNPACK, name)(PAIRS), (low, high), strict=True):
        is_int8 = name == "int8_pair"
        expected = (
            codes.astype(np.uint8).view(np.int8).astype(np.float32) if is_int8 else e4m3(codes)
        )
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(bf16(words)[finite], expected[finite])


@pytest.mark.parametrize("name", ["int8_halves", "e4m3_halves"])
def test_bytes_of_keys_and_values_become_numbers(name: str) -> None:
    """In the cache int8 is 128 more, so that the bytes are in the numbers' order."""
    low, high = (halves(PAIRS) & 255, halves(PAIRS) >> 8)
    found = assembly("paged_attention/triton_visits.py", name)(PAIRS)
    for words, codes in zip(found, (low, high), strict=True):
        expected = codes.astype(np.float32) - 128 if name == "int8_halves" else e4m3(codes)
        finite = np.isfinite(expected)
        numbers = halves(words).view(np.float16).astype(np.float32)
        np.testing.assert_array_equal(numbers[finite], expected[finite])


def scale_words() -> tuple[Words, list[NDArray[np.float32]]]:
    """Words of four e4m3 scales in which each takes every value, and the scales."""
    code = np.arange(127, dtype=np.uint32)  # 127 is NaN
    bytes_ = [np.roll(code, 31 * byte) for byte in range(4)]
    words = sum(byte << np.uint32(8 * index) for index, byte in enumerate(bytes_))
    return np.asarray(words, np.uint32), [e4m3(byte) for byte in bytes_]


def test_nvfp4_is_exact() -> None:
    """Every nibble with every scale, in every place."""
    words, scales = scale_words()
    factors = assembly(UNPACK, "nvfp4_factors")(words)
    nibbles = np.arange(16, dtype=np.uint32)[:, None]
    for plane in range(4):
        pair = nibbles << np.uint32(4 * plane) | (15 - nibbles) << np.uint32(16 + 4 * plane)
        operands = itertools.chain.from_iterable((factor, factor) for factor in factors)
        out = assembly(UNPACK, "e2m1_times")(np.broadcast_to(pair, (16, 127)), *operands)
        expected = e2m1(nibble(pair, plane)) * scales[plane]
        np.testing.assert_array_equal(256 * bf16(out[plane]), expected)


@pytest.mark.parametrize("powers", [(0, -3, -60, -68), (65, 64, 1, -1)])
def test_mxfp4_is_exact(powers: tuple[int, ...]) -> None:
    """Every word, with powers that bfloat16 has relative to 2^64."""
    scales = np.array([sum((127 + power) << 8 * plane for plane, power in enumerate(powers))])
    factors = assembly(UNPACK, "mxfp4_factors")(scales.astype(np.uint32))
    for pair, factor in enumerate(factors):
        words = PAIRS, PAIRS[::-1]
        planes = assembly(UNPACK, "e2m1_of_blocks")(*words, factor, factor)
        for place, found in enumerate(planes):
            block, plane = place // 4, place % 4
            power = np.float32(2.0 ** powers[2 * block + pair])
            expected = e2m1(nibble(words[block], plane)) * power
            np.testing.assert_array_equal(np.float32(2.0**64) * bf16(found), expected)


def test_nibbles_become_e4m3_bytes() -> None:
    planes = assembly(E4M3, "nibble_bytes")(PAIRS, PAIRS[::-1])
    for plane, words in enumerate(planes):
        np.testing.assert_array_equal(lanes(words), four_lanes(plane) & 15)


def lanes(words: Words) -> NDArray[np.uint32]:
    """[4, n]: the bytes."""
    return np.stack([words >> np.uint32(8 * lane) & 255 for lane in range(4)])


def four_lanes(plane: int) -> NDArray[np.uint32]:
    """[4, n]: nibbles of PAIRS and of its reverse, in the order of a register's bytes."""
    both = np.concatenate([nibble(PAIRS, plane), nibble(PAIRS[::-1], plane)])
    return both.astype(np.uint32)


@pytest.mark.parametrize("offset", [0, 40, 90])
def test_e2m1_times_a_factor_is_rounded_to_e4m3(offset: int) -> None:
    """As a float16 product that is then rounded: NVFP4's scales, an eighth of each."""
    words, scales = scale_words()
    factors = assembly(E4M3, "nvfp4_eighths")(words[offset : offset + 1])
    for factor, scale in zip(factors, scales, strict=True):
        expected = each_half(scale[offset : offset + 1] / 8, np.float16)
        np.testing.assert_array_equal(factor, expected)
    operands = itertools.chain.from_iterable([factor] * 4 for factor in factors)
    planes = assembly(E4M3, "e2m1_bytes")(PAIRS, PAIRS[::-1], *operands)
    for plane, packed in enumerate(planes):
        exact = e2m1(four_lanes(plane).astype(np.int32)) * (scales[plane][offset] / 8)
        rounded = exact.astype(np.float16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(lanes(packed), rounded)


def of_registers(register: int) -> NDArray[np.int32]:
    """[4, n]: the nibbles of PAIRS and of its reverse that `hopper_operand` puts into a register:
    even or odd ones of both words of one of the two."""
    pair = (PAIRS, PAIRS[::-1])[register // 2]
    low, high = (nibble(pair, plane) for plane in (register % 2, register % 2 + 2))
    return np.stack([low[0], high[0], low[1], high[1]])


def rounded_products(factors: tuple[Words, ...], powers: list[Any]) -> None:
    """Of every nibble with the factors of its place in a word, which are `powers` over 32."""
    even, odd = ([factor] * 4 for factor in factors)
    registers = assembly(HOPPER, "e2m1_times")(PAIRS, PAIRS[::-1], *even, *odd)
    for register, packed in enumerate(registers):
        places = [powers[register % 2], powers[register % 2 + 2]] * 2
        exact = e2m1(of_registers(register)) * np.asarray(places, np.float32)[:, None]
        rounded = exact.astype(np.float16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(lanes(packed), rounded)


@pytest.mark.parametrize("offset", [0, 5, 40, 90, 126])
def test_nvfp4_in_a_registers_order_is_rounded_to_e4m3(offset: int) -> None:
    words, scales = scale_words()
    factors = assembly(HOPPER, "nvfp4_factors")(words[offset : offset + 1])
    rounded_products(factors, [scale[offset] / 8 for scale in scales])


@pytest.mark.parametrize("down", range(13))
def test_mxfp4_is_looked_up(down: int) -> None:
    """A register has the codes of one word. Tables are those of a block with 2^-down of the largest
    power. At the end 0.5 counts as 0."""
    few, many = 0x6C686000 - down * 0x08080800, 0x7C787470 - down * 0x08080808
    tables = [np.array([each], np.uint32) for each in (few, many) for _ in range(4)]
    registers = assembly(HOPPER_MXFP4, "_bytes")(PAIRS, PAIRS[::-1], *tables)
    for register, packed in enumerate(registers):
        word = halves((PAIRS, PAIRS[::-1])[register // 2])[register % 2]
        codes = np.stack([(word >> (4 * byte)) & 15 for byte in range(4)]).astype(np.int32)
        values = e2m1(codes)
        values = np.where((down == 12) & (np.abs(values) == 0.5), 0, values)
        np.testing.assert_array_equal(e4m3(lanes(packed)), values * 2.0 ** (6 - down))


def test_a_product_of_two_rounded_numbers_is_rounded_once() -> None:
    """Two of them in one instruction, as in float32, down to zeros with their signs."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal((4, 100_000)) * 10.0 ** random.integers(-20, 18, (4, 100_000))
    numbers = numbers.astype(np.float32)
    numbers[:, ::97] *= 0
    (words,) = assembly("triton_activation.py", "product")(*numbers.view(np.uint32))
    first, second = (
        each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in np.split(numbers, 2)
    )
    expected = (first * second).astype(ml_dtypes.bfloat16)
    assert np.array_equal(halves(words), expected.view(np.uint16))
