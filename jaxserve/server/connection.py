"""A client connection: answers requests that are not HTTP, and closes if the client stops
reading."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from typing import Any

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from jaxserve.server.errors import ApiError, internal_error
from jaxserve.server.middleware import as_api_error, shaped
from jaxserve.server.service import SERVICE, Service

log = logging.getLogger(__name__)

PROGRESS_BYTES = 32 * 1024
"""Bytes that a client must read within the write timeout, if that many wait."""
DRAINING_TIMEOUT = 5.0
"""The write timeout while the server shuts down, at most, in seconds."""


SCARCE_DESCRIPTORS = 8
"""A warning is logged when this many descriptors are left."""
_SAY_AGAIN = 3600.0
"""Seconds until the warning is repeated."""


class _ScarceDescriptors:
    """Logs that file descriptors run out. Without a free one, the event loop silently closes each
    new connection."""

    def __init__(self) -> None:
        self._said = -math.inf

    def look(self, connected: socket.socket | None) -> None:
        """Checks the descriptor of the newest connection, which was the lowest free number."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if connected is None or not 0 <= limit - SCARCE_DESCRIPTORS <= connected.fileno():
            return
        if (now := time.monotonic()) < self._said + _SAY_AGAIN:
            return
        self._said = now
        log.error(
            "the limit of %d open files is reached: new connections are closed at once; raise it "
            "(ulimit -n, LimitNOFILE=), or let a proxy limit the connections of each client",
            limit,
        )


_scarce_descriptors = _ScarceDescriptors()


class Connection(RequestHandler):
    """aiohttp's connection, with errors in our format. It closes if its client stops reading.

    Above 64 KiB of unsent data the transport reports that writing is paused. From then on the
    client must read `PROGRESS_BYTES` in every write timeout until writing resumes. Closing the
    connection cancels its handler, which aborts the request.
    """

    __slots__ = ("_at", "_look", "_service", "_unsent")

    def __init__(self, service: Service, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._service = service
        self._look: asyncio.TimerHandle | None = None
        self._unsent, self._at = 0, 0.0
        """Unsent bytes when the client had last read enough, and the time."""

    @property
    def answering(self) -> bool:
        """See `Connected`."""
        return self._request_in_progress

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._service.connections.add(self)
        super().connection_made(transport)
        _scarce_descriptors.look(transport.get_extra_info("socket"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._mark(self.transport.get_write_buffer_size())
            self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._look_no_more()
        self._service.connections.discard(self)
        super().connection_lost(exc)

    def _mark(self, unsent: int) -> None:
        self._unsent, self._at = unsent, asyncio.get_running_loop().time()

    def _look_later(self) -> None:
        pause = min(self._service.config.write_timeout, DRAINING_TIMEOUT) / 2
        self._look = asyncio.get_running_loop().call_later(pause, self._check)

    def _look_no_more(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _check(self) -> None:
        """Closes the connection if the client does not read enough."""
        if self.transport is None:
            return
        unsent, limit = self.transport.get_write_buffer_size(), self._service.config.write_timeout
        if self._service.engine.status().phase == "draining":
            limit = min(limit, DRAINING_TIMEOUT)
        if unsent <= self._unsent - PROGRESS_BYTES:
            self._mark(unsent)
        elif asyncio.get_running_loop().time() - self._at >= limit:
            log.info("closed a connection: its client read no data for %g s", limit)
            self.transport.abort()
            return
        self._look_later()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers data that is not HTTP, and exceptions outside of handlers."""
        super().handle_error(request, status, exc, message)  # logs; raises if the answer has begun
        error = internal_error()
        if status < 500:
            what = (message or "").partition("\n")[0][:200]
            error = ApiError(status, f"the request is not HTTP that is understood here: {what}")
        return _closing(self._shaped(request, error))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Gives our format to aiohttp's own refusals, which do not pass through middleware."""
        if isinstance(resp, web.HTTPException):
            error = as_api_error(request, resp, self._service.config)
            resp = _closing(self._shaped(request, error))
        return await super().finish_response(request, resp, start_time)

    def _shaped(self, request: web.BaseRequest, error: ApiError) -> web.Response:
        response = shaped(error, request.path, self._service.config)
        response.headers[hdrs.SERVER] = "jaxserve"
        return response


def _closing(response: web.Response) -> web.Response:
    response.force_close()
    return response


class _Server(web.Server):
    """Makes connections of our class."""

    service: Service

    def __call__(self) -> RequestHandler:
        return Connection(self.service, self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """aiohttp's runner, with connections of our class."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server  # the application creates aiohttp's class and has no option
        assert isinstance(server, _Server)
        server.service = self.app[SERVICE]
        return server
