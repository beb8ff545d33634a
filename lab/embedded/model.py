"""The embedded model in Flax: its sizes, its files, and greedy generation."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxserve.flax import CausalLM, parameters
from jaxserve.flax.files import named_tensors, put
from jaxserve.flax.model import Cache, Kernel, Past
from jaxserve.models.registry import spec_of
from jaxserve_checkpoints.orbax.layouts import flax_path

Parameters = dict[Any, Any]


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


@dataclass(frozen=True, kw_only=True)
class Qwen3:
    """The model as a function of its parameters: `jaxserve.flax` computes it."""

    config: ModelConfig
    dtype: Any = jnp.bfloat16
    kernel: Kernel = "xla"

    def new(self, seed: int) -> CausalLM:
        spec = spec_of(self.config.huggingface(0, 0))
        return CausalLM(spec, rngs=nnx.Rngs(seed), dtype=self.dtype, kernel=self.kernel)

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: self.new(0)))

    def apply(
        self, params: Parameters, ids: jax.Array, positions: jax.Array, past: Past | None = None
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Logits (float32) for every position, and every layer's keys and values."""
        graph, state = self._parts
        state = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state).with_caches(ids, positions, past)


def init_parameters(config: ModelConfig, seed: int) -> Parameters:
    return parameters(Qwen3(config=config).new(seed))


# -- Files --------------------------------------------------------------------------------------


def from_huggingface(tensors: dict[str, np.ndarray]) -> Parameters:
    """The parameters of tensors under their Hugging Face names."""
    params: Parameters = {}
    for name, array in tensors.items():
        path, transposed = flax_path(name)
        put(params, path, array.T if transposed else array)
    return params


def save_model(folder: Path, params: Parameters) -> None:
    tensors = {
        name: np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))
        for name, array in named_tensors(params).items()
    }
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
    logits, caches = model.apply(params, ids, positions)
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
        logits, caches = model.apply(params, token[:, None], (lengths + step)[:, None], past)
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
