"""Checkpoints that are quantised already: served and converted as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError, SamplingDefaults
from jaxserve.models import decoder
from jaxserve.tokenizer import ByteTokenizer
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import ModelSource
from jaxserve_checkpoints.reader import CheckpointError
from jaxserve_kernels.matmul import take_rows
from jaxserve_kernels.weights import Fp8Weight, Int4Weight, OrderedInt4Weight
from tests.checkpoints import quantized_files as files
from tests.tiny_model import tiny_spec

SIZES = {"vocab_size": 128, "embed": 256, "ffn": 256, "head_dim": 64}
SMALL = tiny_spec(**SIZES, num_layers=2)
"""Few shapes: each is compiled."""
WITH_BIASES = tiny_spec(
    **SIZES, num_layers=2, qk_norm=False, qkv_bias=True, architecture="Qwen2ForCausalLM"
)
MATRICES = {
    "self_attn.q_proj": (SMALL.q_size, SMALL.embed),
    "self_attn.k_proj": (SMALL.kv_size, SMALL.embed),
    "self_attn.v_proj": (SMALL.kv_size, SMALL.embed),
    "self_attn.o_proj": (SMALL.embed, SMALL.q_size),
    "mlp.gate_proj": (SMALL.ffn, SMALL.embed),
    "mlp.up_proj": (SMALL.ffn, SMALL.embed),
    "mlp.down_proj": (SMALL.embed, SMALL.ffn),
}
NORMS = {
    "input_layernorm": SMALL.embed,
    "post_attention_layernorm": SMALL.embed,
    "self_attn.q_norm": SMALL.head_dim,
    "self_attn.k_norm": SMALL.head_dim,
}
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


dequantize = jax.jit(lambda weight: weight.dequantize())


def write(
    folder: Path,
    kind: str,
    *,
    with_embedding: bool = False,
    biases: dict[str, np.ndarray] | None = None,
) -> tuple[ModelSource, dict[str, Any]]:
    """A quantised checkpoint of SMALL, and the weights of its modules. With `biases`, of modules
    of each layer, it is one of Qwen2."""
    folder.mkdir()
    layers = [f"model.layers.{layer}." for layer in range(SMALL.num_layers)]
    modules = {layer + name: size for layer in layers for name, size in MATRICES.items()}
    rng = np.random.default_rng(0)
    plain = {
        f"{layer}{name}.weight": rng.normal(size=size).astype(np.float32)
        for layer in layers
        for name, size in NORMS.items()
        if biases is None or name not in ("self_attn.q_norm", "self_attn.k_norm")
    }
    for name, bias in (biases or {}).items():
        plain |= {f"{layer}{name}.bias": bias + index for index, layer in enumerate(layers)}
    plain["model.norm.weight"] = rng.normal(size=SMALL.embed).astype(np.float32)
    size = (SMALL.vocab_size, SMALL.embed)
    if with_embedding:
        modules["model.embed_tokens"] = size
    else:
        plain["model.embed_tokens.weight"] = rng.normal(size=size).astype(np.float32)
    weights = files.save(folder, files.KINDS[kind], modules, 1, **plain)
    source = ModelSource(
        names=("quantised",),
        spec=SMALL if biases is None else WITH_BIASES,
        folder=folder,
        tokenizer=ByteTokenizer(),
        sampling_defaults=SamplingDefaults(),
    )
    return source, weights


def start(source: ModelSource, cache: Path, *flags: str, stacked: bool = False) -> decoder.Params:
    plan = plan_weights(parse_args(list(flags)), source, jnp.float32, cache, stacked=stacked)
    params = weight_loader(replace(plan, staging=[]), {})(lambda done, total: None)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, plan.encoded)
    return params


def check(params: Any, weights: dict[str, Any], type_: type) -> None:
    """The matrices of unstacked layers are of the type, and what was written."""
    for index, layer in enumerate(params.layers):
        for name, modules in FUSED.items():
            weight = getattr(layer, name)
            assert isinstance(weight, type_)
            parts = [weights[f"model.layers.{index}.{module}"] for module in modules]
            np.testing.assert_array_equal(dequantize(weight), np.concatenate(parts))


def test_a_quantised_checkpoint_is_served_as_it_is(tmp_path: Path) -> None:
    source, weights = write(tmp_path / "original", "gptq-act-order")
    check(start(source, tmp_path / "cache"), weights, OrderedInt4Weight)
    assert not (tmp_path / "cache").exists()


def projection_biases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    names = FUSED["qkv"]
    return {name: rng.normal(size=MATRICES[name][0]).astype(np.float32) for name in names}


@pytest.mark.parametrize(("kind", "type_"), [("gptq-v2", Int4Weight), ("awq", Int4Weight)])
@pytest.mark.parametrize("stacked", [False, True])
def test_biases_beside_quantised_matrices_are_read(
    kind: str, type_: type, stacked: bool, tmp_path: Path
) -> None:
    """As Qwen2.5's files have them."""
    biases = projection_biases()
    source, weights = write(tmp_path / "original", kind, biases=biases)
    params = start(source, tmp_path / "cache", stacked=stacked)
    expected = np.concatenate([biases[name] for name in FUSED["qkv"]])
    if stacked:
        np.testing.assert_array_equal(params.layers.qkv_bias, np.stack([expected, expected + 1]))
    else:
        check(params, weights, type_)
        for index, layer in enumerate(params.layers):
            np.testing.assert_array_equal(layer.qkv_bias, expected + index)


def test_biases_of_zero_of_other_matrices_change_nothing(tmp_path: Path) -> None:
    """GPTQ files have them where the model has none; others would be lost."""
    source, weights = write(tmp_path / "original", "gptq-v2")
    assert source.folder is not None
    file = source.folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.o_proj.bias"
    save_file(tensors | {name: np.zeros(SMALL.embed, np.float32)}, file)
    check(start(source, tmp_path / "cache"), weights, Int4Weight)
    save_file(tensors | {name: np.ones(SMALL.embed, np.float32)}, file)
    with pytest.raises(CheckpointError, match=f"{name}: no leaf of the model takes this tensor"):
        start(source, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "type_"),
    [("gptq-act-order", OrderedInt4Weight), ("awq", Int4Weight), ("fp8-blocks", Fp8Weight)],
)
def test_stacked_and_converted_it_has_the_same_codes(
    kind: str, type_: type, tmp_path: Path
) -> None:
    source, weights = write(tmp_path / "original", kind)
    separate = start(source, tmp_path / "cache")
    check(separate, weights, type_)
    stacked = start(source, tmp_path / "cache", stacked=True)
    out = tmp_path / "out"
    flags = parse_args(["--model", "quantised", "--out", str(out)], "convert")
    convert_model(flags, source, out, lambda done, total: None)
    own = start(replace(source, folder=out), tmp_path / "cache", stacked=True)
    jax.tree.map(np.testing.assert_array_equal, own, stacked)
    for index, layer in enumerate(separate.layers):
        of_stack = jax.tree.map(lambda leaf, index=index: leaf[index], stacked.layers)
        jax.tree.map(np.testing.assert_array_equal, of_stack, layer)


def test_it_is_not_quantised_again_except_for_its_head(tmp_path: Path) -> None:
    source, _ = write(tmp_path / "original", "awq")
    with pytest.raises(ConfigError, match=r"--quantization int4: .* already \(AutoAWQ, 4 bits"):
        start(source, tmp_path, "--quantization", "int4")
    plan = plan_weights(
        parse_args(["--lm-head-dtype", "int8"]), source, jnp.float32, tmp_path, stacked=True
    )
    assert type(plan.encoded.embedding).__name__ == "Int8Weight"


@pytest.mark.parametrize("kind", ["awq", "fp8-blocks"])
def test_an_embedding_without_rows_to_look_up_is_refused(kind: str, tmp_path: Path) -> None:
    source, _ = write(tmp_path / "original", kind, with_embedding=True)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is quantised .* per row"):
        start(source, tmp_path)


def test_an_embedding_of_8_bits_is_served_as_it_is(tmp_path: Path) -> None:
    source, weights = write(tmp_path / "original", "int8", with_embedding=True)
    rows = jnp.array([3, 0, SMALL.vocab_size - 1])
    found = take_rows(start(source, tmp_path).embedding, rows, jnp.float32)
    np.testing.assert_array_equal(found, weights["model.embed_tokens"][rows])


def test_what_is_kept_is_not_taken_for_codes_that_are_read_in_another_way(tmp_path: Path) -> None:
    """`config.json` says what zero points mean; the files of weights stay the same."""
    source, weights = write(tmp_path / "original", "gptq-v2")
    assert source.folder is not None
    file, head = source.folder / "config.json", ("--lm-head-dtype", "int8")
    right = file.read_text()
    assert "gptq_v2" in right
    file.write_text(right.replace("gptq_v2", "gptq"))
    start(source, tmp_path / "cache", *head)
    file.write_text(right)
    check(start(source, tmp_path / "cache", *head), weights, Int4Weight)
    flags = parse_args(["--model", "m", "--out", "o"], "convert")
    convert_model(flags, source, tmp_path / "out", lambda done, total: None)
    file.write_text(right.replace("gptq_v2", "gptq"))
    with pytest.raises(CheckpointError, match="another conversion, with other stored"):
        convert_model(flags, source, tmp_path / "out", lambda done, total: None)


def test_layers_that_are_not_alike_are_not_stacked(tmp_path: Path) -> None:
    source, weights = write(tmp_path / "original", "awq")
    assert source.folder is not None
    file = source.folder / "model.safetensors"
    name = "model.layers.1.mlp.down_proj"
    tensors = {key: each for key, each in load_file(file).items() if not key.startswith(name)}
    save_file(tensors | {f"{name}.weight": weights[name]}, file)
    params = start(source, tmp_path, stacked=True)
    assert isinstance(params.layers, tuple)
    assert isinstance(params.layers[0].down, Int4Weight)
    np.testing.assert_array_equal(params.layers[1].down, weights[name])
