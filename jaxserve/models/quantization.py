"""Settings of weight quantisation: which weights, which format, which method; and their encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve_checkpoints.load import Encode
from jaxserve_kernels.weights import (
    Weight,
    is_quantized,
    layout,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
)
from jaxserve_kernels.weights.hqq import quantize_int4_hqq

type WeightFormat = Literal["int4", "fp8", "nvfp4"]
type HeadFormat = Literal["int8", "fp8"]
type Method = Literal["rtn", "hqq", "awq"]

type Report = Callable[[str, Array], None]
"""Called with the path of a matrix and its relative error, a scalar on the device. The error is
that of the weight; with awq, that of the product over the calibration data."""

_QUANTIZERS: dict[str, Callable[[Array], Weight]] = {
    "int4": jax.jit(quantize_int4),
    "int8": jax.jit(quantize_int8),
    "fp8": jax.jit(quantize_fp8),
    "nvfp4": jax.jit(quantize_nvfp4),
}
"""Rounding to nearest on the device, compiled once per shape."""

_hqq = jax.jit(quantize_int4_hqq)


@jax.jit
def _mxfp4(array: Array) -> Weight:
    missing = -array.shape[-1] % layout.TILE_IN
    return quantize_mxfp4(jnp.pad(array, ((0, 0), (0, missing))))


MATRICES = ("qkv", "out", "gate_up", "down", "in_proj")
"""Leaves of layers that `Quantization.layers` applies to."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What to quantise. None in a field means: as in the checkpoint."""

    layers: WeightFormat | None = None
    """Format of the matrices in the decoder layers. Norms are never quantised."""
    head: HeadFormat | None = None
    """Format of the output matrix, and of the embedding if the two are tied."""
    method: Method = "rtn"
    """Method for the layers' matrices. The head is always rounded to nearest."""
    experts: Literal["mxfp4"] | None = None
    """Format of experts alone, as gpt-oss is published. Not together with `layers`. The experts'
    inputs are padded with zeros to whole tiles."""

    def __post_init__(self) -> None:
        if self.method != "rtn" and self.layers != "int4":
            instead = f", not {self.layers}" if self.layers else ""
            raise ConfigError(
                f"--quantization-method {self.method} makes int4 weights: "
                f"it takes --quantization int4{instead}"
            )

    @property
    def changes_anything(self) -> bool:
        """Whether any weight is quantised."""
        return self != Quantization()

    def encoder(self, spec: ModelSpec) -> Encode:
        """Returns a function that quantises each matrix as it arrives on the device. With method
        awq, it rounds the layers' matrices to nearest: see `calibrated`.

        Raises:
          ConfigError: the format cannot hold a matrix; the message has its shape.
        """
        self._check(spec)
        if self.method == "awq" and spec.state is not None:
            raise ConfigError("--quantization-method awq does not know delta nets: use hqq or rtn")
        head = "embedding" if spec.tie_embeddings else "lm_head"
        formats: dict[str, str | None] = dict.fromkeys(MATRICES, self.layers)
        formats[head] = self.head

        def encode(path: str, array: Array) -> Any:
            leaf = path.rpartition(".")[2]
            if self.experts is not None and ".experts." in path:
                return _mxfp4(array)
            if leaf in MATRICES and self.method == "hqq":
                return _hqq(array)
            name = formats.get(leaf)
            return array if name is None else _QUANTIZERS[name](array)

        return encode

    def _check(self, spec: ModelSpec) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        if self.method == "awq" and spec.experts:
            raise ConfigError(
                "--quantization-method awq does not know experts: use hqq, or round to nearest"
            )
        if self.layers:
            sizes = {
                "qkv": (spec.attention.qkv_size, spec.embed),
                "out": (spec.embed, spec.q_size),
            }
            for name, block in (("", spec.feed_forward), ("experts.", spec.experts)):
                if block:
                    sizes[f"{name}gate_up"] = (2 * block.width, spec.embed)
                    sizes[f"{name}down"] = (spec.embed, block.width)
            if spec.experts and (width := spec.experts.shared_width):
                sizes["shared.gate_up"] = (2 * width, spec.embed)
                sizes["shared.down"] = (spec.embed, width)
        if self.layers and spec.state is not None:
            own = spec.state.delta_net
            sizes["in_proj"] = (own.channels + own.values, spec.embed)
            sizes["out of a delta net"] = (spec.embed, own.values)
        if self.head:
            sizes["lm_head"] = (spec.vocab_size, spec.embed)
        wrong = [
            f"{name} [{out}, {depth}]"
            for name, (out, depth) in sizes.items()
            if out % layout.TILE_OUT or depth % layout.TILE_IN
        ]
        if wrong:
            raise ConfigError(
                f"quantised weights are [out, in] with out a multiple of {layout.TILE_OUT} and in "
                f"a multiple of {layout.TILE_IN}; this model has {', '.join(wrong)}"
            )


def calibrated(encode: Encode, result: Callable[[str], Any]) -> Encode:
    """Returns `encode` with calibrated parts: a part for which `result(path)` is not None gets that
    result.

    Shapes are those of `encode`, because traces do not call `result`.
    """

    def encode_calibrated(path: str, array: Array) -> Any:
        found = None if isinstance(array, jax.core.Tracer) else result(path)
        return encode(path, array) if found is None else found

    return encode_calibrated


def reporting(encode: Encode, report: Report) -> Encode:
    """Returns `encode` with a report of the error of each weight that it quantises."""

    def encode_and_report(path: str, array: Array) -> Any:
        weight = encode(path, array)
        if is_quantized(weight) and not isinstance(array, jax.core.Tracer):
            report(path, _relative_error(array, weight))
        return weight

    return encode_and_report


@jax.jit
def _relative_error(plain: Array, weight: Weight) -> Array:
    """Returns the root mean square of the difference, relative to that of the weight."""
    assert is_quantized(weight)
    wide = plain.astype(jnp.float32)
    difference = weight.dequantize() - wide
    return jnp.sqrt(jnp.sum(difference**2) / jnp.sum(wide**2))
