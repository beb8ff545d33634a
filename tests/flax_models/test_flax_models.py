"""The Flax models: logits of the goldens, through every door; parameters and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxserve.flax
from jaxserve.commands.convert import convert
from jaxserve.config import ConfigError
from jaxserve.models.registry import spec_of
from jaxserve.weights.trees import named_tensors
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.checkpoints.orbax_files import random_tensors
from tests.models.test_golden import GOLDEN, TOLERANCE, VARIANTS, load_golden
from tests.weights.test_formats import assert_same, converting, loaded


@nnx.jit
def logits(model: jaxserve.flax.CausalLM, ids: jax.Array) -> jax.Array:
    return model(ids)


def assert_golden(model: jaxserve.flax.CausalLM, name: str) -> None:
    """All sequences at once, padded to one length: attention looks back only."""
    sequences = load_golden(name).sequences
    width = max(len(tokens) for tokens, _ in sequences)
    ids = np.zeros((len(sequences), width), np.int32)
    for row, (tokens, _) in zip(ids, sequences, strict=True):
        row[: len(tokens)] = tokens
    found = np.asarray(logits(model, jnp.asarray(ids)))
    for row, (_, expected) in zip(found, sequences, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=0, atol=TOLERANCE)


TRAINABLE = [name for name in VARIANTS if not name.startswith(("hybrid", "gpt_oss", "qwen3_moe"))]


@pytest.mark.parametrize("name", sorted({*VARIANTS} - {*TRAINABLE}))
def test_a_model_that_nothing_here_trains_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has experts|has no model to train"):
        jaxserve.flax.load(GOLDEN / name)


@pytest.mark.parametrize("name", TRAINABLE)
def test_logits_are_those_of_transformers(name: str) -> None:
    assert_golden(jaxserve.flax.load(GOLDEN / name), name)


@pytest.mark.parametrize("to", ["native", "orbax"])
def test_logits_are_the_same_through_every_door(to: str, tmp_path: Path) -> None:
    assert convert(converting(GOLDEN / "qwen2", tmp_path / to, "--to", to)) == 0
    assert_golden(jaxserve.flax.load(tmp_path / to), "qwen2")
    assert_same(loaded(tmp_path / to), loaded(GOLDEN / "qwen2"))


def test_what_is_saved_is_loaded_and_served(tmp_path: Path) -> None:
    model = jaxserve.flax.load(GOLDEN / "llama_biases", param_dtype=jnp.bfloat16)
    step = jaxserve.flax.save(model, tmp_path, step=4, like=GOLDEN / "llama_biases")
    assert step == tmp_path / "4"
    again = jaxserve.flax.load(tmp_path, param_dtype=jnp.bfloat16)
    assert_same(jaxserve.flax.parameters(again), jaxserve.flax.parameters(model))
    assert_same(loaded(tmp_path), loaded(GOLDEN / "llama_biases"))
    with pytest.raises(CheckpointError, match="has a step 4 already"):
        jaxserve.flax.save(model, tmp_path, step=4)


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "llama_biases"])
def test_parameters_have_hugging_faces_names(name: str) -> None:
    tensors = named_tensors(
        jaxserve.flax.parameters(jaxserve.flax.load(GOLDEN / name, param_dtype=jnp.bfloat16))
    )
    checkpoint = open_checkpoint(GOLDEN / name)
    assert sorted(tensors) == list(checkpoint.names)
    for each in checkpoint.names:
        np.testing.assert_array_equal(tensors[each], checkpoint.read(each))


def test_a_new_model_has_every_tensor_of_the_engines() -> None:
    spec = spec_of(json.loads((GOLDEN / "llama_biases" / "config.json").read_text()))
    model = jaxserve.flax.CausalLM(spec, rngs=nnx.Rngs(0))
    shapes = {
        name: array.shape for name, array in named_tensors(jaxserve.flax.parameters(model)).items()
    }
    assert shapes == {name: array.shape for name, array in random_tensors(spec).items()}


def test_every_parameter_gets_a_gradient() -> None:
    model = jaxserve.flax.load(GOLDEN / "qwen2")
    ids = jnp.arange(12, dtype=jnp.int32)[None]

    def loss(model: jaxserve.flax.CausalLM) -> jax.Array:
        return jax.nn.log_softmax(model(ids))[0, jnp.arange(11), ids[0, 1:]].mean()

    for path, gradient in jax.tree_util.tree_leaves_with_path(nnx.grad(loss)(model)):
        assert jnp.any(gradient != 0), path


def test_a_window_hides_what_is_older() -> None:
    spec = spec_of(json.loads((GOLDEN / "mistral" / "config.json").read_text()))
    window = spec.smallest_window
    assert window is not None
    model = jaxserve.flax.load(GOLDEN / "mistral")
    ids = np.arange(2 * window + 30, dtype=np.int32)[None] % spec.vocab_size
    changed = ids.copy()
    changed[0, 0] += 1
    one, other = (np.asarray(logits(model, jnp.asarray(each))) for each in (ids, changed))
    reach = spec.num_layers * (window - 1)
    assert np.abs(one - other)[0, :window].max() > 1e-3
    np.testing.assert_array_equal(one[0, reach + 1 :], other[0, reach + 1 :])
