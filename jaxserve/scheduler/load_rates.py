"""How long loads take, as learned from those that have ended, and whether they pay."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.config import HostTierConfig

FIXED_SECONDS = 0.002
"""That a load takes beside its bytes: turns of the engine until it begins and after it ends."""

_WEIGHT = 0.2
"""Weight of the newest load in the moving means."""

_MOST = 4.0
"""How many times the mean, or what part of it, one load can count for."""

_TRIAL = 1.02
"""Growth of the rates that are expected, for each load that does not seem to pay: what one slow
load taught is forgotten."""


class Decision(NamedTuple):
    """Whether a prefix below the device was to be loaded, and why."""

    tokens: int
    """That the load would save."""
    host_bytes: int
    """That go from the host's memory to the device."""
    disk_bytes: int
    """Of these, those that have to be read from disk first."""
    seconds: float
    """That the load should take."""
    prefill_seconds: float | None
    """That computing should take; None: not known."""

    @property
    def pays(self) -> bool:
        return self.prefill_seconds is None or self.seconds <= self.prefill_seconds


class LoadRates:
    """Time per byte, of memory and in addition of disk, as moving means, which one load moves
    little, however slow it was.

    A load of h bytes, of which d come from disk, takes `FIXED_SECONDS` + h * memory + d * disk.
    """

    def __init__(self, config: HostTierConfig):
        self._memory, self._disk = 1 / config.expected_rate, 1 / config.expected_disk_rate

    def seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Returns how long a load should take."""
        return FIXED_SECONDS + host_bytes * self._memory + disk_bytes * self._disk

    def refused(self, decision: Decision) -> None:
        """A load did not seem to pay."""
        self._memory /= _TRIAL
        if decision.disk_bytes:
            self._disk /= _TRIAL

    def learn(self, host_bytes: int, disk_bytes: int, seconds: float) -> None:
        """A load has ended well. What one from disk takes beyond the copies says how fast the disk
        is, and nothing about memory."""
        left = max(seconds - FIXED_SECONDS, 1e-6)
        if disk_bytes:
            beyond = max(left - host_bytes * self._memory, 0.0)
            self._disk = _moved(self._disk, beyond / disk_bytes)
        else:
            self._memory = _moved(self._memory, left / host_bytes)


def _moved(mean: float, newest: float) -> float:
    newest = min(max(newest, mean / _MOST), mean * _MOST)
    return mean + _WEIGHT * (newest - mean)
