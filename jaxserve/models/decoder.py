"""The decoder: parameters and the forward pass of whatever layers a ModelSpec has.

Grouped-query attention with RoPE, delta nets, SwiGLU, pre-norms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.model_spec import Activation, CachePlace, ExpertsSpec, LayerSpec, ModelSpec
from jaxserve.models import attention_prologue, delta_net
from jaxserve.models.delta_net import DeltaNet
from jaxserve.models.rope import RopeTables, step_tables, table_of_layer
from jaxserve_kernels import pdl
from jaxserve_kernels.add_rms_norm import add_rms_norm, rms_norm
from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.experts import ExpertWeights, Routing, experts, route
from jaxserve_kernels.kv_format import KV, AttentionStep, attend, end_step
from jaxserve_kernels.matmul import (
    QuantizedTokens,
    add_linear,
    as_read,
    gated_linear,
    linear,
    plain,
    sum_parts,
    take_rows,
    token_format,
)
from jaxserve_kernels.recurrent_state import RecurrentState, RecurrentStep
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import Weight

type Caches = tuple[KV | RecurrentState, ...]
"""The keys and values of each cache group of a model (`ModelSpec.cache_groups`), then the state of
its recurrent layers, if it has any."""


def paged(kv: Caches) -> tuple[KV, ...]:
    """The caches without the state of recurrent layers."""
    return tuple(each for each in kv if not isinstance(each, RecurrentState))


class Experts(NamedTuple):
    """The matrices of a layer's experts, stacked: [experts, out, in], or quantised."""

    gate_up: Weight  # [experts, 2 * width, embed]: gate, then up
    down: Weight  # [experts, embed, width]


class Layer(NamedTuple):
    """One decoder layer. Matrices are [out, in], as on disk, or quantised.

    A layer has either qkv and out or a delta net. Of one with experts gate_up and down are None,
    and their biases have an axis of experts in front. Norms are float32 in a model whose norms are
    zero-centred, with 1 added.
    """

    attention_norm: Array  # [embed]
    qkv: Weight | None  # [qkv_size, embed]: queries, keys, values
    q_norm: Array | None  # [head_dim]
    k_norm: Array | None  # [head_dim]
    qkv_bias: Array | None  # [q_size + 2 * kv_size]
    out: Weight | None  # [embed, q_size]
    out_bias: Array | None  # [embed]
    mlp_norm: Array  # [embed]
    gate_up: Weight | None  # [2 * ffn, embed]: gate, then up
    gate_up_bias: Array | None  # [2 * ffn]
    down: Weight | None  # [embed, ffn]
    down_bias: Array | None  # [embed]
    router: Array | None = None  # [experts, embed]
    router_bias: Array | None = None  # [experts]
    sinks: Array | None = None  # [q_heads]
    experts: Experts | None = None
    delta: DeltaNet | None = None


class Params(NamedTuple):
    """All weights. `lm_head` is None when it is tied to the embedding.

    `layers` is either a tuple, or one Layer whose arrays hold all layers on a leading axis: few
    arguments are cheap to launch on a GPU, and a CPU would copy each slice. It is a tuple, too,
    where only some layers have experts, or attention.
    """

    embedding: Weight  # [vocab, embed]
    layers: tuple[Layer, ...] | Layer
    final_norm: Array  # [embed]
    lm_head: Weight | None  # [vocab, embed]

    @property
    def dtype(self) -> Any:
        """Of activations."""
        if isinstance(self.layers, Layer):
            return self.final_norm.dtype
        deltas = (layer.delta for layer in self.layers if layer.delta is not None)
        return next((delta.conv.dtype for delta in deltas), self.final_norm.dtype)


type Normed = Array | QuantizedTokens
"""Tokens with a norm [tokens, embed], in the form that the product with them reads."""


class Norm(NamedTuple):
    """A norm's weight, and the matrix that reads what it gives, if it alone does and it matters in
    which form."""

    weight: Array
    reader: Weight | None = None


class StepTokens(NamedTuple):
    """The tokens of a step and where they belong."""

    ids: Array  # int32 [tokens]
    places: tuple[AttentionStep, ...]
    """In each cache group of the model."""
    recurrent: RecurrentStep | None = None
    """In the state of recurrent layers, if the model has any."""

    @property
    def positions(self) -> Array:
        """int32 [tokens], the same in all groups."""
        return self.places[0].positions


def abstract(spec: ModelSpec, dtype: DTypeLike, *, stacked: bool = False) -> Params:
    """Shapes and dtypes of the parameters; see Params for `stacked`."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    norms = jnp.float32 if spec.zero_centred_norms else dtype
    each = tuple(_abstract_layer(layer, spec.embed, dtype, norms) for layer in spec.layers)
    if stacked and spec.is_uniform:
        layers = jax.tree.map(lambda leaf: array(spec.num_layers, *leaf.shape), each[0])
    else:
        layers = each
    final_norm: Any = jax.ShapeDtypeStruct((spec.embed,), norms)
    return Params(
        embedding=array(spec.vocab_size, spec.embed),
        layers=layers,
        final_norm=final_norm,
        lm_head=None if spec.tie_embeddings else array(spec.vocab_size, spec.embed),
    )


def _abstract_layer(layer: LayerSpec, embed: int, dtype: DTypeLike, norms: DTypeLike) -> Layer:
    """Shapes and dtypes of one layer; `norms`: the dtype of their weights."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(size: int) -> Any:
        return jax.ShapeDtypeStruct((size,), norms)

    attention, block = layer.attention, layer.feed_forward
    sparse = isinstance(block, ExpertsSpec)
    leading = (block.num_experts,) if sparse else ()
    gate_up, down = array(*leading, 2 * block.width, embed), array(*leading, embed, block.width)
    found = Layer(
        attention_norm=norm(embed),
        qkv=None,
        q_norm=None,
        k_norm=None,
        qkv_bias=None,
        out=None,
        out_bias=None,
        mlp_norm=norm(embed),
        gate_up=None if sparse else gate_up,
        gate_up_bias=array(*leading, 2 * block.width) if block.bias else None,
        down=None if sparse else down,
        down_bias=array(*leading, embed) if block.bias else None,
        router=array(block.num_experts, embed) if sparse else None,
        router_bias=array(block.num_experts) if sparse and block.router_bias else None,
        experts=Experts(gate_up, down) if sparse else None,
    )
    if attention is None:
        assert layer.delta_net is not None
        return found._replace(delta=delta_net.abstract(layer.delta_net, embed, dtype))
    return found._replace(
        qkv=array(attention.qkv_size, embed),
        q_norm=norm(attention.head_dim) if attention.qk_norm else None,
        k_norm=norm(attention.head_dim) if attention.qk_norm else None,
        qkv_bias=array(attention.qkv_size) if attention.qkv_bias else None,
        out=array(embed, attention.q_size),
        out_bias=array(embed) if attention.out_bias else None,
        sinks=array(attention.q_heads) if attention.sinks else None,
    )


class PreMLP(NamedTuple):
    """Tokens after the attention of the last layer, before its output projection and its MLP: what
    is left to do concerns each alone."""

    x: Array  # [tokens, embed]: hidden states that the layer adds to
    attention_out: Array  # [tokens, q_size], or what a delta net gives

    def of(self, rows: Array) -> PreMLP:
        """The tokens at `rows` [n]."""
        return PreMLP(self.x[rows], self.attention_out[rows])


def abstract_pre_mlp(spec: ModelSpec, dtype: DTypeLike, tokens: int) -> PreMLP:
    """Shapes and dtypes of so many."""

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
    """Run a step's tokens through the decoder and store their keys and values.

    Only tokens whose hidden state somebody wants need the rest of the last layer: `finish`.

    Args:
      kv: the caches, updated in place when donated.

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
    """`forward`, and the hidden states [tokens, embed] after each layer of `taps`, which are in
    their order and without the last."""
    x, normed, tables = _begin(params, tokens, spec)
    layers = layer_views(params.layers)
    run = functools.partial(_run_layers, tile_size=tile_size, target=target, taps=taps)
    norms = _next_norms(layers)
    x, normed, kv, tapped = run(layers[:-1], norms, x, normed, kv, tables, tokens, spec)
    index = len(layers) - 1
    own = tables[table_of_layer(spec, index)]
    with jax.named_scope(f"layer_{index}"):
        attention_out, kv = _mix(
            *(layers[index], spec.cache_places[index], normed, kv, own, tokens, spec),
            dtype=x.dtype,
            tile_size=tile_size,
            target=target,
        )
    kv = _end_step(kv, tokens, tile_size=tile_size, target=target)
    return PreMLP(x, attention_out), kv, tapped


def finish(params: Params, tokens: PreMLP, spec: ModelSpec, *, target: Target) -> Array:
    """Hidden states after the final norm [tokens, embed]."""
    layers = layer_views(params.layers)
    with jax.named_scope(f"layer_{len(layers) - 1}"):
        return plain(
            _feed_forward(layers[-1], Norm(params.final_norm), *tokens, spec, target=target)[1]
        )


def decode(
    params: Params, kv: Caches, tokens: StepTokens, spec: ModelSpec, *, target: Target
) -> tuple[Array, Caches]:
    """`forward` and `finish` of tokens that are each the next one of their sequence.

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
    """`decode`, and the hidden states that `tapped_forward` gives."""
    x, normed, tables = _begin(params, tokens, spec)
    layers = functools.partial(_decode_layers, spec=spec, taps=taps)
    # PDL takes what no kernel reads along.
    read = as_read(params.layers, tokens.ids.shape[0], target=target)
    arguments = (read, params.final_norm, x, normed, kv, tables, tokens)
    if spec.state is None:
        # A decode step is too short to wait for the start of each kernel.
        normed, kv, tapped = pdl.call(layers, *arguments, target=target)
    else:  # between the kernels of recurrent layers are some of XLA
        normed, kv, tapped = layers(*arguments, target=target)
    return normed, _end_step(kv, tokens, tile_size=1, target=target), tapped


def _begin(
    params: Params, tokens: StepTokens, spec: ModelSpec
) -> tuple[Array, Array, tuple[RopeTables, ...]]:
    """x [tokens, embed], x with the first norm, and the different tables of RoPE."""
    x = take_rows(params.embedding, tokens.ids, params.dtype)
    tables = step_tables(spec, tokens.positions)
    first = layer_views(params.layers)[0]
    return x, rms_norm(x, first.attention_norm, spec.norm_eps), tables


def _decode_layers(
    stack: tuple[Layer, ...] | Layer,
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
    """All layers on x [tokens, embed] with its norm: the final norm, caches, what is tapped."""
    layers = layer_views(stack)
    next_norms = [*_next_norms(layers), Norm(final_norm)]
    run = functools.partial(_run_layers, tile_size=1, target=target, taps=taps)
    _, last, kv, tapped = run(layers, next_norms, x, normed, kv, tables, tokens, spec)
    return plain(last), kv, tapped


def _next_norms(layers: Sequence[Layer]) -> list[Norm]:
    """Of each layer but the last one."""
    return [Norm(layer.attention_norm, layer.qkv) for layer in layers[1:]]


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
    """The first layers one after the other, see `decoder_layer`; and x after those in `taps`."""
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


def decoder_layer(
    layer: Layer,
    next_norm: Norm,
    place: CachePlace,
    x: Array,
    normed: Normed,
    kv: Caches,
    tables: RopeTables,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    tile_size: int,
    target: Target,
) -> tuple[Array, Normed, Caches]:
    """The layer whose cache is at `place` on x [tokens, embed], which comes with its norm and
    leaves with the next one's: x, normed, and the caches."""
    own = (layer, place, normed, kv, tables, tokens, spec)
    attention_out, kv = _mix(*own, dtype=x.dtype, tile_size=tile_size, target=target)
    return *_feed_forward(layer, next_norm, x, attention_out, spec, target=target), kv


def _mix(
    layer: Layer,
    place: CachePlace,
    normed: Normed,
    kv: Caches,
    tables: RopeTables,
    tokens: StepTokens,
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    tile_size: int,
    target: Target,
) -> tuple[Array, Caches]:
    """What the output projection reads [tokens, mixed], in `dtype`, and the caches."""
    group, cache = place.group, kv[place.group]
    if isinstance(cache, RecurrentState):
        assert layer.delta is not None and tokens.recurrent is not None
        own = (layer.delta, normed, cache, place.layer, tokens.recurrent, spec)
        mixed, cache = delta_net.mix(*own, target=target)
        return mixed, (*kv[:group], cache)
    assert layer.qkv is not None
    qkv = linear(normed, layer.qkv, target=target)
    heads, gate = HeadWeights(layer.q_norm, layer.k_norm, layer.qkv_bias, layer.sinks), None
    if attention_prologue.is_needed(spec):
        own = attention_prologue.prologue(
            qkv, heads, tables, spec.attention, eps=spec.norm_eps, dtype=dtype
        )
        (qkv, tables, gate), heads = own, HeadWeights(sinks=layer.sinks)
    attention_out, cache = attend(
        *(qkv, cache, place.layer, heads, tables, tokens.places[group]),
        eps=spec.norm_eps,
        tile_size=tile_size,
        dtype=dtype,
        window=spec.cache_groups[group].window,
        target=target,
    )
    kv = (*kv[:group], cache, *kv[group + 1 :])
    attention_out = attention_out.reshape(normed.shape[0], -1)
    return attention_out if gate is None else attention_out * jax.nn.sigmoid(gate), kv


def _end_step(kv: Caches, tokens: StepTokens, *, tile_size: int, target: Target) -> Caches:
    """What is left to do in the caches when all layers have attended."""
    end, caches = functools.partial(end_step, tile_size=tile_size, target=target), paged(kv)
    ended = (end(cache, places) for cache, places in zip(caches, tokens.places, strict=True))
    return (*ended, *kv[len(caches) :])


def _feed_forward(
    layer: Layer,
    next_norm: Norm,
    x: Array,
    attention_out: Array,
    spec: ModelSpec,
    *,
    target: Target,
) -> tuple[Array, Normed]:
    """What follows a layer's attention: x, and x with the next norm."""
    projection = layer.out if layer.delta is None else layer.delta.out
    assert projection is not None
    biased = layer.out_bias is not None
    x, out = add_linear(x, attention_out, projection, biased=biased, target=target)
    form = None
    if layer.gate_up is not None:
        form = token_format(
            layer.gate_up,
            x.shape[0],
            x.dtype,
            gated=layer.gate_up_bias is None,
            activation=_activation(spec),
            target=target,
        )
    own = (x, out, layer.mlp_norm, spec.norm_eps, form)
    x, normed = add_rms_norm(*own, bias=layer.out_bias, target=target)
    block, bias = (_dense, layer.down_bias) if layer.experts is None else (_experts, None)
    x, update = block(layer, x, normed, spec, target=target)
    form = token_format(next_norm.reader, x.shape[0], x.dtype, target=target)
    own = (x, update, next_norm.weight, spec.norm_eps, form)
    return add_rms_norm(*own, bias=bias, target=target)


def _dense(
    layer: Layer, x: Array, normed: Normed, spec: ModelSpec, *, target: Target
) -> tuple[Array, Array | None]:
    """The layer's feed-forward of normed tokens, as `matmul.add_linear` adds it to x, without the
    bias of down."""
    assert layer.gate_up is not None and layer.down is not None
    gated = gated_linear(
        normed,
        layer.gate_up,
        bias=layer.gate_up_bias,
        activation=_activation(spec),
        target=target,
    )
    biased = layer.down_bias is not None
    return add_linear(x, gated, layer.down, biased=biased, target=target)


def _experts(
    layer: Layer, x: Array, normed: Normed, spec: ModelSpec, *, target: Target
) -> tuple[Array, Array]:
    """The layer's experts of normed tokens: x as it is, and what is to be added to it, as partial
    sums."""
    own = spec.experts
    assert layer.experts is not None and layer.router is not None and own is not None
    routing = Routing(
        num_experts=own.num_experts, top_k=own.top_k, scoring="softmax", normalize=own.normalize
    )
    tokens = plain(normed)
    scores = linear(tokens, layer.router, jnp.float32, target=target)
    ids, weights, lists = route(scores, routing, layer.router_bias, target=target)
    stack = ExpertWeights(*layer.experts, layer.gate_up_bias, layer.down_bias)
    update = experts(
        tokens, ids, weights, stack, activation=own.activation, lists=lists, target=target
    )
    return x, update


def _activation(spec: ModelSpec) -> Activation:
    """Of the layers without experts."""
    assert spec.feed_forward is not None
    return spec.feed_forward.activation


def logits(params: Params, hidden: Array, *, target: Target) -> Array:
    """Scores of the next token: hidden [rows, embed] to float32 [rows, vocab]."""
    head = params.embedding if params.lm_head is None else params.lm_head
    return sum_parts(linear(hidden, head, jnp.float32, target=target), jnp.float32)


def layer_views(layers: tuple[Layer, ...] | Layer) -> tuple[Layer, ...]:
    """The layers one by one; XLA reads a stacked weight in place at its layer's offset."""
    if not isinstance(layers, Layer):
        return layers
    leaves, tree = jax.tree.flatten(layers)
    count = layers.attention_norm.shape[0]
    return tuple(tree.unflatten(leaf[index] for leaf in leaves) for index in range(count))
