"""The embedded model with its weights in each format, as the values that the format gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.awq import quantize_layer_awq
from jaxserve.models.calibration import layer_statistics
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve_kernels import weights
from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.hqq import quantize_int4_hqq
from lab.embedded.chat import Encoder
from lab.embedded.data import tokenizer_texts
from lab.embedded.evaluate import MODEL_FOLDER
from lab.embedded.iq2_xxs import BLOCK, Iq2XxsWeight, grid

type Quantize = Callable[[jax.Array], Any]

MATRICES = ("qkv", "out", "gate_up", "down")
CALIBRATION_SEED, SEQUENCES, LENGTH = 11, 32, 256


def with_zeros(weight: jax.Array, group: int = 128) -> weights.Int4Weight:
    """Round to nearest between the least and the largest value (and 0) of each group."""
    *leading, out, depth = weight.shape
    wide = weight.astype(jnp.float32).reshape(*leading, out, depth // group, group)
    low = jnp.minimum(jnp.min(wide, axis=-1, keepdims=True), 0.0)
    high = jnp.maximum(jnp.max(wide, axis=-1, keepdims=True), 0.0)
    scale = jnp.where(high > low, high - low, 1.0) / 15.0
    zero = jnp.clip(jnp.round(-low / scale), 0.0, 15.0)
    codes = jnp.clip(jnp.round(wide / scale) + zero, 0.0, 15.0)
    whole = zero[..., 0].astype(jnp.int32)
    return weights.pack_int4(codes.reshape(weight.shape), scale[..., 0], whole)


def quantize_iq2_xxs(weight: jax.Array) -> Iq2XxsWeight:
    """Round to nearest: of each 32 weights' 16 scales the one with the least squared error.

    Without the weighting by importance that llama.cpp asks for with this format. Where a vector's
    minuses are odd, its smallest weight gets the other sign.
    """
    out, depth = weight.shape
    vectors = weight.astype(jnp.float32).reshape(out, depth // 32, 4, 8)
    odd = jnp.sum(vectors < 0, axis=-1, keepdims=True) % 2 == 1
    smallest = jnp.argmin(jnp.abs(vectors), axis=-1, keepdims=True) == jnp.arange(8)
    minus = (vectors < 0) ^ (odd & smallest)
    folded = jnp.where(minus, -vectors, vectors)
    points = jnp.asarray(grid(), jnp.float32)
    # The largest scale, 15.5 / 4 * d, puts the largest weight of a block on the largest level.
    largest = jnp.max(jnp.abs(weight.reshape(out, -1, BLOCK)).astype(jnp.float32), axis=-1)
    d = (largest / (43 * 15.5 / 4)).astype(jnp.float16)
    unit = jnp.repeat(d.astype(jnp.float32), BLOCK // 32, axis=-1)[..., None, None]

    def best_points(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        step = unit * (0.5 + scale) * 0.25
        distance = step * step * jnp.sum(points**2, axis=-1) - 2 * step * (folded @ points.T)
        chosen = jnp.argmin(distance, axis=-1)
        return chosen, jnp.sum(jnp.min(distance, axis=-1), axis=-1)

    chosen, error = jax.lax.map(best_points, jnp.arange(16, dtype=jnp.float32))
    scale = jnp.argmin(error, axis=0)
    index = jnp.take_along_axis(chosen, scale[None, ..., None], axis=0)[0]
    signs = jnp.sum(minus[..., :7].astype(jnp.uint32) << jnp.arange(7, dtype=jnp.uint32), axis=-1)
    words = jnp.sum(signs << jnp.arange(0, 28, 7, dtype=jnp.uint32), axis=-1)
    words |= scale.astype(jnp.uint32) << 28
    return Iq2XxsWeight(index.astype(jnp.uint8).reshape(out, -1), words, d)


def _iq2_xxs_values(weight: jax.Array) -> jax.Array:
    """Zeros are added to a row that does not end with a block of 256, and taken away again."""
    depth = weight.shape[-1]
    padded = jnp.pad(weight, ((0, 0), (0, -depth % BLOCK)))
    return quantize_iq2_xxs(padded).dequantize()[:, :depth]


def _values(quantize: Quantize) -> Quantize:
    return lambda weight: quantize(weight).dequantize()


def _copied(quantize: Quantize) -> Quantize:
    """What the engine's copy in fp8 of such weights has."""
    return lambda weight: weights.e4m3_copy(quantize(weight)).dequantize()


def _mxfp4_in_int8(weight: jax.Array) -> jax.Array:
    """What kernels that multiply MXFP4 with int8 tokens have: values rounded to a sixteenth of the
    power of their row's largest block."""
    found = weights.quantize_mxfp4(weight)
    power = layout.untile_rows(found.largest).astype(jnp.int32) - (127 + 4)
    step = jnp.ldexp(jnp.float32(1.0), power)
    return jnp.round(found.dequantize() / step) * step


LAYERS: dict[str, Quantize] = {
    "int8-rtn": _values(weights.quantize_int8),
    "fp8-rtn": _values(weights.quantize_fp8),
    "nvfp4-rtn": _values(weights.quantize_nvfp4),
    "mxfp4-rtn": _values(weights.quantize_mxfp4),
    "mxfp4-in-int8": _mxfp4_in_int8,
    "int4-rtn": _values(weights.quantize_int4),
    "nvfp4-copy": _copied(weights.quantize_nvfp4),
    "int4-copy": _copied(weights.quantize_int4),
    "int4-zeros-rtn": _values(with_zeros),
    "int4-hqq": _values(quantize_int4_hqq),
    "int4-g64-rtn": _values(functools.partial(weights.quantize_int4, group=64)),
    "int4-g64-zeros-rtn": _values(functools.partial(with_zeros, group=64)),
    "int4-g64-hqq": _values(functools.partial(quantize_int4_hqq, group=64)),
    "iq2_xxs-rtn": _iq2_xxs_values,
}
"""What becomes of the layers' matrices."""

HEADS: dict[str, Quantize] = {
    "int8-head": _values(weights.quantize_int8),
    "fp8-head": _values(weights.quantize_fp8),
}
"""What becomes of the output matrix, which is the embedding as well; the layers stay."""

FORMATS = ("bf16", *LAYERS, "int4-awq", *HEADS)


def in_format(name: str, plain: decoder.Params, spec: ModelSpec) -> decoder.Params:
    """The model with the values that a format's weights have, in float32."""
    if name == "bf16":
        return plain
    if name in HEADS:
        return plain._replace(embedding=jax.jit(HEADS[name])(plain.embedding))
    views = layer_views(plain.layers)
    if name == "int4-awq":
        statistics = layer_statistics(plain, calibration(), spec)
        quantized = (
            quantize_layer_awq(*pair, spec).layer for pair in zip(views, statistics, strict=True)
        )
        layers = [_replaced(layer, lambda weight: weight.dequantize()) for layer in quantized]
    else:
        values = jax.jit(LAYERS[name])
        layers = [_replaced(layer, values) for layer in views]
    return plain._replace(layers=tuple(layers))


def _replaced(layer: Layer, values: Callable[[Any], jax.Array]) -> Layer:
    return layer._replace(**{name: values(getattr(layer, name)) for name in MATRICES})


def calibration() -> jax.Array:
    """Token ids [sequences, tokens] for AWQ."""
    return token_ids(CALIBRATION_SEED, SEQUENCES, LENGTH)


def token_ids(seed: int, sequences: int, length: int) -> jax.Array:
    """The first tokens of training chats of a seed: int32 [sequences, length]."""
    encoder = Encoder.load(MODEL_FOLDER)
    ids: list[int] = []
    texts: Iterable[str] = tokenizer_texts(seed, sequences * length)
    for text in texts:
        ids += encoder.ids(text)
        if len(ids) >= sequences * length:
            break
    return jnp.array(ids[: sequences * length], jnp.int32).reshape(sequences, length)


def tensors_of(params: decoder.Params, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Under their Hugging Face names."""
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": params.embedding,
        "model.norm.weight": params.final_norm,
    }
    for index, layer in enumerate(layer_views(params.layers)):
        q, k, v = np.split(np.asarray(layer.qkv), [spec.q_size, spec.q_size + spec.kv_size])
        gate, up = np.split(np.asarray(layer.gate_up), 2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "self_attn.o_proj": layer.out,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors |= {f"model.layers.{index}.{name}.weight": each for name, each in parts.items()}
    return {name: np.asarray(array, np.float32) for name, array in tensors.items()}
