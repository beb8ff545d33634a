"""Quantised checkpoints of other makers: read bit for bit, or refused with what is wrong."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.quantized.format import nibble_pairs, nibbles, order_of
from jaxserve_checkpoints.quantized.mxfp4 import decode_blocks
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_kernels.matmul import linear, sum_parts
from jaxserve_kernels.weights import Fp8Weight, Int4Weight, OrderedInt4Weight, Weight
from tests.checkpoints import quantized_files as files

SIZES = {"q": (64, 256), "k": (32, 256), "v": (32, 256)}
NAMES = ("q.weight", "k.weight", "v.weight")


def view(folder: Path) -> QuantizedCheckpoint:
    format = detect(folder)
    assert format is not None
    return QuantizedCheckpoint(open_checkpoint(folder), format)


def read(folder: Path) -> Weight:
    packed = view(folder).packed(NAMES, "qkv")
    assert packed is not None
    return packed.decode()


OFTEN = (
    "awq",
    "gptq-act-order",
    "packed-asym",
    "nvfp4-modelopt",
    "mxfp4-blocks",
    "hqq",
    "fp8-blocks",
)
"""Kinds that every run reads; the others are variations of these."""


@functools.cache
def read_all(kinds: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """What is read of each kind, dequantised, and what NumPy says; compiled together: faster."""
    packed: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in kinds:
            folder = Path(place) / name
            folder.mkdir()
            norm = {"norm.weight": np.ones(8, np.float32)}
            weights = files.save(folder, files.KINDS[name], SIZES, 3, **norm)
            checkpoint = view(folder)
            assert set(checkpoint.names) == {*NAMES, "norm.weight"}
            assert [checkpoint.shape(each) for each in NAMES] == list(SIZES.values())
            assert checkpoint.packed(["norm.weight"], "norm") is None
            packed[name] = checkpoint.packed(NAMES, "qkv")
            expected[name] = np.concatenate(list(weights.values()))

        @jax.jit
        def dequantize(packed: dict[str, Any]) -> dict[str, jax.Array]:
            return {name: each.decode().dequantize() for name, each in packed.items()}

        found = dequantize(packed)
    return {name: (np.asarray(found[name]), expected[name]) for name in kinds}


def check(name: str, kinds: tuple[str, ...]) -> None:
    found, expected = read_all(kinds)[name]
    error = files.KINDS[name].error
    if error == 0:
        np.testing.assert_array_equal(found, expected)
        return
    largest = np.abs(expected.reshape(len(expected), -1, 128)).max(-1).repeat(128, -1)
    assert (np.abs(found - expected) <= 1.001 * error * largest).all()
    relative = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert 1e-3 < relative < 1e-2


@pytest.mark.parametrize("name", OFTEN)
def test_each_format_is_read_as_its_definition_says(name: str) -> None:
    """Three modules become one matrix, whose weights are those that NumPy computes, to the bit."""
    check(name, OFTEN)


REST = tuple(name for name in files.KINDS if name not in OFTEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_so_are_their_variations(name: str) -> None:
    check(name, REST)


def test_kernels_get_groups_and_zeros_that_they_know(tmp_path: Path) -> None:
    """A scale per row is repeated for groups of 128; symmetric codes need no zero points."""
    files.save(tmp_path, files.KINDS["packed-channel"], SIZES, 0)
    weight = read(tmp_path)
    assert isinstance(weight, Int4Weight)
    assert (weight.group, weight.zero) == (128, None)
    files.save(tmp_path, files.KINDS["fp8-blocks"], SIZES, 0)
    weight = read(tmp_path)
    assert isinstance(weight, Fp8Weight)
    assert weight.group == 128


def test_a_product_takes_its_inputs_in_the_order_of_their_groups(tmp_path: Path) -> None:
    weights = files.save(tmp_path, files.KINDS["gptq-act-order"], SIZES, 1)
    weight = read(tmp_path)
    assert isinstance(weight, OrderedInt4Weight)
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    product = jax.jit(lambda *args: sum_parts(linear(*args), args[0].dtype))(x, weight)
    expected = x @ np.concatenate(list(weights.values())).T
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4)


def test_where_one_module_has_an_order_all_have_one(tmp_path: Path) -> None:
    """So that the layers of a model can be stacked."""
    files.save(tmp_path, files.KINDS["gptq-act-order"], SIZES, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["o.g_idx"] = np.repeat(np.arange(2, dtype=np.int32), 128)
    tensors |= {f"o.{n}": tensors[f"q.{n}"] for n in ("qweight", "qzeros", "scales")}
    save_file(tensors, tmp_path / "model.safetensors")
    packed = view(tmp_path).packed(["o.weight"], "out")
    assert packed is not None
    np.testing.assert_array_equal(packed.order, np.arange(256))


def test_experts_of_gpt_oss_have_an_axis_before() -> None:
    rng = np.random.default_rng(2)
    written = [files.mxfp4(rng, 64, 128, blocks=True) for _ in range(2)]
    blocks, scales = (
        np.stack([each.tensors[f".weight_{name}"] for each in written])
        for name in ("blocks", "scales")
    )
    read_all = jax.jit(lambda *tensors: decode_blocks(*tensors).pack().dequantize())
    found = read_all(blocks, scales)
    np.testing.assert_array_equal(found, np.stack([each.weight for each in written]))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=16, max_size=16))
def test_words_and_bytes_give_back_their_nibbles(values: list[int]) -> None:
    codes = np.array(values, np.uint8).reshape(2, 8)
    np.testing.assert_array_equal(nibbles(files.words(codes)), codes)
    np.testing.assert_array_equal(nibble_pairs(files.nibble_bytes(codes)), codes)


@settings(max_examples=30)
@given(st.permutations([0, 0, 1, 1, 2, 2]))
def test_an_order_makes_groups_neighbours(groups: list[int]) -> None:
    order = order_of(np.array(groups), 2)
    if order is None:
        assert groups == [0, 0, 1, 1, 2, 2]
    else:
        assert [groups[i] for i in order] == [0, 0, 1, 1, 2, 2]


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, r"'bitsandbytes', supported: awq .*fbgemm_fp8"),
    "bits": (files.AWQ | {"bits": 3}, "bits is 3, supported: 4"),
    "version": (files.AWQ | {"version": "gemv"}, "version is 'gemv', supported: 'gemm'"),
    "group": (files.AWQ | {"group_size": 100}, "group_size is 100, supported: multiples of 16"),
    "gptq": (files.gptq_config(checkpoint_format="marlin"), "'marlin', supported: gptq, gptq_v2"),
    "dynamic": (files.gptq_config(dynamic={"+:.*down": {"bits": 8}}), r"\+:\.\*down.*one for all"),
    "strategy": (files.compressed("pack-quantized", strategy="tensor"), "'tensor', supported"),
    "sparse": (files.compressed("marlin-24"), "format is 'marlin-24', supported: pack-quantized"),
    "transform": (
        files.compressed("pack-quantized") | {"transform_config": {"R1": {}}},
        "transform_config is .*R1",
    ),
    "blocks": (files.FP8_BLOCKS | {"weight_block_size": [1, 64]}, r"\[1, 64\], supported: \[128"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ', supported"),
    "hqq": (files.hqq_config(nbits=3), "nbits is 3, supported: 4"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named_with_what_is(name: str, tmp_path: Path) -> None:
    config, message = UNSUPPORTED[name]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        detect(tmp_path)


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert detect(tmp_path) is None
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    format = detect(tmp_path)
    assert format is not None and format.describe() == "modelopt NVFP4"


def test_tensors_that_contradict_the_configuration_are_all_named(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq-g64"], SIZES, 0)
    config = {"quantization_config": files.KINDS["awq"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        view(tmp_path)
    text = str(error.value)
    assert "AutoAWQ, 4 bits, groups of 128" in text
    assert "q: qzeros is int32 [4, 8], should be int32 [2, 8]; scales is float16 [4, 64]" in text
    assert "\n  v: " in text


def test_tensors_with_another_number_of_axes_are_refused(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], SIZES, 0)
    change(tmp_path, "k.qweight", np.zeros((2, 256, 8), np.int32))
    with pytest.raises(CheckpointError, match=r"k: \[2, 256, 8\] is not a matrix: qweight"):
        view(tmp_path)


def test_a_configuration_without_any_quantised_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"q.weight": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    config = {"quantization_config": files.AWQ}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no module has a tensor qweight"):
        view(tmp_path)


def change(folder: Path, name: str, value: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_values_that_contradict_the_configuration_are_refused(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["gptq-sym"], SIZES, 0)
    change(tmp_path, "k.qzeros", np.zeros((2, 4), np.int32))
    with pytest.raises(CheckpointError, match="k: sym is true, but zero points differ from 8"):
        view(tmp_path)
    files.save(tmp_path, files.KINDS["gptq-sym"], SIZES, 0)
    change(tmp_path, "v.g_idx", np.zeros(256, np.int32))
    with pytest.raises(CheckpointError, match="v: its inputs are in groups of 0 to 256, not 128"):
        view(tmp_path)
    files.save(tmp_path, files.KINDS["hqq"], SIZES, 0)
    change(tmp_path, "q.nbits", np.array(8, np.int32))
    with pytest.raises(CheckpointError, match="q: nbits is 8, should be 4"):
        view(tmp_path)


def test_scales_of_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    scales = {
        f"layers.0.self_attn.{name}": np.ones(1, np.float32) for name in ("k_scale", "v_scale")
    }
    files.save(tmp_path, files.KINDS["nvfp4-modelopt"], SIZES, 0, **scales)
    checkpoint = view(tmp_path)
    assert set(checkpoint.names) == set(NAMES)
    assert sorted(checkpoint.unused) == sorted([*scales, *(f"{n}.input_scale" for n in SIZES)])


def test_a_matrix_is_quantised_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], {"q": (64, 256)}, 0, **{"k.weight": np.ones((1, 1))})
    with pytest.raises(CheckpointError, match=r"of which q is quantised and k\.weight is not"):
        view(tmp_path).packed(["q.weight", "k.weight"], "qkv")


def test_modules_of_a_matrix_have_one_order(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["gptq-act-order"], SIZES, 0)
    change(tmp_path, "v.g_idx", np.tile(np.arange(2, dtype=np.int32), 128))
    with pytest.raises(CheckpointError, match="the g_idx of q, k, v differ"):
        view(tmp_path).packed(NAMES, "qkv")


def test_sizes_that_tiles_do_not_divide_are_refused(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], {"q": (72, 256)}, 0)
    with pytest.raises(CheckpointError, match=r"qkv is \[72, 256\]; .* multiple of 64"):
        view(tmp_path).packed(["q.weight"], "qkv")
