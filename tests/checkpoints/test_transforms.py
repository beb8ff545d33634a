"""What rules do to tensors on their way to a leaf: the values, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_checkpoints.rules import (
    Offset,
    Reorder,
    Rule,
    Scale,
    Split,
    Squeeze,
    Transform,
    Transpose,
)
from jaxserve_checkpoints.stream_sources import direct_sources
from tests.checkpoints import quantized_files as files

GRID = np.arange(48, dtype=np.float32).reshape(6, 8)


def leaf(*shape: int, dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def loaded(
    folder: Path, tensors: dict[str, NDArray[Any]], rules: list[Rule], tree: dict[str, Any]
) -> dict[str, Any]:
    save_file(tensors, folder / "model.safetensors")
    return load_params(open_checkpoint(folder), rules, tree)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ((), GRID),
        ((Transpose(),), GRID.T),
        ((Reorder(2),), GRID[[0, 2, 4, 1, 3, 5]]),
        ((Reorder(4, axis=1),), GRID[:, [0, 4, 1, 5, 2, 6, 3, 7]]),
        ((Scale(0.25),), GRID / 4),
        ((Offset(1.0),), GRID + 1),
        ((Transpose(), Reorder(2)), GRID.T[[0, 2, 4, 6, 1, 3, 5, 7]]),
        ((Reorder(2), Transpose()), GRID[[0, 2, 4, 1, 3, 5]].T),
    ],
)
def test_a_leaf_is_its_tensor_put_through_the_transforms_in_order(
    transforms: tuple[Transform, ...], expected: NDArray[Any], tmp_path: Path
) -> None:
    rules = [Rule("w", ("t",), transforms=transforms)]
    params = loaded(tmp_path, {"t": GRID}, rules, {"w": leaf(*expected.shape)})
    np.testing.assert_array_equal(params["w"], expected)


@pytest.mark.parametrize("shape", [(600, 257), (256, 512), (1, 900)])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_large_matrix_is_transposed_block_by_block(
    shape: tuple[int, int], stored: Any, tmp_path: Path
) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape).astype(stored)
    rules = [Rule("w", ("t",), transforms=(Transpose(),))]
    tree = {"w": leaf(*shape[::-1], dtype=ml_dtypes.bfloat16)}
    params = loaded(tmp_path, {"t": matrix}, rules, tree)
    np.testing.assert_array_equal(params["w"], matrix.T.astype(ml_dtypes.bfloat16))


def test_experts_are_transposed_each() -> None:
    experts = np.arange(24).reshape(2, 3, 4)
    expected = np.stack([expert.T for expert in experts])
    np.testing.assert_array_equal(Transpose().apply(experts), expected)
    assert Transpose().shape(experts.shape) == expected.shape


def test_an_axis_of_size_1_is_left_out(tmp_path: Path) -> None:
    rules = [Rule("w", ("t",), transforms=(Squeeze(1),))]
    params = loaded(tmp_path, {"t": GRID[:, None]}, rules, {"w": leaf(6, 8)})
    np.testing.assert_array_equal(params["w"], GRID)
    with pytest.raises(CheckpointError, match="no axis 1 of size 1"):
        loaded(tmp_path, {"t": GRID}, rules, {"w": leaf(6, 8)})


def test_parts_of_one_tensor_go_to_several_leaves(tmp_path: Path) -> None:
    rules = [Rule(f"part{i}", ("t",), transforms=(Split(3, i),)) for i in range(3)]
    tree = {f"part{i}": leaf(2, 8) for i in range(3)}
    params = loaded(tmp_path, {"t": GRID}, rules, tree)
    np.testing.assert_array_equal(np.concatenate([params[f"part{i}"] for i in range(3)]), GRID)


def test_sources_are_transformed_before_they_are_concatenated(tmp_path: Path) -> None:
    rules = [Rule("w", ("a", "b"), transforms=(Transpose(),))]
    tensors = {"a": GRID, "b": GRID + 100}
    params = loaded(tmp_path, tensors, rules, {"w": leaf(16, 6)})
    np.testing.assert_array_equal(params["w"], np.concatenate([GRID.T, GRID.T + 100]))


def test_a_scaled_tensor_is_rounded_once(tmp_path: Path) -> None:
    narrow = np.linspace(-3, 3, 64, dtype=np.float32).astype(ml_dtypes.bfloat16)
    rules = [Rule("w", ("t",), transforms=(Scale(1 / 3),))]
    params = loaded(tmp_path, {"t": narrow}, rules, {"w": leaf(64, dtype=ml_dtypes.bfloat16)})
    expected = (narrow.astype(np.float64) / 3).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["w"]), expected)


def test_transformed_leaves_are_no_bytes_of_the_file(tmp_path: Path) -> None:
    save_file({"t": GRID}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    plain, turned = Rule("w", ("t",)), Rule("w", ("t",), transforms=(Transpose(),))
    assert direct_sources(checkpoint, [plain], {"w": leaf(6, 8)}) is not None
    assert direct_sources(checkpoint, [turned], {"w": leaf(8, 6)}) is None


@pytest.mark.parametrize(
    ("transforms", "shape", "message"),
    [
        ([Split(4, 0)], (6, 8), "w: of t: [6, 8] has no 4 equal parts along axis 0"),
        ([Reorder(2, axis=2)], (6, 8), "w: of t: [6, 8] has no 2 equal parts along axis 2"),
        ([Transpose()], (6, 8), "the model needs [6, 8], found t [8, 6] after what its rule does"),
        ([Split(2, 0)], (3, 8), "t: used in 1 parts, which are not each of its 2 once"),
    ],
)
def test_what_does_not_fit_is_named(
    transforms: list[Transform], shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    rules = [Rule("w", ("t",), transforms=tuple(transforms))]
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path, {"t": GRID}, rules, {"w": leaf(*shape)})
    assert message in str(error.value)


def test_a_part_and_the_whole_of_a_tensor_are_two_uses(tmp_path: Path) -> None:
    rules = [Rule("half", ("t",), transforms=(Split(2, 0),)), Rule("whole", ("t",))]
    with pytest.raises(CheckpointError, match="t: used 2 times"):
        loaded(tmp_path, {"t": GRID}, rules, {"half": leaf(3, 8), "whole": leaf(6, 8)})


def test_what_is_quantised_cannot_be_transformed(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], {"q": (64, 256)}, 0)
    found = detect(tmp_path)
    assert found is not None
    checkpoint = QuantizedCheckpoint(open_checkpoint(tmp_path), found)
    rules = [Rule("w", ("q.weight",), transforms=(Reorder(2),))]
    with pytest.raises(CheckpointError, match=r"w is made of q\.weight by reordering them"):
        load_params(checkpoint, rules, {"w": leaf(64, 256)})
