"""What the tiers have done since the start, as numbers to export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class OffloadCounters:
    """Only `poll` of a copier and of a disk tier changes them, so the thread that polls reads them
    without a lock. Times are sums over transfers that succeeded, in seconds, each from its
    first byte to its last; transfers overlap."""

    stores: int = 0
    """Pages copied from the device to the host."""
    store_bytes: int = 0
    store_seconds: float = 0.0
    stores_failed: int = 0

    loads: int = 0
    """Pages copied from the host to the device."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    loads_failed: int = 0

    checksum_failures: int = 0
    """Pages in host memory that were not what was stored. Counted in `loads_failed`, too."""

    disk_writes: int = 0
    disk_write_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_writes_failed: int = 0
    """Of these, `disk_full`, `disk_busy` and `disk_timeouts` have a cause of their own."""

    disk_reads: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    disk_reads_failed: int = 0
    """Files that were there no more, that were damaged, or that took too long."""

    disk_full: int = 0
    disk_busy: int = 0
    """Not even tried, because too many were waiting."""
    disk_timeouts: int = 0
    disk_damaged: int = 0
    """Files removed because they were short, foreign, or not what was written."""
    disk_evicted: int = 0
    """Files removed to keep the folder within its limit."""
