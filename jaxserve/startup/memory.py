"""Memory of the device, planned before anything is allocated, and of this process."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.config import Buckets, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.runner import slot_tables

RESERVE = 2**30
"""Of a GPU: inputs and results of steps, rounding of allocations, copies while weights load."""

_ROUNDING = 256 * 2**20
"""The KV cache takes multiples of it, so that small differences between cards of one kind, or
between two drivers' own needs, do not make other programs of it."""

_COPY_SHARE = 0.1
"""Of the memory for keys and values, that a copy of weights may take."""

_HOST_RESERVE = 512 * 2**20
"""Host memory left to everything else when weights and cache live there."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the process takes of its device, in bytes."""

    limit: int
    """What it may take."""
    weights: int
    kv_cache: int
    state: int
    temporaries: int
    """Scratch memory of the largest step."""

    @property
    def headroom(self) -> int:
        return self.limit - self.weights - self.kv_cache - self.state - self.temporaries

    def check(self) -> None:
        """ConfigError, with the numbers, if it is more than there is."""
        if self.headroom < 0:
            raise ConfigError(f"too little memory: {self}; lower --kv-cache-memory-bytes")

    def __str__(self) -> str:
        return (
            f"weights {in_words(self.weights)} + KV cache {in_words(self.kv_cache)} + "
            f"sequences {in_words(self.state)} + largest step's scratch "
            f"{in_words(self.temporaries)} of {in_words(self.limit)}, "
            f"{in_words(self.headroom)} left"
        )


def is_exhausted(error: Exception) -> bool:
    """Whether XLA or the driver failed for want of device memory: there is no type for it."""
    return any(name in str(error) for name in ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY"))


def tree_bytes(tree: Any) -> int:
    """Of all arrays, or ShapeDtypeStructs, of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit(device: Any, otherwise: int) -> int:
    """Bytes that this process may take of the device; of a CPU, what is free now. ConfigError:
    nobody says.

    Args:
      otherwise: that of a GPU whose allocator does not say it; 0: not known.
    """
    if device.platform == "cpu":
        return available_on_host()
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) or otherwise
    if not limit:
        raise ConfigError(
            "neither the device's allocator nor the driver says how much memory there is: remove "
            "XLA_PYTHON_CLIENT_ALLOCATOR and XLA_PYTHON_CLIENT_PREALLOCATE from the environment"
        )
    return limit


def plan_gpu_cache(
    spec: ModelSpec,
    dtype: DTypeLike,
    buckets: Buckets,
    *,
    weights: int,
    limit: int,
    chunk_context: int = 0,
    unpacked: int = 0,
) -> int:
    """Bytes for the KV cache: what weights, the steps' scratch (estimated) and a reserve leave.

    It depends on nothing that changes from start to start, because programs depend on it.

    Args:
      chunk_context: tokens whose keys and values a mixed step expands, one layer at a time.
      unpacked: bytes of a weight that a mixed step unpacks as a whole.

    Raises:
      ConfigError: the weights alone do not fit.
    """
    if weights > limit:
        raise ConfigError(
            f"too little memory: the weights take {in_words(weights)}, this process may "
            f"take {in_words(limit)} of the GPU; use a smaller model, or a higher "
            "--gpu-memory-utilization if nothing else needs the card"
        )
    itemsize = jnp.dtype(dtype).itemsize
    tokens, rows = buckets.prefill[-1], buckets.decode[-1]
    activations = tokens * (4 * spec.ffn + 4 * spec.q_size + 8 * spec.embed) * itemsize
    scores = rows * spec.vocab_size * 4 * 4
    tables = slot_tables.num_bytes(slot_tables.abstract(rows, spec.vocab_size))
    expanded = chunk_context * spec.kv_bytes_per_token(itemsize) // spec.num_layers
    scratch = activations + unpacked + scores + expanded
    free = limit - weights - scratch - tables - RESERVE
    return max(0, free // _ROUNDING * _ROUNDING)


def affords_copy(size: int, left: int, given: int | None) -> bool:
    """Whether a copy of weights may take `size` bytes of those `left` for keys and values: it makes
    steps faster, and fewer sequences fit.

    Args:
      given: bytes that keys and values must have in any case.
    """
    return size <= left * _COPY_SHARE and size <= left - (given or 0)


def available_on_host(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that processes may still take: what the system keeps of files it gives back."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_host_memory(weights: int, cache: int) -> None:
    """ConfigError, with the numbers, if a CPU's memory does not hold weights and KV cache."""
    available = available_on_host()
    if weights + cache + _HOST_RESERVE > available:
        raise ConfigError(
            f"too little memory: weights {in_words(weights)} + KV cache {in_words(cache)} + "
            f"{in_words(_HOST_RESERVE)}, but {in_words(available)} are free on this machine; "
            "use a smaller model or a GPU"
        )


def in_words(count: int) -> str:
    """Bytes for people: three digits and a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"
    return f"{count} bytes"
