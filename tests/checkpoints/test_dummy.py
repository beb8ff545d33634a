"""Random weights: reproducible, well scaled, and few compilations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_checkpoints import dummy
from jaxserve_checkpoints.dummy import dummy_params


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_each_leaf_depends_on_seed_and_path_only() -> None:
    small = dummy_params({"b": array(8, 4)}, 7)
    large = dummy_params({"a": array(8, 4), "b": array(8, 4)}, 7)
    np.testing.assert_array_equal(small["b"], large["b"])
    assert not np.array_equal(large["a"], large["b"])
    assert not np.array_equal(small["b"], dummy_params({"b": array(8, 4)}, 8)["b"])


def test_matrices_keep_the_scale_and_vectors_are_near_one() -> None:
    params = dummy_params({"w": array(300, 400), "n": array(10_000)}, 0)
    assert np.std(params["w"]) == pytest.approx(400**-0.5, rel=0.02)
    assert abs(np.mean(params["w"])) < 1e-3
    assert np.mean(params["n"]) == pytest.approx(1.0, abs=1e-3)
    assert np.std(params["n"]) == pytest.approx(0.02, rel=0.05)


def test_biases_are_small() -> None:
    bias = dummy_params({"layers.0.qkv_bias": array(10_000)}, 0)["layers.0.qkv_bias"]
    assert abs(np.mean(bias)) < 1e-3
    assert np.std(bias) == pytest.approx(0.02, rel=0.05)


def test_the_tree_keeps_structure_dtypes_and_none() -> None:
    tree = {"a": (array(2, 3, dtype=jnp.bfloat16), None), "b": array(5, dtype=jnp.bfloat16)}
    params = dummy_params(tree, 0)
    assert jax.tree.structure(params) == jax.tree.structure(tree)
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(tree), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)


def test_one_compilation_per_shape() -> None:
    before = dummy._maker.cache_info().misses
    dummy_params({f"w{i}": array(11, 13) for i in range(20)}, 0)
    assert dummy._maker.cache_info().misses == before + 1


def test_integer_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floating point, got int8 \[2, 2\]"):
        dummy_params({"w": array(2, 2, dtype=jnp.int8)}, 0)
