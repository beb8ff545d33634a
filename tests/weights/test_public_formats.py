"""Quantised weights of every kind as safetensors: what other servers read, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.model_source import ModelSource, OrbaxSource
from jaxserve_checkpoints.native_writer import NativeWriter
from jaxserve_checkpoints.orbax import find_step
from jaxserve_checkpoints.quantized import detect
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.weights.test_quantized_weights import start, write


def converted(source: ModelSource, out: Path, *flags: str) -> ModelSource:
    """The source after `convert_model` into `out`, with the settings that `convert` copies."""
    assert source.folder is not None
    options = parse_args(["--model", "m", "--out", str(out), *flags], "convert")

    def begin() -> None:
        assert source.folder is not None
        out.mkdir(exist_ok=True)
        for file in source.folder.glob("*.json"):
            shutil.copyfile(file, out / file.name)

    convert_model(options, source, out, lambda done, total: None, begin=begin)
    return replace(source, folder=out)


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert [each.dtype for each in jax.tree.leaves(one)] == [
        each.dtype for each in jax.tree.leaves(other)
    ]


def tensors(source: ModelSource) -> dict[str, np.ndarray]:
    assert source.folder is not None
    checkpoint = open_checkpoint(source.folder)
    return {name: checkpoint.read(name) for name in checkpoint.names}


AS_COMPRESSED = {
    "awq-g64": "4 bits, groups of 64, zero points",
    "gptq-sym": "4 bits, groups of 128, symmetric",
    "gptq-act-order": "4 bits, groups of 128, zero points",
    "packed-asym": "4 bits, groups of 32, zero points",
    "packed-act-order": "4 bits, groups of 128, symmetric",
    "packed-channel": "4 bits, groups of 128, symmetric",
    "int8": "int-quantized, 8 bits",
    "nvfp4-packed": "nvfp4-pack-quantized",
    "nvfp4-modelopt": "nvfp4-pack-quantized",
    "mxfp4-packed": "mxfp4-pack-quantized",
    "mxfp4-blocks": "mxfp4-pack-quantized",
    "fp8-blocks": "e4m3 with a scale per block",
    "fp8-rows": "e4m3 with a scale per row",
    "hqq": "HQQ, 4 bits, groups of 64, axis 1",
}


FAST = ("gptq-act-order", "nvfp4-modelopt", "fp8-blocks", "packed-asym")


def kinds(*names: str) -> list[Any]:
    """Most are slow: each compiles shapes of its own."""
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("kind", kinds(*AS_COMPRESSED))
def test_every_kind_of_weight_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", kind)
    native = converted(original, tmp_path / "native")
    public = converted(native, tmp_path / "public", "--to", "safetensors")
    assert public.folder is not None
    format = detect(public.folder)
    assert format is not None and AS_COMPRESSED[kind] in format.describe()
    assert_same(start(public, tmp_path / "cache"), start(original, tmp_path / "cache"))


SAME_LAYOUT = (
    *("packed-g64", "packed-asym", "packed-act-order", "int8", "fp8-rows", "mxfp4-packed"),
    *("nvfp4-packed", "fp8-blocks-compressed", "hqq"),
)


@pytest.mark.parametrize("kind", kinds(*SAME_LAYOUT))
def test_what_compressed_tensors_and_hqq_wrote_is_written_alike(kind: str, tmp_path: Path) -> None:
    """Their files here are made in NumPy, from the formats' definitions alone."""
    original, _ = write(tmp_path / "original", kind)
    native = converted(original, tmp_path / "native")
    public = converted(native, tmp_path / "public", "--to", "safetensors")
    theirs, ours = tensors(original), tensors(public)
    theirs = {name: each for name, each in theirs.items() if "input_global_scale" not in name}
    assert theirs.keys() == ours.keys()
    for name, array in theirs.items():
        kept = ours[name]
        assert kept.shape == array.shape, name
        if "global_scale" in name:  # more digits than theirs
            kept = kept.astype(np.float32)
        np.testing.assert_array_equal(kept.astype(array.dtype), array, err_msg=name)
        np.testing.assert_array_equal(kept, array.astype(kept.dtype), err_msg=name)


@pytest.mark.parametrize("kind", ["awq", "gptq-act-order", "nvfp4-modelopt", "hqq-axis-0"])
def test_what_others_quantised_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", kind)
    public = converted(original, tmp_path / "public", "--to", "safetensors")
    assert original.folder is not None and public.folder is not None
    theirs, ours = tensors(original), tensors(public)
    assert {name: each.tobytes() for name, each in ours.items()} == {
        name: each.tobytes() for name, each in theirs.items()
    }
    assert detect(public.folder) == detect(original.folder)


@pytest.mark.parametrize("kind", ["gptq-act-order", "nvfp4-modelopt"])
def test_what_others_quantised_goes_to_orbax_and_on(kind: str, tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", kind)
    expected = start(original, tmp_path / "cache")
    steps = converted(original, tmp_path / "steps", "--to", "orbax")
    step = find_step(tmp_path / "steps")
    assert step is not None and step.settings_folder() == tmp_path / "steps"
    steps = replace(steps, orbax=OrbaxSource(step, {}))
    assert_same(start(steps, tmp_path / "cache"), expected)
    for to in ("safetensors", "native"):
        out = replace(converted(steps, tmp_path / to, "--to", to), orbax=None)
        assert_same(start(out, tmp_path / "cache"), expected)


def test_settings_of_another_format_do_not_stay(tmp_path: Path) -> None:
    """The model was GPTQ's before it was the engine's own."""
    original, _ = write(tmp_path / "original", "gptq")
    native = converted(original, tmp_path / "native")
    assert native.folder is not None
    (native.folder / "hf_quant_config.json").write_text('{"quantization": {}}')
    config = json.loads((native.folder / "config.json").read_text())
    (native.folder / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    public = converted(native, tmp_path / "public", "--to", "safetensors")
    assert public.folder is not None
    written = json.loads((public.folder / "config.json").read_text())
    assert written.keys() == {"vocab_size", "quantization_config"}
    found = written["quantization_config"]
    assert found["quant_method"] == "compressed-tensors" and found["ignore"] == [
        "re:.*embed_tokens$",
        "re:.*lm_head$",
    ]
    assert not (public.folder / "hf_quant_config.json").exists()


def test_a_killed_one_goes_on_and_a_finished_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = write(tmp_path / "original", "packed-asym")
    native = converted(original, tmp_path / "native")
    whole = converted(native, tmp_path / "whole", "--to", "safetensors")
    written, real = list[str](), NativeWriter.write

    def counted(self: NativeWriter, name: str, array: Any) -> None:
        if len(written) == 20:
            raise KeyboardInterrupt
        real(self, name, array)
        written.append(name)

    monkeypatch.setattr(NativeWriter, "write", counted)
    with pytest.raises(KeyboardInterrupt):
        converted(native, tmp_path / "out", "--to", "safetensors")
    first, written[:] = set(written), []
    monkeypatch.setattr(
        NativeWriter,
        "write",
        lambda self, name, array: (written.append(name), real(self, name, array)),
    )
    converted(native, tmp_path / "out", "--to", "safetensors")
    assert len(first) == 20 and written and not first & set(written)
    file = tmp_path / "out" / "model.safetensors"
    assert whole.folder is not None
    assert file.read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    del written[:]
    converted(native, tmp_path / "out", "--to", "safetensors")
    assert not written
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged: the checksums of 1"):
        converted(native, tmp_path / "out", "--to", "safetensors")
    with pytest.raises(CheckpointError, match="is there already: choose another folder"):
        converted(native, tmp_path / "original", "--to", "safetensors")


REFUSED = {
    "groups of 8 bits": ("hqq-axis-0", (), "8 bits with a scale for each 128 inputs .*--to native"),
    "hqq and a head": (
        "hqq",
        ("--lm-head-dtype", "int8"),
        "no place for embed_tokens in another format: .*--lm-head-dtype unquantized",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_layout_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    kind, flags, message = REFUSED[name]
    original, _ = write(tmp_path / "original", kind)
    native = converted(original, tmp_path / "native", *flags)
    with pytest.raises(CheckpointError, match=message) as caught:
        converted(native, tmp_path / "public", "--to", "safetensors")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "public").exists()


def test_it_is_refused_before_anything_is_quantised(tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", "hqq")
    with pytest.raises(CheckpointError, match="no place for embed_tokens in another format"):
        converted(original, tmp_path / "out", "--to", "safetensors", "--lm-head-dtype", "int8")
    assert not (tmp_path / "out").exists()


def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", "packed")
    public = converted(converted(original, tmp_path / "n"), tmp_path / "p", "--to", "safetensors")
    with pytest.raises(ConfigError, match="is quantised already"):
        converted(public, tmp_path / "again", "--to", "safetensors", "--quantization", "int4")


@pytest.mark.parametrize("stacked", [False, True])
def test_a_head_in_another_format_is_read_with_the_layers(stacked: bool, tmp_path: Path) -> None:
    original, _ = write(tmp_path / "original", "packed-act-order")
    native = converted(original, tmp_path / "native", "--lm-head-dtype", "fp8")
    public = converted(native, tmp_path / "public", "--to", "safetensors")
    assert public.folder is not None
    config = json.loads((public.folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    expected = start(native, tmp_path / "cache", stacked=stacked)
    assert_same(start(public, tmp_path / "cache", stacked=stacked), expected)
