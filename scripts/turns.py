"""Processes that take turns on a card."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Context manager: locks the file, so that processes with the same file take turns on the card.
    None: no lock."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
