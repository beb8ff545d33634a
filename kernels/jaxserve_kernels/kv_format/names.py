"""The formats by the names that users give them."""

from __future__ import annotations

from jaxserve_kernels.kv_format.dense import Dense
from jaxserve_kernels.kv_format.eight_bit import Fp8, Int8
from jaxserve_kernels.kv_format.format import KVFormat
from jaxserve_kernels.kv_format.kvarn import KVarN

AUTO = Dense()
"""In the dtype of the activations."""

_FORMATS: dict[str, KVFormat] = {
    "auto": AUTO,
    "bf16": Dense(dtype="bfloat16"),
    "fp8_e4m3": Fp8(),
    "int8": Int8(),
    "kvarn_k4v4_g128": KVarN(value_bits=4),
    "kvarn_k4v2_g128": KVarN(value_bits=2),
}

NAMES = tuple(_FORMATS)
"""Choices of `--kv-cache-dtype`."""


def named(name: str) -> KVFormat:
    """The format called `name`, one of NAMES."""
    return _FORMATS[name]
