"""One connection: what it is told before there is a request, and its end when nobody reads."""

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
"""What a client has to take within the write timeout, if so much waits for it."""
DRAINING_TIMEOUT = 5.0
"""Seconds without it that a client gets, at most, while the server shuts down."""


SCARCE_DESCRIPTORS = 8
"""So few are left when it is said."""
_SAY_AGAIN = 3600.0
"""Seconds until it is said again."""


class _ScarceDescriptors:
    """Logs that file descriptors run out. Without a free one the event loop closes each new
    connection at once, silently."""

    def __init__(self) -> None:
        self._said = -math.inf

    def look(self, connected: socket.socket | None) -> None:
        """Checks the descriptor of the newest connection: it was the lowest free number."""
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
    """aiohttp's, with errors in our shape, and closed when its client takes nothing.

    Above 64 KiB of unsent data the transport says that writing is paused: until it goes on the
    client has to take `PROGRESS_BYTES` within the write timeout again and again. To close the
    connection cancels its handler, which aborts the request.
    """

    __slots__ = ("_at", "_look", "_service", "_unsent")

    def __init__(self, service: Service, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._service = service
        self._look: asyncio.TimerHandle | None = None
        self._unsent, self._at = 0, 0.0
        """Bytes that waited when the client had last taken enough, and when."""

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
        """Whether the client takes what is written."""
        if self.transport is None:
            return
        unsent, limit = self.transport.get_write_buffer_size(), self._service.config.write_timeout
        if self._service.engine.status().phase == "draining":
            limit = min(limit, DRAINING_TIMEOUT)
        if unsent <= self._unsent - PROGRESS_BYTES:
            self._mark(unsent)
        elif asyncio.get_running_loop().time() - self._at >= limit:
            log.info("a client took no data for %g s: its connection is closed", limit)
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
        """The answer to what is not HTTP, and to exceptions from outside of the handlers."""
        super().handle_error(request, status, exc, message)  # it logs, and raises if one has begun
        error = internal_error()
        if status < 500:
            what = (message or "").partition("\n")[0][:200]
            error = ApiError(status, f"the request is not HTTP that is understood here: {what}")
        return _closing(self._shaped(request, error))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """aiohttp's own refusals come here without having met a middleware."""
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
    """Makes our connections."""

    service: Service

    def __call__(self) -> RequestHandler:
        return Connection(self.service, self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """aiohttp's, with our connections."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server  # the application makes aiohttp's own and offers no other way
        assert isinstance(server, _Server)
        server.service = self.app[SERVICE]
        return server
