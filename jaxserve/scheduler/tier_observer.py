"""Who is told what a tier below the device does."""

from __future__ import annotations

from typing import Protocol


class TierObserver(Protocol):
    """Counts. `jaxserve.metrics.metrics.Metrics` implements it."""

    def tier_looked_up(self, tokens: int, found: int) -> None:
        """Report a lookup of prompt tokens that the device did not have, and those found."""
        ...

    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None:
        """Report pages that came back to the device, how long a sequence waited for them, and their
        tokens: found in the host's memory, and read from disk for this."""
        ...

    def tier_recomputed(self, cause: str) -> None:
        """Report that a sequence waited for pages that did not come: it computes them."""
        ...

    def tier_stored(self, num_bytes: int) -> None:
        """Report a page that was copied to the host."""
        ...

    def tier_skipped(self, cause: str) -> None:
        """Report a page that the device evicted and the host does not have."""
        ...


class NoObserver:
    """Counts nothing."""

    def tier_looked_up(self, tokens: int, found: int) -> None: ...
    def tier_loaded(
        self, num_bytes: int, seconds: float, *, host_tokens: int, disk_tokens: int
    ) -> None: ...
    def tier_recomputed(self, cause: str) -> None: ...
    def tier_stored(self, num_bytes: int) -> None: ...
    def tier_skipped(self, cause: str) -> None: ...
