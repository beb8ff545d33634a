"""Stacked weights are the same model: for GPUs, all layers' weights of a kind in one array."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import decoder, registry
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.models.test_golden import load_golden, logits_in_chunks
from tests.tiny_model import SPEC

GOLDEN = Path(__file__).parent.parent / "golden"


def unstacked(params: decoder.Params, layers: int) -> decoder.Params:
    assert isinstance(params.layers, Layer)
    views = tuple(
        jax.tree.map(lambda weights, index=index: weights[index], params.layers)
        for index in range(layers)
    )
    return params._replace(layers=views)


@pytest.mark.parametrize("name", ["hybrid", "hybrid_moe", "qwen3_moe_mixed"])
def test_layers_of_each_kind_are_stacked(name: str) -> None:
    """Kinds differ in their mixer, or in their feed-forward."""
    spec = registry.spec_of(_config(name))
    plain = decoder.abstract(spec, jnp.float32)
    abstract = decoder.abstract(spec, jnp.float32, stacked=True)
    assert isinstance(abstract.layers, dict)
    numbers = [number for each in abstract.layers for number in each]
    assert sorted(numbers) == [*range(spec.num_layers)] and len(abstract.layers) == 2
    assert sorted(part.path for part in leaf_parts(abstract)) == sorted(
        part.path for part in leaf_parts(plain)
    )

    checkpoint, rules = open_checkpoint(GOLDEN / name), registry.rules(spec)
    separate = load_params(checkpoint, rules, plain)
    stacked = load_params(checkpoint, rules, abstract)
    assert_equal(stacked._replace(layers=layer_views(stacked.layers)), separate)
    assert stacked.dtype == separate.dtype
    stacked = dummy_params(abstract, seed=3)
    stacked = stacked._replace(layers=layer_views(stacked.layers))
    assert_equal(stacked, dummy_params(plain, seed=3))


@pytest.mark.parametrize("name", ["hybrid_moe", "qwen3_moe_mixed"])
def test_stacked_layers_compute_the_same(name: str) -> None:
    golden = load_golden(name)
    spec, rules = golden.spec, registry.rules(golden.spec)
    abstract = decoder.abstract(spec, jnp.float32, stacked=True)
    stacked = golden._replace(params=load_params(open_checkpoint(GOLDEN / name), rules, abstract))
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 40).astype(np.int32)
    np.testing.assert_array_equal(
        logits_in_chunks(stacked, tokens, 24), logits_in_chunks(golden, tokens, 24)
    )


def assert_equal(got: decoder.Params, expected: decoder.Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_loads_into_stacked_leaves_layer_by_layer() -> None:
    checkpoint = open_checkpoint(GOLDEN / "untied_sharded")
    spec = registry.spec_of(_config("untied_sharded"))
    rules = registry.rules(spec)
    separate = load_params(checkpoint, rules, decoder.abstract(spec, jnp.float32))
    stacked = load_params(checkpoint, rules, decoder.abstract(spec, jnp.float32, stacked=True))
    assert_equal(unstacked(stacked, spec.num_layers), separate)


def test_random_weights_do_not_depend_on_how_they_are_stored() -> None:
    separate = dummy_params(decoder.abstract(SPEC, jnp.float32), seed=3)
    stacked = dummy_params(decoder.abstract(SPEC, jnp.float32, stacked=True), seed=3)
    assert_equal(unstacked(stacked, SPEC.num_layers), separate)


def test_a_layer_that_the_checkpoint_lacks_is_named() -> None:
    spec = registry.spec_of({**_config("tied"), "num_hidden_layers": 9})
    abstract = decoder.abstract(spec, jnp.float32, stacked=True)
    with pytest.raises(CheckpointError, match=r"layers\.8\.qkv"):
        load_params(open_checkpoint(GOLDEN / "tied"), registry.rules(spec), abstract)


def _config(name: str) -> dict[str, object]:
    return json.loads((GOLDEN / name / "config.json").read_text())
