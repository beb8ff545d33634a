"""The interface that reports the work of lower tiers."""

from __future__ import annotations

from typing import Protocol


class TierObserver(Protocol):
    """Counts the work of tiers. `jaxserve.metrics.metrics.Metrics` implements it."""

    def tier_looked_up(self, tokens: int, found: int) -> None:
        """Reports a lookup of prompt tokens that the device lacked, and how many were found."""
        ...

    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None:
        """Reports loaded pages: their bytes, how long a sequence waited for them, and their tokens,
        separately for pages in host memory and pages read from disk."""
        ...

    def tier_paced(self, seconds: float) -> None:
        """Reports how long a sequence waited for the turn of its load."""
        ...

    def tier_recomputed(self, cause: str) -> None:
        """Reports a sequence whose load failed, so that it computes the tokens."""
        ...

    def tier_stored(self, num_bytes: int) -> None:
        """Reports a page that was copied to the host."""
        ...

    def tier_skipped(self, cause: str) -> None:
        """Reports an evicted page that the host does not have."""
        ...


class NoObserver:
    """Counts nothing."""

    def tier_looked_up(self, tokens: int, found: int) -> None: ...
    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None: ...
    def tier_paced(self, seconds: float) -> None: ...
    def tier_recomputed(self, cause: str) -> None: ...
    def tier_stored(self, num_bytes: int) -> None: ...
    def tier_skipped(self, cause: str) -> None: ...
