"""The decoder: parameters and the forward pass for the layers of any ModelSpec.

Layers have grouped-query attention with RoPE or delta nets, SwiGLU or experts, and pre-norms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import ModelSpec
from jaxserve.models.layer import (
    Caches,
    Norm,
    Normed,
    StepTokens,
    decoder_layer,
    feed_forward,
    mix,
    paged,
)
from jaxserve.models.layer_weights import (
    Layer,
    Layers,
    abstract_layer,
    layer_views,
    stacked_layers,
)
from jaxserve.models.rope import RopeTables, step_tables, table_of_layer
from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import rms_norm
from jaxserve_kernels.kv_format import end_step
from jaxserve_kernels.matmul import as_read, linear, plain, sum_parts, take_rows
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight


class Params(NamedTuple):
    """All weights. `lm_head` is None if it is tied to the embedding.

    `layers` is a tuple, or stacked: one Layer whose arrays hold all layers on a leading axis, or
    one for each kind of layer. A GPU launches programs with few arguments faster; a CPU would copy
    each slice.
    """

    embedding: Weight  # [vocab, embed]
    layers: Layers
    final_norm: Array  # [embed]
    lm_head: Weight | None  # [vocab, embed]

    @property
    def dtype(self) -> Any:
        """The dtype of activations."""
        if isinstance(self.layers, Layer):
            return self.final_norm.dtype
        layers = self.layers.values() if isinstance(self.layers, dict) else self.layers
        deltas = (layer.delta for layer in layers if layer.delta is not None)
        return next((delta.conv.dtype for delta in deltas), self.final_norm.dtype)


def abstract(spec: ModelSpec, dtype: DTypeLike, *, stacked: bool = False) -> Params:
    """Returns the shapes and dtypes of the parameters. See Params for `stacked`."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    norms = jnp.float32 if spec.zero_centred_norms else dtype
    layers = tuple(abstract_layer(layer, spec.embed, dtype, norms) for layer in spec.layers)
    final_norm: Any = jax.ShapeDtypeStruct((spec.embed,), norms)
    return Params(
        embedding=array(spec.vocab_size, spec.embed),
        layers=stacked_layers(layers) if stacked else layers,
        final_norm=final_norm,
        lm_head=None if spec.tie_embeddings else array(spec.vocab_size, spec.embed),
    )


class PreMLP(NamedTuple):
    """Tokens after the attention of the last layer, before its output projection and its MLP. The
    rest of the computation handles each token separately."""

    x: Array  # [tokens, embed]: hidden states that the layer adds to
    attention_out: Array  # [tokens, q_size], or the output of a delta net

    def of(self, rows: Array) -> PreMLP:
        """Returns the tokens at `rows` [n]."""
        return PreMLP(self.x[rows], self.attention_out[rows])


def abstract_pre_mlp(spec: ModelSpec, dtype: DTypeLike, tokens: int) -> PreMLP:
    """Returns the shapes and dtypes of `tokens` tokens."""

    def array(width: int) -> Any:
        return jax.ShapeDtypeStruct((tokens, width), dtype)

    return PreMLP(array(spec.embed), array(spec.layers[-1].mixed))


def forward(
    params: Params,
    kv: Caches,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
) -> tuple[PreMLP, Caches]:
    """Runs a step's tokens through the decoder and stores their keys and values.

    It leaves out the end of the last layer. `finish` computes that, for the tokens whose hidden
    state is needed.

    Args:
      kv: the caches, updated in place if donated.

    Returns:
      All tokens before the end of the last layer, and kv.
    """
    return tapped_forward(params, kv, tokens, spec, tile_size=tile_size, target=target)[:2]


def tapped_forward(
    params: Params,
    kv: Caches,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
    taps: Sequence[int] = (),
) -> tuple[PreMLP, Caches, tuple[Array, ...]]:
    """Does the same as `forward`. Also returns the hidden states [tokens, embed] after each layer
    in `taps`, which are in order and do not include the last layer."""
    x, normed, tables = _begin(params, tokens, spec)
    layers = functools.partial(_forward_layers, spec=spec, tile_size=tile_size, taps=taps)
    arguments = (params.layers, x, normed, kv, tables, tokens)
    before_mlp, kv, tapped = pdl.join(layers, *arguments, target=target)
    return before_mlp, _end_step(kv, tokens, tile_size=tile_size, target=target), tapped


def _forward_layers(
    stack: Layers,
    x: Array,
    normed: Array,
    kv: Caches,
    tables: tuple[RopeTables, ...],
    tokens: StepTokens,
    *,
    spec: ModelSpec,
    tile_size: int,
    target: Target,
    taps: Sequence[int],
) -> tuple[PreMLP, Caches, tuple[Array, ...]]:
    """Runs all layers but the last one's feed-forward on x [tokens, embed] and its norm."""
    layers = layer_views(stack, copies=target.uses_triton())
    run = functools.partial(_run_layers, tile_size=tile_size, target=target, taps=taps)
    norms = _next_norms(layers)
    x, last, kv, tapped = run(layers[:-1], norms, x, normed, kv, tables, tokens, spec)
    index = len(layers) - 1
    own = tables[table_of_layer(spec, index)]
    with jax.named_scope(f"layer_{index}"):
        attention_out, kv = mix(
            *(layers[index], spec.cache_places[index], last, kv, own, tokens, spec),
            dtype=x.dtype,
            tile_size=tile_size,
            target=target,
        )
    return PreMLP(x, attention_out), kv, tapped


def finish(
    params: Params,
    tokens: PreMLP,
    spec: ModelSpec,
    *,
    active: Array | None = None,
    target: Target,
) -> Array:
    """Returns the hidden states after the final norm, [tokens, embed]. active: see `StepTokens`."""
    layers = layer_views(params.layers)
    own = (layers[-1], Norm(params.final_norm), tokens.x, tokens.attention_out, spec)
    with jax.named_scope(f"layer_{len(layers) - 1}"):
        return plain(feed_forward(*own, active=active, target=target)[1])


def decode(
    params: Params, kv: Caches, tokens: StepTokens, spec: ModelSpec, *, target: Target
) -> tuple[Array, Caches]:
    """Runs `forward` and `finish` for tokens that each continue a different sequence.

    Returns:
      Hidden states after the final norm [tokens, embed], and kv.
    """
    return tapped_decode(params, kv, tokens, spec, target=target)[:2]


def tapped_decode(
    params: Params,
    kv: Caches,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    target: Target,
    taps: Sequence[int] = (),
) -> tuple[Array, Caches, tuple[Array, ...]]:
    """Does the same as `decode`. Also returns the hidden states of `tapped_forward`."""
    x, normed, tables = _begin(params, tokens, spec)
    layers = functools.partial(_decode_layers, spec=spec, taps=taps)
    # PDL also carries arrays that no kernel reads.
    read = as_read(params.layers, tokens.ids.shape[0], target=target)
    arguments = (read, params.final_norm, x, normed, kv, tables, tokens)
    # A decode step is too short to wait for the launch of each kernel.
    normed, kv, tapped = pdl.call(layers, *arguments, target=target)
    return normed, _end_step(kv, tokens, tile_size=1, target=target), tapped


def _begin(
    params: Params, tokens: StepTokens, spec: ModelSpec
) -> tuple[Array, Array, tuple[RopeTables, ...]]:
    """Returns x [tokens, embed], x after the first norm, and the distinct RoPE tables."""
    x = take_rows(params.embedding, tokens.ids, params.dtype)
    tables = step_tables(spec, tokens.positions)
    first = layer_views(params.layers)[0]
    return x, rms_norm(x, first.attention_norm, spec.norm_eps), tables


def _decode_layers(
    stack: Layers,
    final_norm: Array,
    x: Array,
    normed: Array,
    kv: Caches,
    tables: tuple[RopeTables, ...],
    tokens: StepTokens,
    *,
    spec: ModelSpec,
    target: Target,
    taps: Sequence[int],
) -> tuple[Array, Caches, tuple[Array, ...]]:
    """Runs all layers on x [tokens, embed] and its norm. Returns the final norm, caches and
    taps."""
    # In a chain, kernels take an address in the stack.
    layers = layer_views(stack, copies=target.uses_triton() and not target.pdl)
    next_norms = [*_next_norms(layers), Norm(final_norm)]
    run = functools.partial(_run_layers, tile_size=1, target=target, taps=taps)
    _, last, kv, tapped = run(layers, next_norms, x, normed, kv, tables, tokens, spec)
    return plain(last), kv, tapped


def _next_norms(layers: Sequence[Layer]) -> list[Norm]:
    """Returns the norm after each layer except the last."""
    return [
        Norm(layer.attention_norm, layer.qkv)
        if layer.delta is None
        else Norm(layer.attention_norm, layer.delta.in_proj, twice=True)
        for layer in layers[1:]
    ]


def _run_layers(
    layers: Sequence[Layer],
    next_norms: Sequence[Norm],
    x: Array,
    normed: Normed,
    kv: Caches,
    tables: tuple[RopeTables, ...],
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
    taps: Sequence[int],
) -> tuple[Array, Normed, Caches, tuple[Array, ...]]:
    """Runs the first layers in order, see `decoder_layer`. Also returns x after those in `taps`."""
    tapped: list[Array] = []
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            own, place = tables[table_of_layer(spec, index)], spec.cache_places[index]
            x, normed, kv = decoder_layer(
                *(layer, next_norm, place, x, normed, kv, own, tokens, spec),
                tile_size=tile_size,
                target=target,
            )
        if index in taps:
            tapped.append(x)
    return x, normed, kv, tuple(tapped)


def _end_step(kv: Caches, tokens: StepTokens, *, tile_size: int, target: Target) -> Caches:
    """Completes the caches when all layers have attended."""
    end, caches = functools.partial(end_step, tile_size=tile_size, target=target), paged(kv)
    ended = (end(cache, places) for cache, places in zip(caches, tokens.places, strict=True))
    return (*ended, *kv[len(caches) :])


def logits(params: Params, hidden: Array, *, target: Target) -> Array:
    """Returns the scores of the next token, float32 [rows, vocab], for hidden [rows, embed]."""
    head = params.embedding if params.lm_head is None else params.lm_head
    return sum_parts(linear(hidden, head, jnp.float32, target=target), jnp.float32)
