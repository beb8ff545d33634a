"""Reads the fields of Hugging Face's `config.json` that families share. No I/O.

It refuses everything that would be computed wrongly, and reports all problems together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError, number
from jaxserve.layer_spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from jaxserve.model_spec import ModelSpec

type Config = Mapping[str, Any]

_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS, _MOST = 10_000, 2**31 - 1


def dense_spec(
    config: Config,
    architecture: str,
    *,
    problems: Sequence[str] = (),
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    ffn_bias: bool = False,
    gated: bool = False,
    partial_rope: float | None = None,
    max_position: int,
) -> ModelSpec:
    """Returns a decoder of plain layers: grouped-query attention and a gated feed-forward block.

    Args:
      problems: the problems that the family found.
      partial_rope: default for the part of each head that RoPE rotates; None: RoPE rotates whole
        heads, and no other value is supported.
      max_position: default for `max_position_embeddings`.

    Raises:
      ConfigError: the file has problems; the message lists all of them.
    """
    found = [*problems, *_unsupported(config), *_bad_counts(config)]
    if found:
        raise ConfigError("config.json: " + "; ".join(found))
    q_heads = config["num_attention_heads"]
    rope = read_rope(config, partial_rope)
    eps = number(config, "rms_norm_eps", 1e-6)
    if rope.theta <= 1 or eps < 0:
        raise ConfigError(
            f"config.json: rope_theta is {rope.theta:g} and must be above 1; rms_norm_eps is "
            f"{eps:g} and must not be negative"
        )
    return ModelSpec.dense(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        embed=config["hidden_size"],
        ffn=FeedForwardSpec(
            width=config["intermediate_size"],
            activation=_ACTIVATIONS[config.get("hidden_act", "silu")],
            bias=ffn_bias,
        ),
        num_layers=config["num_hidden_layers"],
        attention=AttentionSpec(
            q_heads=q_heads,
            kv_heads=config.get("num_key_value_heads") or q_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // q_heads,
            rope=rope,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            gated=gated,
        ),
        norm_eps=eps,
        max_position=config.get("max_position_embeddings") or max_position,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def with_windows(spec: ModelSpec, windows: Sequence[int | None]) -> ModelSpec:
    """Returns the model with a window, or None, for each layer."""
    layers = (
        replace(layer, attention=replace(layer.attention, window=window))
        if layer.attention
        else layer
        for layer, window in zip(spec.layers, windows, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def window_size(config: Config) -> int | None:
    """Returns `sliding_window`; None: there is none. Raises ConfigError unless it is a positive
    integer."""
    if config.get("sliding_window") is None:
        return None
    return count(config, "sliding_window")


def switched_window(config: Config) -> int | None:
    """Returns Qwen's `sliding_window` if `use_sliding_window` is on, else None.

    Raises:
      ConfigError: the window is on but has no size.
    """
    if not config.get("use_sliding_window"):
        return None
    window = window_size(config)
    if window is None:
        raise ConfigError("config.json: use_sliding_window is true, but sliding_window is missing")
    return window


def late_windows(config: Config, layers: int) -> list[int | None]:
    """Returns the window of each layer. `switched_window` applies to the layers that `layer_types`
    lists, or to the layers from `max_window_layers` on. Raises ConfigError like
    `switched_window`."""
    window = switched_window(config)
    if window is None:
        return [None] * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(number(config, "max_window_layers", 28))
        kinds = ["sliding_attention" if index >= first else "" for index in range(layers)]
    if len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def refused(config: Config, key: str, why: str) -> list[str]:
    """Returns the problem of an unsupported switch if it is on, else an empty list."""
    return [f"{key} is true, {why}"] if config.get(key) else []


def count(config: Config, key: str, otherwise: int | None = None) -> int:
    """Returns a positive integer; `otherwise` if the key is missing.

    Raises:
      ConfigError: the value is no positive integer, or is missing without an `otherwise`.
    """
    if config.get(key) is None and otherwise is not None:
        return otherwise
    if not _is_count(config, key):
        raise ConfigError(
            f"config.json: {key} is {config.get(key)!r:.40}, which is not a positive integer up to "
            f"{_most(key)}"
        )
    return config[key]


def _unsupported(config: Config) -> list[str]:
    activation = config.get("hidden_act", "silu")
    if isinstance(activation, str) and activation in _ACTIVATIONS:
        return []
    supported = ", ".join(repr(name) for name in _ACTIVATIONS)
    return [f"hidden_act is {activation!r}, supported: {supported}"]


def _bad_counts(config: Config) -> list[str]:
    present = (key for key in _OPTIONAL if config.get(key) is not None)
    return [
        f"{key} is missing or not a positive integer up to {_most(key)}"
        for key in (*_REQUIRED, *present)
        if not _is_count(config, key)
    ]


def _most(key: str) -> int:
    return _MOST_LAYERS if key == "num_hidden_layers" else _MOST


def _is_count(config: Config, key: str) -> bool:
    value = config.get(key)
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _most(key)


def read_rope(config: Config, partial_rope: float | None = None) -> Rope:
    """Returns RoPE's base and scaling. transformers 5 writes `rope_parameters`, earlier versions
    two fields.

    `partial_rope`: see `dense_spec`.

    Raises:
      ConfigError: a kind or a field is not supported, or fields contradict each other.
    """
    old, new = _object(config, "rope_scaling"), _object(config, "rope_parameters")
    unlike = any(old[name] != new[name] for name in old.keys() & new.keys())
    if old and new and (unlike or _rope_kind(old) != _rope_kind(new)):
        raise ConfigError(
            f"config.json: rope_scaling is {dict(old)}, rope_parameters is {dict(new)}: they "
            "contradict each other; write what is meant into one of them and remove the other"
        )
    rope = {**old, **new}
    fields = rope if rope.get("partial_rotary_factor") else config
    fraction = number(fields, "partial_rotary_factor", partial_rope or 1.0)
    rope.pop("partial_rotary_factor", None)
    if fraction != 1.0 and partial_rope is None:
        raise ConfigError(
            f"config.json: partial_rotary_factor is {fraction:g}, but all of a head is rotated here"
        )
    theta = number(rope if rope.get("rope_theta") else config, "rope_theta", 10_000.0)
    kind = _rope_kind(rope)
    if kind == "default":
        return Rope(theta=theta, fraction=fraction)
    if kind not in _FIELDS:
        supported = ", ".join(repr(each) for each in ("default", *_FIELDS))
        raise ConfigError(f"config.json: rope type is {kind!r}, supported: {supported}")
    name, needed, optional = _FIELDS[kind]
    original = config.get("max_position_embeddings") if kind == "yarn" else None
    rope = {"original_max_position_embeddings": original, **_without_nulls(rope)}
    numbers = {field: number(rope, field, 0.0) for field in (*needed, *optional)}
    if missing := [field for field in needed if numbers[field] <= 0]:
        raise ConfigError(
            f"config.json: {name} needs {_quoted(missing)}, found {sorted(_without_nulls(rope))}"
        )
    known = {"rope_type", "type", "rope_theta", _ORIGINAL, *needed, *optional}
    known |= {"truncate"} if kind == "yarn" else set()
    if unknown := sorted(_without_nulls(rope).keys() - known):
        raise ConfigError(f"config.json: {name} with {', '.join(unknown)} is not supported")
    scaling = _scaling(kind, rope, numbers)
    return Rope(theta=theta, scaling=scaling, fraction=fraction)


_ORIGINAL = "original_max_position_embeddings"
_FIELDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "linear": ("linear RoPE", ("factor",), ()),
    "llama3": (
        "llama3 RoPE",
        ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
        (),
    ),
    "yarn": (
        "YaRN",
        ("factor", _ORIGINAL),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""By kind of scaling: its name in messages, its required numbers, its optional numbers."""


def _scaling(
    kind: str, rope: Mapping[str, Any], numbers: Mapping[str, float]
) -> LinearScaling | Llama3Scaling | YarnScaling:
    if kind == "linear":
        return LinearScaling(factor=numbers["factor"])
    original = int(numbers[_ORIGINAL])
    if kind == "llama3":
        return Llama3Scaling(
            factor=numbers["factor"],
            low_freq_factor=numbers["low_freq_factor"],
            high_freq_factor=numbers["high_freq_factor"],
            original_max_position=original,
        )
    return YarnScaling(
        factor=numbers["factor"],
        original_max_position=original,
        beta_fast=numbers["beta_fast"] or 32.0,
        beta_slow=numbers["beta_slow"] or 1.0,
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate") is not False,
    )


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _object(config: Config, key: str) -> Mapping[str, Any]:
    """Returns an object; empty if the key is missing. Raises ConfigError for another type."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} is {found!r:.100}, which is not an object")
    return found


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"
