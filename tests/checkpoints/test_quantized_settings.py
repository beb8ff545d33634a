"""Settings of quantised checkpoints: where they are found, and what is not supported is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve_checkpoints.quantized import detect
from jaxserve_checkpoints.quantized.compressed_tensors import IntQuantized, PackQuantized
from jaxserve_checkpoints.quantized.format import Format, Mixed
from jaxserve_checkpoints.quantized.fp8 import Fp8
from jaxserve_checkpoints.reader import CheckpointError
from tests.checkpoints import quantized_files as files


def two_schemes(config: dict[str, Any], **other: Any) -> dict[str, Any]:
    """With a second group of modules, whose weights have these settings, too."""
    first = config["config_groups"]["group_0"]
    second = first | {"weights": first["weights"] | other}
    return config | {"config_groups": {"group_0": first, "group_1": second}}


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, r"'bitsandbytes', supported: awq .*fbgemm_fp8"),
    "bits": (files.AWQ | {"bits": 3}, "bits is 3, supported: 4"),
    "version": (files.AWQ | {"version": "gemv"}, "version is 'gemv', supported: 'gemm'"),
    "group": (files.AWQ | {"group_size": 100}, "group_size is 100, supported: multiples of 16"),
    "gptq": (files.gptq_config(checkpoint_format="marlin"), "'marlin', supported: gptq, gptq_v2"),
    "dynamic": (files.gptq_config(dynamic={"+:.*down": {"bits": 8}}), r"\+:\.\*down.*one for all"),
    "strategy": (files.compressed("pack-quantized", strategy="tensor"), "'tensor', supported"),
    "sparse": (files.compressed("marlin-24"), "format is 'marlin-24', supported: pack-quantized"),
    "sparse-tensors": (
        files.compressed("pack-quantized")
        | {"sparsity_config": {"format": "sparse-24-bitmask", "global_sparsity": 0.5}},
        "sparsity_config is .*'sparse-24-bitmask'.*, supported: none, format 'dense'",
    ),
    "transform": (
        files.compressed("pack-quantized") | {"transform_config": {"R1": {}}},
        "transform_config is .*R1",
    ),
    "blocks": (files.FP8_BLOCKS | {"weight_block_size": [1, 64]}, r"\[1, 64\], supported: \[128"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ', supported"),
    "hqq": (files.hqq_config(nbits=3), "nbits is 3, supported: 4"),
    "bits-gptq": (files.gptq_config(bits=3), "bits is 3, supported: 4"),
    "bits-packed": (files.compressed("pack-quantized", num_bits=8), "num_bits is 8, supported: 4"),
    "bits-nvfp4": (
        files.compressed("nvfp4-pack-quantized", type="float", num_bits=8),
        "num_bits is 8, supported: 4",
    ),
    "group-nvfp4": (
        files.compressed("nvfp4-pack-quantized", type="float", group_size=32),
        "group_size is 32, supported: 16",
    ),
    "group-mxfp4": (
        files.compressed("mxfp4-pack-quantized", type="float", group_size=16),
        "group_size is 16, supported: 32",
    ),
    "mixed": (
        two_schemes(files.compressed("pack-quantized", strategy="channel"), num_bits=8),
        "num_bits is 8, supported: 4",
    ),
    "symmetric": (files.AWQ | {"zero_point": False}, "zero_point is False, supported: True"),
    # What is not of the kind that it should be.
    "method-list": ({"quant_method": ["awq"]}, r"quant_method is \['awq'\], supported: awq"),
    "version-number": (files.AWQ | {"version": 1}, "version is 1, supported: 'gemm'"),
    "format-list": (files.gptq_config(checkpoint_format=["gptq"]), "checkpoint_format is .*'gptq'"),
    "dynamic-list": (files.gptq_config(dynamic=["-:.*"]), "dynamic is .*supported: an object"),
    "sym-text": (files.gptq_config(sym="false"), "sym is 'false', supported: true, false"),
    "groups-list": (
        files.compressed("pack-quantized") | {"config_groups": [{}]},
        "config_groups is .*supported: an object",
    ),
    "group-text": (
        files.compressed("pack-quantized") | {"config_groups": {"group_0": "FP8"}},
        "group_0 is 'FP8', supported: an object",
    ),
    "hqq-text": (
        {"quant_method": "hqq", "quant_config": "4 bits"},
        "quant_config is '4 bits', supported: an object",
    ),
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
    content["quantization"] = {"quant_algo": "W4A16_AWQ", "group_size": 128}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json says: quant_algo is 'W4A16"):
        detect(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": ["NVFP4"]}')
    with pytest.raises(CheckpointError, match=r"quantization is .'NVFP4'., supported"):
        detect(tmp_path)


def test_compressed_tensors_settings_may_have_their_first_name(tmp_path: Path) -> None:
    config = dict(files.KINDS["packed"].config)
    del config["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": config}))
    first = detect(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": files.KINDS["packed"].config})
    )
    assert first is not None and first == detect(tmp_path)
    (tmp_path / "config.json").write_text('{"compression_config": {"sparsity_config": {}}}')
    with pytest.raises(CheckpointError, match=r"quantised, as config\.json says"):
        detect(tmp_path)


def test_zeros_of_a_sparse_model_may_be_stored_like_other_weights(tmp_path: Path) -> None:
    """As compressed-tensors says of a model that was pruned, or only looked at."""
    plain = files.KINDS["packed"].config
    sparsity = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
    found: list[Format | None] = []
    for config in (plain, plain | {"sparsity_config": sparsity}):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        found.append(detect(tmp_path))
    assert found[0] is not None and found[0] == found[1]


def test_a_group_may_quantise_what_attention_reads_and_no_weights(tmp_path: Path) -> None:
    eight = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Qwen3Attention"], "weights": None, "input_activations": eight}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": eight,
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert detect(tmp_path) is None


TARGETS = {
    "model.layers.0.mlp.down_proj": "int8",
    "model.layers.1.mlp.down_proj": "int4",
    "model.layers.1.mlp.up_proj": "int4",
    "lm_head": "fp8",
    "model.embed_tokens": None,
}
"""Modules and the format that `test_several_formats_go_to_their_targets` gives them."""


def test_several_formats_go_to_their_targets(tmp_path: Path) -> None:
    groups = {
        "int4": files.KINDS["packed"].config,
        "fp8": files.KINDS["fp8-rows"].config,
        "int8": files.KINDS["int8"].config,
    }
    targets = {
        "int4": ["Linear"],
        "fp8": ["re:.*lm_head$"],
        "int8": ["model.layers.0.mlp.down_proj"],
    }
    config = files.KINDS["packed"].config | {"format": "mixed-precision"}
    config["config_groups"] = {
        name: each["config_groups"]["group_0"]
        | {"targets": targets[name], "format": each["format"]}
        for name, each in groups.items()
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = detect(tmp_path)
    assert isinstance(found, Mixed)
    kinds = {"int4": PackQuantized, "fp8": Fp8, "int8": IntQuantized, None: type(None)}
    for module, name in TARGETS.items():
        assert type(found.of(module)) is kinds[name], module
    assert found.describe().count(" and ") == 2
