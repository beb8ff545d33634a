"""Qwen3.5 on its way from files into the tree: each layout, each way of quantising."""

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

from jaxserve.config import ConfigError
from jaxserve.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Rope,
)
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, registry
from jaxserve.models.quantization import Quantization, WeightFormat
from jaxserve.models.tensor_names import rows_of
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.naming import leaf_parts, substitute, with_words
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_checkpoints.rules import Rule, Squeeze
from jaxserve_kernels.weights import is_quantized
from tests.checkpoints import quantized_files as files
from tests.models.test_golden import Golden, logits_in_chunks

GOLDEN = Path(__file__).parents[1] / "golden" / "hybrid_moe"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
FULL = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    rope=Rope(theta=10_000.0, fraction=0.25),
    qk_norm=True,
    gated=True,
)
DELTA_NET = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv_width=4)


def quantizable(*, sparse: bool) -> ModelSpec:
    """The least that quantised weights hold."""
    experts = ExpertsSpec(num_experts=4, top_k=2, width=128, normalize=True, shared_width=128)
    block = experts if sparse else FeedForwardSpec(width=128)
    return ModelSpec(
        architecture=f"Qwen3_5{'Moe' if sparse else ''}ForConditionalGeneration",
        vocab_size=128,
        embed=128,
        layers=(
            LayerSpec(delta_net=DELTA_NET, feed_forward=block),
            LayerSpec(attention=FULL, feed_forward=block),
        ),
        max_position=256,
        tie_embeddings=False,
        zero_centred_norms=True,
    )


def as_published(folder: Path, *, fused: bool) -> ModelSpec:
    """The golden as a file with vision: nested settings, other names, tensors of vision and MTP,
    and with `fused` all experts of a layer in one tensor."""
    tensors = load_file(GOLDEN / "model.safetensors")
    if fused:
        for layer in range(CONFIG["num_hidden_layers"]):
            block = f"model.layers.{layer}.mlp.experts."

            def stack(name: str, block: str = block) -> NDArray[Any]:
                each = range(CONFIG["num_experts"])
                return np.stack([tensors.pop(f"{block}{n}.{name}.weight") for n in each])

            gate_up = stack("gate_proj"), stack("up_proj")
            tensors[f"{block}gate_up_proj"] = np.concatenate(gate_up, axis=1)
            tensors[f"{block}down_proj"] = stack("down_proj")
    stored = {
        name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()
    }
    extra = np.ones((3, 2), np.float32)
    names = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.norm.weight")
    save_file(stored | dict.fromkeys(names, extra), folder / "model.safetensors")
    return registry.spec_of(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": CONFIG | {"intermediate_size": None},
            "tie_word_embeddings": False,
            "vision_config": {"depth": 1},
        }
    )


def load(folder: Path, spec: ModelSpec) -> decoder.Params:
    abstract = decoder.abstract(spec, jnp.bfloat16)
    return load_params(open_checkpoint(folder), registry.rules(spec), abstract)


@pytest.mark.parametrize("fused", [True, False])
def test_files_with_vision_hold_the_text_model(fused: bool, tmp_path: Path) -> None:
    spec = as_published(tmp_path, fused=fused)
    expected = load(GOLDEN, registry.spec_of(CONFIG))
    got = load(tmp_path, spec)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert isinstance(got.layers, tuple) and got.layers[0].shared is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp.shared_expert.up_proj.weight", "shared_expert.up_proj.weight"),
        ("mlp.shared_expert_gate.weight", "shared_expert_gate.weight"),
        ("linear_attn.in_proj_z.weight", "in_proj_z.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, message: str, tmp_path: Path) -> None:
    spec = as_published(tmp_path, fused=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.language_model.layers.0.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, spec)


_QUANTIZED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def quantized(
    folder: Path, spec: ModelSpec, kind: str
) -> tuple[decoder.Params, dict[str, NDArray[np.float32]]]:
    """A checkpoint whose large matrices are quantised, as it is loaded, and those matrices."""
    rules = {rule.leaf: rule for rule in registry.rules(spec) if isinstance(rule, Rule)}
    rng = np.random.default_rng(0)
    plain: dict[str, NDArray[Any]] = {}
    modules: dict[str, tuple[int, int]] = {}
    abstract = decoder.abstract(spec, jnp.float32)
    for part in leaf_parts(abstract):
        rule = rules[with_words(part.path)]
        rows = rows_of(spec, part.path) or part.leaf.shape[:1]
        for source, count in zip(rule.sources, rows, strict=True):
            name, size = substitute(source, part.numbers), (count, *part.leaf.shape[1:])
            if name.endswith(_QUANTIZED):
                modules[name.removesuffix(".weight")] = (size[0], size[1])
                continue
            size = (size[0], 1, size[1]) if Squeeze(1) in rule.transforms else size
            plain[name] = (0.3 * rng.normal(size=size)).astype(np.float32)
    weights = files.save(folder, files.KINDS[kind], modules, 1, **plain)
    found = detect(folder)
    assert found is not None
    checkpoint = QuantizedCheckpoint(open_checkpoint(folder), found)
    return load_params(checkpoint, registry.rules(spec), abstract), weights


def dequantized(params: decoder.Params) -> Any:
    """With plain matrices in place of quantised ones."""
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf,
        params,
        is_leaf=is_quantized,
    )


def logits(spec: ModelSpec, params: decoder.Params) -> NDArray[Any]:
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 20)
    return logits_in_chunks(Golden("hybrid", spec, params, {}), tokens, 16)


@pytest.mark.parametrize(
    ("kind", "sparse"),
    [
        ("fp8-blocks", True),
        *(
            pytest.param(kind, sparse, marks=pytest.mark.slow)
            for kind in ("fp8-blocks", "gptq", "packed", "nvfp4-modelopt", "nvfp4-packed")
            for sparse in (True, False)
            if (kind, sparse) != ("fp8-blocks", True)
        ),
    ],
)
def test_a_quantised_checkpoint_is_read_as_it_is(kind: str, sparse: bool, tmp_path: Path) -> None:
    spec = quantizable(sparse=sparse)
    params, weights = quantized(tmp_path, spec, kind)
    plain = dequantized(params)
    assert isinstance(plain.layers, tuple)
    block = "model.language_model.layers.{}.".format
    delta, own = plain.layers[0].delta, f"{block(0)}linear_attn."
    assert delta is not None and not is_quantized(params.layers[0].delta.in_gates)
    names = ("in_proj_qkv", "in_proj_z")
    expected = np.concatenate([weights[f"{own}{name}"] for name in names])
    np.testing.assert_array_equal(delta.in_proj, expected)
    np.testing.assert_array_equal(delta.out, weights[f"{own}out_proj"])
    names = ("q_proj", "k_proj", "v_proj")
    expected = np.concatenate([weights[f"{block(1)}self_attn.{name}"] for name in names])
    np.testing.assert_array_equal(plain.layers[1].qkv, expected)
    if sparse:
        down = f"{block(1)}mlp.experts.3.down_proj"
        np.testing.assert_array_equal(plain.layers[1].experts.down[3], weights[down])
        down = f"{block(1)}mlp.shared_expert.down_proj"
        np.testing.assert_array_equal(plain.layers[1].shared.down, weights[down])
    np.testing.assert_allclose(logits(spec, params), logits(spec, plain), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    ("name", "matrix", "bound"), [("int4", 0.12, 0.8), ("fp8", 0.03, 0.3), ("nvfp4", 0.12, 0.8)]
)
def test_weights_quantised_at_load_give_alike_logits(
    name: WeightFormat, matrix: float, bound: float, sparse: bool
) -> None:
    """Bounds are of the root mean square of the difference over the deviation: of each matrix, and
    of the logits. Random matrices this small leave a dense model 0.31, 0.09 and 0.31 of its logits;
    unrelated logits would give 1.4."""
    spec = quantizable(sparse=sparse)
    abstract = decoder.abstract(spec, jnp.float32)
    encode = Quantization(layers=name).encoder(spec)
    params, plain = dummy_params(abstract, 1, encode), dummy_params(abstract, 1)
    assert isinstance(params.layers, tuple)
    delta = params.layers[0].delta
    assert delta is not None and is_quantized(delta.in_proj) and is_quantized(delta.out)
    assert not is_quantized(delta.in_gates) and is_quantized(params.layers[1].qkv)
    if sparse:
        assert params.layers[0].shared is not None and not is_quantized(params.layers[0].router)
        assert is_quantized(params.layers[0].shared.down)
    for one, other in zip(
        jax.tree.leaves(dequantized(params)), jax.tree.leaves(plain), strict=True
    ):
        assert _error(one, other) < matrix
    got, expected = logits(spec, params), logits(spec, plain)
    assert 1e-4 < _error(got, expected) < bound
    np.testing.assert_allclose(got, logits(spec, dequantized(params)), rtol=0, atol=2e-4)


def _error(got: Any, expected: Any) -> float:
    difference = np.sqrt(np.mean((np.asarray(got) - expected) ** 2))
    return float(difference / max(np.std(expected), 1e-6))


def test_what_no_tile_holds_is_refused_with_its_shape() -> None:
    with pytest.raises(ConfigError, match=r"shared.gate_up \[96, 64\]"):
        Quantization(layers="int4").encoder(registry.spec_of(CONFIG))
