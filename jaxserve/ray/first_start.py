"""Starts one replica of a machine before the others, so that they load its compiled programs."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def first_start(flags: Sequence[str]) -> AsyncGenerator[None]:
    """Delays starts with equal flags while one of them is running. The others then start together.
    A process that dies releases its lock."""
    name = hashlib.sha256("\0".join(flags).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"jaxserve-start-{os.getuid()}-{name}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_SH)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        yield
    finally:
        os.close(descriptor)
