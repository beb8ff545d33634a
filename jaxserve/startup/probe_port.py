"""`--probe-port`: a thread with its own event loop that answers probes and scrapes.

The API's event loop may be busy for longer than a probe waits: with the tokens of a step for
hundreds of streams, or with a large body. A thread gets its turn within Python's switch interval,
which is 1 ms here. Also, a client that only probes and scrapes needs no access to the API and no
key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from aiohttp import web

from jaxserve.config import ConfigError
from jaxserve.server.health import Pulse, probe_app
from jaxserve.server.service import Service
from jaxserve.startup.listen import listen

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_LEAVE_SECONDS = 5.0


@asynccontextmanager
async def probe_port(service: Service, host: str, port: int) -> AsyncGenerator[int]:
    """Answers probes until the end of the block. Yields the port.

    Raises:
      ConfigError: the address is in use, or the server cannot listen on it.
    """
    probes, pulse = _Probes(), Pulse()
    main = probes.serve(service, pulse, host, port)
    thread = threading.Thread(target=asyncio.run, args=(main,), name="probes", daemon=True)
    thread.start()
    beating = asyncio.ensure_future(_beat(pulse))
    try:
        found = await asyncio.wrap_future(probes.listening)
        log.info("probes and metrics on port %d", found)
        yield found
    finally:
        beating.cancel()
        probes.end()
        await asyncio.to_thread(thread.join, _LEAVE_SECONDS)


async def _beat(pulse: Pulse) -> None:
    while True:
        pulse.beat()
        await asyncio.sleep(BEAT_SECONDS)


class _Probes:
    """The thread and its event loop."""

    def __init__(self) -> None:
        self.listening = Future[int]()
        """The port, or the exception that prevented listening."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    async def serve(self, service: Service, pulse: Pulse, host: str, port: int) -> None:
        """Answers probes until `end`."""
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            probe_app(service, pulse),
            keepalive_timeout=service.config.header_timeout,
            access_log=None,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        try:
            await listen(runner, host, port, "--probe-port")
            self.listening.set_result(runner.addresses[0][1])
            await self._ended.wait()
        except ConfigError as error:
            self.listening.set_exception(error)
        finally:
            await runner.cleanup()

    def end(self) -> None:
        """Ends the thread. Call it on another thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._ended.set)
