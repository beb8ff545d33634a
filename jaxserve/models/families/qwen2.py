"""Qwen2 and Qwen2.5, dense: biases of queries, keys and values; optional windows in later
layers."""

from __future__ import annotations

from jaxserve.layer_spec import AttentionSpec, Rope
from jaxserve.model_spec import ModelSpec, NamedModel
from jaxserve.models.hf_config import Config, dense_spec, late_windows, with_windows
from jaxserve.models.tensor_names import decoder_rules as rules

__all__ = ["ARCHITECTURE", "NAMED", "rules", "spec"]

ARCHITECTURE = "Qwen2ForCausalLM"


def spec(config: Config) -> ModelSpec:
    """Returns the model of a config.json; see `registry.spec_of`."""
    plain = dense_spec(config, ARCHITECTURE, qkv_bias=True, max_position=32_768)
    return with_windows(plain, late_windows(config, plain.num_layers))


def _published(
    size: str,
    embed: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    *,
    head_dim: int = 128,
    vocab: int = 152_064,
    tied: bool = False,
) -> NamedModel:
    attention = AttentionSpec(
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        rope=Rope(theta=1e6),
        qkv_bias=True,
    )
    spec = ModelSpec.dense(
        architecture=ARCHITECTURE,
        vocab_size=vocab,
        embed=embed,
        ffn=ffn,
        num_layers=layers,
        attention=attention,
        max_position=32_768,
        tie_embeddings=tied,
    )
    return NamedModel(f"Qwen/Qwen2.5-{size}-Instruct", spec)


_SMALL = 151_936

NAMED = {
    "qwen2.5-0.5b": _published(
        "0.5B", 896, 4864, 24, (14, 2), head_dim=64, vocab=_SMALL, tied=True
    ),
    "qwen2.5-1.5b": _published("1.5B", 1536, 8960, 28, (12, 2), vocab=_SMALL, tied=True),
    "qwen2.5-3b": _published("3B", 2048, 11008, 36, (16, 2), vocab=_SMALL, tied=True),
    "qwen2.5-7b": _published("7B", 3584, 18944, 28, (28, 4)),
    "qwen2.5-14b": _published("14B", 5120, 13824, 48, (40, 8)),
    "qwen2.5-32b": _published("32B", 5120, 27648, 64, (40, 8)),
}
