"""Small kernels of a launch chain on the emulator: norms, the prologue of attention, its gates, the
sum with a shared expert, and products with few rows of a weight."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve_kernels import dense_matmul
from jaxserve_kernels.add_rms_norm import add_rms_norm, add_rms_norm_twice
from jaxserve_kernels.add_rms_norm import reference as norm_reference
from jaxserve_kernels.add_rms_norm import triton as norm_triton
from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.gated_attention import PrologueHeads, reference, triton
from jaxserve_kernels.quantized_matmul.e4m3.tokens import (
    BothForms,
    Order,
    QuantizedTokens,
    TokenFormat,
)
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.shared_expert import reference as shared_reference
from jaxserve_kernels.shared_expert import triton as shared_triton
from jaxserve_kernels.target import Target
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER, PDL


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jnp.ndarray:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def wide(x: jnp.ndarray) -> jnp.ndarray:
    return x.astype(jnp.float32)


@pytest.mark.parametrize(
    ("gated", "rotated", "norms", "biased"),
    [(True, 16, "float32", False), (False, 64, "bfloat16", True), (False, 16, None, False)],
)
def test_the_prologue(gated: bool, rotated: int, norms: str | None, biased: bool) -> None:
    heads = PrologueHeads(q_heads=6, kv_heads=2, head_dim=64, gated=gated)
    rng, tokens = np.random.default_rng(rotated), 3
    width = heads.q_size * (1 + gated) + 2 * heads.kv_size
    weights = HeadWeights(
        q_norm=normal(rng, 64, dtype=norms) if norms else None,
        k_norm=normal(rng, 64, dtype=norms) if norms else None,
        bias=normal(rng, width, dtype="bfloat16") if biased else None,
    )
    angles = rng.uniform(0, 6, (tokens, rotated // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    projected = normal(rng, 4, tokens, width)
    qkv, gate = triton.attention_prologue(
        projected, weights, tables, heads=heads, eps=1e-6, dtype="bfloat16", target=PDL
    )
    expected, wanted = reference.attention_prologue(
        projected, weights, tables, heads=heads, eps=1e-6, dtype="bfloat16"
    )
    assert relative_error(wide(qkv), wide(expected)) < 2e-3
    assert (gate is None) == (wanted is None) == (not gated)
    if gate is not None and wanted is not None:
        assert relative_error(wide(gate), wide(wanted)) < 2e-3


def test_gates() -> None:
    rng = np.random.default_rng(1)
    x, gate = (normal(rng, 3, 700, dtype="bfloat16") for _ in range(2))
    found, expected = triton.gate_heads(x, gate, target=PDL), reference.gate_heads(x, gate)
    assert relative_error(wide(found), wide(expected)) < 4e-3


def test_a_product_with_a_weight_of_few_rows() -> None:
    rng = np.random.default_rng(2)
    x, weight = normal(rng, 5, 640, dtype="bfloat16"), normal(rng, 96, 640, dtype="bfloat16")
    parts = dense_matmul.linear(x, weight, jnp.float32, target=PDL)
    assert parts.shape == (5, 5, 96)
    assert relative_error(parts.sum(0), wide(x) @ wide(weight).T) < 1e-6


@pytest.mark.parametrize("rows", [17, 257])
def test_a_product_with_a_router_of_no_whole_tiles(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight = normal(rng, 5, 256, dtype="bfloat16"), normal(rng, rows, 256, dtype="bfloat16")
    parts = dense_matmul.linear(x, weight, jnp.float32, target=PDL)
    assert parts.shape[1:] == (5, rows)
    assert relative_error(parts.sum(0), wide(x) @ wide(weight).T) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "rows", "inputs"), [(65, 33, 192), (200, 96, 256), (1030, 70, 128)]
)
def test_many_tokens_with_a_router_in_a_chain(tokens: int, rows: int, inputs: int) -> None:
    rng, joined = np.random.default_rng(tokens), HOPPER.replace(joined=True)
    x, weight = (normal(rng, each, inputs, dtype="bfloat16") for each in (tokens, rows))
    parts = dense_matmul.linear(x, weight, jnp.float32, target=joined)
    assert parts.shape[0] > 1 and parts.shape[1:] == (tokens, rows)
    assert relative_error(parts.sum(0), wide(x) @ wide(weight).T) < 1e-6
    rounded = dense_matmul.linear(x, weight, target=joined)
    assert rounded.dtype == jnp.bfloat16 and rounded.shape[0] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_with_a_shared_expert(dtype: str) -> None:
    rng, tokens, embed = np.random.default_rng(3), 3, 640
    update, every = normal(rng, 1, tokens, embed, dtype=dtype), normal(rng, 4, tokens, embed)
    given = (update, every, normal(rng, 2, tokens, 9))
    found = shared_triton.add_shared_expert(*given, column=8, dtype=dtype, target=PDL)
    expected = shared_reference.add_shared_expert(*given, column=8, dtype=dtype)
    bound = 1e-6 if dtype == "float32" else 4e-3
    assert relative_error(wide(found), wide(expected)) < bound


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "embed", "programs"), [(3, 2560, 5), (1, 96, 6), (2, 40, 5)])
def test_a_norm_by_the_programs_of_a_cluster(
    tokens: int, embed: int, programs: int, biased: bool
) -> None:
    rng = np.random.default_rng(embed)
    x = normal(rng, tokens, embed, dtype="bfloat16")
    weight, bias = (normal(rng, embed, dtype="bfloat16") for _ in range(2))
    given = (x, normal(rng, 4, tokens, embed), weight, 1e-6)
    added = bias if biased else None
    found = add_rms_norm(*given, bias=added, target=PDL)
    expected = norm_reference.add_rms_norm(*given, added)
    assert norm_triton.pieces_of(embed)[0] == programs
    for got, wanted in zip(found, expected, strict=True):
        assert relative_error(wide(got), wide(wanted)) < 3e-3


@given(size=st.integers(8, 16_384), inputs=st.sampled_from([8, 128]))
def test_pieces_of_a_row_have_all_of_it_and_none_is_empty(size: int, inputs: int) -> None:
    programs, taken = norm_triton.pieces_of(size, inputs)
    assert 1 <= programs <= 8
    assert taken % inputs == 0
    assert (programs - 1) * taken < size <= programs * taken


@pytest.mark.parametrize("target", [PDL, HOPPER], ids=["cluster", "one_program"])
@pytest.mark.parametrize("sums", [0, 128])
def test_a_norm_that_writes_int8_with_scales_of_groups(sums: int, target: Target) -> None:
    """Like a norm and then a kernel that quantises, to the last bit. With plain tokens, too."""
    rng, tokens, embed = np.random.default_rng(4), 3, 1280
    form = TokenFormat(jnp.int8, Order.BYTES, sums, tokens, scale_group=128)
    x = normal(rng, tokens, embed, dtype="bfloat16").at[1, 128:256].set(0)
    update = normal(rng, 2, tokens, embed).at[:, 1, 128:256].set(0)
    given = (x, update, normal(rng, embed, dtype="bfloat16"), 1e-6)
    total, plain = add_rms_norm(*given, target=target)
    expected = quantized(plain, form, target=target)
    with_codes, codes = add_rms_norm(*given, form, target=target)
    again, both = add_rms_norm_twice(*given, form, target=target)
    assert isinstance(codes, QuantizedTokens) and isinstance(both, BothForms)
    np.testing.assert_array_equal(wide(both.plain), wide(plain))
    for each in (with_codes, again):
        np.testing.assert_array_equal(wide(each), wide(total))
    for found in (codes, both.quantized):
        np.testing.assert_array_equal(found.codes, expected.codes)
        np.testing.assert_array_equal(found.scale, expected.scale)
        if sums:
            np.testing.assert_array_equal(found.sums, expected.sums)
    in_order = np.asarray(expected.codes, np.float32).reshape(tokens, -1, 64, 2).swapaxes(-1, -2)
    groups = in_order.reshape(tokens, -1, 128)
    values = (groups * np.asarray(expected.scale).T[..., None]).reshape(tokens, embed)
    assert relative_error(values, wide(plain)) < 1.1e-2
    assert not values[1, 128:256].any()
    if sums:
        np.testing.assert_array_equal(expected.sums, groups.sum(-1).T)
