"""The shape of a model as data: layer specifications and what surrounds them. No I/O, no arrays.

`jaxserve.models.registry` makes it of a `config.json`; `jaxserve.models.decoder` runs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from jaxserve.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """RoPE with all positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"linear RoPE factor must be at least 1, got {self.factor}")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Context extension of Llama 3.1: slow rotations are divided by `factor`, fast ones kept,
    those between are blended. Bounds are in rotations over the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"llama3 RoPE factor must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3 RoPE needs 0 < low_freq_factor ({self.low_freq_factor:g}) < "
                f"high_freq_factor ({self.high_freq_factor:g})"
            )


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
class Rope:
    """Rotary position embedding (arXiv 2104.09864) of all pairs (i, i + head_dim / 2)."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    qk_norm: bool = False
    """An RMSNorm on every query and key head, before RoPE."""
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    """Keys that a query sees, its own among them; None: all."""
    scale: float | None = None
    """Factor on scores; None: head_dim ** -0.5."""

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
        """Elements of a token's queries."""
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Queries, keys and values of a token."""
        return self.q_size + 2 * self.kv_size


type Activation = Literal["silu", "gelu_tanh"]
"""Of the gate; GELU by its approximation with tanh."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)): SwiGLU and GeGLU (Shazeer 2020, arXiv 2002.05202)."""

    width: int
    """Outputs of gate and of up."""
    activation: Activation = "silu"
    bias: bool = False
    """Of all three matrices."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x += attention(norm(x)), then x += feed_forward(norm(x))."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec

    def num_params(self, embed: int) -> int:
        """Of a model whose hidden states have `embed` elements."""
        attention, feed_forward = self.attention, self.feed_forward
        return (
            attention.qkv_size * (embed + attention.qkv_bias)
            + (attention.q_size + attention.out_bias) * embed
            + 3 * embed * feed_forward.width
            + (2 * feed_forward.width + embed) * feed_forward.bias
            + 2 * embed
            + 2 * attention.head_dim * attention.qk_norm
        )


@dataclass(frozen=True, kw_only=True)
class PagedLayers:
    """Layers whose keys and values lie in pages with the same page table."""

    layers: tuple[int, ...]
    """In their order in the model."""
    window: int | None = None
    """See `AttentionSpec.window`."""


type CacheGroup = PagedLayers
"""Layers that keep what they need of a sequence's past in the same way. State of a fixed size per
sequence, as recurrent layers have it, would be another type."""


class CachePlace(NamedTuple):
    """Where a layer keeps its keys and values."""

    group: int
    """Index into `ModelSpec.cache_groups`."""
    layer: int
    """Index among the group's layers."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder: embedding, layers, a norm, and an output matrix."""

    architecture: str
    """Hugging Face's name of the class: says how tensors are named, and nothing of programs."""
    vocab_size: int
    embed: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float = 1e-6
    max_position: int
    """The longest context that the model was made for."""
    tie_embeddings: bool
    """The output matrix is the embedding."""

    def __post_init__(self) -> None:
        shapes = {
            (
                *(a.q_heads, a.kv_heads, a.head_dim, a.qk_norm, a.qkv_bias, a.out_bias),
                layer.feed_forward,
            )
            for layer in self.layers
            for a in [layer.attention]
        }
        if len(shapes) != 1:
            raise ConfigError(
                f"the model has layers of {len(shapes)} shapes; supported are layers of one shape"
            )

    @classmethod
    def dense(
        cls,
        *,
        architecture: str,
        vocab_size: int,
        embed: int,
        ffn: int | FeedForwardSpec,
        num_layers: int,
        attention: AttentionSpec,
        max_position: int,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
    ) -> ModelSpec:
        """A model whose layers are all alike; `ffn` is the width of a SwiGLU, or more than that."""
        feed_forward = FeedForwardSpec(width=ffn) if isinstance(ffn, int) else ffn
        layer = LayerSpec(attention=attention, feed_forward=feed_forward)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            embed=embed,
            layers=(layer,) * num_layers,
            norm_eps=norm_eps,
            max_position=max_position,
            tie_embeddings=tie_embeddings,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Of the first layer: sizes are those of all layers, RoPE and windows are not."""
        return self.layers[0].attention

    @property
    def feed_forward(self) -> FeedForwardSpec:
        """Of every layer."""
        return self.layers[0].feed_forward

    @property
    def q_heads(self) -> int:
        """Query heads of each layer."""
        return self.attention.q_heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads of each layer."""
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.attention.head_dim

    @property
    def q_size(self) -> int:
        """See `AttentionSpec.q_size`."""
        return self.attention.q_size

    @property
    def kv_size(self) -> int:
        """See `AttentionSpec.kv_size`."""
        return self.attention.kv_size

    @property
    def ffn(self) -> int:
        """Width of the feed-forward blocks."""
        return self.feed_forward.width

    @property
    def num_params(self) -> int:
        """Of the whole model; tied heads count once."""
        heads = 1 if self.tie_embeddings else 2
        layers = sum(layer.num_params(self.embed) for layer in self.layers)
        return layers + heads * self.vocab_size * self.embed + self.embed

    @property
    def smallest_window(self) -> int | None:
        """The longest context in which every layer sees all of it; None: any."""
        return min((group.window for group in self.cache_groups if group.window), default=None)

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers by what they see: those that see everything first, then by growing window."""
        layers: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            layers.setdefault(layer.attention.window, []).append(index)
        windows = sorted(layers, key=lambda window: -1 if window is None else window)
        return tuple(PagedLayers(layers=tuple(layers[each]), window=each) for each in windows)

    @cached_property
    def cache_places(self) -> tuple[CachePlace, ...]:
        """The place of each layer."""
        places = {
            layer: CachePlace(number, index)
            for number, group in enumerate(self.cache_groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.num_layers))

    def within(self, context: int) -> ModelSpec:
        """Returns the same model for at most `context` tokens: windows that hide none of them are
        left out."""

        def narrowed(layer: LayerSpec) -> LayerSpec:
            window = layer.attention.window
            if window is None or window < context:
                return layer
            return replace(layer, attention=replace(layer.attention, window=None))

        return replace(self, layers=tuple(map(narrowed, self.layers)))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize


class NamedModel(NamedTuple):
    """A published model."""

    hub_id: str
    """Its repository on the Hugging Face Hub."""
    spec: ModelSpec
