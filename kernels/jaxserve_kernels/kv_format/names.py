"""Constructs KV formats from their user-facing names: see `kv_format_names`."""

from __future__ import annotations

import functools
import importlib

from jaxserve_kernels.kv_format.dense import Dense
from jaxserve_kernels.kv_format.format import KVFormat
from jaxserve_kernels.kv_format_names import KV_FORMATS

AUTO = Dense()
"""The dense format in the dtype of the activations."""

NAMES = tuple(KV_FORMATS)
"""Choices of `--kv-cache-dtype`."""


@functools.cache
def named(name: str) -> KVFormat:
    """The format called `name`.

    Raises:
      KeyError: the name is not in NAMES.
    """
    entry = KV_FORMATS[name]
    module = importlib.import_module(f"{__package__}.{entry.module}")
    return getattr(module, entry.type)(**entry.options)
