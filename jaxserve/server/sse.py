"""Server-sent events: exact framing, delayed headers, keep-alive comments."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from jaxserve.server.request.schema import StreamOptions

DONE = b"data: [DONE]\n\n"
EVENT_SIZE = 512
"""With `include_obfuscation`, the size of an event is a multiple of this many bytes."""
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_encode = msgspec.json.Encoder().encode
_MARK = "\0text\0"


def data_event(body: Any) -> bytes:
    """Returns a server-sent event with this data."""
    return b"data: %b\n\n" % _encode(body)


def named_event(name: str, body: Any) -> bytes:
    """Returns a server-sent event with a name and this data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


class TextEvent:
    """Encodes events that differ only in one text. Everything else is encoded once."""

    def __init__(self, body_of: Callable[[str], Any]):
        """`body_of` makes the event's body for a text. The text may occur in it several times."""
        self._around = data_event(body_of(_MARK)).split(_encode(_MARK))

    def __call__(self, text: str) -> bytes:
        """Returns `data_event(body_of(text))`."""
        return _encode(text).join(self._around)


def event_encoder(options: StreamOptions) -> Callable[[dict[str, Any]], bytes]:
    """Returns an encoder of event bodies. It pads them if the options ask for it."""
    return _obfuscated_event if options.include_obfuscation else data_event


def _obfuscated_event(body: dict[str, Any]) -> bytes:
    return data_event(padded(body))


def padded(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body with a padding field, so that the event's size does not reveal its text."""
    missing = -len(data_event({**body, "obfuscation": ""})) % EVENT_SIZE
    return {**body, "obfuscation": secrets.token_urlsafe(missing)[:missing]}


class EventStream:
    """A response that begins with its first event, so that an early failure can set the status.

    After `keep_alive_interval` silent seconds it sends a comment, which may begin the response,
    because proxies close streams that are silent for long.
    """

    def __init__(
        self, request: web.Request, headers: dict[str, str], keep_alive_interval: float
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS | headers)
        self.started = False
        """Whether the response has begun, perhaps only with a comment."""
        self.silent = True
        """Whether only comments were sent. Whoever sends anything else clears it."""
        self._request = request
        self._starting = asyncio.Lock()
        self._interval = keep_alive_interval
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._keep_alive: asyncio.Task[None] | None = None

    async def send(self, events: bytes) -> None:
        """Sends events with one write to the socket."""
        if not self.started:
            async with self._starting:
                if not self.started:
                    await self.response.prepare(self._request)
                    self.started = True
        self._last_sent = self._loop.time()
        await self.response.write(events)

    async def __aenter__(self) -> Self:
        self._keep_alive = asyncio.create_task(self._send_keep_alives())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if error is None and self.started:
            await self.response.write_eof()

    async def _send_keep_alives(self) -> None:
        # Polls the clock: a timer that every token restarts would cost more.
        while True:
            silent = self._loop.time() - self._last_sent
            if silent < self._interval:
                await asyncio.sleep(self._interval - silent)
                continue
            try:
                await self.send(KEEP_ALIVE)
            except ConnectionError:
                return  # the handler is cancelled, which tells it
