"""Calibration reads what the model reads; AWQ folds its factors so that the layer stays itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model_spec import ModelSpec
from jaxserve.models import awq, decoder, registry
from jaxserve.models.awq import AwqLayers, Quantized, quantize_layer_awq
from jaxserve.models.calibration import LayerInputs, layer_statistics, run_layer
from jaxserve.models.layer_weights import Layer
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.target import CPU
from jaxserve_kernels.weights import quantize_int4
from tests.tiny_model import tiny_spec

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = {"vocab_size": 128, "embed": 256, "ffn": 256, "head_dim": 64}
SMALL = tiny_spec(**SIZES, num_layers=1)


@pytest.mark.parametrize("name", ["tied", "llama_biases", "qwen2"])
def test_calibration_computes_what_transformers_computes(name: str) -> None:
    folder = GOLDEN / name
    spec = registry.spec_of(json.loads((folder / "config.json").read_text()))
    abstract = decoder.abstract(spec, jnp.float32)
    params = load_params(open_checkpoint(folder), registry.rules(spec), abstract)
    with np.load(folder / "golden.npz") as arrays:
        tokens, logits = arrays["tokens_0"], arrays["logits_0"]

    @jax.jit
    def compute(params: decoder.Params) -> jax.Array:
        x = params.embedding[tokens]
        for layer in params.layers:
            x, _ = run_layer(layer, x, spec.layers[0], eps=spec.norm_eps)
        return decoder.logits(params, rms_norm(x, params.final_norm, spec.norm_eps), target=CPU)

    np.testing.assert_allclose(compute(params), logits, atol=2e-4)


def test_layers_that_nobody_asks_for_are_run_and_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversion that goes on asks for the rest; norms that do not change are never ours."""
    spec = tiny_spec(**SIZES, num_layers=3)
    params = dummy_params(decoder.abstract(spec, jnp.float32), 0)
    assert isinstance(params.layers, tuple)
    ids = jax.random.randint(jax.random.key(2), (1, 64), 0, spec.vocab_size)
    means = [found.qkv.mean for found in layer_statistics(params, ids, spec)]
    searched: list[jax.Array] = []
    reported: list[str] = []

    def search(layer: Layer, inputs: LayerInputs[Any], spec: ModelSpec) -> Quantized:
        searched.append(inputs.qkv.mean)
        return Quantized(layer, LayerInputs(*(jnp.float32(0.1),) * 4))

    monkeypatch.setattr(awq, "quantize_layer_awq", search)
    layers = AwqLayers(lambda: params, ids, spec, lambda path, error: reported.append(path))
    assert layers.part("embedding") is None
    assert layers.part("layers.0.q_norm") is None
    assert searched == []
    for name in ("attention_norm", "down"):
        assert layers.part(f"layers.1.{name}") is getattr(params.layers[1], name)
    assert layers.part("layers.2.qkv") is params.layers[2].qkv
    for found, mean in zip(searched, means[1:], strict=True):
        np.testing.assert_array_equal(found, mean)
    assert reported == [f"layers.{i}.{name}" for i in (1, 2) for name in LayerInputs._fields]


BIASED = tiny_spec(**SIZES, num_layers=1, qk_norm=False, qkv_bias=True, ffn_bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SMALL, BIASED], ids=["qwen3", "biased"])
def test_a_layer_quantised_by_awq_is_nearer_to_itself_than_one_rounded(spec: ModelSpec) -> None:
    """Its factors are in norms, values, the gate's partner and their biases, and nowhere else."""
    params = dummy_params(decoder.abstract(spec, jnp.float32), 0)
    layer = params.layers[0]
    if spec is BIASED:
        names = ("qkv_bias", "gate_up_bias")
        layer = layer._replace(**{name: 20 * getattr(layer, name) for name in names})
    uneven = jnp.exp(jax.random.normal(jax.random.key(1), (spec.embed,)))
    layer = layer._replace(
        attention_norm=layer.attention_norm * uneven, mlp_norm=layer.mlp_norm * uneven
    )
    ids = jax.random.randint(jax.random.key(2), (2, 64), 0, spec.vocab_size)
    plain = params._replace(layers=(layer,))
    quantized, errors = quantize_layer_awq(layer, next(layer_statistics(plain, ids, spec)), spec)
    rounded = layer._replace(
        **{name: quantize_int4(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
    )
    run = jax.jit(partial(run_layer, spec=spec.layers[0], eps=spec.norm_eps))
    x = params.embedding[ids[0]]
    expected = run(layer, x)[0] - x

    def error(other: Layer) -> float:
        difference = run(other, x)[0] - x - expected
        return float(jnp.sqrt(jnp.mean(difference**2) / jnp.mean(expected**2)))

    assert error(quantized) < 0.8 * error(rounded)
    assert all(0 < float(each) < 0.12 for each in errors)
    if layer.q_norm is not None:
        np.testing.assert_array_equal(quantized.q_norm, layer.q_norm)
    assert not np.array_equal(quantized.attention_norm, layer.attention_norm)
