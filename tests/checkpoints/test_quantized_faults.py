"""Quantised checkpoints whose tensors and settings disagree are refused, with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve_checkpoints.reader import CheckpointError
from tests.checkpoints import quantized_files as files
from tests.checkpoints.quantized_files import NAMES, SIZES, view


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


def zeros(*shape: int, dtype: Any = np.int32) -> Any:
    return np.zeros(shape, dtype)


CONTRADICTIONS: dict[str, tuple[str, str, Any, str]] = {
    "no scales": ("awq", "q.scales", None, "q: it has no scales"),
    "no zero points": (
        "packed-asym",
        "q.weight_zero_point",
        None,
        "q: it has no weight_zero_point",
    ),
    "no size": ("packed", "q.weight_shape", None, "q: it has no weight_shape"),
    "another dtype": (
        "awq",
        "k.scales",
        zeros(2, 32),
        r"k: scales is int32 \[2, 32\], should be f",
    ),
    "another shape": ("awq", "q.qzeros", zeros(1, 8), r"q: qzeros is int32 \[1, 8\], should be"),
    "twice": ("awq", "q.weight", zeros(64, 256, dtype=np.float16), "q: it has a plain weight, too"),
    "desc_act without g_idx": ("gptq-act-order", "q.g_idx", None, "q: it has no g_idx"),
    "actorder without g_idx": (
        *("packed-act-order", "q.weight_g_idx", None),
        "q: it has no weight_g_idx",
    ),
    "a group that is not there": (
        *("gptq-act-order", "v.g_idx", np.repeat(np.int32([0, 2]), 128)),
        "v: its inputs are in groups 0 to 2, there are groups 0 to 1",
    ),
    "a group below 0": (
        *("gptq-act-order", "v.g_idx", np.repeat(np.int32([-1, 1]), 128)),
        "v: its inputs are in groups -1 to 1, there",
    ),
    "a short g_idx": ("gptq", "v.g_idx", zeros(128), r"v: g_idx is int32 \[128\], should be"),
    "three sizes": (
        *("packed", "q.weight_shape", np.array([64, 256, 1])),
        r"q: weight_shape is \[64, 256, 1\], should be \[out, in\]",
    ),
    "sizes of no matrix": (
        *("hqq", "q.shape", np.array([0, 256])),
        r"q: shape is \[0, 256\], should be \[out, in\]",
    ),
    "two numbers of bits": (
        "hqq",
        "q.nbits",
        np.int32([4, 4]),
        r"q: nbits is \[4, 4\], should be 4",
    ),
    "another packing": (
        *("hqq", "q.packing", np.frombuffer(b"\xff2bit", np.uint8)),
        "q: packing is '\ufffd2bit', should be '4bit_u8'",
    ),
    "packed scales": ("hqq", "q.quant_scale", np.array(1, np.uint8), "q: quant_scale is 1, should"),
    "blocks of 64": (
        *("mxfp4-blocks", "q.weight_scales", zeros(64, 4, dtype=np.uint8)),
        r"q: weight_scales is uint8 \[64, 4\], should be uint8 \[64, 8\]",
    ),
}
"""A kind, a tensor of it that is made another or taken away, and what is said."""


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_tensor_that_contradicts_the_others_is_named(name: str, tmp_path: Path) -> None:
    kind, tensor, value, message = CONTRADICTIONS[name]
    files.save(tmp_path, files.KINDS[kind], SIZES, 0)
    view(tmp_path)  # is right before
    change(tmp_path, tensor, value)
    with pytest.raises(CheckpointError, match=message):
        view(tmp_path)


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


def test_a_matrix_is_quantised_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], {"q": (64, 256)}, 0, **{"k.weight": np.ones((1, 1))})
    with pytest.raises(CheckpointError, match=r"of which q is quantised and k\.weight is not"):
        view(tmp_path).packed(["q.weight", "k.weight"], "qkv")


def test_a_matrix_has_one_format(tmp_path: Path) -> None:
    """Where a checkpoint has several, each of its modules is read by its own."""
    groups, tensors = {}, {}
    for index, (kind, names) in enumerate({"packed": ["q"], "int8": ["k", "v"]}.items()):
        config = files.KINDS[kind].config
        group = config["config_groups"]["group_0"]
        groups[f"group_{index}"] = group | {"targets": names, "format": config["format"]}
        files.save(tmp_path, files.KINDS[kind], {name: SIZES[name] for name in names}, 3)
        tensors |= load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    config = files.KINDS["packed"].config | {"config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = view(tmp_path)
    assert sorted(checkpoint.names) == sorted(NAMES) and not checkpoint.unused
    with pytest.raises(CheckpointError, match=r"qkv is one matrix of several formats: q .*pack-q"):
        checkpoint.packed(NAMES, "qkv")
    assert checkpoint.packed(NAMES[1:], "kv") is not None


def test_modules_of_a_matrix_have_one_order(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["gptq-act-order"], SIZES, 0)
    change(tmp_path, "v.g_idx", np.tile(np.arange(2, dtype=np.int32), 128))
    with pytest.raises(CheckpointError, match="the g_idx of q, k, v differ"):
        view(tmp_path).packed(NAMES, "qkv")


def test_sizes_that_tiles_do_not_divide_are_refused(tmp_path: Path) -> None:
    files.save(tmp_path, files.KINDS["awq"], {"q": (72, 256)}, 0)
    with pytest.raises(CheckpointError, match=r"qkv is \[72, 256\]; .* multiple of 64"):
        view(tmp_path).packed(["q.weight"], "qkv")
