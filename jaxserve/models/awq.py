"""Activation-aware quantisation (AWQ) of a decoder layer: where each matrix's factors go."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.model_spec import ModelSpec
from jaxserve.models.calibration import LayerInputs, layer_statistics
from jaxserve.models.decoder import Params
from jaxserve.models.layer_weights import Layer, layer_views
from jaxserve.models.quantization import Report
from jaxserve_kernels.weights import (
    Int4Weight,
    Weight,
    quantize_int4,
)
from jaxserve_kernels.weights.awq import (
    InputStatistics,
    output_error,
    quantize_int4_clipped,
    search_scale,
)

_CHANGED = (*LayerInputs._fields, "attention_norm", "mlp_norm", "qkv_bias", "gate_up_bias")
_PART = re.compile(rf"layers\.([0-9]+)\.({'|'.join(_CHANGED)})")


class AwqLayers:
    """Quantises layers in ascending order, each when its first part is requested.

    A layer that nobody requests, because it is written already, is only run: later layers read its
    output.
    """

    def __init__(
        self, load: Callable[[], Params], sequences: Any, spec: ModelSpec, report: Report
    ) -> None:
        """
        Args:
          load: returns the unquantised model; called with the first request.
          sequences: int32 [sequences, tokens], the calibration text.
        """
        self._spec = spec
        self._report = report
        self._layers = self._with_inputs(load, sequences)
        self._index, self._quantized = -1, None

    def part(self, path: str) -> Any:
        """Returns the new value of the part at this path; None: it does not change."""
        found = _PART.fullmatch(path)
        if found is None:
            return None
        return getattr(self._layer(int(found[1])), found[2])

    def _layer(self, index: int) -> Layer:
        assert index >= self._index, "layers are requested in ascending order"
        if self._quantized is None or index > self._index:
            layer, inputs = next(each for at, each in self._layers if at == index)
            quantized = quantize_layer_awq(layer, inputs, self._spec)
            for name, error in quantized.errors._asdict().items():
                self._report(f"layers.{index}.{name}", error)
            self._index, self._quantized = index, quantized.layer
        return self._quantized

    def _with_inputs(
        self, load: Callable[[], Params], sequences: Any
    ) -> Iterator[tuple[int, tuple[Layer, LayerInputs[InputStatistics]]]]:
        params = load()
        inputs = layer_statistics(params, jnp.asarray(sequences), self._spec)
        yield from enumerate(zip(layer_views(params.layers), inputs, strict=True))


class Quantized(NamedTuple):
    """A layer with quantised matrices, and the relative error of each product."""

    layer: Layer
    errors: LayerInputs[Array]
    """sqrt(mean |y' - y|^2 / mean |y|^2) over the calibration data."""


@functools.partial(jax.jit, static_argnames="spec")
def quantize_layer_awq(
    layer: Layer, inputs: LayerInputs[InputStatistics], spec: ModelSpec
) -> Quantized:
    """Searches factors for the four matrices, folds them in, and clips and rounds the matrices.

    The inverse of a matrix's factors is folded into whatever produces its inputs. For qkv and
    gate_up, that is the norm before them. For out, it is the rows of values, with one factor for
    all query heads that share a value. For down, it is the rows of up. Biases get the factors of
    their rows. Norms are rounded to their dtype first, and the factors are computed from the
    rounded norms, so that folding changes nothing else.
    """
    assert layer.qkv is not None and layer.out is not None
    assert layer.gate_up is not None and layer.down is not None
    attention_norm, attention_scale = _folded(layer.attention_norm, _scale(layer.qkv, inputs.qkv))
    mlp_norm, mlp_scale = _folded(layer.mlp_norm, _scale(layer.gate_up, inputs.gate_up))
    value_scale = _shared(_scale(layer.out, _of_values(inputs.out, spec)), spec)
    down_scale = _scale(layer.down, inputs.down)
    qkv = jnp.ones(layer.qkv.shape[0]).at[-spec.kv_size :].set(_once(value_scale, spec))
    gate_up = jnp.ones(2 * spec.ffn).at[spec.ffn :].set(down_scale)
    matrices = LayerInputs(
        qkv=_matrix(layer.qkv, inputs.qkv, attention_scale, qkv),
        out=_matrix(layer.out, inputs.out, value_scale),
        gate_up=_matrix(layer.gate_up, inputs.gate_up, mlp_scale, gate_up),
        down=_matrix(layer.down, inputs.down, down_scale),
    )
    quantized = {name: weight for name, (weight, _) in matrices._asdict().items()}
    return Quantized(
        layer._replace(
            attention_norm=attention_norm,
            mlp_norm=mlp_norm,
            qkv_bias=_divided(layer.qkv_bias, qkv),
            gate_up_bias=_divided(layer.gate_up_bias, gate_up),
            **quantized,
        ),
        LayerInputs(*(error for _, error in matrices)),
    )


def _divided(bias: Array | None, rows: Array) -> Array | None:
    return None if bias is None else (bias / rows).astype(bias.dtype)


def _scale(weight: Weight, inputs: InputStatistics) -> Array:
    return search_scale(_plain(weight), inputs, lambda wide: quantize_int4(wide).dequantize())


def _plain(weight: Weight) -> Array:
    assert isinstance(weight, Array), "it is already quantised"
    return weight


def _of_values(inputs: InputStatistics, spec: ModelSpec) -> InputStatistics:
    """Returns the statistics with the mean of all query heads that share a value: [q_size]."""
    return inputs._replace(mean=_shared(inputs.mean, spec))


def _shared(values: Array, spec: ModelSpec) -> Array:
    """Returns [q_size]: each query head gets the mean of the heads that share its value."""
    heads = values.reshape(spec.kv_heads, -1, spec.head_dim)
    return jnp.broadcast_to(jnp.mean(heads, axis=1, keepdims=True), heads.shape).reshape(-1)


def _once(values: Array, spec: ModelSpec) -> Array:
    """Reduces [q_size] of shared values to [kv_size]."""
    return values.reshape(spec.kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)


def _folded(norm: Array, scale: Array) -> tuple[Array, Array]:
    """Returns the norm's weight divided by `scale`, and the factors that rounding leaves."""
    wide = norm.astype(jnp.float32)
    divided = (wide / scale).astype(norm.dtype)
    exact = wide / jnp.where(divided == 0, 1.0, divided.astype(jnp.float32))
    usable = (divided != 0) & (exact != 0)
    return jnp.where(usable, divided, norm), jnp.where(usable, exact, 1.0)


def _matrix(
    weight: Weight, inputs: InputStatistics, scale: Array, rows: Array | None = None
) -> tuple[Int4Weight, Array]:
    """Returns weight * scale / rows[:, None], clipped and rounded, and the product's relative
    error.

    `inputs`: statistics before the division by `scale`.
    """
    wide = _plain(weight).astype(jnp.float32)
    divisor = jnp.ones((1, 1)) if rows is None else rows[:, None]
    moment = inputs.moment / scale / scale[:, None]
    rounded = quantize_int4_clipped(wide * scale / divisor, moment)
    difference = rounded.dequantize() * divisor / scale - wide
    error = output_error(difference, inputs.moment) / output_error(wide, inputs.moment)
    return rounded, jnp.sqrt(error)
