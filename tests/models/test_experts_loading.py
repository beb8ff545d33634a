"""Experts on their way from files into the tree: each layout, each way of quantising, each copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.layer_spec import ExpertsSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.models.quantization import Quantization
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints.convert import convert
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import as_stored, encoded_abstract, load_leaves, load_params
from jaxserve_checkpoints.native import open_native
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_checkpoints.stream_sources import assembled_sources, direct_sources
from jaxserve_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight
from scripts import random_checkpoint
from tests.tiny_model import tiny_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe"
SPEC = registry.spec_of(json.loads((GOLDEN / "config.json").read_text()))
QUANTIZABLE = tiny_spec(
    vocab_size=128,
    embed=256,
    head_dim=64,
    ffn=ExpertsSpec(num_experts=4, top_k=2, width=128, normalize=True),
    architecture="Qwen3MoeForCausalLM",
)


def load(folder: Path, spec: ModelSpec = SPEC, *, stacked: bool = False) -> decoder.Params:
    abstract = decoder.abstract(spec, jnp.bfloat16, stacked=stacked)
    return load_params(open_checkpoint(folder), registry.rules(spec), abstract)


def assert_equal(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def fused(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """With all experts of a layer in one tensor, as in memory of transformers."""
    kept = {name: each for name, each in tensors.items() if ".experts." not in name}
    for layer in range(SPEC.num_layers):
        block = f"model.layers.{layer}.mlp.experts."

        def stack(name: str, block: str = block) -> NDArray[Any]:
            return np.stack([tensors[f"{block}{each}.{name}.weight"] for each in range(8)])

        halves = (stack("gate_proj"), stack("up_proj"))
        kept[f"{block}gate_up_proj"] = np.concatenate(halves, axis=1)
        kept[f"{block}down_proj"] = stack("down_proj")
    return kept


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_a_layer_may_be_one_tensor(stacked: bool, tmp_path: Path) -> None:
    save_file(fused(load_file(GOLDEN / "model.safetensors")), tmp_path / "model.safetensors")
    assert_equal(load(tmp_path, stacked=stacked), load(GOLDEN, stacked=stacked))


def test_layers_may_be_stacked_and_streamed() -> None:
    apart, stacked = load(GOLDEN), load(GOLDEN, stacked=True)
    views = layer_views(stacked.layers)
    assert_equal(apart._replace(layers=views), apart)
    abstract = decoder.abstract(SPEC, jnp.bfloat16, stacked=True)
    checkpoint, rules = open_checkpoint(GOLDEN), registry.rules(SPEC)
    assert_equal(load_leaves(checkpoint, rules, abstract), stacked)
    direct = direct_sources(checkpoint, rules, abstract)
    assert direct is not None
    found = {source.path: source for source in direct}
    own = found["layers.experts.down"]
    first = stacked.layers
    assert isinstance(first, Layer) and first.experts is not None
    content = b"".join(
        each.file.read_bytes()[each.offset : each.offset + each.nbytes] for each in own.segments
    )
    assert content == np.asarray(first.experts.down).tobytes()
    assert len(assembled_sources(checkpoint, rules, abstract)) == len(direct)


def test_a_layer_without_experts_is_stacked_apart() -> None:
    spec = registry.spec_of(
        json.loads((GOLDEN / "config.json").read_text()) | {"mlp_only_layers": [1]}
    )
    params = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    assert isinstance(params.layers, dict) and params.layers.keys() == {(0,), (1,)}
    views = layer_views(decoder.abstract(spec, jnp.bfloat16).layers)
    assert [layer.experts is None for layer in views] == [False, True]
    assert [layer.gate_up is None for layer in views] == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "experts.3.up",
        ),
        (lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"), "mlp.gate.weight"),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.experts.8.up_proj.weight": np.ones((48, 64), np.float32)}
            ),
            "experts.8.up_proj.weight: no leaf of the model takes this tensor",
        ),
    ],
)
def test_each_tensor_is_there_and_used_once(change: Any, message: str, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_tensor_of_more_experts_than_the_model_has_is_refused(tmp_path: Path) -> None:
    tensors = fused(load_file(GOLDEN / "model.safetensors"))
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="used in 8 parts, which are not each of its 9 once"):
        load(tmp_path)


@pytest.mark.parametrize("layers", ["int4", "fp8"])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_quantised_one_by_one(layers: Any, stacked: bool) -> None:
    """As a matrix of its own, and the router not at all."""
    encode = Quantization(layers=layers).encoder(QUANTIZABLE)
    abstract = decoder.abstract(QUANTIZABLE, jnp.bfloat16, stacked=stacked)
    params = dummy_params(abstract, 1, encode)
    plain = dummy_params(abstract, 1)
    pairs = zip(layer_views(params.layers), layer_views(plain.layers), strict=True)
    for layer, original in pairs:
        assert layer.experts is not None and original.experts is not None
        np.testing.assert_array_equal(layer.router, original.router)
        for name, weight in layer.experts._asdict().items():
            each = getattr(original.experts, name)
            assert weight.shape == each.shape
            for index in range(4):
                one = jax.tree.map(lambda leaf, index=index: leaf[index], weight)
                assert_equal(one, encode(f"layers.0.experts.0.{name}", each[index]))


@pytest.mark.parametrize("stacked", [False, True])
def test_a_converted_copy_is_what_it_was_made_from(stacked: bool, tmp_path: Path) -> None:
    rules = registry.rules(SPEC)
    encode = Quantization(head=None).encoder(SPEC)
    abstract = decoder.abstract(SPEC, jnp.bfloat16, stacked=stacked)
    convert(open_checkpoint(GOLDEN), rules, abstract, encode, tmp_path, made_from={})
    own = open_native(tmp_path)
    assert_equal(
        load_params(own.tensors, own.rules(), own.encoded(abstract)), load(GOLDEN, stacked=stacked)
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_quantised_experts_are_kept(stacked: bool, tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    save_file(_published(QUANTIZABLE), original / "model.safetensors")
    rules = registry.rules(QUANTIZABLE)
    encode = Quantization(layers="int4").encoder(QUANTIZABLE)
    abstract = decoder.abstract(QUANTIZABLE, jnp.bfloat16, stacked=stacked)
    checkpoint = open_checkpoint(original)
    expected = load_params(checkpoint, rules, abstract, encode=encode)
    convert(checkpoint, rules, abstract, encode, copy, made_from={})
    own = open_native(copy)
    assert own.description.types["layers.experts.gate_up"] == "Int4Weight"
    encoded = own.encoded(abstract)
    assert jax.tree.structure(encoded) == jax.tree.structure(encoded_abstract(abstract, encode))
    own.verify()
    assert_equal(load_params(own.tensors, own.rules(), encoded), expected)


def _published(spec: ModelSpec) -> dict[str, NDArray[Any]]:
    """Random tensors by the names of a checkpoint."""
    from jaxserve.models.tensor_names import rows_of
    from jaxserve_checkpoints.naming import leaf_parts, substitute, with_words
    from jaxserve_checkpoints.rules import Rule

    rules = {rule.leaf: rule for rule in registry.rules(spec) if isinstance(rule, Rule)}
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for part in leaf_parts(decoder.abstract(spec, jnp.float32)):
        rows = rows_of(spec, part.path) or part.leaf.shape[:1]
        sources = rules[with_words(part.path)].sources
        for name, count in zip(sources, rows, strict=True):
            size = (count, *part.leaf.shape[1:])
            tensors[substitute(name, part.numbers)] = rng.normal(size=size).astype(np.float32)
    return tensors


def test_what_awq_and_shapes_do_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="awq does not know experts"):
        Quantization(layers="int4", method="awq").encoder(QUANTIZABLE)
    with pytest.raises(ConfigError, match=r"experts.gate_up \[96, 64\]"):
        Quantization(layers="int4").encoder(SPEC)


GPT_OSS = Path(__file__).parents[1] / "golden" / "gpt_oss"


def gpt_oss_in_mxfp4(folder: Path) -> tuple[ModelSpec, dict[str, NDArray[Any]]]:
    """The golden with its experts in MXFP4 as gpt-oss is published; and its tensors, of which the
    experts have the values that are left of them."""
    tensors = load_file(GPT_OSS / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        matrix = np.swapaxes(stored.pop(name).astype(np.float32), 1, 2)  # [experts, out, in]
        blocks, scales, values = _mxfp4(matrix)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(np.swapaxes(values, 1, 2))
    config = json.loads((GPT_OSS / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return registry.spec_of(config), plain


def _mxfp4(matrix: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Blocks uint8 [experts, out, in / 32, 16], scales, and the values that they stand for."""
    each = matrix.reshape(*matrix.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(each).max(-1))).astype(np.int32) - 2
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scaled = each / np.exp2(exponent)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - numbers).argmin(-1).astype(np.uint8)
    values = np.sign(scaled) * numbers[codes] * np.exp2(exponent)[..., None]
    codes |= np.where(scaled < 0, 8, 0).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = np.ascontiguousarray(exponent + 127, np.uint8)
    return np.ascontiguousarray(blocks), scales, values.reshape(matrix.shape)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_in_mxfp4_are_read_as_they_are(stacked: bool, tmp_path: Path) -> None:
    """Beside attention in bfloat16; from the file and from its converted copy."""
    quantized, plain, copy = (tmp_path / name for name in ("quantized", "plain", "copy"))
    for each in (quantized, plain, copy):
        each.mkdir()
    spec, tensors = gpt_oss_in_mxfp4(quantized)
    save_file(tensors, plain / "model.safetensors")
    expected = load(plain, spec, stacked=stacked)
    abstract, rules = decoder.abstract(spec, jnp.bfloat16, stacked=stacked), registry.rules(spec)
    checkpoint = QuantizedCheckpoint(open_checkpoint(quantized), found_format(quantized))
    params = load_params(checkpoint, rules, abstract)
    views = zip(layer_views(params.layers), layer_views(expected.layers), strict=True)
    for layer, original in views:
        assert layer.experts is not None and original.experts is not None
        for name, weight in layer.experts._asdict().items():
            assert isinstance(weight, Mxfp4Weight)
            want = getattr(original.experts, name)
            found = weight.dequantize()
            np.testing.assert_array_equal(found[..., : want.shape[-1]], want)
            np.testing.assert_array_equal(found[..., want.shape[-1] :], 0)
        assert_equal(layer._replace(experts=None), original._replace(experts=None))
    convert(checkpoint, rules, abstract, as_stored, copy, made_from={})
    own = open_native(copy)
    assert_equal(load_params(own.tensors, own.rules(), own.encoded(abstract)), params)


def test_random_weights_of_gpt_oss_are_as_published(tmp_path: Path) -> None:
    """A folder of `random_checkpoint.py` is read, and named models' weights have its formats."""
    spec = registry.spec_of(json.loads((GPT_OSS / "config.json").read_text()))
    random_checkpoint.make(spec, tmp_path)
    assert registry.spec_of(json.loads((tmp_path / "config.json").read_text())) == spec
    abstract = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    checkpoint = QuantizedCheckpoint(open_checkpoint(tmp_path), found_format(tmp_path))
    read = load_params(checkpoint, registry.rules(spec), abstract)
    made = dummy_params(abstract, 0, Quantization(experts="mxfp4").encoder(spec))
    experts = decoder.layer_views(made.layers)[0].experts
    assert experts is not None and isinstance(experts.down, Mxfp4Weight)

    def kind(leaf: Any) -> tuple[Any, Any]:
        return leaf.shape, leaf.dtype

    assert jax.tree.map(kind, made) == jax.tree.map(kind, read)
    floats = [leaf for leaf in jax.tree.leaves(read) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in floats)


@pytest.mark.parametrize(
    ("flags", "experts", "matrices"),
    [
        ((), Mxfp4Weight, jax.Array),
        (("--quantization", "int4"), Int4Weight, Int4Weight),
        (("--quantization", "fp8"), Fp8Weight, Fp8Weight),
    ],
)
def test_a_start_without_files_has_experts_as_published_unless_a_flag_quantises(
    flags: tuple[str, ...],
    experts: type[Any],
    matrices: type[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((GPT_OSS / "config.json").read_text())
    config |= {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    monkeypatch.setitem(registry.NAMED_MODELS, "small", registry.spec_of(config))
    monkeypatch.setitem(registry.PUBLISHED_EXPERTS, "small", "mxfp4")
    options = parse_args(["--model", "small", "--load-format", "dummy", *flags])
    plan = plan_weights(options, find_model(options), jnp.bfloat16, tmp_path, stacked=True)
    params = weight_loader(plan, {})(lambda done, total: None)
    for layer in decoder.layer_views(params.layers):
        assert layer.experts is not None
        assert {type(weight) for weight in layer.experts} == {experts}
        assert isinstance(layer.qkv, matrices) and isinstance(layer.out, matrices)


def test_scales_of_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    gpt_oss_in_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.down_proj: it has no"):
        QuantizedCheckpoint(open_checkpoint(tmp_path), found_format(tmp_path))


def found_format(folder: Path) -> Any:
    found = detect(folder)
    assert found is not None
    return found
