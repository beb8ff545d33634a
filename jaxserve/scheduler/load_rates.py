"""Predicts how long loads take, learned from finished loads, and decides whether they pay."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.config import HostTierConfig

FIXED_SECONDS = 0.002
"""Seconds of a load besides its bytes: the engine turns before it begins and after it ends."""

_WEIGHT = 0.2
"""Weight of the newest load in the moving means."""

_MOST = 4.0
"""One load counts as at most this many times the mean, and at least the mean divided by it."""

_TRIAL = 1.02
"""Factor on the expected rates after each refused load. So the effect of one slow load fades."""


MOST_WAIT = 5.0
"""The most seconds that a sequence may have to wait for its load to begin. If its turn comes later,
its prefix is computed, so that more requests than the bound allows do not wait ever longer."""


class Decision(NamedTuple):
    """Whether to load a prefix from a lower tier, and the numbers behind the decision."""

    tokens: int
    """Tokens that the load would save."""
    host_bytes: int
    """Bytes to copy from host memory to the device."""
    disk_bytes: int
    """The part of `host_bytes` that must first be read from disk."""
    seconds: float
    """Predicted seconds of the load."""
    prefill_seconds: float | None
    """Predicted seconds to compute the tokens instead; None: unknown."""
    wait: float = 0.0
    """Predicted seconds until the load may begin."""

    @property
    def pays(self) -> bool:
        """Whether the load is faster than computing, and its turn comes soon enough.

        The wait is not compared with computing. Loads wait for the sake of running sequences, and
        computing would delay these far more than the load does.
        """
        if self.wait > MOST_WAIT:
            return False
        return self.prefill_seconds is None or self.seconds <= self.prefill_seconds


class LoadRates:
    """Moving means of the seconds per byte of memory, and of the additional seconds per byte of
    disk. A single slow load moves them little.

    A load of h bytes, of which d are read from disk, takes `FIXED_SECONDS` + h * memory + d * disk.
    """

    def __init__(self, config: HostTierConfig):
        self._memory, self._disk = 1 / config.expected_rate, 1 / config.expected_disk_rate

    def seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Returns the predicted seconds of a load."""
        return FIXED_SECONDS + host_bytes * self._memory + disk_bytes * self._disk

    def refused(self, decision: Decision) -> None:
        """Reports that a load was refused because it did not seem to pay. If it would have paid
        without its wait, the rates stay as they are."""
        if decision._replace(wait=0.0).pays:
            return
        self._memory /= _TRIAL
        if decision.disk_bytes:
            self._disk /= _TRIAL

    def learn(self, host_bytes: int, disk_bytes: int, seconds: float) -> None:
        """Reports a successful load. For a load with disk reads, the time beyond the predicted
        copies updates only the disk rate."""
        left = max(seconds - FIXED_SECONDS, 1e-6)
        if disk_bytes:
            beyond = max(left - host_bytes * self._memory, 0.0)
            self._disk = _moved(self._disk, beyond / disk_bytes)
        else:
            self._memory = _moved(self._memory, left / host_bytes)


def _moved(mean: float, newest: float) -> float:
    newest = min(max(newest, mean / _MOST), mean * _MOST)
    return mean + _WEIGHT * (newest - mean)
