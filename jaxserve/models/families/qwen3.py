"""Qwen3, dense: an RMSNorm on every query and key head, no biases."""

from __future__ import annotations

from jaxserve.layer_spec import AttentionSpec, Rope
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, dense_spec, late_windows, refused, with_windows
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen3ForCausalLM"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    problems = refused(config, "attention_bias", "Qwen3 attention has no bias")
    plain = dense_spec(
        config, ARCHITECTURE, problems=problems, qk_norm=True, max_position=_MAX_POSITION
    )
    return with_windows(plain, late_windows(config, plain.num_layers))


_MAX_POSITION = 40_960


def _published(
    size: str, embed: int, ffn: int, layers: int, q_heads: int, *, tied: bool = False
) -> NamedModel:
    attention = AttentionSpec(
        q_heads=q_heads, kv_heads=8, head_dim=128, rope=Rope(theta=1e6), qk_norm=True
    )
    spec = ModelSpec.dense(
        architecture=ARCHITECTURE,
        vocab_size=151_936,
        embed=embed,
        ffn=ffn,
        num_layers=layers,
        attention=attention,
        max_position=_MAX_POSITION,
        tie_embeddings=tied,
    )
    return NamedModel(f"Qwen/Qwen3-{size}", spec)


NAMED = {
    "qwen3-0.6b": _published("0.6B", 1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _published("1.7B", 2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _published("4B", 2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _published("8B", 4096, 12288, 36, 32),
    "qwen3-14b": _published("14B", 5120, 17408, 40, 40),
    "qwen3-32b": _published("32B", 5120, 25600, 64, 64),
}
