"""Qwen3 with experts: its attention, and in most or all layers a router and small experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, Rope
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import (
    Config,
    count,
    dense_spec,
    refused,
    switched_window,
    with_windows,
)
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen3MoeForCausalLM"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    problems = refused(config, "attention_bias", "Qwen3 attention has no bias")
    plain = dense_spec(
        config, ARCHITECTURE, problems=problems, qk_norm=True, max_position=_MAX_POSITION
    )
    experts = ExpertsSpec(
        num_experts=count(config, _NUM if config.get(_NUM) else "num_local_experts"),
        top_k=count(config, "num_experts_per_tok"),
        width=count(config, "moe_intermediate_size"),
        normalize=_flag(config, "norm_topk_prob"),
        activation=plain.feed_forward.activation if plain.feed_forward else "silu",
    )
    sparse = _sparse_layers(config, plain.num_layers)
    layers = (
        replace(layer, feed_forward=experts) if index in sparse else layer
        for index, layer in enumerate(plain.layers)
    )
    # Unlike in Qwen3, a window that is on applies to all layers.
    windows = [switched_window(config)] * plain.num_layers
    return with_windows(replace(plain, layers=tuple(layers)), windows)


_NUM = "num_experts"
"""transformers 5 names it num_local_experts."""


def _sparse_layers(config: Config, layers: int) -> Sequence[int]:
    """Returns the layers with experts: every `decoder_sparse_step`-th layer that `mlp_only_layers`
    does not name."""
    step = count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers is {dense!r:.100}, which is not a list of layers"
        )
    return [each for each in range(layers) if each not in dense and (each + 1) % step == 0]


def _flag(config: Config, key: str) -> bool:
    """Returns a boolean. Raises ConfigError if it is missing: its default differs between
    libraries."""
    if not isinstance(config.get(key), bool):
        raise ConfigError(f"config.json: {key} is {config.get(key)!r:.40}, needed is true or false")
    return config[key]


_MAX_POSITION = 40_960


def _published(
    name: str,
    embed: int,
    layers: int,
    heads: tuple[int, int],
    experts: tuple[int, int],
    *,
    theta: float = 1e6,
    max_position: int = _MAX_POSITION,
) -> NamedModel:
    layer = LayerSpec(
        attention=AttentionSpec(
            q_heads=heads[0], kv_heads=heads[1], head_dim=128, rope=Rope(theta=theta), qk_norm=True
        ),
        feed_forward=ExpertsSpec(num_experts=experts[0], top_k=8, width=experts[1], normalize=True),
    )
    spec = ModelSpec(
        architecture=ARCHITECTURE,
        vocab_size=151_936,
        embed=embed,
        layers=(layer,) * layers,
        max_position=max_position,
        tie_embeddings=False,
    )
    return NamedModel(f"Qwen/{name}", spec)


NAMED = {
    "qwen3-30b-a3b": _published("Qwen3-30B-A3B", 2048, 48, (32, 4), (128, 768)),
    "qwen3-coder-30b-a3b": _published(
        *("Qwen3-Coder-30B-A3B-Instruct", 2048, 48, (32, 4), (128, 768)),
        theta=1e7,
        max_position=262_144,
    ),
}
