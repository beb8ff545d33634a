"""The embedded model in flax: the Qwen3 architecture, its files, and greedy generation."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

Parameters = dict[str, Any]
AttentionKernel = Literal["xla", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes, named as in config.json. All are multiples of 128 where a weight or a cache has them,
    so that group-128 formats can be measured on this model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        stored = json.loads((folder / "config.json").read_text())
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})

    def huggingface(self, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The contents of config.json."""
        return asdict(self) | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": self.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }


class Cache(NamedTuple):
    """Keys and values of one layer, [batch, length, kv_heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


class Past(NamedTuple):
    """What a decode step attends to: every layer's cache, the slot of the new token in it, and
    the mask [batch, 1, 1, length] of the slots that hold something."""

    caches: tuple[Cache, ...]
    slot: jax.Array
    mask: jax.Array


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """RoPE on [batch, length, heads, head_dim], the first half of a head paired with the second."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with an RMS norm on each head's queries and keys."""

    config: ModelConfig
    dtype: Any
    kernel: AttentionKernel

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache | None, past: Past | None
    ) -> tuple[jax.Array, Cache]:
        c = self.config
        batch, length, _ = x.shape
        dense = partial(_dense, dtype=self.dtype)
        norm = partial(nn.RMSNorm, epsilon=c.rms_norm_eps, dtype=self.dtype)

        def heads(name: str, count: int) -> jax.Array:
            return dense(count * c.head_dim, name=name)(x).reshape(batch, length, count, c.head_dim)

        q = norm(name="q_norm")(heads("q_proj", c.num_attention_heads))
        k = norm(name="k_norm")(heads("k_proj", c.num_key_value_heads))
        v = heads("v_proj", c.num_key_value_heads)
        q, k = rotate(q, positions, c.rope_theta), rotate(k, positions, c.rope_theta)
        new = Cache(k, v)
        if cache is None or past is None:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.kernel)
        else:
            new = Cache(*(_put(old, x, past.slot) for old, x in zip(cache, new, strict=True)))
            out = jax.nn.dot_product_attention(q, *new, mask=past.mask, implementation="xla")
        depth_scale = (2 * c.num_hidden_layers) ** -0.5
        return dense(c.hidden_size, name="o_proj", scale=depth_scale)(
            out.reshape(batch, length, -1)
        ), new


def _put(cache: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, slot, axis=1)


def _dense(size: int, *, name: str, dtype: Any, scale: float = 1.0) -> nn.Dense:
    init = nn.initializers.normal(0.02 * scale)
    return nn.Dense(size, use_bias=False, dtype=dtype, kernel_init=init, name=name)


class Mlp(nn.Module):
    """SwiGLU."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = _dense(c.intermediate_size, name="gate_proj", dtype=self.dtype)(x)
        up = _dense(c.intermediate_size, name="up_proj", dtype=self.dtype)(x)
        scale = (2 * c.num_hidden_layers) ** -0.5
        down = _dense(c.hidden_size, name="down_proj", dtype=self.dtype, scale=scale)
        return down(nn.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    config: ModelConfig
    dtype: Any
    kernel: AttentionKernel

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache | None, past: Past | None
    ) -> tuple[jax.Array, Cache]:
        norm = partial(nn.RMSNorm, epsilon=self.config.rms_norm_eps, dtype=self.dtype)
        attention = Attention(self.config, self.dtype, self.kernel, name="self_attn")
        out, cache = attention(norm(name="input_layernorm")(x), positions, cache, past)
        x = x + out
        mlp = Mlp(self.config, self.dtype, name="mlp")
        return x + mlp(norm(name="post_attention_layernorm")(x)), cache


class Qwen3(nn.Module):
    """Logits (float32) for every position, and every layer's keys and values."""

    config: ModelConfig
    dtype: Any = jnp.bfloat16
    kernel: AttentionKernel = "xla"

    @nn.compact
    def __call__(
        self, ids: jax.Array, positions: jax.Array, past: Past | None = None
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        c = self.config
        embed = nn.Embed(
            c.vocab_size,
            c.hidden_size,
            dtype=self.dtype,
            embedding_init=nn.initializers.normal(0.02),
            name="embed_tokens",
        )
        x = embed(ids)
        caches: list[Cache] = []
        for i in range(c.num_hidden_layers):
            layer = Layer(c, self.dtype, self.kernel, name=f"layers_{i}")
            x, cache = layer(x, positions, past.caches[i] if past else None, past)
            caches.append(cache)
        x = nn.RMSNorm(epsilon=c.rms_norm_eps, dtype=self.dtype, name="norm")(x)
        head = embed.embedding.astype(self.dtype)
        logits = jnp.einsum("ble,ve->blv", x, head, preferred_element_type=jnp.float32)
        return logits, tuple(caches)


def init_parameters(config: ModelConfig, seed: int) -> Parameters:
    ids = jnp.zeros((1, 8), jnp.int32)
    return Qwen3(config).init(jax.random.key(seed), ids, ids)["params"]


# -- Files --------------------------------------------------------------------------------------


def to_huggingface(params: Parameters) -> dict[str, np.ndarray]:
    """Tensors under their Hugging Face names; projections become [out, in]."""
    tensors: dict[str, np.ndarray] = {}
    for path, value in flatten_dict(params).items():
        *modules, leaf = path
        name = ".".join(["model", *modules, "weight"]).replace("layers_", "layers.")
        array = np.asarray(value)
        tensors[name] = np.ascontiguousarray(array.T) if leaf == "kernel" else array
    return tensors


def from_huggingface(tensors: dict[str, np.ndarray]) -> Parameters:
    """The inverse of to_huggingface."""
    flat: dict[tuple[str, ...], np.ndarray] = {}
    for name, array in tensors.items():
        modules = name.replace("layers.", "layers_").split(".")[1:-1]
        if modules[-1] == "embed_tokens":
            flat[(*modules, "embedding")] = array
        elif modules[-1].endswith("_proj"):
            flat[(*modules, "kernel")] = array.T
        else:
            flat[(*modules, "scale")] = array
    return unflatten_dict(flat)


def save_model(folder: Path, params: Parameters) -> None:
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in to_huggingface(params).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path) -> Parameters:
    """The stored bfloat16 weights, as float32."""
    tensors = load_file(folder / "model.safetensors")
    return from_huggingface({name: array.astype(np.float32) for name, array in tensors.items()})


# -- Generation ---------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("model", "max_new", "stop_ids"))
def _generate(
    model: Qwen3,
    params: Parameters,
    ids: jax.Array,
    lengths: jax.Array,
    *,
    max_new: int,
    stop_ids: tuple[int, ...],
) -> jax.Array:
    """Greedy tokens [batch, max_new] after prompts padded at their end; stops when all stopped."""
    batch, width = ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), ids.shape)
    logits, caches = model.apply({"params": params}, ids, positions)
    first = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0].argmax(-1)
    caches = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, max_new), (0, 0), (0, 0))), caches)
    slots = jnp.arange(width + max_new)
    stops = jnp.asarray(stop_ids)

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        step, _, _, done, _ = state
        return (step < max_new) & ~done.all()

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, token, out, done, caches = state
        out = out.at[:, step].set(jnp.where(done, stops[0], token))
        done |= (token[:, None] == stops).any(-1)
        slot = width + step
        held = (slots < lengths[:, None]) | ((slots >= width) & (slots <= slot))
        past = Past(caches, slot, held[:, None, None, :])
        logits, caches = model.apply(
            {"params": params}, token[:, None], (lengths + step)[:, None], past
        )
        return step + 1, logits[:, 0].argmax(-1), out, done, caches

    out = jnp.full((batch, max_new), stops[0])
    state = (jnp.int32(0), first, out, jnp.zeros(batch, bool), caches)
    return jax.lax.while_loop(unfinished, advance, state)[2]


def generate(
    model: Qwen3,
    params: Parameters,
    prompts: Sequence[list[int]],
    *,
    max_new: int,
    stop_ids: tuple[int, ...],
    batch_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """Greedy answers as (prompt index, tokens), in batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    widths = (128, 512, 1024, 2048, 4096)
    for lower, width in zip((0, *widths), widths, strict=False):
        chosen = [i for i in order if lower < len(prompts[i]) <= width]
        size = max(1, batch_tokens // width)
        for start in range(0, len(chosen), size):
            indices = chosen[start : start + size]
            ids = np.zeros((size, width), np.int32)
            lengths = np.ones(size, np.int32)
            for row, index in enumerate(indices):
                lengths[row] = len(prompts[index])
                ids[row, : lengths[row]] = prompts[index]
            out = _generate(model, params, ids, lengths, max_new=max_new, stop_ids=stop_ids)
            for index, tokens in zip(indices, np.asarray(out).tolist(), strict=False):
                ends = [tokens.index(stop) for stop in stop_ids if stop in tokens]
                yield index, tokens[: min(ends, default=len(tokens))]
