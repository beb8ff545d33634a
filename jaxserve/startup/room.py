"""Chooses how many sequences run at once and how long they may be, from the memory beside the
weights."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.config import Buckets, ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.models.delta_net import abstract_state
from jaxserve.models.drafts.spec import DraftSpec
from jaxserve.runner import kv_cache
from jaxserve.startup import memory
from jaxserve_kernels.kv_format import KVFormat

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 512 * 2**20

_TOKENS_EACH = 512
"""The smallest KV cache per sequence, in tokens, if no flag sets the number of sequences. Also the
shortest context that `Room.fit` chooses."""

_SHARE = 1 / 2
"""The smallest KV cache, as a share of the cache with the fewest sequences. Memory per sequence may
take the rest."""


_SNAPSHOT_SHARE = 1 / 4
"""The largest share of the KV cache's memory for snapshots of recurrent state."""
_SNAPSHOTS_EACH = 16
"""The most snapshots per sequence."""


class Fit(NamedTuple):
    """The chosen or given sizes."""

    buckets: Buckets
    max_model_len: int
    """May exceed what the KV cache holds; the start is then refused."""
    budget: int
    """Bytes of keys and values."""
    snapshots: int = 0
    """Number of snapshots of recurrent state."""


class Held(NamedTuple):
    """Capacity of a KV cache, in tokens."""

    tokens: int
    """All sequences together."""
    longest: int
    """One sequence."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that sequences share with the weights."""

    spec: ModelSpec
    dtype: DTypeLike
    kv_format: KVFormat
    page_size: int
    gpu: bool
    limit: int
    """Bytes of device memory that the process may use."""
    given: int | None
    """Bytes of the KV cache and recurrent state, if a flag sets them."""
    beside: int = 0
    """Device bytes for other uses than weights, steps and cache, such as a draft head and rings."""
    caches_prefixes: bool = True
    """Whether a model with recurrent layers gets snapshots of their state."""
    quantized: bool = False
    """Whether the weights are quantised."""
    unpacks: bool = False
    """Whether products of many tokens unpack whole quantised weights first."""
    draft: DraftSpec | None = None
    """The draft head or model. Its keys and values take memory in each page."""

    def left(self, weights: int, buckets: Buckets, max_model_len: int) -> int:
        """Returns the bytes for the KV cache beside `weights` bytes, ignoring `given`.

        Raises:
          ConfigError: the weights alone do not fit.
        """
        if not self.gpu:
            return _CPU_KV_BYTES
        expanded = self.kv_format.expanded_tokens(
            max_model_len,
            step_tokens=buckets.prefill[-1],
            sequences=buckets.decode[-1] + 1,  # padding has a slot, too
        )
        return memory.plan_gpu_cache(
            self.spec,
            self.dtype,
            buckets,
            weights=weights,
            limit=self.limit - self.beside,
            chunk_context=expanded,
            unpacked=self._unpacked,
        )

    @property
    def _unpacked(self) -> int:
        """Bytes of the largest unpacked weight: the gate and up matrix of a layer or an expert."""
        experts = self.spec.experts
        size = (
            2
            * max(self.spec.ffn, experts.width if experts else 0)
            * self.spec.embed
            * jnp.dtype(self.dtype).itemsize
        )
        return size if self.quantized and self.unpacks else 0

    def fit(self, weights: int, choices: Sequence[Buckets], max_model_len: int | None) -> Fit:
        """Returns the first choice whose sequences have enough KV cache; the last if none has.

        Args:
          weights: bytes of the weights.
          choices: in order of falling number of sequences.
          max_model_len: the flag's context; None: the longest context that fits is chosen.

        Raises:
          ConfigError: the weights do not fit, or nothing is left beside them.
        """
        alone = self._holds(weights, choices[-1], max_model_len or self.spec.max_position).tokens

        def is_enough(buckets: Buckets) -> bool:
            length = max_model_len or self._context(weights, buckets)
            held = self._holds(weights, buckets, length)
            wanted = max(_TOKENS_EACH * buckets.decode[-1], _SHARE * alone)
            return held.tokens >= wanted and held.longest >= (max_model_len or 0)

        buckets = next(filter(is_enough, choices), choices[-1])
        length = max_model_len or self._context(weights, buckets)
        snapshots = self.snapshots(weights, buckets, length)
        fit = Fit(buckets, length, self._budget(weights, buckets, length), snapshots)
        if not fit.budget:
            raise ConfigError(
                f"too little memory: weights {memory.in_words(weights)}, the largest step's "
                f"scratch (estimated) and {memory.in_words(memory.RESERVE)} in reserve leave "
                f"nothing of {memory.in_words(self.limit)} for keys and values; use a smaller "
                "model, --quantization int4, a lower --max-num-batched-tokens or --max-num-seqs, "
                "or a higher --gpu-memory-utilization"
            )
        return fit

    def _context(self, weights: int, buckets: Buckets) -> int:
        """Returns the longest context that fits one sequence: the model's limit or whole pages."""
        most = self.spec.max_position
        if self._holds(weights, buckets, most).longest >= most:
            return most

        def is_too_long(pages: int) -> bool:
            length = pages * self.page_size
            return self._holds(weights, buckets, length).longest < length

        pages = bisect.bisect_left(range(1, -(-most // self.page_size)), True, key=is_too_long)
        return max(pages * self.page_size, min(_TOKENS_EACH, most))

    def _holds(self, weights: int, buckets: Buckets, max_model_len: int) -> Held:
        """Returns the capacity of the KV cache."""
        budget = self._budget(weights, buckets, max_model_len)
        spec, demand = self.spec.within(max_model_len), self.demand(buckets, max_model_len)
        groups = kv_cache.sized_groups(spec, self.page_size, buckets.decode[-1], self.draft)
        pages = kv_cache.num_pages(self.kv_format, groups, self.dtype, budget, demand)
        if min(pages) < 2:  # the first is for padding
            return Held(0, 0)
        cache = kv_cache.cache_config(spec, pages, self.page_size)
        return Held(cache.usable_tokens, cache.longest)

    def demand(self, buckets: Buckets, max_model_len: int) -> kv_cache.Demand:
        """Returns the limits of sequences from which the KV cache is sized."""
        return kv_cache.Demand(max_model_len, buckets.decode[-1], buckets.prefill[-1])

    def _budget(self, weights: int, buckets: Buckets, max_model_len: int) -> int:
        """Returns the bytes for keys and values, without recurrent state."""
        left = self._left_or_given(weights, buckets, max_model_len)
        snapshots = self.snapshots(weights, buckets, max_model_len)
        return max(left - self.state_bytes(buckets, snapshots), 0)

    def _left_or_given(self, weights: int, buckets: Buckets, max_model_len: int) -> int:
        left = self.given
        return self.left(weights, buckets, max_model_len) if left is None else left

    def snapshots(self, weights: int, buckets: Buckets, max_model_len: int) -> int:
        """Returns the number of snapshots of recurrent state in the prefix cache."""
        if self.spec.state is None or not self.caches_prefixes:
            return 0
        one = memory.tree_bytes(abstract_state(self.spec, self.dtype, 1))
        left = self._left_or_given(weights, buckets, max_model_len) - self.state_bytes(buckets)
        return min(int(max(left, 0) * _SNAPSHOT_SHARE) // one, _SNAPSHOTS_EACH * buckets.decode[-1])

    def state_bytes(self, buckets: Buckets, snapshots: int = 0) -> int:
        """Returns the bytes of recurrent state, including the padding slot and snapshots."""
        slots = buckets.decode[-1] + 1 + snapshots
        return memory.tree_bytes(abstract_state(self.spec, self.dtype, slots))

    def report(self, fit: Fit, weights: int, choices: Sequence[Buckets], *, chosen: bool) -> None:
        """Logs limits below those of the model or of a larger device.

        Args:
          chosen: whether `fit` chose the context, rather than a flag.
        """
        sequences = fit.buckets.decode[-1]
        if sequences < choices[0].decode[-1]:
            log.info(
                "at most %d sequences run at once: the KV cache has room for no more; "
                "--max-num-seqs overrides this",
                sequences,
            )
        if chosen and fit.max_model_len < self.spec.max_position:
            log.warning(
                "the context is %s tokens, not the model's %s: keys and values get %s beside %s of "
                "weights. %s. --max-model-len %d silences this warning",
                f"{fit.max_model_len:,}",
                f"{self.spec.max_position:,}",
                *(memory.in_words(fit.budget), memory.in_words(weights)),
                self._more(),
                fit.max_model_len,
            )

    def _more(self) -> str:
        """Returns advice on how to make room for a longer context."""
        if self.gpu and self.given is None:
            ways = ["a higher --gpu-memory-utilization", "a lower --max-num-batched-tokens"]
        else:
            ways = ["more --kv-cache-memory-bytes"]
        if not self.kv_format.quantized:
            ways.append("--kv-cache-dtype int8")
        if self.gpu and not self.quantized:
            ways.append("--quantization int4")
        return f"More fits with {', '.join(ways)}"
