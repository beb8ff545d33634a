"""Mistral, dense: one optional window for all layers. Head sizes need not match the hidden size."""

from __future__ import annotations

from jaxserve.layer_spec import AttentionSpec, Rope
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, dense_spec, window_size, with_windows
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "MistralForCausalLM"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    plain = dense_spec(config, ARCHITECTURE, max_position=131_072)
    return with_windows(plain, [window_size(config)] * plain.num_layers)


NAMED = {
    "mistral-7b": NamedModel(
        "mistralai/Mistral-7B-Instruct-v0.3",
        ModelSpec.dense(
            architecture=ARCHITECTURE,
            vocab_size=32_768,
            embed=4096,
            ffn=14_336,
            num_layers=32,
            attention=AttentionSpec(q_heads=32, kv_heads=8, head_dim=128, rope=Rope(theta=1e6)),
            norm_eps=1e-5,
            max_position=32_768,
        ),
    )
}
