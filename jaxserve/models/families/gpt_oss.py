"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped SwiGLU, attention sinks, and a
window in every second layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError, number
from jaxserve.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, Rope, YarnScaling
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, count, dense_spec, window_size, with_windows
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "GptOssForCausalLM"
_LIMIT, _ALPHA = 7.0, 1.702
"""Constants of its SwiGLU, which the experts' kernels have built in."""


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    problems = [
        f"{key} is {number(config, key, value):g}, supported: {value:g}"
        for key, value in (("swiglu_limit", _LIMIT), ("swiglu_alpha", _ALPHA))
        if number(config, key, value) != value
    ]
    if not config.get("attention_bias", True):
        problems.append("attention_bias is false, but gpt-oss has biases")
    plain = dense_spec(
        {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, **config},
        ARCHITECTURE,
        problems=problems,
        qkv_bias=True,
        out_bias=True,
        max_position=_MAX_POSITION,
    )
    experts = ExpertsSpec(
        num_experts=count(config, "num_local_experts"),
        top_k=count(config, "num_experts_per_tok"),
        width=plain.ffn,
        **_EXPERTS,
    )
    layers = (
        LayerSpec(attention=replace(plain.attention, sinks=True), feed_forward=experts)
        for _ in plain.layers
    )
    return with_windows(replace(plain, layers=tuple(layers)), _windows(config, plain.num_layers))


def _windows(config: Config, layers: int) -> list[int | None]:
    """Returns the window of each layer: `sliding_window` in the layers that `layer_types` lists, or
    in every second layer from the first on."""
    window = window_size(config)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    if len(kinds) != layers or window is None:
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {layers} layers, "
            f"sliding_window is {window}: gpt-oss needs both"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


_MAX_POSITION = 131_072
_EXPERTS: dict[str, Any] = {
    # A softmax of only the chosen logits equals the softmax of all, divided by the sum of the
    # chosen.
    "normalize": True,
    "activation": "swiglu_oss",
    "bias": True,
    "router_bias": True,
}


def _published(size: str, layers: int, experts: int) -> NamedModel:
    yarn = YarnScaling(factor=32.0, original_max_position=4096, truncate=False)
    attention = AttentionSpec(
        q_heads=64,
        kv_heads=8,
        head_dim=64,
        rope=Rope(theta=150_000.0, scaling=yarn),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
    )
    block = ExpertsSpec(num_experts=experts, top_k=4, width=2880, **_EXPERTS)
    layer = LayerSpec(attention=attention, feed_forward=block)
    spec = ModelSpec(
        architecture=ARCHITECTURE,
        vocab_size=201_088,
        embed=2880,
        layers=(layer,) * layers,
        norm_eps=1e-5,
        max_position=_MAX_POSITION,
        tie_embeddings=False,
    )
    windows = [None if index % 2 else 128 for index in range(layers)]
    return NamedModel(f"openai/gpt-oss-{size}", with_windows(spec, windows), experts="mxfp4")


NAMED = {
    "gpt-oss-20b": _published("20b", 24, 32),
    "gpt-oss-120b": _published("120b", 36, 128),
}
