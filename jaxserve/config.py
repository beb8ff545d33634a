"""Settings: frozen, checked where they are made, passed down; no environment reads, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


class ConfigError(ValueError):
    """A setting or a model configuration that cannot work; the message says what to change."""


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
            f"{key} is missing or not a positive integer"
            for key in (*required, *(key for key in optional if config.get(key) is not None))
            if not isinstance(config.get(key), int) or config[key] <= 0
        ]
        if problems:
            raise ConfigError("config.json: " + "; ".join(problems))
        q_heads = config["num_attention_heads"]
        theta, scaling = _rope(config)
        return cls(
            vocab_size=config["vocab_size"],
            embed=config["hidden_size"],
            ffn=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            q_heads=q_heads,
            kv_heads=config.get("num_key_value_heads") or q_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // q_heads,
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=config.get("max_position_embeddings") or 40_960,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


_YARN_FIELDS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    )
)


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
    rope = dict(config.get("rope_scaling") or {})
    rope.update(config.get("rope_parameters") or {})
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {partial}, but all of a head is rotated here"
        )
    theta = _number(rope if rope.get("rope_theta") else config, "rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type is {kind!r}, supported: 'default', 'yarn'")
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if "factor" not in rope or not original:
        raise ConfigError(
            "config.json: YaRN needs 'factor' and 'original_max_position_embeddings', "
            f"found {sorted(rope)}"
        )
    if unknown := sorted(name for name in rope.keys() - _YARN_FIELDS if rope[name] is not None):
        raise ConfigError(f"config.json: YaRN with {', '.join(unknown)} is not supported")
    return theta, YarnScaling(
        factor=_number(rope, "factor", 1.0),
        original_max_position=int(original),
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate") is not False,
    )


def _number(
    config: Mapping[str, Any], key: str, default: float, file: str = "config.json"
) -> float:
    """`default` where the file has none, or null. ConfigError: it has something else."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"{file}: {key} is {value!r}, which is not a number")
    return default if value is None else float(value)


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


KV_CACHE_DTYPES = ("auto", "bf16", "fp8_e4m3", "int8", "kvarn_k4v4_g128", "kvarn_k4v2_g128")
"""Names of the KV formats, whose definitions are in `jaxserve_kernels.kv_format`."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Paged KV cache. Page 0 is the padding page: written by padding, never given out."""

    num_pages: int
    page_size: int = 16
    identity: str = ""
    """What keys and values depend on beside tokens and positions: the model and their format."""
    own_tokens: int = 0
    """At its beginning, in whole pages, that each sequence computes itself, found in the prefix
    cache or not: the format keeps them for each slot as well."""

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ConfigError(f"the KV cache needs at least 2 pages, got {self.num_pages}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def usable_tokens(self) -> int:
        return self.usable_pages * self.page_size


POLICIES = ("fcfs", "priority", "slo")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one sequence."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_queued: int = 1024
    prefix_caching: bool = True
    """Sequences share the pages of equal prefixes."""
    policy: str = "fcfs"
    """One of POLICIES."""
    ttft_slo: float | None = None
    """Seconds to the first token that requests without a deadline of their own have, if any."""
    max_itl: float = 0.05
    """Seconds that a step with a prefill chunk may take while sequences decode."""
    max_chunk_context: int | None = None
    """Tokens, in whole pages, that the chunks of one step may see together; None: any number."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes in a step"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"the scheduling policy is {self.policy!r}, known: {POLICIES}")
        if self.max_itl <= 0:
            raise ConfigError(f"max_itl must be positive, got {self.max_itl} seconds")
        if self.max_chunk_context is not None and self.max_chunk_context < self.max_model_len:
            raise ConfigError(
                f"max_chunk_context ({self.max_chunk_context}) must be at least max_model_len "
                f"({self.max_model_len}): otherwise a long prompt would wait for ever"
            )


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Static shapes that are compiled: rows of a decode step, tokens of a mixed step."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, sizes in (("decode", self.decode), ("prefill", self.prefill)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name} buckets must be increasing and positive, got {sizes}")


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What an unset sampling field means for this model (`generation_config.json`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def from_hf(cls, generation: Mapping[str, Any]) -> SamplingDefaults:
        """Read a `generation_config.json`; `do_sample: false` means greedy.

        ConfigError: a value that is no number.
        """
        if generation.get("do_sample") is False:
            return cls(temperature=0.0)
        file = "generation_config.json"
        return cls(
            temperature=_number(generation, "temperature", 1.0, file),
            top_p=_number(generation, "top_p", 1.0, file),
            top_k=int(_number(generation, "top_k", 0, file)),
        )


REASONING_FIELDS = ("both", "reasoning", "reasoning_content")

TEMPLATE_VARIABLES = frozenset({"enable_thinking", "thinking", "preserve_thinking"})
"""Names that `chat_template_kwargs` may set."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    model_names: tuple[str, ...]
    """Names clients may use; the first one is reported."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    """A Unix domain socket to listen on instead."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_template: str | None = None
    """Jinja for chats; None: the model's own."""
    template_variables: Mapping[str, Any] = MappingProxyType({})
    """`chat_template_kwargs` of chats that do not set them."""
    reasoning_field: str = "both"
    """Where chats have thoughts: one of REASONING_FIELDS."""
    by_priority: bool = False
    """The scheduler's policy looks at priorities."""
    isolate_cache_by_key: bool = False
    """Prefixes are shared only among requests with the same API key."""
    max_request_bytes: int = 16 * 1024 * 1024
    keep_alive_interval: float = 15.0
    """Seconds between SSE comments on a stream that waits for its next token."""
    stall_timeout: float = 120.0
    """Seconds without progress of the engine thread after which `/health` is 503."""
    api_key_digests: tuple[bytes, ...] = ()
    """SHA-256 of the keys that clients may use; none: no key is needed."""
    admin_key_digests: tuple[bytes, ...] = ()
    """SHA-256 of the keys of administrators; none: their routes do not exist."""
    open_metrics: bool = False
    """`/metrics` needs no key."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that browsers let use the server; `*`: all."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait for their first output token before 429; None: any number."""
    request_timeout: float | None = None
    """Seconds from a request's arrival until it is given up; None: as long as it takes."""
    max_queue_time: float | None = None
    """Seconds from a request's arrival until its first token must be there; None: any time."""
    force_include_usage: bool = False
    """Every stream of chats and completions ends with usage, asked for or not."""
    root_path: str = ""
    """A path that the routes stand under, too, for a proxy that does not take it away."""
    header_timeout: float = 75.0
    """Seconds that a connection may wait for the whole header of its next request."""
    body_timeout: float = 60.0
    """Seconds that the body of a request may take to arrive."""
    log_requests: bool = False
    """One log line per request that has ended."""
