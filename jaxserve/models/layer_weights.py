"""The weights of a decoder layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.layer_spec import ExpertsSpec, LayerSpec
from jaxserve.models import delta_net
from jaxserve.models.delta_net import DeltaNet
from jaxserve_kernels.weights import Weight


class Experts(NamedTuple):
    """The matrices of a layer's experts, stacked: [experts, out, in], or quantised."""

    gate_up: Weight  # [experts, 2 * width, embed]: gate, then up
    down: Weight  # [experts, embed, width]


class SharedExpert(NamedTuple):
    """The matrices of the shared expert, which every token uses."""

    gate_up: Weight  # [2 * width, embed]: gate, then up
    down: Weight  # [embed, width]


class Layer(NamedTuple):
    """One decoder layer. Matrices are [out, in], as on disk, or quantised.

    A layer has either qkv and out, or a delta net. With experts, gate_up and down are None, and
    their biases have a leading axis of experts. If the model's norms are zero-centred, the norms
    here are float32 with 1 added.
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
    router: Array | None = None  # [experts, embed]; a shared expert adds a row
    router_bias: Array | None = None  # [experts]
    sinks: Array | None = None  # [q_heads]
    experts: Experts | None = None
    shared: SharedExpert | None = None
    delta: DeltaNet | None = None


type LayerStacks = dict[tuple[int, ...], Layer]
"""The weights of layers of different kinds. Each value has those of one kind, on a leading axis;
its key has their numbers."""


type Layers = tuple[Layer, ...] | Layer | LayerStacks
"""All layers: one by one, stacked, or stacked by kind."""


def abstract_layer(layer: LayerSpec, embed: int, dtype: DTypeLike, norms: DTypeLike) -> Layer:
    """Returns the shapes and dtypes of one layer. `norms`: dtype of the norms' weights."""

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
        router=array(block.num_experts + bool(block.shared_width), embed) if sparse else None,
        router_bias=array(block.num_experts) if sparse and block.router_bias else None,
        experts=Experts(gate_up, down) if sparse else None,
    )
    if sparse and (width := block.shared_width):
        shared = SharedExpert(array(2 * width, embed), array(embed, width))
        found = found._replace(shared=shared)
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


_ALIGNMENT = 16
"""Bytes of which kernels expect an array's address to be a multiple."""


def stacked_layers(layers: tuple[Layer, ...]) -> Layers:
    """Returns the shapes of the layers' weights with those of equal layers stacked. They are not
    if a slice of a stack would not be aligned."""
    sizes = (leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
    if any(size % _ALIGNMENT for size in sizes):
        return layers
    kinds: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers):
        leaves, tree = jax.tree.flatten(layer)
        alike = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kinds.setdefault(alike, []).append(number)

    def stack(numbers: list[int]) -> Layer:
        def of_all(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((len(numbers), *leaf.shape), leaf.dtype)

        return jax.tree.map(of_all, layers[numbers[0]])

    if len(kinds) == 1:
        return stack([*range(len(layers))])
    return {tuple(numbers): stack(numbers) for numbers in kinds.values()}


def layer_views(layers: Layers, *, copies: bool = False) -> tuple[Layer, ...]:
    """Returns the layers one by one. XLA reads a stacked weight in place at its layer's offset.

    Args:
      copies: what XLA would copy or pad in each layer is copied once for all of them. Vectors may
        then be longer than what they belong to, and a router may have more rows; what is past
        their ends is not read.
    """
    if isinstance(layers, tuple) and not isinstance(layers, Layer):
        return layers
    if isinstance(layers, Layer):
        layers = {tuple(range(layers.attention_norm.shape[0])): layers}
    views: dict[int, Layer] = {}
    for numbers, stack in layers.items():
        leaves, tree = jax.tree.flatten(_copied(stack) if copies else stack)
        for place, number in enumerate(numbers):
            views[number] = tree.unflatten(leaf[place] for leaf in leaves)
    return tuple(views[number] for number in range(len(views)))


_IN_PLACE = 256
"""Bytes of which an address is a multiple if XLA gives a slice to a kernel without a copy."""
_ROWS = 8
"""Rows of which XLA pads a product's weight to a multiple."""


def _copied(stack: Layer) -> Layer:
    """A stack whose layers XLA reads in place."""
    names = "attention_norm", "mlp_norm", "out_bias", "router_bias", "sinks"
    vectors = {name: _lengthened(getattr(stack, name)) for name in names}
    found = stack._replace(**vectors)
    if (delta := stack.delta) is not None:
        longer = {"a_log": _lengthened(delta.a_log), "dt_bias": _lengthened(delta.dt_bias)}
        found = found._replace(delta=delta._replace(**longer))
    if (router := stack.router) is not None and (rows := -router.shape[1] % _ROWS):
        padded = jnp.pad(router, ((0, 0), (0, rows), (0, 0)))
        found = found._replace(router=jax.lax.optimization_barrier(padded))
    return found


def _lengthened(vectors: Array | None) -> Array | None:
    """Vectors [layers, size], all at multiples of `_IN_PLACE` bytes."""
    if vectors is None or vectors.shape[0] == 1:
        return vectors
    itemsize = vectors.dtype.itemsize
    padding = -vectors.shape[1] * itemsize % _IN_PLACE // itemsize
    if not padding:
        return vectors
    # Without a barrier XLA slices the weight itself.
    return jax.lax.optimization_barrier(jnp.pad(vectors, ((0, 0), (0, padding))))
