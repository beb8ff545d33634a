"""Stacked weights are the same model: for GPUs, all layers' weights of a kind in one array."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.models import decoder, registry
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import find_weights
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.models.test_golden import Golden, logits_in_chunks
from tests.models.test_hybrid_loading import quantizable
from tests.tiny_model import SPEC

GOLDEN = Path(__file__).parent.parent / "golden"


def unstacked(params: decoder.Params, layers: int) -> decoder.Params:
    assert isinstance(params.layers, Layer)
    views = tuple(
        jax.tree.map(lambda weights, index=index: weights[index], params.layers)
        for index in range(layers)
    )
    return params._replace(layers=views)


def views(params: decoder.Params) -> decoder.Params:
    return params._replace(layers=layer_views(params.layers))


KINDS = {
    "experts in some": registry.spec_of(
        json.loads((GOLDEN / "qwen3_moe_mixed" / "config.json").read_text())
    ),
    "delta nets in some": quantizable(sparse=False),
    "the same with experts": quantizable(sparse=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_each_kind_are_stacked(name: str) -> None:
    spec = KINDS[name]
    plain = decoder.abstract(spec, jnp.float32)
    abstract = decoder.abstract(spec, jnp.float32, stacked=True)
    assert isinstance(abstract.layers, dict) and len(abstract.layers) == 2
    numbers = [number for each in abstract.layers for number in each]
    assert sorted(numbers) == [*range(spec.num_layers)]
    paths = {part.path for part in leaf_parts(plain)}
    assert {part.path for part in leaf_parts(abstract)} == paths
    stacked, separate = dummy_params(abstract, seed=3), dummy_params(plain, seed=3)
    assert_equal(views(stacked), separate)
    assert stacked.dtype == separate.dtype
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 40).astype(np.int32)
    np.testing.assert_array_equal(
        logits_in_chunks(Golden(name, spec, stacked, {}), tokens, 24),
        logits_in_chunks(Golden(name, spec, separate, {}), tokens, 24),
    )


@pytest.mark.parametrize(("name", "copied_names"), [
    ("gpt_oss", {"router_bias", "sinks"}),
    ("the same with experts", {"a_log", "dt_bias", "router"}),
])  # fmt: skip
def test_views_with_copies_are_the_same_model(name: str, copied_names: set[str]) -> None:
    """Vectors are longer, at multiples of 256 bytes, and routers have multiples of eight rows."""
    spec = registry.spec_of(json.loads((GOLDEN / "gpt_oss" / "config.json").read_text()))
    if name in KINDS:
        spec = replace(KINDS[name], layers=KINDS[name].layers * 2)
    params = dummy_params(decoder.abstract(spec, jnp.float32, stacked=True), seed=3)
    copied = layer_views(params.layers, copies=True)
    longer = {
        jax.tree_util.keystr(path[-1:]).strip(".")
        for (path, one), (_, other) in zip(
            jax.tree_util.tree_leaves_with_path(copied),
            jax.tree_util.tree_leaves_with_path(layer_views(params.layers)),
            strict=True,
        )
        if one.shape != other.shape
    }
    assert longer == copied_names
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 40).astype(np.int32)
    np.testing.assert_array_equal(
        logits_in_chunks(Golden(name, spec, params._replace(layers=copied), {}), tokens, 24),
        logits_in_chunks(Golden(name, spec, params, {}), tokens, 24),
    )


def test_a_checkpoint_loads_into_the_stacks_of_each_kind() -> None:
    spec, folder = KINDS["experts in some"], GOLDEN / "qwen3_moe_mixed"
    checkpoint, rules = open_checkpoint(folder), registry.rules(spec)
    separate = load_params(checkpoint, rules, decoder.abstract(spec, jnp.float32))
    abstract = decoder.abstract(spec, jnp.float32, stacked=True)
    assert_equal(views(load_params(checkpoint, rules, abstract)), separate)


def test_a_converted_checkpoint_loads_into_the_stacks_of_each_kind(tmp_path: Path) -> None:
    folder, made = GOLDEN / "qwen3_moe_mixed", tmp_path / "made"
    flags = ["--model", str(folder), "--out", str(made), "--dtype", "float32"]
    source = find_weights(parse_args(flags[:2]))
    convert_model(parse_args(flags, "convert"), source, made, lambda done, total: None)
    shutil.copy(folder / "config.json", made)
    options = parse_args(["--model", str(made)])
    plan = plan_weights(options, find_weights(options), jnp.float32, tmp_path, stacked=True)
    assert plan.native is not None and isinstance(plan.plain.layers, dict)
    stacked = weight_loader(replace(plan, staging=[]), {})(lambda done, total: None)
    checkpoint, rules = open_checkpoint(folder), registry.rules(source.spec)
    abstract = decoder.abstract(source.spec, jnp.float32)
    assert_equal(views(stacked), load_params(checkpoint, rules, abstract))


def test_layers_whose_slices_would_not_be_aligned_are_not_stacked() -> None:
    """Six value heads have 24 bytes of `a_log`."""
    abstract = decoder.abstract(registry.spec_of(_config("hybrid")), jnp.float32, stacked=True)
    assert isinstance(abstract.layers[0], Layer)


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
