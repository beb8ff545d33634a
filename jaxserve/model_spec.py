"""The shape of a model: from its `config.json`, or of the Qwen3 models by name. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.config import ConfigError, number


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN context extension (Peng et al. 2023, arXiv 2309.00071), as Hugging Face names it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """The bounds between fast and slow rotations are whole pairs."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"YaRN factor must be at least 1, got {self.factor}")

    @property
    def score_scale(self) -> float:
        """Factor on the rotated queries and keys: 0.1 ln(factor) + 1 unless given, or the ratio of
        that with each logarithm times `mscale` and `mscale_all_dim`, as DeepSeek's models have."""
        if self.attention_factor is not None:
            return self.attention_factor
        log = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * log + 1.0) / (self.mscale_all_dim * log + 1.0)
        return log + 1.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one dense Qwen3-class decoder."""

    vocab_size: int
    embed: int
    ffn: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling | None = None
    max_position: int = 40_960
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.q_heads}) must be a multiple of "
                f"num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        per_layer = (
            self.embed * (self.q_size + 2 * self.kv_size)
            + self.q_size * self.embed
            + 3 * self.embed * self.ffn
            + 2 * self.embed
            + 2 * self.head_dim
        )
        heads = 1 if self.tie_embeddings else 2
        return self.num_layers * per_layer + heads * self.vocab_size * self.embed + self.embed

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face `config.json`; ConfigError lists everything wrong with it."""
        problems = _unsupported(config)
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
        problems += [
            f"{key} is missing or not a positive integer up to {_most(key)}"
            for key in (*required, *(key for key in optional if config.get(key) is not None))
            if not _is_count(config.get(key), key)
        ]
        if problems:
            raise ConfigError("config.json: " + "; ".join(problems))
        q_heads = config["num_attention_heads"]
        theta, scaling = _rope(config)
        eps = number(config, "rms_norm_eps", 1e-6)
        if theta <= 1 or eps < 0:
            raise ConfigError(
                f"config.json: rope_theta is {theta:g} and must be above 1; rms_norm_eps is "
                f"{eps:g} and must not be negative"
            )
        return cls(
            vocab_size=config["vocab_size"],
            embed=config["hidden_size"],
            ffn=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            q_heads=q_heads,
            kv_heads=config.get("num_key_value_heads") or q_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // q_heads,
            norm_eps=eps,
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=config.get("max_position_embeddings") or 40_960,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


_YARN_NUMBERS = (
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
_YARN_FIELDS = frozenset(("rope_type", "type", "rope_theta", "truncate", *_YARN_NUMBERS))


_MOST_LAYERS, _MOST = 10_000, 2**31 - 1


def _most(key: str) -> int:
    return _MOST_LAYERS if key == "num_hidden_layers" else _MOST


def _is_count(value: Any, key: str) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _most(key)


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """What in a Hugging Face config this engine would compute wrongly."""
    problems: list[str] = []
    architectures = config.get("architectures") or []
    if "Qwen3ForCausalLM" not in architectures:
        problems.append(f"architectures is {architectures}, supported: ['Qwen3ForCausalLM']")
    if config.get("attention_bias"):
        problems.append("attention_bias is true, Qwen3 attention has no bias")
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window is true, sliding windows are not supported")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {config['hidden_act']!r}, supported: 'silu'")
    return problems


def _rope(config: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """RoPE base and scaling; transformers 5 writes `rope_parameters`, earlier ones two fields."""
    old, new = _object(config, "rope_scaling"), _object(config, "rope_parameters")
    unlike = any(old[name] != new[name] for name in old.keys() & new.keys())
    if old and new and (unlike or _rope_kind(old) != _rope_kind(new)):
        raise ConfigError(
            f"config.json: rope_scaling is {dict(old)}, rope_parameters is {dict(new)}: they "
            "contradict each other; write what is meant into one of them and remove the other"
        )
    rope = {**old, **new}
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {partial}, but all of a head is rotated here"
        )
    theta = number(rope if rope.get("rope_theta") else config, "rope_theta", 10_000.0)
    kind = _rope_kind(rope)
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type is {kind!r}, supported: 'default', 'yarn'")
    for name in _YARN_NUMBERS:
        number(rope, name, 0.0)
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if "factor" not in rope or not original or original < 1:
        raise ConfigError(
            "config.json: YaRN needs 'factor' and 'original_max_position_embeddings', "
            f"found {sorted(rope)}"
        )
    if unknown := sorted(name for name in rope.keys() - _YARN_FIELDS if rope[name] is not None):
        raise ConfigError(f"config.json: YaRN with {', '.join(unknown)} is not supported")
    return theta, YarnScaling(
        factor=number(rope, "factor", 1.0),
        original_max_position=int(original),
        beta_fast=number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate") is not False,
    )


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Empty where there is none. ConfigError: it is something else."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} is {found!r:.100}, which is not an object")
    return found


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _qwen3(
    embed: int, ffn: int, layers: int, q_heads: int, kv_heads: int = 8, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        vocab_size=151_936,
        embed=embed,
        ffn=ffn,
        num_layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        tie_embeddings=tied,
    )


NAMED_MODELS: dict[str, ModelSpec] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
}
"""Shapes of the Qwen3 dense models as published in their config.json files."""
