"""Counters of the tiers since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class OffloadCounters:
    """Updated only by `poll` of a copier and of a disk tier, so the polling thread reads them
    without a lock. Times are sums over successful transfers, in seconds, each from its first byte
    to its last. Transfers overlap."""

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
    """Pages in host memory that differ from the stored ones. Also counted in `loads_failed`."""

    disk_writes: int = 0
    disk_write_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_writes_failed: int = 0
    """Includes `disk_full`, `disk_busy` and `disk_timeouts`."""

    disk_reads: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    disk_reads_failed: int = 0
    """Files that were missing, were damaged, or took too long to read."""

    disk_full: int = 0
    disk_busy: int = 0
    """Writes refused because too many were waiting."""
    disk_timeouts: int = 0
    disk_damaged: int = 0
    """Files removed because they were too short, foreign, or changed."""
    disk_evicted: int = 0
    """Files removed to keep the folder within its limit."""
