"""Llama 3: RoPE with `llama3` scaling, and optional biases."""

from __future__ import annotations

from jaxserve.layer_spec import AttentionSpec, Llama3Scaling, Rope
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, dense_spec
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "LlamaForCausalLM"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    shards = config.get("pretraining_tp") or 1
    biased = bool(config.get("attention_bias"))
    return dense_spec(
        config,
        ARCHITECTURE,
        problems=[f"pretraining_tp is {shards!r}, supported: 1"] if shards != 1 else [],
        qkv_bias=biased,
        out_bias=biased,
        ffn_bias=bool(config.get("mlp_bias")),
        max_position=2048,
    )


def _published(
    size: str,
    embed: int,
    ffn: int,
    layers: int,
    q_heads: int,
    *,
    head_dim: int = 128,
    factor: float,
    tied: bool = False,
) -> NamedModel:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    attention = AttentionSpec(
        q_heads=q_heads, kv_heads=8, head_dim=head_dim, rope=Rope(theta=5e5, scaling=scaling)
    )
    spec = ModelSpec.dense(
        architecture=ARCHITECTURE,
        vocab_size=128_256,
        embed=embed,
        ffn=ffn,
        num_layers=layers,
        attention=attention,
        norm_eps=1e-5,
        max_position=131_072,
        tie_embeddings=tied,
    )
    return NamedModel(f"meta-llama/Llama-{size}-Instruct", spec)


NAMED = {
    "llama-3.1-8b": _published("3.1-8B", 4096, 14336, 32, 32, factor=8.0),
    "llama-3.2-1b": _published("3.2-1B", 2048, 8192, 16, 32, head_dim=64, factor=32.0, tied=True),
    "llama-3.2-3b": _published("3.2-3B", 3072, 8192, 28, 24, factor=32.0, tied=True),
    "llama-3.3-70b": _published("3.3-70B", 8192, 28672, 80, 64, factor=8.0),
}
