"""Plans the size of the tier in host memory, before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jax.typing import DTypeLike

from jaxserve import host_memory
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError, HostTierConfig
from jaxserve.offload.slab import RESERVE
from jaxserve.runner import kv_cache
from jaxserve.runner.page_moves import Rings, ring_bytes
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.state_pieces import StatePieces
from jaxserve.startup import memory
from jaxserve_kernels.kv_format import CacheShape, PageLayout
from jaxserve_kernels.recurrent_state import RecurrentState

log = logging.getLogger(__name__)

_GPU_RINGS = 256 * 2**20, 512 * 2**20
"""Bytes of the store ring and of the load ring. With steps of 15 ms, loads fill one load ring per
step, which is 36 GB/s."""
_STEPS, _MOST_STORE_BYTES = 2, 2**30
"""The store ring holds the pages that this many of the longest steps compute, up to this many
bytes. A slot is free again two steps after its page was written, and a long run of prompts evicts
as many pages as it computes. See `test_later_turns_of_chats_find_what_the_device_has_evicted`."""
_CPU_RINGS = 8 * 2**20, 8 * 2**20
_LEAST, _MOST = 4, 256
"""The least and the most slots of a ring."""

_LINE = 4096
"""Alignment of host slots in bytes."""


def check_flags(options: Options) -> None:
    """Raises ConfigError for flags of the tier that contradict each other."""
    if options.kv_offload_size is None:
        for flag, given in (
            ("--kv-offload-path", options.kv_offload_path),
            ("--kv-offload-verify", options.kv_offload_verify),
            ("--kv-offload-load-rate", options.kv_offload_load_rate),
        ):
            if given:
                raise ConfigError(f"{flag} needs --kv-offload-size, the host memory above it")
    elif not options.enable_prefix_caching:
        raise ConfigError(
            "--kv-offload-size needs the prefix cache; leave out --no-enable-prefix-caching"
        )


def plan_rings(
    options: Options,
    layouts: Sequence[PageLayout],
    shapes: Sequence[CacheShape],
    dtype: DTypeLike,
    state: RecurrentState | None,
    *,
    step_pages: int,
    gpu: bool,
) -> tuple[Rings | None, int]:
    """Returns the sizes of the rings, if there is a tier, and their bytes on the device.

    Args:
      layouts, shapes: the caches of all groups. Their numbers of pages do not matter.
      step_pages: pages per group that the longest step computes.
      state: abstract state of recurrent layers. The rings hold all pieces of a snapshot at once.
    """
    if options.kv_offload_size is None:
        return None, 0
    pieces = None if state is None else StatePieces.of(state)
    each = sum(kv_cache.page_bytes(layouts, shapes, dtype))
    each += pieces.page_bytes(state) if pieces and state else 0
    least = max(_LEAST, pieces.layers if pieces else 0)
    store, load = (min(size // each, _MOST) for size in (_GPU_RINGS if gpu else _CPU_RINGS))
    if gpu:
        store = max(store, min(_STEPS * step_pages, _MOST_STORE_BYTES // each))
    rings = Rings(store=max(least, store), load=max(least, load))
    return rings, ring_bytes(layouts, shapes, dtype, rings, state)


def plan_tier(options: Options, config: RunnerConfig) -> HostTierConfig | None:
    """Returns the sizes of the tier that the flags ask for; None without a tier.

    Raises:
      ConfigError: it holds too few pages, or the device has no memory for snapshots of recurrent
        state.
    """
    rings, size = config.rings, options.kv_offload_size
    if rings is None or size is None:
        return None
    each = kv_cache.page_bytes(config.layouts, config.kv_shapes, config.dtype)
    state = config.recurrent_state
    if state is not None and not config.cache.snapshots:
        raise ConfigError(
            "--kv-offload-size keeps prefixes, but there is no memory for snapshots of recurrent "
            "state on the device: leave the flag out"
        )
    pieces = None if state is None else StatePieces.of(state)
    if pieces and state:
        each = (*each, pieces.page_bytes(state))
    slot = -(-max(each) // _LINE) * _LINE
    slots, longest = size // slot, config.pages_per_seq
    if slots < 4 * len(each):
        raise ConfigError(
            f"--kv-offload-size {memory.in_words(size)} holds {slots} pages of "
            f"{memory.in_words(slot)}: give it more, or leave it out"
        )
    if slots < sum(shape.pages - 1 for shape in config.kv_shapes):
        log.info(
            "--kv-offload-size %s is smaller than the KV cache on the device (%s), so it helps "
            "little: a prefix that leaves the device soon leaves the host, too",
            memory.in_words(size),
            memory.in_words(sum(s.pages * b for s, b in zip(config.kv_shapes, each, strict=False))),
        )
    return HostTierConfig(
        slots=slots,
        page_bytes=each,
        state_pieces=pieces.layers if pieces else 0,
        store_ring=rings.store,
        load_ring=rings.load,
        lookahead=min(2 * longest, slots // (4 * len(each))),
        load_rate=options.kv_offload_load_rate,
    )


def check_memory(tier: HostTierConfig, beside: int) -> None:
    """Raises ConfigError, with the numbers, if the machine has too little memory for the tier. It
    runs before weights are loaded, which takes long. The slab checks again.

    Args:
      beside: bytes of the same memory that weights and KV cache will take.
    """
    slot = -(-max(tier.page_bytes) // _LINE) * _LINE
    size, free = tier.slots * slot, host_memory.available()
    most = free - RESERVE - beside
    if size <= most:
        return
    cache = f", weights and KV cache take {memory.in_words(beside)}" if beside else ""
    advice = "leave it out"
    if most >= 4 * slot * len(tier.page_bytes):
        advice = f"ask for at most {most // 2**20}Mi, or {advice}"
    raise ConfigError(
        f"--kv-offload-size {memory.in_words(size)} is more than this machine can give: "
        f"{memory.in_words(free)} are available to this process{cache} and "
        f"{memory.in_words(RESERVE)} stay free; {advice}"
    )
