"""Which weights are quantised at load, to what: the settings, and the encoder that follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import Array

from jaxserve.config import ConfigError, ModelSpec
from jaxserve_checkpoints.load import Encode
from jaxserve_kernels.weights import (
    Weight,
    layout,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

type WeightFormat = Literal["int4", "fp8", "nvfp4"]
type HeadFormat = Literal["int8", "fp8"]

_QUANTIZERS: dict[str, Callable[[Array], Weight]] = {
    "int4": jax.jit(quantize_int4),
    "int8": jax.jit(quantize_int8),
    "fp8": jax.jit(quantize_fp8),
    "nvfp4": jax.jit(quantize_nvfp4),
}
"""Round to nearest, on the device; compiled once per shape."""

_MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """None: as the checkpoint has it."""

    layers: WeightFormat | None = None
    """Of the matrices in the decoder layers; norms stay as they are."""
    head: HeadFormat | None = None
    """Of the output matrix, and of the embedding where they are one."""

    @property
    def changes_anything(self) -> bool:
        return self != Quantization()

    def encoder(self, spec: ModelSpec) -> Encode:
        """Quantises each matrix as it arrives on the device.

        Raises:
          ConfigError: a matrix that the format cannot hold, with its shape.
        """
        self._check(spec)
        head = "embedding" if spec.tie_embeddings else "lm_head"
        formats: dict[str, str | None] = dict.fromkeys(_MATRICES, self.layers)
        formats[head] = self.head

        def encode(path: str, array: Array) -> Any:
            name = formats.get(path.rpartition(".")[2])
            return array if name is None else _QUANTIZERS[name](array)

        return encode

    def _check(self, spec: ModelSpec) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        if self.layers:
            sizes = {
                "qkv": (spec.q_size + 2 * spec.kv_size, spec.embed),
                "out": (spec.embed, spec.q_size),
                "gate_up": (2 * spec.ffn, spec.embed),
                "down": (spec.embed, spec.ffn),
            }
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
