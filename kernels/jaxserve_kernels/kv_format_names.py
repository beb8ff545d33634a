"""User-facing names of the KV formats. This module does not import jax, so that flags and settings
can use it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Where a format is defined. `kv_format.named` constructs it."""

    module: str
    """A module of `jaxserve_kernels.kv_format`."""
    type: str
    options: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments of its class."""


KV_FORMATS: Mapping[str, Entry] = {
    "auto": Entry("dense", "Dense"),
    "bf16": Entry("dense", "Dense", {"dtype": "bfloat16"}),
    "fp8_e4m3": Entry("eight_bit", "Fp8"),
    "int8": Entry("eight_bit", "Int8"),
    "kvarn_k4v4_g128": Entry("kvarn", "KVarN", {"value_bits": 4}),
    "kvarn_k4v2_g128": Entry("kvarn", "KVarN", {"value_bits": 2}),
}
