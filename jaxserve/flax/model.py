"""A decoder of dense layers in Flax NNX, built from the ModelSpec that the engine runs.

Its logits equal those of `jaxserve.models.decoder`: tests compare both with golden files. Paths of
parameters are Hugging Face's names without "model.", with Flax's name as their last part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxserve.config import ConfigError
from jaxserve.layer_spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models.attention import has_prologue
from jaxserve.models.rope import RopeTables, rope_tables

type Kernel = Literal["xla", "cudnn"]
"""Implementation of attention; see `jax.nn.dot_product_attention`."""

_DEVIATION = 0.02
"""Standard deviation of new matrices. Matrices that add to the residual stream divide it by the
square root of their number."""


class Cache(NamedTuple):
    """Keys and values of one layer, [batch, length, kv_heads, head_dim]."""

    keys: Array
    values: Array


class Past(NamedTuple):
    """The context that one new token of each row attends to."""

    caches: tuple[Cache, ...]
    """Caches of all layers."""
    slot: Array
    """int32 []: position of the new tokens in the caches."""
    mask: Array
    """bool [batch, 1, 1, length]: the positions that are filled."""


class Types(NamedTuple):
    """Dtypes and attention implementation of a model."""

    dtype: DTypeLike
    """Dtype of activations and products."""
    param_dtype: DTypeLike
    kernel: Kernel


class Attention(nnx.Module):
    """Grouped-query attention with RoPE."""

    def __init__(self, spec: AttentionSpec, embed: int, depth: int, types: Types, rngs: nnx.Rngs):
        self.spec = spec
        self.kernel: Kernel = types.kernel
        self.q_proj = _linear(embed, spec.q_size, spec.qkv_bias, types, rngs)
        self.k_proj = _linear(embed, spec.kv_size, spec.qkv_bias, types, rngs)
        self.v_proj = _linear(embed, spec.kv_size, spec.qkv_bias, types, rngs)
        self.o_proj = _linear(spec.q_size, embed, spec.out_bias, types, rngs, depth)
        self.q_norm = _norm(spec.head_dim, types, rngs) if spec.qk_norm else None
        self.k_norm = _norm(spec.head_dim, types, rngs) if spec.qk_norm else None

    def __call__(
        self, x: Array, tables: RopeTables, cache: Cache | None, past: Past | None
    ) -> tuple[Array, Cache]:
        """Maps x [batch, length, embed] to the same shape. Also returns the keys and values."""
        spec, shape = self.spec, (*x.shape[:2], -1, self.spec.head_dim)
        q, k, v = (each(x).reshape(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotated(q, tables), _rotated(k, tables)
        if cache is None or past is None:
            window = None if spec.window is None else (spec.window - 1, 0)
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=window, implementation=self.kernel
            )
            new = Cache(k, v)
        else:
            new = Cache(_put(cache.keys, k, past.slot), _put(cache.values, v, past.slot))
            out = jax.nn.dot_product_attention(q, *new, mask=past.mask, implementation="xla")
        return self.o_proj(out.reshape(*x.shape[:2], -1)), new


class Mlp(nnx.Module):
    """SwiGLU or GeGLU."""

    def __init__(self, spec: FeedForwardSpec, embed: int, depth: int, types: Types, rngs: nnx.Rngs):
        self.activation = spec.activation
        self.gate_proj = _linear(embed, spec.width, spec.bias, types, rngs)
        self.up_proj = _linear(embed, spec.width, spec.bias, types, rngs)
        self.down_proj = _linear(spec.width, embed, spec.bias, types, rngs, depth)

    def __call__(self, x: Array) -> Array:
        gate = self.gate_proj(x)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and MLP. Each one follows a norm and is added to its input.

    Raises:
      ConfigError: the model's layers are of another kind.
    """

    def __init__(self, spec: LayerSpec, model: ModelSpec, types: Types, rngs: nnx.Rngs):
        embed, depth, eps = model.embed, 2 * model.num_layers, model.norm_eps
        if isinstance(spec.feed_forward, ExpertsSpec):
            raise ConfigError(f"{model.architecture} has experts, which cannot be trained here")
        if spec.attention is None or has_prologue(model):
            raise ConfigError(f"{model.architecture} has no model to train")
        self.input_layernorm = _norm(embed, types, rngs, eps)
        self.self_attn = Attention(spec.attention, embed, depth, types, rngs)
        self.post_attention_layernorm = _norm(embed, types, rngs, eps)
        self.mlp = Mlp(spec.feed_forward, embed, depth, types, rngs)

    def __call__(
        self, x: Array, tables: RopeTables, cache: Cache | None, past: Past | None
    ) -> tuple[Array, Cache]:
        out, new = self.self_attn(self.input_layernorm(x), tables, cache, past)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), new


class CausalLM(nnx.Module):
    """A language model of any dense family: Qwen3, Qwen2, Llama, Mistral."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        kernel: Kernel = "xla",
    ):
        """Returns a model with random weights.

        Args:
          dtype: dtype of activations and products. Norms and logits are computed in float32.
          param_dtype: dtype of the parameters.
          kernel: implementation of attention.
        """
        types = Types(dtype, param_dtype, kernel)
        self.spec, self.dtype = spec, dtype
        self.embed_tokens = nnx.Embed(
            spec.vocab_size,
            spec.embed,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=nnx.initializers.normal(_DEVIATION),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(layer, spec, types, rngs) for layer in spec.layers])
        self.norm = _norm(spec.embed, types, rngs, spec.norm_eps)
        self.lm_head = (
            None
            if spec.tie_embeddings
            else _linear(spec.embed, spec.vocab_size, False, types, rngs)
        )

    def __call__(self, ids: Array, positions: Array | None = None) -> Array:
        """Returns the scores of the token after each token: ids int32 [batch, length] to float32
        [batch, length, vocab]. `positions` has the shape of ids and counts from 0 by default."""
        return self.with_caches(ids, positions)[0]

    def with_caches(
        self, ids: Array, positions: Array | None = None, past: Past | None = None
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Returns scores, and the keys and values of every layer: of `ids`, or with `past` of all
        tokens.

        Raises:
          ValueError: `past` is given to a model with a sliding window.
        """
        if past is not None and self.spec.smallest_window is not None:
            raise ValueError("a model with a sliding window computes whole sequences only")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        x, caches = self.embed_tokens(ids), list[Cache]()
        for index, layer in enumerate(self.layers):
            attention = self.spec.layers[index].attention
            assert attention is not None
            tables = rope_tables(attention, positions.reshape(-1))
            x, new = layer(x, tables, past.caches[index] if past else None, past)
            caches.append(new)
        return self._logits(self.norm(x)), tuple(caches)

    def _logits(self, x: Array) -> Array:
        if self.lm_head is None:
            head = self.embed_tokens.embedding[...]
        else:
            head = self.lm_head.kernel[...].T
        head = head.astype(self.dtype)
        return jnp.einsum("ble,ve->blv", x, head, preferred_element_type=jnp.float32)


def _linear(
    inputs: int, outputs: int, bias: bool, types: Types, rngs: nnx.Rngs, depth: int = 1
) -> nnx.Linear:
    """Returns a linear layer. `depth`: how many such layers add to the residual stream."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=types.dtype,
        param_dtype=types.param_dtype,
        kernel_init=nnx.initializers.normal(_DEVIATION * depth**-0.5),
        rngs=rngs,
    )


def _norm(size: int, types: Types, rngs: nnx.Rngs, eps: float = 1e-6) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        size, epsilon=eps, dtype=types.dtype, param_dtype=types.param_dtype, rngs=rngs
    )


def _rotated(x: Array, tables: RopeTables) -> Array:
    """Applies RoPE to [batch, length, heads, head_dim]; pairs the first half of a head with the
    second."""
    cos, sin = (each.reshape(*x.shape[:2], 1, -1) for each in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _put(cache: Array, new: Array, slot: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, slot, axis=1)
