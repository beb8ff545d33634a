"""Which products with quantised weights are launched how: kernels fit their shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels import weights
from jaxserve_kernels.quantized_matmul.config import Config, steps
from jaxserve_kernels.quantized_matmul.e4m3.tokens import format_for
from jaxserve_kernels.quantized_matmul.rules import choose, reads_quantized
from jaxserve_kernels.target import Target

HOPPER = Target.for_gpu(90)
PDL = HOPPER.replace(pdl=True)
QUANTIZE = {
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}

MODELS = [
    spec
    for spec in NAMED_MODELS.values()
    if spec.ffn and all(layer.attention for layer in spec.layers)
]
"""Dense ones with attention everywhere: products of experts are those of `experts`."""


@functools.cache
def weight_of(name: str, out: int, depth: int) -> Any:
    plain = jax.ShapeDtypeStruct((out, depth), jnp.bfloat16)
    return jax.eval_shape(QUANTIZE[name], plain)


def config_of(
    name: str,
    out: int,
    depth: int,
    tokens: int,
    *,
    gated: bool = False,
    hopper: bool = False,
    target: Target = HOPPER,
) -> Config | None:
    return choose(weight_of(name, out, depth), tokens, gated=gated, hopper=hopper, target=target)


@pytest.mark.parametrize("name", QUANTIZE)
def test_a_configuration_divides_its_product(name: str) -> None:
    """Of every model and every bucket: rows, splits and turns of the loop come out even."""
    for spec in MODELS:
        products = [
            (spec.q_size + 2 * spec.kv_size, spec.embed, False),
            (spec.embed, spec.q_size, False),
            (2 * spec.ffn, spec.embed, True),
            (spec.embed, spec.ffn, False),
        ]
        for out, depth, gated in products:
            for tokens in (1, 2, 16, 17, 24, 48, 64, 65, 96, 128, 200, 256, 512, 2048):
                config = config_of(name, out, depth, tokens, gated=gated)
                assert config is not None
                assert out % config.rows == 0
                assert config.splits == 1 or not gated
                if config.method == "small_m":  # tiles past the last one count nothing
                    continue
                in_registers = not config.beforehand
                tile = 64 if name == "nvfp4" and in_registers else 128
                turns, rest = divmod(depth // tile, config.splits)
                assert rest == 0 and turns % config.unroll == 0


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("name", QUANTIZE)
def test_a_weight_of_fewer_rows_than_a_tile_has_no_kernel(name: str, hopper: bool) -> None:
    """Or one with smaller tiles."""
    for tokens in (1, 9, 17, 33, 64, 65, 256, 1024):
        for depth in (128, 8192):
            config = config_of(name, 64, depth, tokens, hopper=hopper)
            assert config is None or config.rows <= 64


@pytest.mark.parametrize(("name", "tokens"), [("int4", (200, 512)), ("nvfp4", (65, 256, 384, 512))])
def test_on_hopper_each_multiprocessor_has_one_program(name: str, tokens: tuple[int, ...]) -> None:
    """No part of the inputs is without a tile, and no more than one program's tiles wait."""
    for spec in MODELS:
        for out, depth in ((spec.embed, spec.ffn), (spec.q_size + 2 * spec.kv_size, spec.embed)):
            for count in tokens:
                config = config_of(name, out, depth, count, hopper=True)
                assert config is not None
                if config.method != "hopper":  # integers with few inputs
                    assert name == "int4" and depth < 8192
                    continue
                tiles = depth // 128
                each = -(-tiles // config.splits)
                assert (config.splits - 1) * each < tiles <= config.splits * each
                programs = out // config.rows * -(-count // config.tokens) * config.splits
                assert config.splits == 1 or programs <= 132


def test_what_hopper_takes() -> None:
    """Gate and up, and down: NVFP4 but gate and up of 384 tokens, integers of many tokens or
    inputs in groups of 128, no prompts; fp8 of more than a tile of tokens."""

    def on_hopper(name: str, tokens: int) -> tuple[bool, bool]:
        gate_up = config_of(name, 19_456, 2560, tokens, gated=True, hopper=True)
        down = config_of(name, 2560, 9728, tokens, hopper=True)
        assert gate_up is not None and down is not None
        return gate_up.method == "hopper", down.method == "hopper"

    for name in ("nvfp4", "mxfp4"):
        taken = [on_hopper(name, tokens) for tokens in (64, 128, 256, 384, 512, 1024)]
        no, both = (False, False), (True, True)
        assert taken == [no, both, both, (False, True), both, no]
    taken = [on_hopper("int4", tokens) for tokens in (128, 256, 384, 512, 1024)]
    assert taken == [(False, False), (False, True), (False, True), (True, True), (False, False)]
    assert on_hopper("int4-g64", 512) == on_hopper("int8", 256) == (False, False)
    taken = [on_hopper("fp8", tokens) for tokens in (64, 128, 160, 512, 8192)]
    assert taken == [(False, False)] * 2 + [(True, True)] * 3


def test_fp8_has_large_tiles_where_there_are_enough_and_parts_where_few_are_deep() -> None:
    """Of gate and up, and of down."""
    for tokens, rows, parts in (
        (256, (256, 128), 3),
        (384, (256, 128), 1),
        (1024, (256, 128), 1),
        (2048, (256, 256), 1),
    ):
        gate_up = config_of("fp8", 19_456, 2560, tokens, gated=True, hopper=True)
        down = config_of("fp8", 2560, 9728, tokens, hopper=True)
        assert gate_up is not None and down is not None
        assert (gate_up.rows, down.rows) == rows
        assert (gate_up.splits, down.splits) == (1, parts)


def test_few_tokens_are_unpacked_and_many_computed_in_e4m3() -> None:
    def methods(name: str) -> list[str | None]:
        each = [config_of(name, 6144, 2560, tokens) for tokens in (1, 16, 64, 128, 2048)]
        return [config.method if config else None for config in each]

    for name in QUANTIZE:
        one = "small_m" if name.startswith("int4") else "unpack"
        some = "e4m3" if name == "fp8" else "unpack"
        assert methods(name) == [one, "unpack", some, "e4m3", "e4m3"]


@pytest.mark.parametrize("name", QUANTIZE)
def test_with_pdl_codes_stream_up_to_64_tokens(name: str) -> None:
    """Whole tiles of rows, no part without a tile of the input, few enough for their readers."""
    for spec in MODELS:
        for out, depth, gated in (
            (spec.q_size + 2 * spec.kv_size, spec.embed, False),
            (spec.embed, spec.ffn, False),
            (2 * spec.ffn, spec.embed, True),
        ):
            for tokens in (1, 8, 9, 16, 17, 32, 48, 64):
                config = config_of(name, out, depth, tokens, gated=gated, target=PDL)
                assert config is not None
                if config.method == "stream_k":
                    assert gated and tokens > 32 and name.startswith("int4")
                    continue
                assert config.method == "streaming"
                assert tokens <= config.tokens and out % config.rows == 0
                tiles, turn = depth // 128, config.unroll
                each = steps(tiles, config.splits, turn)
                assert config.splits <= 8 and config.num_stages > 2
                assert (config.splits - 1) * each < tiles <= config.splits * each
                assert tiles % each == 0 or each % turn == tiles % turn == 0
                assert config.splits == 1 or not gated
                half = steps(tiles, 2, turn)
                assert config.halved == 0 or (gated and (tiles % half == 0 or half % turn == 0))
    config = config_of(name, 6144, 2560, 65, target=PDL)
    assert config is not None and config.method not in ("streaming", "stream_k")


@pytest.mark.parametrize("name", ["int4", "int4-g64"])
def test_warpgroups_share_tokens_where_each_multiprocessor_has_over_two_tiles(name: str) -> None:
    """Of the rows of gate and up: with two it would idle."""
    for out, shared in ((16_896, False), (19_456, True), (24_576, True), (34_816, True)):
        config = config_of(name, out, 2560, 64, gated=True, target=PDL)
        assert config is not None and (config.method == "stream_k") == shared
        assert not shared or (config.num_stages >= 6 and config.splits == 1)


@pytest.mark.parametrize("name", QUANTIZE)
def test_after_norms_integers_of_4_bits_read_int8_tokens(name: str) -> None:
    """In groups of 128; from nine tokens on, while they stream. The norm is told so."""
    for out, depth, gated in ((6144, 2560, False), (19_456, 2560, True), (2560, 9728, False)):
        for tokens in (8, 9, 33, 64, 65):
            config = config_of(name, out, depth, tokens, gated=gated, target=PDL)
            expected = name == "int4" and out > depth and 8 < tokens <= 64
            assert config is not None and config.int8_tokens == expected
            if expected:
                weight = weight_of(name, out, depth)
                assert reads_quantized(weight.operand, tokens, config, PDL)
                form = format_for(weight, tokens, config)
                assert (form.dtype, form.scale_group, form.group) == (jnp.int8, 128, 0)


@pytest.mark.parametrize("name", QUANTIZE)
def test_a_last_wave_of_tiles_is_halved_where_all_halves_fit_it(name: str) -> None:
    """Of gate and up, with 17 to 32 tokens; not of a single wave, or with few inputs."""

    def halved(tiles: int, depth: int, tokens: int, *, gated: bool = True) -> int:
        config = config_of(name, 64 * tiles, depth, tokens, gated=gated, target=PDL)
        assert config is not None
        return config.halved

    wave = 3 * 132
    waves = {304: 0, wave: 0, 448: 52, 544: 148, wave + 198: 198, wave + 199: 0, 2 * wave + 8: 8}
    for tiles, expected in waves.items():
        assert halved(tiles, 5120, 17) == halved(tiles, 5120, 32) == expected
    assert halved(544, 5120, 16) == halved(544, 5120, 33) == 0
    assert halved(544, 5120, 32, gated=False) == halved(544, 512, 32) == 0


def test_an_output_matrix_of_integers_is_tall() -> None:
    """On Hopper, where tokens are so many that their copies count."""

    def method(name: str, out: int, tokens: int, *, hopper: bool = True) -> str | None:
        config = config_of(name, out, 2560, tokens, hopper=hopper)
        return config and config.method

    for tokens in (17, 32, 64):
        assert method("int8", 151_936, tokens) == "large_n"
        assert method("int8", 2560, tokens) == "unpack"
        assert method("int8", 151_936, tokens, hopper=False) == "unpack"
        assert method("fp8", 151_936, tokens) == "e4m3"
    assert method("int8", 151_936, 16) == "unpack"
    assert method("int8", 151_936, 65) == "e4m3"


def test_a_thread_has_registers_for_all_its_codes_of_few_tokens() -> None:
    """Eight for each tile; a product that must not leave parts gets more warps instead."""
    for tokens in (1, 8):
        for out, depth, gated in ((2560, 4096, False), (8192, 28_672, False), (57_344, 8192, True)):
            config = config_of("int4", out, depth, tokens, gated=gated)
            assert config is not None and config.method == "small_m"
            assert depth // 128 <= config.splits * config.num_warps * (8 if gated else 5)


def test_groups_that_no_kernel_knows_are_dequantised() -> None:
    coarse = functools.partial(weights.quantize_int4, group=256)
    plain = jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)
    assert choose(jax.eval_shape(coarse, plain), 1, gated=False, target=HOPPER) is None
    assert config_of("int8", 192, 256, 17) is None  # 192 rows are no multiple of a program's 128


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", QUANTIZE)
def test_a_ring_is_as_deep_as_the_cards_shared_memory_allows(name: str, capability: int) -> None:
    """Three programs fit beside each other, and one stage more would not: no card's number is a
    constant."""
    target = Target.for_gpu(capability).replace(pdl=True)
    plain = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    operand = jax.eval_shape(QUANTIZE[name], plain).operand
    config = config_of(name, 4096, 4096, 16, target=target)
    assert config is not None and config.method == "streaming"
    stage = config.unroll * (64 * operand.row_bytes + 256 * config.tokens)
    room = target.gpu.shared_memory // 3 - 1024
    assert config.num_stages * stage <= room < (config.num_stages + 1) * stage
