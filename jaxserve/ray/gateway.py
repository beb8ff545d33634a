"""The ASGI application in front of replicas: retries requests, and reports errors to clients. Does
not depend on Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import msgspec

from jaxserve.ray.call import Call, Head, ReplicaLost, beginning
from jaxserve.ray.outgoing import Outgoing
from jaxserve.server.errors import ApiError, invalid, too_large

type Message = MutableMapping[str, Any]
type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]
type Ask = Callable[[Call, str], AsyncGenerator[Head | bytes]]
"""Sends a call to a replica. The text is the beginning of its prompt. Raises ReplicaLost."""

log = logging.getLogger(__name__)

TRIES = 5
_PAUSE_SECONDS = 0.2
"""Seconds before another replica is asked: Ray may not yet know that the first one is dead."""
_OWN_STORE = "/v1/responses"


class Gateway:
    """Forwards requests to replicas. If a replica dies, its requests go to another one as long as
    the client has received nothing. After that they end with an error."""

    def __init__(self, ask: Ask, *, max_request_bytes: int, shared: bool):
        """`shared`: there may be several replicas. They do not know each other's stored
        responses."""
        self._ask = ask
        self._most = max_request_bytes
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            body = await _body(receive, self._most)
            if body is None:
                return
            call = _call(scope, body)
            if self._shared:
                _refuse_stored(call)
        except ApiError as error:
            await Outgoing(path, send).refuse(error)
            return
        answering = asyncio.ensure_future(self._answer(call, Outgoing(path, send)))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.wait((answering,))

    async def _answer(self, call: Call, outgoing: Outgoing) -> None:
        begins = beginning(call)
        for attempt in range(TRIES):
            try:
                async with aclosing(self._ask(call, begins)) as items:
                    async for item in items:
                        await outgoing.take(item)
                await outgoing.end()
                return
            except ReplicaLost as error:
                log.warning("%s %s: %s", call.method, call.path.partition("?")[0], error)
                if outgoing.begun:
                    break
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
                outgoing.again()
        await outgoing.fail(lost(begun=outgoing.begun))


def lost(*, begun: bool) -> ApiError:
    """Returns the error for a lost replica. `begun`: whether the answer had begun."""
    which = "after its answer had begun" if begun else f"{TRIES} times"
    message = f"the replica that served this request was lost {which}; send the request again"
    return ApiError(503, message, code="replica_lost", retry_after=1)


async def _body(receive: Receive, most: int) -> bytes | None:
    """Returns a request's body; None: the client has disconnected.

    Raises:
      ApiError: 413 if the body has more than `most` bytes.
    """
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > most:
            raise too_large(most)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    """Waits until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _call(scope: Scope, body: bytes) -> Call:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    root: str = scope.get("root_path", "")
    path = path.partition(b"?")[0].removeprefix(root.encode())
    query: bytes = scope.get("query_string", b"")
    full = path + (b"?" + query if query else b"")
    headers = ((n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"])
    return Call(scope["method"], full.decode("latin-1"), tuple(headers), body)


def _refuse_stored(call: Call) -> None:
    """Raises ApiError 400 for requests that only the replica with a stored response could
    answer."""
    path = call.path.partition("?")[0]
    named = path.startswith(f"{_OWN_STORE}/")
    if path == _OWN_STORE and b'"previous_response_id"' in call.body:
        try:
            body = msgspec.json.decode(call.body)
        except (msgspec.DecodeError, RecursionError):
            return
        named = isinstance(body, dict) and body.get("previous_response_id") is not None
    if named:
        raise invalid(
            "responses are stored by one of several replicas: send the conversation in `input` "
            "in place of previous_response_id",
            code="not_shared",
        )
