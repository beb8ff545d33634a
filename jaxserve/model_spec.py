"""The shape of a model as data: its layers, the parts around them, and the state that they keep for
a sequence. No I/O, no arrays.

`jaxserve.models.registry` builds it from a `config.json`; `jaxserve.models.decoder` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from jaxserve.config import ConfigError
from jaxserve.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
)


@dataclass(frozen=True, kw_only=True)
class PagedLayers:
    """Layers whose keys and values lie in pages and use the same page table."""

    layers: tuple[int, ...]
    """Layer indices in model order."""
    window: int | None = None
    """See `AttentionSpec.window`."""


type CacheGroup = PagedLayers
"""Layers that keep the past of a sequence in the same way."""


@dataclass(frozen=True, kw_only=True)
class StateLayers:
    """Recurrent layers. They keep state of a fixed size per sequence."""

    layers: tuple[int, ...]
    """Layer indices in model order."""
    delta_net: DeltaNetSpec
    """The shape of all these layers."""


STATE = -1
"""Marks the state of recurrent layers where a cache group index is expected. State is the last of
the caches."""


class CachePlace(NamedTuple):
    """Where a layer keeps its keys and values, or its state."""

    group: int
    """Index into `ModelSpec.cache_groups`, or STATE."""
    layer: int
    """Index among the group's layers."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder: embedding, layers, a norm, and an output matrix."""

    architecture: str
    """The model class by Hugging Face's name. It decides tensor names, not programs."""
    vocab_size: int
    embed: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float = 1e-6
    max_position: int
    """The longest context that the model supports."""
    tie_embeddings: bool
    """The output matrix is the embedding matrix."""
    zero_centred_norms: bool = False
    """Checkpoints store norm weights minus 1, except for the norms inside delta nets."""

    def __post_init__(self) -> None:
        shapes = {
            (a.q_heads, a.kv_heads, a.head_dim, a.qk_norm, a.qkv_bias, a.out_bias, a.sinks)
            for layer in self.layers
            for a in [layer.attention or self.attention]
        }
        blocks = {layer.feed_forward for layer in self.layers}
        dense = [block for block in blocks if isinstance(block, FeedForwardSpec)]
        if len(shapes) != 1 or len(dense) > 1 or len(blocks) - len(dense) > 1:
            raise ConfigError(
                f"the model has attention of {len(shapes)} shapes, {len(dense)} kinds of dense "
                f"feed-forwards and {len(blocks) - len(dense)} kinds of experts; jaxserve supports "
                "one of each"
            )
        if len({layer.delta_net for layer in self.layers} - {None}) > 1:
            raise ConfigError(
                "the model's delta nets differ; jaxserve supports delta nets of one shape"
            )

    @classmethod
    def dense(
        cls,
        *,
        architecture: str,
        vocab_size: int,
        embed: int,
        ffn: int | FeedForwardSpec | ExpertsSpec,
        num_layers: int,
        attention: AttentionSpec,
        max_position: int,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = False,
    ) -> ModelSpec:
        """Returns a model whose layers are all alike. An integer `ffn` is the width of a SwiGLU."""
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
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer that has it. All attention layers have the same sizes, but
        RoPE and windows may differ.

        Raises:
          ConfigError: no layer has attention.
        """
        found = next((layer.attention for layer in self.layers if layer.attention), None)
        if found is None:
            raise ConfigError("the model has no attention layer; jaxserve needs at least one")
        return found

    @cached_property
    def feed_forward(self) -> FeedForwardSpec | None:
        """The dense feed-forward, equal in all layers without experts; None: every layer has
        experts."""
        blocks = (layer.feed_forward for layer in self.layers)
        return next((each for each in blocks if isinstance(each, FeedForwardSpec)), None)

    @cached_property
    def experts(self) -> ExpertsSpec | None:
        """The experts, equal in all layers that have them; None: no layer has experts."""
        blocks = (layer.feed_forward for layer in self.layers)
        return next((each for each in blocks if isinstance(each, ExpertsSpec)), None)

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
        """Width of the dense feed-forward blocks; 0: there are none."""
        return self.feed_forward.width if self.feed_forward else 0

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied output matrix counts once."""
        heads = 1 if self.tie_embeddings else 2
        layers = sum(layer.num_params(self.embed) for layer in self.layers)
        return layers + heads * self.vocab_size * self.embed + self.embed

    @property
    def active_params(self) -> int:
        """Parameters that one token uses. Of the experts, only the token's own count."""
        return self.num_params - sum(layer.unused_params(self.embed) for layer in self.layers)

    @property
    def smallest_window(self) -> int | None:
        """The longest context that every layer sees in full; None: no limit."""
        return min((group.window for group in self.cache_groups if group.window), default=None)

    @cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers grouped by window: first the layers without a window, then by growing window."""
        layers: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.attention is not None:
                layers.setdefault(layer.attention.window, []).append(index)
        windows = sorted(layers, key=lambda window: -1 if window is None else window)
        return tuple(PagedLayers(layers=tuple(layers[each]), window=each) for each in windows)

    @cached_property
    def state(self) -> StateLayers | None:
        """The recurrent layers; None: the model has none."""
        layers = [(index, layer.delta_net) for index, layer in enumerate(self.layers)]
        found = [(index, spec) for index, spec in layers if spec is not None]
        if not found:
            return None
        return StateLayers(layers=tuple(index for index, _ in found), delta_net=found[0][1])

    @cached_property
    def cache_places(self) -> tuple[CachePlace, ...]:
        """The cache place of each layer, in model order."""
        places = {
            layer: CachePlace(number, index)
            for number, group in enumerate(self.cache_groups)
            for index, layer in enumerate(group.layers)
        }
        if self.state is not None:
            places |= {each: CachePlace(STATE, n) for n, each in enumerate(self.state.layers)}
        return tuple(places[layer] for layer in range(self.num_layers))

    def within(self, context: int) -> ModelSpec:
        """Returns the same model for at most `context` tokens. It drops windows that would hide
        none of them."""

        def narrowed(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            if attention is None or attention.window is None or attention.window < context:
                return layer
            return replace(layer, attention=replace(attention, window=None))

        return replace(self, layers=tuple(map(narrowed, self.layers)))

    @property
    def num_paged_layers(self) -> int:
        """Number of layers that have keys and values."""
        return sum(len(group.layers) for group in self.cache_groups)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_paged_layers * self.kv_size * itemsize


class NamedModel(NamedTuple):
    """A published model."""

    hub_id: str
    """Repository on the Hugging Face Hub."""
    spec: ModelSpec
    experts: Literal["mxfp4"] | None = None
    """Format of the published experts; None: the same as other weights."""
