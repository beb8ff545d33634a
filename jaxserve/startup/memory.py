"""Plans device memory before anything is allocated, and checks host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve import host_memory
from jaxserve.config import Buckets, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.delta_net import input_bytes
from jaxserve.runner import slot_tables

RESERVE = 2**30
"""Bytes of a GPU kept for inputs and results of steps, rounding, and copies while weights load."""

_ROUNDING = 256 * 2**20
"""The KV cache's size is a multiple of this, so that small differences between cards of one kind or
between drivers do not change the programs."""

_COPY_SHARE = 0.1
"""The most that fp8 copies may take, as a share of the KV cache's memory."""

_HOST_RESERVE = 512 * 2**20
"""Bytes of host memory left free when weights and cache live there."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The process's device memory, in bytes."""

    limit: int
    """The limit of the sum."""
    weights: int
    kv_cache: int
    state: int
    temporaries: int
    """Scratch memory of the largest step."""

    @property
    def headroom(self) -> int:
        """Bytes that the plan leaves free."""
        return self.limit - self.weights - self.kv_cache - self.state - self.temporaries

    def check(self) -> None:
        """Raises ConfigError, with the numbers, if the sum is above the limit."""
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
    """Returns whether an error of XLA or the driver means that device memory ran out. Reads the
    message, because such errors have no separate type."""
    return any(name in str(error) for name in ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY"))


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays, or ShapeDtypeStructs, in a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit(device: Any, otherwise: int) -> int:
    """Returns the bytes of device memory that the process may use; on a CPU, the free memory.

    Args:
      otherwise: the limit of a GPU whose allocator does not report it; 0: unknown.

    Raises:
      ConfigError: the limit is unknown.
    """
    if device.platform == "cpu":
        return host_memory.available()
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
    """Returns the bytes left for the KV cache after weights, the steps' estimated scratch memory
    and a reserve.

    The result must not vary between starts, because programs depend on it.

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
    rows = buckets.decode[-1]
    pairs = spec.experts.top_k * (4 * spec.experts.width + spec.embed) if spec.experts else 0
    token = (max(4 * spec.ffn, pairs) + 4 * spec.q_size + 8 * spec.embed) * itemsize
    scores = spec.vocab_size * 4 * 4
    verified = max((rows * positions for rows, positions in buckets.verify), default=0)
    # Each position of a verify step has its own tables, and inputs to update recurrent state.
    own = spec.vocab_size * 2 * 4 + input_bytes(spec, itemsize)
    tables = slot_tables.num_bytes(slot_tables.abstract(rows, spec.vocab_size))
    expanded = chunk_context * spec.kv_bytes_per_token(itemsize) // spec.num_paged_layers
    largest = max(buckets.prefill[-1] * token + rows * scores, verified * (token + scores + own))
    scratch = largest + unpacked + expanded
    free = limit - weights - scratch - tables - RESERVE
    return max(0, free // _ROUNDING * _ROUNDING)


def affords_copy(size: int, left: int, given: int | None) -> bool:
    """Returns whether fp8 copies of `size` bytes may be made. They make steps faster and leave less
    room for sequences.

    Args:
      left: bytes left for the KV cache.
      given: bytes that the KV cache must have in any case.
    """
    return size <= left * _COPY_SHARE and size <= left - (given or 0)


def check_host_memory(weights: int, cache: int) -> None:
    """Raises ConfigError, with the numbers, if weights and KV cache exceed free host memory."""
    available = host_memory.available()
    if weights + cache + _HOST_RESERVE > available:
        raise ConfigError(
            f"too little memory: weights {in_words(weights)} + KV cache {in_words(cache)} + "
            f"{in_words(_HOST_RESERVE)}, but {in_words(available)} are free on this machine; "
            "use a smaller model or a GPU"
        )


def in_words(count: int) -> str:
    """Formats a number of bytes for people, such as "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"
    return f"{count} bytes"
