"""One replica of a machine starts before the others: it compiles what they then load."""

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
    """Holds back starts with equal flags while one of them is going on; the others then go on
    together. A process that dies lets go."""
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
