"""The formats by the names that users give them."""

from __future__ import annotations

from jaxserve_kernels.kv_format.base import KVFormat
from jaxserve_kernels.kv_format.dense import Dense

AUTO = Dense()
"""In the dtype of the activations."""

_FORMATS: dict[str, KVFormat] = {
    "auto": AUTO,
    "bf16": Dense(dtype="bfloat16"),
}

NAMES = tuple(_FORMATS)
"""Choices of `--kv-cache-dtype`."""


def named(name: str) -> KVFormat:
    """The format called `name`, one of NAMES."""
    return _FORMATS[name]
