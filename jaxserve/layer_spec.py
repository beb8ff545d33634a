"""The shape of one decoder layer as data: attention, delta nets, feed-forwards. No I/O, no arrays.

`jaxserve.model_spec` combines layers to models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
    """Context extension of Llama 3.1. It divides slow rotations by `factor`, keeps fast ones, and
    blends those between. Bounds are in rotations over the original context."""

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
    """YaRN context extension (Peng et al. 2023, arXiv 2309.00071), with Hugging Face's field
    names."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the bounds between fast and slow rotations are rounded to whole pairs."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(f"YaRN factor must be at least 1, got {self.factor}")

    @property
    def score_scale(self) -> float:
        """Factor on the rotated queries and keys: `attention_factor` if given, else 0.1 ln(factor)
        + 1. With `mscale` and `mscale_all_dim`, as in DeepSeek's models, it is the ratio of two
        such terms, each with its logarithm times one of the two."""
        if self.attention_factor is not None:
            return self.attention_factor
        log = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * log + 1.0) / (self.mscale_all_dim * log + 1.0)
        return log + 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864). It rotates the pairs (i, i + r / 2) of the
    first r elements of a head. r is the head size, or a fraction of it."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    fraction: float = 1.0
    """Share of a head's elements that is rotated. The others pass through unchanged."""

    def rotated(self, head_dim: int) -> int:
        """Returns how many elements of a head are rotated."""
        return int(head_dim * self.fraction)


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
    """Keys that a query sees, its own included; None: all keys."""
    scale: float | None = None
    """Factor on scores; None: head_dim ** -0.5."""
    sinks: bool = False
    """Each query head has an additional score, whose value vector is 0."""
    gated: bool = False
    """The query projection has an additional gate for each query element. The head's result is
    multiplied by the sigmoid of the gate."""

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.q_heads}) must be a multiple of "
                f"num_key_value_heads ({self.kv_heads})"
            )
        if self.scale is not None and self.rope.fraction < 1:
            raise ConfigError("a scale of attention needs RoPE on whole heads")
        rotated = self.rope.rotated(self.head_dim)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ConfigError(
                f"RoPE must rotate an even number of a head's elements, got {rotated} of "
                f"{self.head_dim}"
            )

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
        """Elements of a token's queries, gates if any, keys and values."""
        return self.q_size * (1 + self.gated) + 2 * self.kv_size

    def num_params(self, embed: int) -> int:
        """Parameters of the attention, with hidden states of `embed` elements."""
        return (
            self.qkv_size * (embed + self.qkv_bias)
            + (self.q_size + self.out_bias) * embed
            + 2 * self.head_dim * self.qk_norm
            + self.q_heads * self.sinks
        )


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """Linear attention by the gated delta rule after a causal convolution (Yang et al. 2024, arXiv
    2412.06464). If there are n value heads per key head, key head j serves the value heads j * n to
    j * n + n - 1."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Inputs that the convolution sees, the current one included."""
    block: int = 64
    """Tokens of a prompt that are computed together. Blocks begin at multiples of this number."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )
        if self.conv_width < 2:
            raise ConfigError(f"a convolution sees 2 inputs or more, got {self.conv_width}")
        if self.block < 1 or self.block & (self.block - 1):
            raise ConfigError(f"a block's tokens must be a power of two, got {self.block}")

    @property
    def values(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.values

    def num_params(self, embed: int) -> int:
        """Parameters of the delta net, with hidden states of `embed` elements."""
        return (
            (self.channels + 2 * self.values + 2 * self.value_heads) * embed
            + self.channels * self.conv_width
            + 2 * self.value_heads
            + self.value_dim
        )


type Activation = Literal["silu", "gelu_tanh"]
"""Activation of the gate. GELU uses the tanh approximation."""

type ExpertActivation = Activation | Literal["swiglu_oss"]
"""The above, or that of gpt-oss: it clamps gate and up, and adds 1 to up."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)): SwiGLU and GeGLU (Shazeer 2020, arXiv 2002.05202)."""

    width: int
    """Output size of gate, and of up."""
    activation: Activation = "silu"
    bias: bool = False
    """Whether all three matrices have biases."""

    def num_params(self, embed: int) -> int:
        """Parameters of the feed-forward, with hidden states of `embed` elements."""
        return 3 * embed * self.width + (2 * self.width + embed) * self.bias


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts. A router chooses `top_k` gated feed-forwards for each token. Their
    results are added with the router's weights (Shazeer et al. 2017, arXiv 1701.06538)."""

    num_experts: int
    top_k: int
    """Experts per token."""
    width: int
    """Output size of gate, and of up, of one expert."""
    normalize: bool
    """Whether the weights of a token's experts, from a softmax over all experts, are divided by
    their sum."""
    activation: ExpertActivation = "silu"
    bias: bool = False
    """Whether all matrices of the experts have biases."""
    router_bias: bool = False
    shared_width: int = 0
    """Output size of gate, and of up, of a shared expert; 0: there is none. Every token uses the
    shared expert, whose result is multiplied by the sigmoid of a separate score."""

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"a token cannot have {self.top_k} experts of {self.num_experts} that there are"
            )

    def num_params(self, embed: int, experts: int | None = None) -> int:
        """Parameters of the layer's experts, with hidden states of `embed` elements. Counts all
        experts, or `experts` of them."""
        each = 3 * embed * self.width + (2 * self.width + embed) * self.bias
        router = self.num_experts * (embed + self.router_bias)
        shared = (3 * self.shared_width + 1) * embed if self.shared_width else 0
        return router + shared + (self.num_experts if experts is None else experts) * each


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x += mixer(norm(x)), then x += feed_forward(norm(x)). The mixer is either
    attention or a delta net."""

    attention: AttentionSpec | None = None
    delta_net: DeltaNetSpec | None = None
    feed_forward: FeedForwardSpec | ExpertsSpec

    def __post_init__(self) -> None:
        if (self.attention is None) == (self.delta_net is None):
            raise ValueError("a layer has either attention or a delta net")

    @property
    def mixer(self) -> AttentionSpec | DeltaNetSpec:
        """The part of the layer that reads other tokens."""
        mixer = self.attention or self.delta_net
        assert mixer is not None
        return mixer

    @property
    def mixed(self) -> int:
        """Elements per token that the mixer passes to the output projection."""
        mixer = self.mixer
        return mixer.q_size if isinstance(mixer, AttentionSpec) else mixer.values

    def num_params(self, embed: int) -> int:
        """Parameters of the layer, with hidden states of `embed` elements."""
        return self.mixer.num_params(embed) + self.feed_forward.num_params(embed) + 2 * embed

    def unused_params(self, embed: int) -> int:
        """Parameters of the experts that a token does not use."""
        if not isinstance(self.feed_forward, ExpertsSpec):
            return 0
        every = self.feed_forward.num_params(embed)
        return every - self.feed_forward.num_params(embed, self.feed_forward.top_k)
