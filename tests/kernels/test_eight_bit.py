"""The 8-bit KV formats keep elements within their rounding, and attention sees what they keep."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from jaxserve_kernels.kv_format import attend, named
from jaxserve_kernels.kv_format.eight_bit import reference
from jaxserve_kernels.target import CPU
from tests.kernels.kv_steps import EPS, LAYER, Sequences

HEADS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=8, max_size=8).map(
    lambda values: np.array([values], np.float32)
)

encode_int8, decode_int8 = jax.jit(reference.encode_int8), jax.jit(reference.decode_int8)
encode_fp8, decode_fp8 = jax.jit(reference.encode_fp8), jax.jit(reference.decode_fp8)


@given(head=HEADS)
def test_int8_is_off_by_half_a_step_at_most(head: NDArray[np.float32]) -> None:
    words, scales = encode_int8(head)
    decoded = np.asarray(decode_int8(words, scales), np.float64)
    assert scales[0] == pytest.approx(np.abs(head).max() / 127, rel=1e-6)
    assert (np.abs(decoded - head) <= 0.5001 * float(scales[0]) + 1e-30).all()


@given(head=HEADS, scale=st.sampled_from([1.0, 0.25, 8.0]))
def test_fp8_has_four_bits_of_mantissa_and_saturates(
    head: NDArray[np.float32], scale: float
) -> None:
    scales = np.full(1, scale, np.float32)
    decoded = np.asarray(decode_fp8(encode_fp8(head, scales), scales), np.float64)
    largest = reference.FP8_MAX * scale
    clipped = np.clip(head.astype(np.float64), -largest, largest)
    # Below 2**-6 the steps are those of the subnormal numbers, 2**-9.
    allowed = np.maximum(np.abs(clipped) / 16, scale * 2**-10)
    assert (np.abs(decoded - clipped) <= allowed * 1.0001).all()


def test_fp8_rounds_the_same_with_any_scale_that_is_a_power_of_two_and_fits() -> None:
    heads = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    heads = np.where(np.abs(heads) < 2**-5, 1, heads)
    plain, other = (
        decode_fp8(encode_fp8(heads, scales), scales)
        for scales in (np.full(64, scale, np.float32) for scale in (1, 2**-5))
    )
    np.testing.assert_array_equal(plain, other)


def test_the_largest_magnitudes_are_those_of_all_pages_but_paddings() -> None:
    shape = Sequences(lengths=(40,), page_size=4).shape
    fp8 = named("fp8_e4m3")
    kv = fp8.with_scales(fp8.allocate(shape, jnp.float32), np.full((2, 2, 2), 0.5))
    rng = np.random.default_rng(0)
    kept = rng.normal(size=(2, shape.pages, 2, 2, 4, 16)).astype(np.float32)
    kept[:, 0] = 100
    kept[1, 3, 1, 0, 2, 13] = -300  # beyond 448 * 0.5
    words = encode_fp8(kept, np.full(kept.shape[:-1], 0.5, np.float32))
    largest = fp8.largest_magnitudes(kv._replace(words=words))
    expected = np.abs(kept[:, 1:]).max(axis=(1, 4, 5))
    np.testing.assert_allclose(largest, np.minimum(expected, 224), rtol=1 / 15)
    assert float(largest[1, 1, 0]) == 224


def test_what_was_never_written_decodes_to_a_finite_number() -> None:
    for name in ("int8", "fp8_e4m3"):
        kv = named(name).allocate(Sequences(lengths=(3,), page_size=4).shape, jnp.float32)
        for side in (0, 1):
            assert np.isfinite(kv.read(0, jnp.arange(2), side)).all()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_attention_is_the_softmax_over_what_the_cache_keeps(name: str) -> None:
    sequences = Sequences(lengths=(9, 1, 30), page_size=8)
    kv = named(name).allocate(sequences.shape, jnp.float32)
    run: Any = jax.jit(
        functools.partial(attend, target=CPU),
        static_argnames=("layer", "eps", "tile_size", "dtype"),
    )
    step = sequences.step((0, 0, 0), (9, 1, 30), 4)
    qkv, tables = sequences.projections(step)
    out, kv = run(
        qkv, kv, LAYER, sequences.heads, tables, step, eps=EPS, tile_size=4, dtype=sequences.dtype
    )
    identity = named("auto").allocate(sequences.shape, jnp.float32)
    exact, _ = run(
        qkv,
        identity,
        LAYER,
        sequences.heads,
        tables,
        step,
        eps=EPS,
        tile_size=4,
        dtype=sequences.dtype,
    )
    error = float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))
    assert 1e-4 < error < (0.01 if name == "int8" else 0.05), error
    # The same queries over the decoded cache, by the dense format.
    pages = jnp.arange(sequences.num_pages)
    decoded = jnp.stack([kv.read(LAYER, pages, side) for side in (0, 1)], axis=2)
    dense = jnp.stack([jnp.zeros_like(decoded), decoded])
    from jaxserve_kernels.attention_inputs.reference import heads_of
    from jaxserve_kernels.paged_attention.reference import paged_attention

    q, _, _ = heads_of(
        qkv, sequences.heads, tables, kv_heads=sequences.kv_heads, eps=EPS, dtype=sequences.dtype
    )
    expected = paged_attention(q, dense, LAYER, step.page_table, step.tiles, tile_size=4)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
