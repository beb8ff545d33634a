"""Random weights in every format that products support, for the scripts that time them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from matmul_report import COPY

from jaxserve.model_spec import ModelSpec
from jaxserve.models.quantization import MATRICES, HeadFormat, Quantization
from jaxserve_checkpoints.load import Encode
from jaxserve_kernels import weights


def with_zeros(weight: jax.Array) -> weights.Int4Weight:
    """int4 codes with integer zero points that are not all 8."""
    packed = weights.quantize_int4(weight)
    zero = jax.random.randint(jax.random.key(1), packed.scale.shape, 6, 11)
    return packed._replace(zero=zero)


def in_another_order(weight: jax.Array) -> weights.OrderedInt4Weight:
    """int4 weights like GPTQ's with activation order: products permute their inputs first."""
    packed = weights.quantize_int4(weight)
    order = jax.random.permutation(jax.random.key(2), weight.shape[1]).astype(jnp.int32)
    return weights.OrderedInt4Weight(packed.packed, packed.scale, order)


def with_copy(quantize: Callable[[jax.Array], Any], weight: jax.Array) -> weights.CopiedWeight:
    """A 4-bit weight with an fp8 copy, as in the engine if the card has room."""
    codes = quantize(weight)
    return weights.CopiedWeight(codes, weights.e4m3_copy(codes))


QUANTIZE: dict[str, Callable[[jax.Array], Any]] = {
    "bf16": lambda weight: weight,
    "int4": weights.quantize_int4,
    "int4-g64": functools.partial(weights.quantize_int4, group=64),
    "int4-zeros": with_zeros,
    "int4-act-order": in_another_order,
    "fp8": weights.quantize_fp8,
    "fp8-blocks": functools.partial(weights.quantize_fp8, group=128),
    "int8": weights.quantize_int8,
    "nvfp4": weights.quantize_nvfp4,
    "mxfp4": weights.quantize_mxfp4,
}
COPIED = ("int4", "int4-g64", "int4-zeros", "int4-act-order", "nvfp4", "mxfp4")
QUANTIZE |= {f"{name}{COPY}": functools.partial(with_copy, QUANTIZE[name]) for name in COPIED}

LAYER_FORMATS = (
    "int4", "int4-g64", "int4-zeros", "int4-act-order", "fp8", "int8", "nvfp4", "mxfp4"
)  # fmt: skip
"""Formats of whole models. `jaxserve` can quantise to three of them, and reads the others."""


def encoder(spec: ModelSpec, layers: str | None, head: HeadFormat | None) -> Encode:
    """The function that encodes a model's plain weights. None as a format: not quantised."""
    if spec.experts and spec.experts.bias and layers == "mxfp4":  # gpt-oss, as it is published
        return Quantization(head=head, experts="mxfp4").encoder(spec)
    encode_head = Quantization(head=head).encoder(spec)
    quantize = jax.jit(QUANTIZE[layers or "bf16"])

    def encode(path: str, array: jax.Array) -> Any:
        of_a_layer = path.rpartition(".")[2] in MATRICES
        return quantize(array) if of_a_layer else encode_head(path, array)

    return encode
