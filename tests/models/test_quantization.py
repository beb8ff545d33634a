"""Weights quantised at load: what becomes of which matrix, and that the model still runs on it."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.models.layer_weights import Layer
from jaxserve.models.quantization import Quantization, WeightFormat
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import encoded_abstract, load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import embedded_model
from jaxserve_kernels.weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    is_quantized,
    quantize_int4,
)
from tests.models.test_golden import Golden, logits_in_chunks
from tests.tiny_model import SPEC, tiny_spec

FOLDER = embedded_model()
EMBEDDED = registry.spec_of(json.loads((FOLDER / "config.json").read_text()))
SIZES = {"vocab_size": 128, "embed": 128, "ffn": 128, "head_dim": 32}
SMALL = tiny_spec(**SIZES)
"""The least that a quantised weight holds."""


def load(quantization: Quantization) -> decoder.Params:
    abstract = decoder.abstract(EMBEDDED, jnp.float32)
    encode = quantization.encoder(EMBEDDED)
    rules = registry.rules(EMBEDDED)
    return load_params(open_checkpoint(FOLDER), rules, abstract, encode=encode)


def dequantized(params: decoder.Params) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf,
        params,
        is_leaf=lambda leaf: is_quantized(leaf),
    )


def test_the_matrices_of_the_layers_are_quantised_and_nothing_else() -> None:
    params = load(Quantization(layers="int4"))
    plain = load(Quantization())
    assert isinstance(params.layers, tuple) and isinstance(plain.layers, tuple)
    for layer, original in zip(params.layers, plain.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            expected = quantize_int4(getattr(original, name))
            jax.tree.map(np.testing.assert_array_equal, getattr(layer, name), expected)
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
            np.testing.assert_array_equal(getattr(layer, name), getattr(original, name))
    np.testing.assert_array_equal(params.embedding, plain.embedding)


@pytest.mark.parametrize(
    ("name", "kind"), [("int4", Int4Weight), ("fp8", Fp8Weight), ("nvfp4", Nvfp4Weight)]
)
def test_stacked_layers_hold_what_separate_ones_hold(name: WeightFormat, kind: type) -> None:
    encode = Quantization(layers=name, head="int8").encoder(SMALL)
    separate = dummy_params(decoder.abstract(SMALL, jnp.float32), 3, encode)
    abstract = decoder.abstract(SMALL, jnp.float32, stacked=True)
    stacked = dummy_params(abstract, 3, encode)
    assert isinstance(separate.layers, tuple) and isinstance(stacked.layers, Layer)
    assert isinstance(stacked.layers.qkv, kind)
    assert isinstance(stacked.embedding, Int8Weight)
    for index, layer in enumerate(separate.layers):
        of_stack = jax.tree.map(lambda leaf, index=index: leaf[index], stacked.layers)
        jax.tree.map(np.testing.assert_array_equal, of_stack, layer)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), stacked)
    expected = encoded_abstract(abstract, encode)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected)


def test_an_untied_head_is_quantised_and_the_embedding_is_not() -> None:
    spec = tiny_spec(**SIZES, tie_embeddings=False)
    encode = Quantization(head="fp8").encoder(spec)
    params = dummy_params(decoder.abstract(spec, jnp.float32), 0, encode)
    assert isinstance(params.lm_head, Fp8Weight)
    assert not is_quantized(params.embedding)


@pytest.mark.parametrize("chunk", [16, 1])
def test_a_quantised_model_computes_with_its_dequantised_weights(chunk: int) -> None:
    encode = Quantization(layers="int4", head="int8").encoder(SMALL)
    params = dummy_params(decoder.abstract(SMALL, jnp.float32), 1, encode)
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, 16)
    got, expected = (
        logits_in_chunks(Golden("small", SMALL, weights, {}), tokens, chunk)
        for weights in (params, dequantized(params))
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected, axis=0).min() > 0.01, "tokens matter"


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4"])
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
def test_heads_of_other_families_compute_with_quantised_weights(
    name: WeightFormat, biased: bool
) -> None:
    spec = tiny_spec(**SIZES, qk_norm=False, qkv_bias=biased)
    encode = Quantization(layers=name, head="int8").encoder(spec)
    params = dummy_params(decoder.abstract(spec, jnp.float32), 1, encode)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 16)
    got, expected = (
        logits_in_chunks(Golden("other", spec, weights, {}), tokens, 16)
        for weights in (params, dequantized(params))
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected, axis=0).min() > 0.01, "tokens matter"


def test_a_shape_that_the_formats_cannot_hold_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 128; this model has qkv \[64, 32\], .*48"):
        Quantization(layers="int4").encoder(SPEC)
    with pytest.raises(ConfigError, match=r"lm_head \[97, 32\]"):
        Quantization(head="int8").encoder(SPEC)
