"""Loading: what arrives on the device is what was saved, cast and concatenated."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_checkpoints.rules import Rule


class Layer(NamedTuple):
    up: Any
    norm: Any


class Params(NamedTuple):
    layers: tuple[Layer, ...]
    head: Any


RULES = (
    Rule("layers.{layer}.up", ("l{layer}.a", "l{layer}.b"), axis=1),
    Rule("layers.{layer}.norm", ("l{layer}.n",)),
    Rule("head", ("head",)),
)


def saved(folder: Path, dtype: Any, layers: int = 3) -> dict[str, np.ndarray]:
    """Random tensors of `dtype` on disk, in two shards' worth of names in one file."""
    generator = np.random.default_rng(0)
    shapes = {"head": (6, 4)}
    for i in range(layers):
        shapes |= {f"l{i}.a": (4, 2), f"l{i}.b": (4, 3), f"l{i}.n": (4,)}
    tensors = {
        name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def abstract(dtype: Any, layers: int = 3, head: bool = True) -> Params:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = Layer(up=array(4, 5), norm=array(4))
    return Params(layers=(layer,) * layers, head=array(6, 4) if head else None)


@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("max_bytes", [1, 200, 1 << 30])
def test_load_equals_what_was_saved(
    stored: Any, target: Any, max_bytes: int, tmp_path: Path
) -> None:
    tensors = saved(tmp_path, stored)
    params = load_params(
        open_checkpoint(tmp_path), RULES, abstract(target), max_bytes_in_flight=max_bytes
    )
    assert isinstance(params, Params)
    assert all(leaf.dtype == target for leaf in jax.tree.leaves(params))
    for i, layer in enumerate(params.layers):
        up = np.concatenate([tensors[f"l{i}.a"], tensors[f"l{i}.b"]], axis=1)
        np.testing.assert_array_equal(np.asarray(layer.up), up.astype(target))
        np.testing.assert_array_equal(np.asarray(layer.norm), tensors[f"l{i}.n"].astype(target))
    np.testing.assert_array_equal(np.asarray(params.head), tensors["head"].astype(target))


def test_absent_leaves_stay_none(tmp_path: Path) -> None:
    tensors = saved(tmp_path, np.float32)
    del tensors["head"]
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(open_checkpoint(tmp_path), RULES, abstract(jnp.float32, head=False))
    assert params.head is None


def test_progress_rises_to_the_size_of_the_tree(tmp_path: Path) -> None:
    saved(tmp_path, np.float32)
    calls: list[tuple[int, int]] = []
    load_params(
        open_checkpoint(tmp_path),
        RULES,
        abstract(jnp.bfloat16),
        progress=lambda done, total: calls.append((done, total)),
        max_bytes_in_flight=1,
    )
    size = 2 * (3 * (4 * 5 + 4) + 6 * 4)
    assert {total for _, total in calls} == {size}
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert (done[0], done[-1], len(done)) == (0, size, 8)


def test_place_gets_each_leaf_with_its_sharding(tmp_path: Path) -> None:
    saved(tmp_path, np.float32, layers=1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = abstract(jnp.float32, layers=1)
    tree = tree._replace(head=jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding))
    calls: list[tuple[tuple[int, ...], Any]] = []

    def place(array: np.ndarray, target: Any) -> jax.Array:
        calls.append((array.shape, target))
        return jax.device_put(array, target)

    load_params(open_checkpoint(tmp_path), RULES, tree, place=place)
    assert calls == [((4, 5), None), ((4,), None), ((6, 4), sharding)]


def test_nothing_is_placed_when_the_checkpoint_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path, np.float32, layers=2)

    def place(array: np.ndarray, target: Any) -> jax.Array:
        raise AssertionError("placed a leaf of a checkpoint that does not fit")

    with pytest.raises(CheckpointError, match=r"layers\.2\.up: not in the checkpoint"):
        load_params(open_checkpoint(tmp_path), RULES, abstract(jnp.float32), place=place)


@settings(max_examples=25, deadline=None)
@given(
    leaves=st.lists(
        st.tuples(
            st.integers(1, 3),  # tensors
            st.lists(st.integers(0, 3), min_size=1, max_size=3),  # shape of one
            st.integers(0, 2),  # axis
            st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
        ),
        min_size=1,
        max_size=5,
    ),
    target=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    max_bytes=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_trees_round_trip(tmp_path_factory, leaves, target, max_bytes, seed) -> None:
    generator = np.random.default_rng(seed)
    tensors, rules, tree, expected = {}, [], {}, {}
    for i, (count, shape, axis, dtype) in enumerate(leaves):
        names = tuple(f"t{i}.{j}" for j in range(count))
        parts = [generator.standard_normal(shape).astype(dtype) for _ in names]
        axis %= len(shape)
        tensors |= dict(zip(names, parts, strict=True))
        rules.append(Rule(f"leaf{i}", names, axis))
        expected[f"leaf{i}"] = np.concatenate(parts, axis).astype(target)
        tree[f"leaf{i}"] = jax.ShapeDtypeStruct(expected[f"leaf{i}"].shape, target)
    folder = tmp_path_factory.mktemp("tree")
    save_file(tensors, folder / "model.safetensors")
    params = load_params(open_checkpoint(folder), rules, tree, max_bytes_in_flight=max_bytes)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), array)
