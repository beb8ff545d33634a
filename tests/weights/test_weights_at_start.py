"""Weights that are quantised at load: kept for the next start, made anew if damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.cli.options import Options, parse_args
from jaxserve.config import ConfigError, SamplingDefaults
from jaxserve.models import decoder, registry
from jaxserve.tokenizer import ByteTokenizer
from jaxserve.weights import loading
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints import native
from jaxserve_checkpoints.naming import leaf_parts
from jaxserve_checkpoints.native_writer import NativeWriter
from jaxserve_checkpoints.rules import Rule
from jaxserve_kernels.weights import Fp8Weight
from tests.tiny_model import tiny_spec

SMALL = tiny_spec(vocab_size=128, embed=128, ffn=128, head_dim=32)
FLAGS = ["--quantization", "int4", "--model", "small"]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    """A Hugging Face checkpoint of SMALL with random float32 weights."""
    folder = tmp_path / "original"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    rules = {rule.leaf: rule for rule in registry.rules(SMALL) if isinstance(rule, Rule)}
    for part in leaf_parts(decoder.abstract(SMALL, jnp.float32, stacked=True)):
        generic = part.owner.replace("layers.", "layers.{layer}.")
        names = [name.replace("{layer}", str(part.layer)) for name in rules[generic].sources]
        sizes = _split(generic, part.leaf.shape[0])
        for name, size in zip(names, sizes, strict=True):
            tensors[name] = rng.normal(size=(size, *part.leaf.shape[1:])).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return ModelSource(
        names=("org/small model",),
        spec=SMALL,
        folder=folder,
        tokenizer=ByteTokenizer(),
        sampling_defaults=SamplingDefaults(),
    )


def _split(leaf: str, size: int) -> list[int]:
    if leaf.endswith(".qkv"):
        return [SMALL.q_size, SMALL.kv_size, SMALL.kv_size]
    return [size // 2, size // 2] if leaf.endswith(".gate_up") else [size]


def options(*flags: str) -> Options:
    return parse_args([*FLAGS, *flags])


def start(
    source: ModelSource, cache: Path, *flags: str, chosen: Options | None = None
) -> decoder.Params:
    """What a start with these flags puts on the device."""
    plan = plan_weights(chosen or options(*flags), source, jnp.float32, cache, stacked=False)
    return weight_loader(plan, {})(lambda done, total: None)


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def expected(source: ModelSource, cache: Path) -> decoder.Params:
    """Quantised at load, nothing kept."""
    params = start(source, cache, "--no-keep-converted")
    assert not cache.exists()
    return params


def kept_files(cache: Path) -> list[Path]:
    return list(cache.glob(f"checkpoints/small-model-*/{native.FILE}"))


def test_the_second_start_reads_what_the_first_one_quantised(
    source: ModelSource, cache: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(start(source, cache), expected)
    (file,) = kept_files(cache)

    written = file.stat().st_mtime_ns

    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("the weights were quantised again")

    monkeypatch.setattr(loading, "convert", fails)
    assert_same(start(source, cache), expected)
    assert file.stat().st_mtime_ns == written


def test_copies_in_fp8_stand_beside_what_was_loaded(
    source: ModelSource, cache: Path, expected: Any
) -> None:
    plan = plan_weights(options(), source, jnp.float32, cache, stacked=False).with_fp8_copy()
    programs = {each.name: jax.jit(each.function) for each in plan.copying}
    params = weight_loader(plan, programs)(lambda done, total: None)
    assert jax.tree.structure(params) == jax.tree.structure(plan.served)
    for layer, codes in zip(params.layers, expected.layers, strict=True):
        assert_same(layer.qkv.codes, codes.qkv)
        assert isinstance(layer.qkv.copy, Fp8Weight)
    (file,) = kept_files(cache)  # on disk are codes only
    assert not any("copy" in name for name in native.open_native(file.parent).tensors.names)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty])
def test_damaged_kept_weights_are_made_anew(
    source: ModelSource,
    cache: Path,
    expected: Any,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    start(source, cache)
    damage(kept_files(cache)[0])
    with caplog.at_level(logging.WARNING):
        assert_same(start(source, cache), expected)
    assert native.FILE in caplog.text
    native.open_native(kept_files(cache)[0].parent).verify()


def test_other_flags_or_another_original_keep_their_own(source: ModelSource, cache: Path) -> None:
    start(source, cache)
    start(source, cache, "--lm-head-dtype", "unquantized")
    assert len(kept_files(cache)) == 2
    assert source.folder is not None
    file = source.folder / "model.safetensors"
    file.write_bytes(file.read_bytes())
    start(source, cache)
    assert len(kept_files(cache)) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(
    source: ModelSource, cache: Path, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert_same(start(source, cache), expected)
    assert caplog.text.count("converted weights cannot be kept") == 1


def test_a_server_does_not_wait_for_another_one_that_converts(
    source: ModelSource, cache: Path, expected: Any
) -> None:
    plan = plan_weights(options(), source, jnp.float32, cache, stacked=False)
    assert plan.keep_in is not None
    with NativeWriter(plan.keep_in, {"x": np.zeros(3, np.float32)}, {}, {}):
        assert_same(start(source, cache), expected)


def converted(source: ModelSource, out: Path, *flags: str) -> ModelSource:
    chosen = parse_args([*FLAGS, *flags, "--out", str(out)], "convert")
    convert_model(chosen, source, out, lambda done, total: None)
    return replace(source, folder=out)


def test_a_converted_checkpoint_is_served_without_flags_and_nothing_is_kept_of_it(
    source: ModelSource, tmp_path: Path, cache: Path, expected: Any
) -> None:
    out = converted(source, tmp_path / "out")
    assert_same(start(out, cache, chosen=parse_args(["--model", "out"])), expected)
    assert_same(start(out, cache), expected)
    assert not cache.exists()


def test_flags_that_contradict_a_converted_checkpoint_are_refused(
    source: ModelSource, tmp_path: Path, cache: Path
) -> None:
    out = converted(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"layers in int4, .* with --lm-head-dtype fp8;"):
        start(out, cache, "--lm-head-dtype", "fp8")
    with pytest.raises(ConfigError, match="cannot be served with --quantization nvfp4;"):
        start(out, cache, chosen=parse_args(["--quantization", "nvfp4"]))
    with pytest.raises(ConfigError, match="is converted already"):
        converted(out, tmp_path / "again")


def test_without_quantisation_a_conversion_holds_the_plain_weights(
    source: ModelSource, tmp_path: Path, cache: Path
) -> None:
    plain = ["--model", "small"]
    out = tmp_path / "out"
    convert_model(parse_args([*plain, "--out", "o"], "convert"), source, out, lambda *_: None)
    served = start(replace(source, folder=out), cache, chosen=parse_args(plain))
    assert_same(served, start(source, cache, chosen=parse_args(plain)))
    assert loading.quantization(parse_args(plain)).changes_anything is False
