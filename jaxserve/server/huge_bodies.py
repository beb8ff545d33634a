"""Limits the bytes of large request bodies that the server processes at once."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.errors import ApiError
from jaxserve.server.off_loop import HUGE_BYTES

BODIES_AT_ONCE = 4
"""This many bodies of the largest size are processed at once."""
_RETRY_SECONDS = 5.0
_HELD = web.RequestKey("held", int)


class HugeBodies:
    """Limits the bytes of large bodies, because processing a body takes several times its bytes. A
    body counts from its arrival until its prompt is ready. Used only on the event loop's thread.
    """

    def __init__(self, most: int):
        """`most`: the most bytes at once."""
        self.held = 0
        self._most = most

    def hold(self, request: web.Request, size: int) -> None:
        """Counts `size` bytes of the request's body. Raises ApiError 429 if other requests hold too
        many."""
        if size < HUGE_BYTES:
            return
        more = size - request.get(_HELD, 0)
        if self.held + more > self._most:
            raise ApiError(
                429,
                f"{self.held:,} bytes of large requests are being read and this one has {more:,}; "
                f"at most {self._most:,} are read at once",
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            )
        self.held += more
        request[_HELD] = size

    def release(self, request: web.Request) -> None:
        """Stops counting the request's body, because its prompt is ready or the request has
        ended."""
        self.held -= request.get(_HELD, 0)
        request[_HELD] = 0
