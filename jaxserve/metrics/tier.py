"""Metrics of the tiers below the device: vLLM's names if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from jaxserve.metrics.exposition import Registry
from jaxserve.metrics.families import Families

_SIZES = tuple(float(2**exponent) for exponent in range(16, 36, 2))
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class TierCounters(Protocol):
    """Counters of copies since the start, see `jaxserve.offload.counters`."""

    store_bytes: int
    store_seconds: float
    stores_failed: int
    load_bytes: int
    load_seconds: float
    loads_failed: int
    checksum_failures: int
    disk_write_bytes: int
    disk_writes_failed: int
    disk_read_bytes: int
    disk_reads_failed: int


class TierSlots(Protocol):
    """Host slots and waiting sequences, see `jaxserve.scheduler.host_tier.TierUsage`."""

    @property
    def total(self) -> int: ...
    @property
    def filled(self) -> int: ...
    @property
    def arriving(self) -> int: ...
    @property
    def pinned(self) -> int: ...
    @property
    def loading(self) -> int: ...


class TierFigures(NamedTuple):
    """State of the lower tiers and totals since the start, for people who watch. In bytes of pages
    and tokens of prompts."""

    host_bytes: int
    host_total: int
    disk_bytes: int
    disk_total: int
    """The limit of the disk tier in bytes; 0: there is no disk tier."""
    loading: int
    """Sequences that wait for pages."""
    looked_up: int
    """Tokens that the device lacked."""
    from_host: int
    from_disk: int
    """Loaded tokens, by the tier that had them."""
    loaded: int
    stored: int
    """Bytes copied from host memory to the device, and from the device to host memory."""
    read: int
    written: int
    """Bytes read from disk to host memory, and written from host memory to disk."""


class TierMetrics(Families):
    """Implements `jaxserve.scheduler.tier_observer.TierObserver`."""

    def __init__(
        self,
        registry: Registry,
        labels: Mapping[str, str],
        *,
        counters: TierCounters,
        num_bytes: int,
        slot_bytes: int,
    ):
        """`num_bytes`: size of the host memory."""
        super().__init__(registry, labels)
        self._counters = counters
        self._num_bytes, self._slot_bytes = num_bytes, slot_bytes
        self.disk_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes of files. Callable from any thread."""
        self.disk_total = 0
        """The limit on bytes of files; 0: there is no disk tier."""
        self.usage: Callable[[], TierSlots] | None = None
        """Returns the state of the host slots. Callable from any thread. None before the engine
        serves."""
        self._queries = self._counter(
            "vllm:external_prefix_cache_queries",
            "Prompt tokens that the device lacked and that were looked up in lower tiers",
        )
        self._hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens found in lower tiers"
        )
        restored = registry.counter(
            "jaxserve_kv_offload_restored_tokens",
            "Tokens of pages loaded to the device, by the tier that had them",
            [*labels, "tier"],
        )
        self._restored = {tier: restored.labels(**labels, tier=tier) for tier in ("host", "disk")}
        self._load_size = self._histogram(
            "vllm:kv_offload_load_size", "Bytes per load of one or more pages", _SIZES
        )
        self._store_size = self._histogram(
            "vllm:kv_offload_store_size", "Bytes per page stored on the host", _SIZES
        )
        self._restore = self._histogram(
            "jaxserve_kv_offload_restore_seconds",
            "Seconds from the start of a load until its pages are on the device",
            _SECONDS,
        )
        self._paced = self._counter(
            "jaxserve_kv_offload_paced_seconds",
            "Seconds that loads waited for their turn (--kv-offload-load-rate)",
        )
        self._full = self._counter(
            "vllm:kv_offload_allocation_failure",
            "Pages not stored because all host slots were in use",
        )
        cause = [*labels, "cause"]
        self._skipped = registry.counter(
            "vllm:kv_offload_stores_skipped", "Evicted pages that the host does not have", cause
        )
        self._recomputed = registry.counter(
            "jaxserve_kv_offload_recomputed",
            "Sequences that computed tokens because a load failed",
            cause,
        )
        self._copied = {
            field: self._counter(f"{prefix}{name}", text)
            for prefix, name, field, text in (
                ("vllm:kv_offload_", "load_bytes", "load_bytes", "Bytes copied from the host"),
                ("vllm:kv_offload_", "load_time", "load_seconds", "Seconds of these copies"),
                ("vllm:kv_offload_", "store_bytes", "store_bytes", "Bytes copied to the host"),
                ("vllm:kv_offload_", "store_time", "store_seconds", "Seconds of these copies"),
                *(
                    ("jaxserve_kv_offload_", field, field, text)
                    for field, text in (
                        ("loads_failed", "Pages whose copy from the host failed"),
                        ("stores_failed", "Pages whose copy to the host failed"),
                        ("checksum_failures", "Pages in host memory that changed after the store"),
                        ("disk_write_bytes", "Bytes of pages written to disk"),
                        ("disk_read_bytes", "Bytes of pages read from disk"),
                        ("disk_writes_failed", "Pages that could not be written to disk"),
                        ("disk_reads_failed", "Pages that could not be read from disk"),
                    )
                ),
            )
        }
        self._usage = self._gauge("vllm:kv_offload_cpu_cache_usage_perc", "Share of slots, 0-1")
        self._reading = self._gauge(
            "vllm:kv_offload_cpu_cache_read_usage_perc", "Share of slots that copies read, 0-1"
        )
        self._writing = self._gauge(
            "vllm:kv_offload_cpu_cache_write_usage_perc", "Share of slots that copies fill, 0-1"
        )
        self._gauge("vllm:kv_offload_cpu_allocation_size", "Bytes of host memory").set(num_bytes)
        info = registry.gauge(
            "vllm:kv_offload_config_info",
            "Geometry of the host tier; the value is 1",
            [*labels, "slot_bytes"],
        )
        info.labels(**labels, slot_bytes=str(slot_bytes)).set(1)

    def refresh(self) -> None:
        """Copies the counters of other components into metrics. Called before each scrape."""
        for field, number in self._copied.items():
            number.set(getattr(self._counters, field))
        if self.usage is not None:
            slots = self.usage()
            self._usage.set(slots.filled / slots.total)
            self._reading.set(slots.pinned / slots.total)
            self._writing.set(slots.arriving / slots.total)

    def figures(self) -> TierFigures | None:
        """Returns the current figures. Callable from any thread. None before the engine serves."""
        if self.usage is None:
            return None
        slots, counters = self.usage(), self._counters
        return TierFigures(
            host_bytes=slots.filled * self._slot_bytes,
            host_total=self._num_bytes,
            disk_bytes=self.disk_bytes(),
            disk_total=self.disk_total,
            loading=slots.loading,
            looked_up=int(self._queries.value),
            from_host=int(self._restored["host"].value),
            from_disk=int(self._restored["disk"].value),
            loaded=counters.load_bytes,
            stored=counters.store_bytes,
            read=counters.disk_read_bytes,
            written=counters.disk_write_bytes,
        )

    def tier_looked_up(self, tokens: int, found: int) -> None:
        """See `TierObserver`."""
        self._queries.inc(tokens)
        self._hits.inc(found)

    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None:
        """See `TierObserver`."""
        self._restored["host"].inc(host_tokens)
        self._restored["disk"].inc(disk_tokens)
        self._load_size.observe(num_bytes)
        self._restore.observe(seconds)

    def tier_paced(self, seconds: float) -> None:
        """See `TierObserver`."""
        self._paced.inc(seconds)

    def tier_recomputed(self, cause: str) -> None:
        """See `TierObserver`."""
        self._recomputed.labels(**self._labels, cause=cause).inc()

    def tier_stored(self, num_bytes: int) -> None:
        """See `TierObserver`."""
        self._store_size.observe(num_bytes)

    def tier_skipped(self, cause: str) -> None:
        """See `TierObserver`."""
        self._skipped.labels(**self._labels, cause=cause).inc()
        if cause == "host full":
            self._full.inc()
