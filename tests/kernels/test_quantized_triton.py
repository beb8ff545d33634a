"""Products with quantised weights by the Triton kernels against their definition, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import pdl, weights
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.matmul import gated_linear, linear, sum_parts, token_format
from jaxserve_kernels.quantized_matmul.rules import choose
from jaxserve_kernels.target import REFERENCE, Implementation, Target

pytestmark = pytest.mark.gpu


def with_zeros(weight: jax.Array, dtype: str) -> weights.Int4Weight:
    packed = weights.quantize_int4(weight)
    zeros = jax.random.randint(jax.random.key(1), packed.scale.shape, 5, 11)
    return packed._replace(zero=zeros if dtype == "int32" else zeros.astype(dtype) + 0.375)


QUANTIZE: dict[str, Callable[[jax.Array], Any]] = {
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int4-g32": functools.partial(weights.quantize_int4, group=32),
    "int4-whole-zeros": functools.partial(with_zeros, dtype="int32"),
    "int4-any-zeros": functools.partial(with_zeros, dtype="float32"),
    "int8": weights.quantize_int8,
    "fp8": weights.quantize_fp8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}


def in_another_order(weight: jax.Array) -> weights.OrderedInt4Weight:
    packed = weights.quantize_int4(weight)
    depth = weight.shape[-1]
    orders = [jax.random.permutation(jax.random.key(layer), depth) for layer in range(len(weight))]
    return weights.OrderedInt4Weight(packed.packed, packed.scale, jnp.stack(orders))


def in_blocks(weight: jax.Array) -> weights.Fp8Weight:
    """With a scale for 128 inputs of each row."""
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, 128)
    scale = jnp.max(jnp.abs(groups), -1, keepdims=True) / 448
    values = (groups / scale).astype(jnp.float8_e4m3fn).reshape(weight.shape)
    return weights.pack_fp8(values, scale[..., 0])


IN_INT8 = ("int4", "int4-whole-zeros", "int4-any-zeros")
"""Formats whose chains of 9 to 64 tokens have tokens in int8."""

CHAINED = {**QUANTIZE, "fp8-g128": in_blocks, "int4-act-order": in_another_order}

TOLERANCE = 6e-3
"""Of the norm: bfloat16 rounds a result by 1.7e-3; the gating rounds three times, 3.6e-3."""

INT8_TOLERANCE = 1.2e-2
"""Tokens in int8 with a scale for each 128 inputs cost 6e-3, gated 9e-3."""

E4M3_TOLERANCE = 6.5e-2
"""Tokens in e4m3 cost 2.6e-2, gated 3.7e-2, weights of 4 bits in e4m3 as much again."""


@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize(
    ("tokens", "out", "depth"),
    [
        (1, 6144, 2560),
        (5, 1280, 640),
        (24, 2560, 4096),
        (70, 1280, 640),
        (300, 2560, 4096),
        (200, 17_920, 512),
        (600, 256, 512),
        (1100, 2560, 640),
        (250, 256, 8192),
    ],
)
def test_products_equal_their_definition(name: str, tokens: int, out: int, depth: int) -> None:
    keys = jax.random.split(jax.random.key(out + tokens), 2)
    x = jax.random.normal(keys[0], (tokens, depth), jnp.bfloat16)
    plain = (jax.random.normal(keys[1], (2, out, depth)) * depth**-0.5).astype(jnp.bfloat16)
    stacked = QUANTIZE[name](plain)
    second = jax.tree.map(lambda leaf: leaf[1], stacked)

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        def both(x: jax.Array, stacked: Any) -> tuple[jax.Array, jax.Array]:
            weight = jax.tree.map(lambda leaf: leaf[1], stacked)
            return sum_parts(linear(x, weight, target=target), jnp.float32), gated_linear(
                x, weight, target=target
            )

        # The definition on a CPU: it compiles in a fraction of the time.
        device = jax.devices("cpu" if implementation == "reference" else None)[0]
        target = Target.here().replace(implementation=implementation)
        return jax.jit(both)(*jax.device_put((x, stacked), device))

    for gated, out_, expected in zip((False, True), run("triton"), run("reference"), strict=True):
        here = Target.here()
        hopper = here.runs_hopper_kernels()
        config = choose(second, tokens, gated=gated, hopper=hopper, target=here)
        in_e4m3 = config is not None and config.method in ("e4m3", "hopper")
        limit = E4M3_TOLERANCE if in_e4m3 else TOLERANCE
        assert relative_error(out_, expected) < limit, config


@pytest.mark.parametrize(
    "name", ["int4", "int4-g64", "int4-g32", "int4-whole-zeros", "int4-any-zeros", "nvfp4", "mxfp4"]
)
def test_a_pass_beforehand_makes_what_a_copy_is(name: str) -> None:
    """But for values in the middle between two numbers of e4m3, which may go either way."""
    from jaxserve_kernels.quantized_matmul.e4m3.triton_convert import to_fp8

    plain = (jax.random.normal(jax.random.key(3), (256, 640)) * 640**-0.5).astype(jnp.bfloat16)
    codes = QUANTIZE[name](plain)
    copy, converted = (
        jax.jit(weights.e4m3_copy)(codes),
        jax.jit(functools.partial(to_fp8, target=Target.here()))(codes),
    )
    np.testing.assert_allclose(converted.scale, copy.scale, rtol=1e-6)
    for one, other in ((copy, codes), (converted, codes), (converted, copy)):
        limit = 1e-7 if name == "mxfp4" else 0.03
        assert relative_error(one.dequantize(), other.dequantize()) < limit


@pytest.mark.parametrize(
    ("tokens", "embed", "ffn"),
    [
        (1, 2560, 9728),
        (5, 2560, 9728),
        (8, 256, 512),
        (12, 2560, 9728),
        (32, 256, 640),
        (50, 256, 512),
        (40, 2560, 9728),
        (64, 512, 17_408),
    ],
)
def test_a_chain_of_products_equals_its_definition(tokens: int, embed: int, ffn: int) -> None:
    """Of few and of some tokens with 4-bit integers: codes are read before the kernels before
    them end."""
    check_chain("int4", tokens, embed, ffn)


@pytest.mark.parametrize("tokens", [3, 16, 24, 64])
@pytest.mark.parametrize("name", [name for name in CHAINED if name != "int4"])
def test_so_does_a_chain_in_every_other_format(name: str, tokens: int) -> None:
    check_chain(name, tokens, 640, 1280)


def check_chain(name: str, tokens: int, embed: int, ffn: int) -> None:
    keys = jax.random.split(jax.random.key(tokens), 4)
    quantize = jax.jit(CHAINED[name])
    gate_up = quantize(jax.random.normal(keys[0], (2, 2 * ffn, embed)) * embed**-0.5)
    down = quantize(jax.random.normal(keys[1], (2, embed, ffn)) * ffn**-0.5)
    norms = (1 + 0.1 * jax.random.normal(keys[2], (3, embed))).astype(jnp.bfloat16)

    def layers(
        x: jax.Array, update: jax.Array, gate_up: Any, down: Any, norms: jax.Array, target: Target
    ) -> tuple[jax.Array, jax.Array]:
        for layer in range(2):
            gates, downs = (jax.tree.map(lambda leaf: leaf[layer], w) for w in (gate_up, down))  # noqa: B023
            form = token_format(gates, x.shape[0], x.dtype, gated=True, target=target)
            x, normed = add_rms_norm(x, update, norms[layer], 1e-6, form, target=target)
            update = linear(gated_linear(normed, gates, target=target), downs, target=target)
        return add_rms_norm(x, update, norms[2], 1e-6, target=target)

    limit = 2 * (INT8_TOLERANCE if name in IN_INT8 else TOLERANCE)
    program = jax.jit(lambda *arrays: pdl.call(layers, *arrays, target=Target.here()))
    for step in range(4):  # by the third call a graph is replayed
        x = jax.random.normal(jax.random.fold_in(keys[3], step), (tokens, embed))
        arrays = (x.astype(jnp.bfloat16), x[None] / 2, gate_up, down, norms)
        out = program(*arrays)
        expected = jax.jit(lambda *arrays: layers(*arrays, target=REFERENCE))(*arrays)
        for got, wanted in zip(out, expected, strict=True):
            assert relative_error(got, wanted) < limit
    assert "jaxserve_pdl_launches" in program.lower(*arrays).as_text()


@pytest.mark.parametrize("tokens", [17, 40, 64])
def test_scores_by_an_output_matrix_of_integers(tokens: int) -> None:
    """Of 513 blocks of rows, which programs take three at a time."""
    keys = jax.random.split(jax.random.key(tokens), 2)
    head = jax.jit(weights.quantize_int8)(jax.random.normal(keys[0], (513 * 128, 640)))
    x = jax.random.normal(keys[1], (tokens, 640), jnp.bfloat16)

    def run(implementation: Implementation) -> jax.Array:
        def scores(x: jax.Array, head: Any) -> jax.Array:
            return sum_parts(linear(x, head, jnp.float32, target=target), jnp.float32)

        target = Target.here().replace(implementation=implementation)
        return jax.jit(scores)(x, head)

    assert relative_error(run("triton"), run("reference")) < TOLERANCE


@pytest.mark.parametrize("name", ["int4", "int4-g64", "fp8"])
def test_a_norm_makes_the_tokens_that_its_reader_would(name: str) -> None:
    """To the last bit: tokens in 8 bits from the norm's kernel, or from one after it."""
    keys = jax.random.split(jax.random.key(7), 3)
    weight = jax.jit(QUANTIZE[name])(jax.random.normal(keys[0], (1280, 640), jnp.bfloat16))
    x = jax.random.normal(keys[1], (130, 640), jnp.bfloat16)
    update = jax.random.normal(keys[2], (2, 130, 640))
    norm = jnp.full((640,), 1.5, jnp.bfloat16)

    target = Target.here()

    def run(quantizing: bool) -> tuple[jax.Array, jax.Array]:
        def both(x: jax.Array, update: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            form = token_format(weight, x.shape[0], x.dtype, target=target) if quantizing else None
            assert (form is not None) == quantizing
            total, normed = add_rms_norm(x, update, norm, 1e-6, form, target=target)
            return total, sum_parts(linear(normed, weight, target=target), jnp.float32)

        return jax.jit(both)(x, update, weight)

    for together, apart in zip(run(True), run(False), strict=True):
        assert np.array_equal(together, apart)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
