"""Quantised checkpoints of other makers: read bit for bit, or refused with what is wrong."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxserve_checkpoints.quantized.compressed_tensors import Nvfp4Packed
from jaxserve_checkpoints.quantized.format import IntCodes, nibble_pairs, nibbles, order_of
from jaxserve_checkpoints.quantized.gptq import Gptq
from jaxserve_checkpoints.quantized.mxfp4 import decode_blocks
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_kernels.matmul import linear, sum_parts
from jaxserve_kernels.target import CPU
from jaxserve_kernels.weights import Fp8Weight, Int4Weight, OrderedInt4Weight, Weight
from tests.checkpoints import quantized_files as files
from tests.checkpoints.quantized_files import NAMES, SIZES, view


def read(folder: Path) -> Weight:
    packed = view(folder).packed(NAMES, "qkv")
    assert packed is not None
    return packed.decode()


OFTEN = (
    "awq",
    "gptq-act-order",
    "gptq-v2",
    "packed-g64",
    "packed-asym",
    "nvfp4-packed",
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


def test_a_block_of_fp8_is_128_rows_and_128_inputs(tmp_path: Path) -> None:
    """The last rows are a part of a block."""
    weights = files.save(tmp_path, files.KINDS["fp8-blocks"], {"q": (192, 384)}, 0)
    packed = view(tmp_path).packed(["q.weight"], "q")
    assert packed is not None
    np.testing.assert_array_equal(packed.decode().dequantize(), weights["q"])


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


@pytest.mark.parametrize(("group", "cut"), [(16, 16), (32, 32), (96, 32), (192, 64), (256, 128)])
def test_groups_are_cut_into_those_that_kernels_know(group: int, cut: int, tmp_path: Path) -> None:
    kind = files.Kind(files.AWQ | {"group_size": group}, files.with_(files.awq, group=group))
    weights = files.save(tmp_path, kind, {"q": (64, 768)}, 0)
    packed = view(tmp_path).packed(["q.weight"], "q")
    assert packed is not None
    weight = packed.decode()
    assert isinstance(weight, Int4Weight)
    assert weight.group == cut
    np.testing.assert_array_equal(weight.dequantize(), weights["q"])


def test_a_product_takes_its_inputs_in_the_order_of_their_groups(tmp_path: Path) -> None:
    weights = files.save(tmp_path, files.KINDS["gptq-act-order"], SIZES, 1)
    weight = read(tmp_path)
    assert isinstance(weight, OrderedInt4Weight)
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    product = jax.jit(lambda *args: sum_parts(linear(*args, target=CPU), args[0].dtype))(x, weight)
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


@pytest.mark.parametrize("kind", ["gptq", "packed"])
def test_groups_of_neighbours_need_no_g_idx(kind: str, tmp_path: Path) -> None:
    weights = files.save(tmp_path, files.KINDS[kind], {"q": (64, 256)}, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if not name.endswith("g_idx")]
    save_file({name: tensors[name] for name in names}, tmp_path / "model.safetensors")
    packed = view(tmp_path).packed(["q.weight"], "q")
    assert packed is not None and packed.order is None
    np.testing.assert_array_equal(packed.decode().dequantize(), weights["q"])


def test_a_tensor_that_the_format_does_not_have_stays_to_be_named(tmp_path: Path) -> None:
    """Whoever fills the model from the checkpoint refuses what nothing takes."""
    files.save(tmp_path, files.KINDS["awq"], SIZES, 0, **{"q.g_idx": np.zeros(256, np.int32)})
    assert "q.g_idx" in view(tmp_path).names


def test_a_module_may_lie_in_several_files(tmp_path: Path) -> None:
    weights = files.save(tmp_path, files.KINDS["gptq-act-order"], {"q": (64, 256)}, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-{n:05}-of-00004.safetensors" for n, name in enumerate(tensors, 1)}
    for name, file in shards.items():
        save_file({name: tensors[name]}, tmp_path / file)
    index = {"metadata": {}, "weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    packed = view(tmp_path).packed(["q.weight"], "q")
    assert packed is not None
    np.testing.assert_array_equal(packed.decode().dequantize(), weights["q"])
    (tmp_path / shards["q.scales"]).unlink()
    with pytest.raises(CheckpointError, match="1 of 4 shards are missing"):
        view(tmp_path)


@given(st.integers(0x00800000, 0x7E000000))
def test_the_inverse_of_a_global_scale_is_rounded_once(bits: int) -> None:
    """Of a float32 as JAX would divide; of a float64 what it was made of, whatever that is."""
    value = np.array([bits], np.uint32).view(np.float32)
    prepared = functools.partial(Nvfp4Packed().prepared, ".weight_global_scale")
    np.testing.assert_array_equal(prepared(value), np.float32(1) / value)
    np.testing.assert_array_equal(prepared(1.0 / value.astype(np.float64)), value)


def test_a_zero_point_of_0_borrows_from_its_neighbour_in_version_1() -> None:
    """Zero points 0, 5, 0, 0, 1, 15, 8, 8 less 0x11111111, as GPTQModel writes and reads them."""
    word = np.uint32(0x88F10050 - 0x11111111)
    format = Gptq(group_size=-1, symmetric=False, version=1)
    tensors = {
        ".qweight": np.zeros((1, 8), np.int32),
        ".qzeros": word.reshape(1, 1).view(np.int32),
        ".scales": np.ones((1, 8), np.float32),
    }
    codes = format.decode({n: jnp.asarray(each) for n, each in tensors.items()}, (8, 8), None)
    assert isinstance(codes, IntCodes) and codes.zero is not None
    assert np.asarray(codes.zero).ravel().tolist() == [0, 5, 0, 0, 1, 15, 8, 8]


def test_scales_of_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    scales = {
        f"layers.0.self_attn.{name}": np.ones(1, np.float32) for name in ("k_scale", "v_scale")
    }
    files.save(tmp_path, files.KINDS["nvfp4-modelopt"], SIZES, 0, **scales)
    checkpoint = view(tmp_path)
    assert set(checkpoint.names) == set(NAMES)
    assert sorted(checkpoint.unused) == sorted([*scales, *(f"{n}.input_scale" for n in SIZES)])
