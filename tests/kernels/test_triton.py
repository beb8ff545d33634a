"""The Triton kernels against the plain-JAX references, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.attention_inputs import KVSlots, attention_inputs
from jaxserve_kernels.dense_matmul import add_linear, gated_linear, linear, sum_parts
from jaxserve_kernels.kv_format import AttentionStep, attend
from jaxserve_kernels.paged_attention import QueryTiles, paged_attention
from jaxserve_kernels.shared_expert import add_shared_expert
from jaxserve_kernels.target import REFERENCE, Implementation, Target
from tests.kernels.attention_inputs import AttentionSpec, Chunk, Heads, apart, make_inputs
from tests.kernels.attention_specs import HOPPER_SPECS, MODEL_SPECS, SMALL_SPECS
from tests.kernels.gated_steps import CASES, Case, attended, inputs_of
from tests.kernels.kv_steps import HEADS, LAYER, head_weights

pytestmark = pytest.mark.gpu


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


TOLERANCE = {"bfloat16": 6e-3, "float32": 2e-6}
"""Relative to the norm; the bf16 result is rounded to 8 bits, which alone costs 2e-3."""


@pytest.mark.parametrize("split", [False, True], ids=["one_list", "decode_rows_apart"])
@pytest.mark.parametrize("spec", SMALL_SPECS + HOPPER_SPECS + MODEL_SPECS, ids=lambda s: s.name)
def test_paged_attention_equals_its_reference(spec: AttentionSpec, split: bool) -> None:
    inputs = make_inputs(spec, seed=7)
    tiles = QueryTiles(inputs.first, inputs.length, inputs.slot, inputs.position)
    if split and spec.tile_size == 1:
        pytest.skip("every tile has one token")

    def attend(implementation: Implementation, dtype: jnp.dtype, tiles: QueryTiles) -> jax.Array:
        target = Target.here().replace(implementation=implementation)
        call = functools.partial(
            paged_attention, layer=inputs.layer, tile_size=spec.tile_size, target=target
        )
        return jax.jit(lambda q, kv, table, t: call(q, kv, page_table=table, tiles=t))(
            jnp.asarray(inputs.q, dtype),
            jnp.asarray(inputs.kv, dtype),
            inputs.page_table,
            tiles,
        )

    used = np.zeros(spec.num_tokens, bool)
    for first, length in zip(inputs.first, inputs.length, strict=True):
        used[first : first + length] = True
    with jax.default_matmul_precision("highest"):
        expected = attend("reference", jnp.dtype("float32"), tiles)
    out = attend("triton", jnp.dtype(spec.dtype), apart(inputs) if split else tiles)
    assert relative_error(out[used], expected[used]) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("tokens", "embed"), [(1, 256), (3, 2560), (64, 2560), (17, 5120)])
def test_add_rms_norm_equals_its_reference(tokens: int, embed: int, parts: int, dtype: str) -> None:
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (tokens, embed)).astype(dtype)
    update = jax.random.normal(keys[1], (parts, tokens, embed))
    update = update if parts > 1 else update.astype(dtype)
    weight = (1 + 0.1 * jax.random.normal(keys[2], (embed,))).astype(dtype)

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        target = Target.here().replace(implementation=implementation)
        return jax.jit(lambda *arrays: add_rms_norm(*arrays, 1e-6, target=target))(
            x, update, weight
        )

    for out, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [384, 500, 512, 768, 1024, 2048, 2100, 4096])
def test_the_gated_product_of_many_tokens_equals_its_reference(tokens: int) -> None:
    """Of 512, 768, 2,048 and 4,096 tokens the last tiles are cut into pieces."""
    keys = jax.random.split(jax.random.key(tokens), 2)
    x = jax.random.normal(keys[0], (tokens, 2560), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (2 * 9728, 2560)) / 50).astype(jnp.bfloat16)

    def run(implementation: Implementation) -> jax.Array:
        target = Target.here().replace(implementation=implementation)
        return jax.jit(lambda *arrays: gated_linear(*arrays, target=target))(x, weight)

    assert relative_error(run("triton"), run("reference")) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("tokens", [16, 256, 2047, 2048])
def test_a_product_and_the_norm_after_it_equal_their_reference(tokens: int) -> None:
    keys = jax.random.split(jax.random.key(tokens), 3)
    x = jax.random.normal(keys[0], (tokens, 2560), jnp.bfloat16)
    heads = jax.random.normal(keys[1], (tokens, 4096), jnp.bfloat16)
    out = (jax.random.normal(keys[2], (3, 2560, 4096)) / 64).astype(jnp.bfloat16)

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        def both(x: jax.Array, heads: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
            return add_rms_norm(
                *add_linear(x, heads, out[1], target=target),
                jnp.ones_like(x[0]),
                1e-6,
                target=target,
            )

        target = Target.here().replace(implementation=implementation)
        return jax.jit(both)(x, heads, out)

    for got, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(got, expected) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "page"),
    [(32, 8, 128, 64), (4, 2, 64, 16), (28, 4, 128, 64), (1, 1, 32, 4)],
)
@pytest.mark.parametrize("options", HEADS)
def test_attention_inputs_equal_their_reference(
    options: str, q_heads: int, kv_heads: int, dim: int, page: int, dtype: str, parts: int
) -> None:
    rng = np.random.default_rng(5)
    tokens, pages = 9, 5
    width = (q_heads + 2 * kv_heads) * dim
    qkv = jnp.asarray(
        rng.standard_normal((parts, tokens, width)), "float32" if parts > 1 else dtype
    )
    kv = jnp.asarray(rng.standard_normal((3, pages, kv_heads, 2, page, dim)), dtype)
    heads = head_weights(options, q_heads, kv_heads, dim, dtype)
    angles = rng.uniform(0, 100, (tokens, dim // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    places = rng.choice(pages * page, tokens, replace=False)
    slots = KVSlots(jnp.asarray(places // page, jnp.int32), jnp.asarray(places % page, jnp.int32))

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        target = Target.here().replace(implementation=implementation)
        return jax.jit(
            lambda qkv, kv: attention_inputs(
                qkv, kv, 1, heads, tables, slots, eps=1e-6, dtype=dtype, target=target
            )
        )(qkv, kv)

    for out, expected in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
@pytest.mark.parametrize(("out", "depth"), [(6144, 2560), (2560, 4096), (2560, 9728), (768, 256)])
def test_products_of_few_tokens_equal_their_reference(tokens: int, out: int, depth: int) -> None:
    keys = jax.random.split(jax.random.key(out + tokens), 2)
    x = jax.random.normal(keys[0], (tokens, depth), jnp.bfloat16)
    weights = (jax.random.normal(keys[1], (3, out, depth)) * depth**-0.5).astype(jnp.bfloat16)

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        def both(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = sum_parts(linear(x, weights[1], jnp.float32, target=target), jnp.float32)
            return product, gated_linear(x, weights[2], target=target)

        target = Target.here().replace(implementation=implementation)
        return jax.jit(both)(x, weights)

    (product, gated), (expected, expected_gated) = run("triton"), run("reference")
    assert relative_error(product, expected) < 1e-5
    assert relative_error(gated, expected_gated) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("tokens", [1, 5, 16, 32])
@pytest.mark.parametrize(("embed", "ffn"), [(2560, 9728), (256, 512)])
def test_a_chain_of_kernels_equals_its_reference(tokens: int, embed: int, ffn: int) -> None:
    keys = jax.random.split(jax.random.key(tokens), 4)
    gate_up = (jax.random.normal(keys[0], (2, 2 * ffn, embed)) * embed**-0.5).astype(jnp.bfloat16)
    down = (jax.random.normal(keys[1], (2, embed, ffn)) * ffn**-0.5).astype(jnp.bfloat16)
    norms = (1 + 0.1 * jax.random.normal(keys[2], (3, embed))).astype(jnp.bfloat16)

    def layers(
        x: jax.Array, update: jax.Array, *weights: jax.Array, target: Target
    ) -> tuple[jax.Array, jax.Array]:
        gate_up, down, norms = weights
        for layer in range(2):
            x, normed = add_rms_norm(x, update, norms[layer], 1e-6, target=target)
            update = linear(
                gated_linear(normed, gate_up[layer], target=target), down[layer], target=target
            )
        return add_rms_norm(x, update, norms[2], 1e-6, target=target)

    program = jax.jit(lambda *arrays: pdl.call(layers, *arrays, target=Target.here()))
    for step in range(4):  # by the third call a graph is replayed
        x = jax.random.normal(jax.random.fold_in(keys[3], step), (tokens, embed))
        arrays = (x.astype(jnp.bfloat16), x[None] / 2, gate_up, down, norms)
        out = program(*arrays)
        expected = jax.jit(lambda *arrays: layers(*arrays, target=REFERENCE))(*arrays)
        for got, wanted in zip(out, expected, strict=True):
            assert relative_error(got, wanted) < 2 * TOLERANCE["bfloat16"]
    assert "jaxserve_pdl_launches" in program.lower(*arrays).as_text()


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (Heads(32, 8, 128), "norms"),
        (Heads(40, 8, 128), "both"),
        (Heads(8, 8, 64), "nothing"),
        (Heads(28, 4, 128), "bias"),
    ],
    ids=str,
)
@pytest.mark.parametrize("starts", [(1024,), (0, 63, 64, 65, 200, 1, 128)], ids=["one", "some"])
def test_attention_with_pdl_equals_its_reference(
    starts: tuple[int, ...], heads: Heads, options: str
) -> None:
    """One kernel computes the attention's inputs too; past keys are read before they exist."""
    chunks = tuple(Chunk(start, 1) for start in starts)
    spec = AttentionSpec(
        name="", chunks=chunks, heads=heads, page_size=64, tile_size=1, dtype="bfloat16",
        padding_tokens=1, padding_tiles=1, pages_per_seq=24,
    )  # fmt: skip
    inputs = make_inputs(spec, seed=3)
    tiles = QueryTiles(*(jnp.asarray(each) for each in inputs[4:]))
    tokens, used = spec.num_tokens, len(starts)
    positions, slots = np.zeros((2, tokens), np.int32)
    positions[inputs.first[:used]] = inputs.position[:used]
    slots[inputs.first[:used]] = inputs.slot[:used]
    pages = inputs.page_table[slots, positions // 64] * (np.arange(tokens) < used)
    places = (jnp.asarray(each) for each in (slots, positions, pages, positions % 64))
    step = AttentionStep(*places, tiles, jnp.asarray(inputs.page_table))
    rng = np.random.default_rng(4)
    weights = head_weights(options, heads.q, heads.kv, heads.dim, "bfloat16")
    angles = rng.uniform(0, 100, (tokens, heads.dim // 2))
    tables = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    width = (heads.q + 2 * heads.kv) * heads.dim
    qkv = jnp.asarray(rng.standard_normal((4, tokens, width)), jnp.float32)

    def layer(qkv: jax.Array, kv: jax.Array, *args: Any, target: Target) -> Any:
        return attend(
            qkv, kv, inputs.layer, *args, eps=1e-6, tile_size=1, dtype="bfloat16", target=target
        )

    arrays = (qkv, jnp.asarray(inputs.kv), weights, tables, step)
    program = jax.jit(lambda *arrays: pdl.call(layer, *arrays, target=Target.here()))
    out, kv = program(*arrays)
    assert "paged_attention" in str(jax.make_jaxpr(program)(*arrays))
    assert "attention_inputs" not in str(jax.make_jaxpr(program)(*arrays))
    expected, expected_kv = jax.jit(lambda *arrays: layer(*arrays, target=REFERENCE))(*arrays)
    assert relative_error(out[:used], expected[:used]) < TOLERANCE["bfloat16"]
    kv, expected_kv = (np.asarray(x[inputs.layer, 1:], np.float32) for x in (kv, expected_kv))
    np.testing.assert_array_equal(np.isnan(kv), np.isnan(expected_kv))
    assert relative_error(np.nan_to_num(kv), np.nan_to_num(expected_kv)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_attention_with_pdl_equals_its_reference(case: Case) -> None:
    inputs, used = inputs_of(case), len(case.starts)
    call = functools.partial(attended, case)
    program = jax.jit(lambda *arrays: pdl.call(call, *arrays, target=Target.here()))
    out, kv = program(*inputs)
    assert "attention_prologue" not in str(jax.make_jaxpr(program)(*inputs))
    expected, expected_kv = jax.jit(lambda *arrays: call(*arrays, target=REFERENCE))(*inputs)
    assert relative_error(out[:used], expected[:used]) < TOLERANCE["bfloat16"]
    assert relative_error(kv[LAYER, 1:], expected_kv[LAYER, 1:]) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("tokens", [17, 64, 100, 256, 1000, 2048])
@pytest.mark.parametrize(("out", "depth"), [(6144, 2560), (2560, 9728), (19456, 2560), (768, 256)])
def test_products_of_many_tokens_equal_their_reference(tokens: int, out: int, depth: int) -> None:
    """Whichever kernel the dispatch chooses."""
    keys = jax.random.split(jax.random.key(out + tokens), 2)
    x = jax.random.normal(keys[0], (tokens, depth), jnp.bfloat16)
    weights = (jax.random.normal(keys[1], (3, out, depth)) * depth**-0.5).astype(jnp.bfloat16)

    def run(implementation: Implementation) -> tuple[jax.Array, jax.Array]:
        def both(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
            return sum_parts(linear(x, weights[1], target=target), x.dtype), gated_linear(
                x, weights[2], target=target
            )

        target = Target.here().replace(implementation=implementation)
        return jax.jit(both)(x, weights)

    for got, expected in zip(run("triton"), run("reference"), strict=True):
        assert got.dtype == expected.dtype
        assert relative_error(got, expected) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_router_and_the_sum_with_a_shared_expert(tokens: int) -> None:
    """Of Qwen3.5-35B-A3B, in a chain."""
    keys = jax.random.split(jax.random.key(tokens), 3)
    x = jax.random.normal(keys[0], (tokens, 2048), jnp.bfloat16)
    router = (jax.random.normal(keys[1], (257, 2048)) / 45).astype(jnp.bfloat16)
    down = (jax.random.normal(keys[2], (2048, 2048)) / 45).astype(jnp.bfloat16)

    def both(
        x: jax.Array, update: jax.Array, router: jax.Array, down: jax.Array, *, target: Target
    ) -> jax.Array:
        scores = linear(x, router, jnp.float32, target=target)
        every = linear(x, down, target=target)
        return add_shared_expert(update, every, scores, column=256, dtype="bfloat16", target=target)

    given = (x, x[None], router, down)
    chain = jax.jit(lambda *arrays: pdl.call(both, *arrays, target=Target.here()))
    expected = jax.jit(functools.partial(both, target=REFERENCE))(*given)
    assert relative_error(chain(*given), expected) < TOLERANCE["bfloat16"]
